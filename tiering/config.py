"""The settings of an engine, as in `kv_connector_extra_config`.  Validated once, here."""

from __future__ import annotations

import difflib
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from storage.admission import ADMISSION
from storage.codec import CODEC_NAMES, NO_CODEC
from storage.errors import ConfigError
from storage.eviction import EVICTION
from storage.options import DriveOptions, StoreOptions
from storage.sizes import parse_size
from tiering.primary import REGION
from tiering.weights import SAMPLED, WEIGHTS_FINGERPRINTS

DISK_TIER = "disk"  # type of a secondary tier, and the name of the one that `disk` configures
DP_RANK = "{dp_rank}"  # in a root: the engine's data-parallel rank

_TIER_NAME = re.compile(r"[a-z0-9_-]{1,40}")
_MAX_QUARANTINE_ROWS = 1000  # for a person to look at
_MAX_BLOCKS_PER_CHUNK = 1 << 16
_MAX_SECONDS = 86_400.0  # a day: beyond any use, and far below what a clock can count


class RootSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `disk.roots`."""

    root: str
    budget: str | int


class DiskSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`disk`: the store below the region."""

    root: str | None = None
    """Directory of the store; made if it is missing; a relative one is below the directory in which
    vLLM is started.  One engine at a time: `{dp_rank}` in it stands for the engine's data-parallel
    rank.  Required, unless `roots` are given."""
    budget: str | int | None = None
    """Physical bytes that everything under `root` may use, over all models.  Required with it."""
    roots: list[RootSettings] | None = None
    """Instead of `root` and `budget`, one per drive: `[{"root": ..., "budget": ...}, ...]`.  Rows
    are spread over them; a drive that dies costs its rows and nothing else."""
    segment_size: str | int | None = None
    """About how large one file of a new namespace is.  Default: budget / 512, 4 MiB to 1 GiB."""
    eviction: str = next(iter(EVICTION))
    """Which rows go first."""
    admission: str = next(iter(ADMISSION))
    """Which rows are worth a write once the disk is full."""
    write_bytes_per_day: str | int | None = None
    """Bytes of rows that the drive is given in any 24 hours.  Default: no limit."""
    io_threads: int = 8
    """Threads that read and write; at least 1."""
    write_threads: int | None = None
    """Of these, how many may write at once.  Default: all but one, so that reads find one."""
    write_queue: str | int = "4GiB"
    """Bytes of rows that may wait to be written; further ones are declined."""
    read_timeout_s: float = 10.0
    """After that a read has failed, whatever the disk does."""
    write_timeout_s: float = 30.0
    """After that a write has failed, whatever the disk does."""
    quarantine_rows: int = 0
    """Rows found corrupt that are kept aside under `root`/quarantine, at most."""
    scrub_bytes_per_s: str | int = 0
    """How fast rows that nobody asks for are verified; 0: not at all."""
    reserve: str | int | None = None
    """Free space to leave on the file system.  Default: 1 % of it, at most 1 GiB."""
    codec: str = NO_CODEC
    """How rows are stored: "none", "blosc-lz4" or "zstd".  Each keeps rows of its own."""
    codec_always: bool = False
    """Encode also where the drive is faster than the codec: for room rather than speed."""


class SecondaryTierSettings(DiskSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of `secondary_tiers`: all settings of `disk`, and these."""

    type: str
    """"disk", the only type."""
    name: str
    """Of the tier in metrics and messages: small letters, digits, "-" and "_"; no two the same."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of `kv_connector_extra_config`."""

    cpu_bytes_to_use: str | int
    """Size of the region in shared memory, for all ranks of the engine together."""
    disk: DiskSettings | None = None
    """The disk tier; without one chunks live in the region alone."""
    secondary_tiers: list[SecondaryTierSettings] | None = None
    """Instead of `disk`, several, the one to be asked first first, such as a fast drive and then a
    large one.  Each is given every chunk; see below."""
    dedup: bool = True
    """False: keep every rank's copy of the same bytes, as vLLM's own tiers do; to compare."""
    blocks_per_chunk: int = 1
    """Blocks that are stored, looked up and evicted together."""
    weights_fingerprint: str = SAMPLED
    """How weight files are compared: "sampled", by headers and up to 16 samples of each tensor, or
    "content", by every byte; that also sees an edit of a few rows of a tensor, and reads all
    weights once more at start."""
    promotion_timeout_s: float = 10.0
    """How long a request waits for disk reads, over its whole life, before it computes instead."""
    offload_prompt_only: bool = True
    """Store the KV of prompts only, not that of generated tokens."""
    self_describing_kv_events: bool = False
    """vLLM's own: KV events that name their tokens."""
    sync_load_budget_bytes: int = 0
    """vLLM's own (0.33): loads up to this size within one step."""
    spec_name: str | None = None
    spec_module_path: str | None = None
    """vLLM's own keys for the class to load; nothing here reads them."""


@dataclass(frozen=True, slots=True)
class Config:
    """Checked settings.  `Config.parse` alone builds it; the inside trusts it."""

    region_bytes: int
    stores: Mapping[str, StoreOptions]
    """Secondary tiers by name, in order; the one of `disk` is called "disk"."""
    dedup: bool
    blocks_per_chunk: int
    weights_fingerprint: str
    promotion_timeout_s: float
    offload_prompt_only: bool

    @classmethod
    def parse(
        cls, raw: Mapping[str, Any], where: str = "kv_connector_extra_config", dp_rank: int = 0
    ) -> Config:
        """Check `raw`, for the engine of that data-parallel rank.  Raises `ConfigError` that names
        the setting, what was expected and found.

        Touches no disk: whether the root can be had is for the store to say.
        """
        _refuse_bad_text(raw, where)
        _refuse_unknown(raw, Settings, where)
        if isinstance(raw.get("disk"), Mapping):
            _refuse_unknown(raw["disk"], DiskSettings, f"{where}.disk")
        tiers = raw.get("secondary_tiers")
        for number, tier in enumerate(tiers if isinstance(tiers, list) else []):
            if isinstance(tier, Mapping):
                place = f"{where}.secondary_tiers[{number}]"
                _refuse_unknown(tier, SecondaryTierSettings, place)
        try:
            settings = msgspec.convert(dict(raw), Settings)
        except msgspec.ValidationError as exc:
            raise _as_config_error(exc, raw, where) from None
        if not 1 <= settings.blocks_per_chunk <= _MAX_BLOCKS_PER_CHUNK:
            raise ConfigError(
                f"{where}.blocks_per_chunk",
                f"1 to {_MAX_BLOCKS_PER_CHUNK}",
                settings.blocks_per_chunk,
            )
        _check_seconds(settings.promotion_timeout_s, f"{where}.promotion_timeout_s")
        if settings.weights_fingerprint not in WEIGHTS_FINGERPRINTS:
            raise ConfigError(
                f"{where}.weights_fingerprint",
                f"one of {', '.join(WEIGHTS_FINGERPRINTS)}",
                settings.weights_fingerprint,
            )
        return cls(
            region_bytes=parse_size(settings.cpu_bytes_to_use, f"{where}.cpu_bytes_to_use"),
            stores=_stores(settings, where, dp_rank),
            dedup=settings.dedup,
            blocks_per_chunk=settings.blocks_per_chunk,
            weights_fingerprint=settings.weights_fingerprint,
            promotion_timeout_s=settings.promotion_timeout_s,
            offload_prompt_only=settings.offload_prompt_only,
        )


def refuse_shared_root(
    raw: Mapping[str, Any], engines: int, where: str = "kv_connector_extra_config"
) -> None:
    """Refuse one root for several data-parallel engines of one node, whose settings `raw` are good.

    Raises `ConfigError`.
    """
    first, second = (Config.parse(raw, where, dp_rank).stores for dp_rank in range(2))
    if engines == 1:
        return
    taken = {root for options in first.values() for root in options.roots}
    for name, options in second.items():
        for root in options.roots:
            if root in taken:
                raise ConfigError(
                    f"{where}.{_place_of(name, raw)}.root",
                    f"a root for each of the {engines} data-parallel engines of this node, each "
                    f'with the budget that is given: "{root}/{DP_RANK}"',
                    str(root),
                )


def _place_of(name: str, raw: Mapping[str, Any]) -> str:
    """Where a tier stands in settings that are good."""
    tiers = raw.get("secondary_tiers") or []
    numbers = [number for number, tier in enumerate(tiers) if tier["name"] == name]
    return f"secondary_tiers[{numbers[0]}]" if numbers else "disk"


def disk_options(raw: Mapping[str, Any], where: str, dp_rank: int = 0) -> StoreOptions:
    """Check the settings of a disk that stand by themselves, at `where`.  Raises `ConfigError`."""
    _refuse_bad_text(raw, where)
    _refuse_unknown(raw, DiskSettings, where)
    try:
        settings = msgspec.convert(dict(raw), DiskSettings)
    except msgspec.ValidationError as exc:
        raise _as_config_error(exc, raw, where) from None
    return _store_options(settings, where, dp_rank)


def _stores(settings: Settings, where: str, dp_rank: int) -> dict[str, StoreOptions]:
    tiers = settings.secondary_tiers or []
    if settings.disk is not None:
        if tiers:
            raise ConfigError(f"{where}.secondary_tiers", "either these, or disk", "both")
        return {DISK_TIER: _store_options(settings.disk, f"{where}.disk", dp_rank)}
    stores: dict[str, StoreOptions] = {}
    for number, tier in enumerate(tiers):
        place = f"{where}.secondary_tiers[{number}]"
        if tier.type != DISK_TIER:
            raise ConfigError(f"{place}.type", f'"{DISK_TIER}"', tier.type)
        if not _TIER_NAME.fullmatch(tier.name) or tier.name in (REGION, *stores):
            raise ConfigError(
                f"{place}.name",
                f'small letters, digits, "-" and "_", other than "{REGION}" and the other tiers',
                tier.name,
            )
        options = _store_options(tier, place, dp_rank)
        others = [root for other in stores.values() for root in other.roots]
        for root in options.roots:
            if not _is_apart(root, others):
                raise ConfigError(
                    f"{place}.root", "a directory apart from the other roots", str(root)
                )
        stores[tier.name] = options
    return stores


def _is_apart(root: Path, others: Iterable[Path]) -> bool:
    """As far as names tell: of links to one directory the second finds it locked."""
    root = Path(os.path.normpath(root))
    plain = [Path(os.path.normpath(other)) for other in others]
    return not any(root.is_relative_to(o) or o.is_relative_to(root) for o in plain)


def _store_options(disk: DiskSettings, where: str, dp_rank: int) -> StoreOptions:
    drives = _drives(disk, where, dp_rank)
    if not 1 <= disk.io_threads <= 256:
        raise ConfigError(f"{where}.io_threads", "1 to 256", disk.io_threads)
    if disk.write_threads is not None and not 1 <= disk.write_threads <= disk.io_threads:
        raise ConfigError(
            f"{where}.write_threads", f"1 to io_threads ({disk.io_threads})", disk.write_threads
        )
    if not 0 <= disk.quarantine_rows <= _MAX_QUARANTINE_ROWS:
        raise ConfigError(
            f"{where}.quarantine_rows", f"0 to {_MAX_QUARANTINE_ROWS}", disk.quarantine_rows
        )
    for name in ("read_timeout_s", "write_timeout_s"):
        _check_seconds(getattr(disk, name), f"{where}.{name}")
    for name, known in (("eviction", EVICTION), ("admission", ADMISSION)):
        if getattr(disk, name) not in known:
            raise ConfigError(f"{where}.{name}", f"one of {', '.join(known)}", getattr(disk, name))
    per_day = disk.write_bytes_per_day
    if per_day is not None:
        per_day = parse_size(per_day, f"{where}.write_bytes_per_day")
    if disk.codec not in CODEC_NAMES:
        raise ConfigError(f"{where}.codec", f"one of {', '.join(CODEC_NAMES)}", disk.codec)
    if disk.codec_always and disk.codec == NO_CODEC:
        raise ConfigError(f"{where}.codec_always", "a codec to use always", disk.codec)
    segment = disk.segment_size
    if segment is not None:
        segment = parse_size(segment, f"{where}.segment_size")
    smallest = min(drive.budget_bytes for drive in drives)
    if segment is not None and segment > smallest:
        found = disk.budget if not disk.roots else smallest
        raise ConfigError(
            f"{where}.budget", f"at least one segment ({segment} bytes, segment_size)", found
        )
    reserve = None if disk.reserve is None else _size_or_zero(disk.reserve, f"{where}.reserve")
    return StoreOptions(
        root=drives[0].root,
        budget_bytes=drives[0].budget_bytes,
        more_drives=tuple(drives[1:]),
        segment_bytes=segment,
        io_threads=disk.io_threads,
        write_threads=disk.write_threads,
        reserve_bytes=reserve,
        quarantine_rows=disk.quarantine_rows,
        scrub_bytes_per_s=_size_or_zero(disk.scrub_bytes_per_s, f"{where}.scrub_bytes_per_s"),
        read_timeout_s=disk.read_timeout_s,
        write_timeout_s=disk.write_timeout_s,
        write_queue_bytes=parse_size(disk.write_queue, f"{where}.write_queue"),
        eviction=disk.eviction,
        admission=disk.admission,
        write_bytes_per_day=per_day,
        codec=disk.codec,
        codec_always=disk.codec_always,
    )


def _drives(disk: DiskSettings, where: str, dp_rank: int) -> list[DriveOptions]:
    """The roots, one at least, each a directory of its own."""
    if not disk.roots:
        for name in ("root", "budget"):
            if getattr(disk, name) is None:
                raise ConfigError(f"{where}.{name}", "a value", None)
        assert disk.root is not None
        assert disk.budget is not None
        settings = [(where, RootSettings(disk.root, disk.budget))]
    elif disk.root is not None or disk.budget is not None:
        raise ConfigError(f"{where}.roots", "either these, or root and budget", "both")
    else:
        settings = [(f"{where}.roots[{n}]", of) for n, of in enumerate(disk.roots)]
    drives: list[DriveOptions] = []
    for place, of in settings:
        if not of.root.strip():
            raise ConfigError(f"{place}.root", "a directory", of.root)
        try:
            root = Path(of.root.replace(DP_RANK, str(dp_rank))).expanduser().absolute()
        except RuntimeError:  # of pathlib, where there is no such user
            raise ConfigError(
                f"{place}.root", "a directory, or ~ of a user who has one", of.root
            ) from None
        if not _is_apart(root, (drive.root for drive in drives)):
            raise ConfigError(f"{place}.root", "a directory apart from the other roots", of.root)
        drives.append(DriveOptions(root, parse_size(of.budget, f"{place}.budget")))
    return drives


def _size_or_zero(value: str | int, field: str) -> int:
    return 0 if value in (0, "0") and value is not False else parse_size(value, field)


def _check_seconds(value: float, field: str) -> None:
    if not 0 < value <= _MAX_SECONDS:
        raise ConfigError(field, f"seconds above 0, at most {_MAX_SECONDS:g}", value)


def _refuse_bad_text(value: object, where: str) -> None:
    """Refuse what no message, and hardly a file name, can have: control characters, and halves of
    pairs of UTF-16.  Looks into all that `value` holds."""
    if isinstance(value, str):
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            raise ConfigError(where, "text without control characters, in valid Unicode", value)
    elif isinstance(value, Mapping):
        for name, each in value.items():
            _refuse_bad_text(each, f"{where}.{name}")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            _refuse_bad_text(each, f"{where}[{number}]")


def _refuse_unknown(raw: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    known = [field.encode_name for field in msgspec.structs.fields(kind)]
    for key in raw:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(sorted(known))}"
            raise ConfigError(f"{where}.{key}", f"a known setting ({hint})", raw[key])


def _as_config_error(
    exc: msgspec.ValidationError, raw: Mapping[str, Any], where: str
) -> ConfigError:
    """msgspec's message, "Expected `int`, got `str` - at `$.disk.io_threads`", as ours."""
    message, _, path = str(exc).partition(" - at `$")
    path = path.rstrip("`")
    found: Any = raw
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        if index:
            found = found[int(index)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    expected = message.split(", got")[0].removeprefix("Expected ").replace("`", "")
    if message.startswith("Object missing required field"):
        return ConfigError(f"{where}{path}.{message.split('`')[1]}", "a value", None)
    return ConfigError(f"{where}{path}", expected, found)
