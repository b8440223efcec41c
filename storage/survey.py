"""A root as it stands on disk, for people: takes no lock, changes nothing, trusts nothing.

Safe beside the store process that owns the root.  That rewrites headers in turns of two copies, so
a header that looks torn is read again before it is called so; it makes and removes segments, so
what is gone between two looks was never there.  Whatever a crash, a person or another program left
in the root is told as a `Finding`, and the rest is read all the same.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.codec import CODEC_NAMES, ELEMENT_BYTES, NO_CODEC, Codec
from storage.device import (
    PARTIAL_SUFFIX,
    Device,
    FileStat,
    ReadOnlyDevice,
    aligned_buffer,
    lock_holder,
    read_fully,
)
from storage.errors import CorruptRecord, DeviceError, LayoutMismatch, RootUnusable, StorageError
from storage.facts import RowFacts, facts_of
from storage.findings import Finding, Trouble, Weight
from storage.header import (
    ENTRY,
    Entries,
    SegmentGeometry,
    claimed_generation,
    decode_table,
    drop_strays,
    key_of,
    new_entries,
)
from storage.namespace import (
    METADATA,
    ROWS,
    Identity,
    is_namespace_directory,
    read_geometry,
    read_metadata,
)
from storage.quarantine import QUARANTINE
from storage.segment import segment_path
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)
from storage.status import STATUS, StoreStatus, read_status
from storage.types import MAX_KEY_BYTES, PAGE_BYTES, SegmentId, SlotId

_HEADER_PAUSE_S = 0.02  # before a header that looks torn is read again; a write takes about 1 ms
_HEADER_PAUSES = 4  # for one header ...
_HEADER_PAUSES_MAX = 50  # ... and for all of a root: after a power cut many are torn for good


@dataclass
class SegmentSurvey:
    """One segment file.  `entries` is its newest key table: `ENTRY[slots]`."""

    number: SegmentId
    path: Path
    geometry: SegmentGeometry
    weight: Weight
    entries: Entries

    @cached_property
    def named(self) -> npt.NDArray[np.int64]:
        """Slots that hold a row, ascending."""
        return np.flatnonzero(self.entries["key_bytes"])

    def key_endings(self, count: int) -> npt.NDArray[np.uint8]:
        """The last `count` bytes of each row's key (zeros where it is shorter): [rows, count]."""
        raw = self.entries.view(np.uint8).reshape(len(self.entries), -1)
        key_bytes = self.entries["key_bytes"][self.named].astype(np.int64)
        ends = raw.shape[1] - MAX_KEY_BYTES + key_bytes
        positions = ends[:, None] + np.arange(-count, 0)
        return np.where((key_bytes >= count)[:, None], raw[self.named[:, None], positions], 0)

    def forget_named(self) -> None:
        """After a change of `entries`."""
        self.__dict__.pop("named", None)

    def key(self, slot: int) -> bytes:
        """Of a slot that holds a row."""
        key = key_of(self.entries, slot)
        assert key is not None
        return key


@dataclass
class NamespaceSurvey:
    """One namespace.  Of a damaged one `identity` or `geometry` may be missing."""

    directory: Path
    opened_s: float
    """Unix time of its last opening; 0.0 if unknown."""
    identity: Identity | None = None
    codec: Codec | None = None
    facts: RowFacts = field(default_factory=RowFacts)
    geometry: SegmentGeometry | None = None
    """Without a codec."""
    segments: list[SegmentSurvey] = field(default_factory=list)
    unread_segments: Weight = field(default_factory=Weight)
    """Of segment files that could not be understood."""
    metadata: Weight = field(default_factory=Weight)
    foreign: Weight = field(default_factory=Weight)

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def fingerprint(self) -> bytes:
        return bytes.fromhex(self.name[-32:])

    @property
    def model(self) -> str:
        name = self.identity.model if self.identity else self.name[:-33]
        return self.facts.model_name or name

    @property
    def codec_name(self) -> str:
        return self.codec.name if self.codec else NO_CODEC

    @property
    def row_bytes(self) -> int:
        return self.geometry.row_bytes if self.geometry else 0

    @property
    def weight(self) -> Weight:
        """Of everything in its directory."""
        total = Weight()
        for part in (self.metadata, self.unread_segments, self.foreign):
            total += part
        for segment in self.segments:
            total += segment.weight
        return total

    @property
    def charged_bytes(self) -> int:
        """What the owner of the root charges for it."""
        charged = NAMESPACE_OVERHEAD_BYTES + self.foreign.allocated_bytes
        weights = [segment.weight for segment in self.segments]
        if self.unread_segments.files:
            weights.append(self.unread_segments)
        return charged + sum(
            max(w.allocated_bytes, w.apparent_bytes) + w.files * SEGMENT_OVERHEAD_BYTES
            for w in weights
        )

    @property
    def row_count(self) -> int:
        return sum(len(segment.named) for segment in self.segments)


@dataclass
class RootSurvey:
    """A whole root, as of `taken_s` (Unix time)."""

    root: Path
    taken_s: float
    owner: dict[str, Any]
    """Who opened it last, as its metadata says; empty if that is lost."""
    owner_pid: int | None
    """Who holds its lock now; None if nobody does, or the system does not say."""
    file_system_bytes: int
    available_bytes: int
    namespaces: list[NamespaceSurvey] = field(default_factory=list)
    metadata: Weight = field(default_factory=Weight)
    quarantine: Weight = field(default_factory=Weight)
    foreign: Weight = field(default_factory=Weight)
    status: StoreStatus | None = None
    """What the root remembers of its use; None if nothing."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def weight(self) -> Weight:
        """Of every file under the root."""
        total = Weight()
        for part in (self.metadata, self.quarantine, self.foreign):
            total += part
        for namespace in self.namespaces:
            total += namespace.weight
        return total

    @property
    def charged_bytes(self) -> int:
        """About what the owner charges against the budget; a quarantine is charged ahead."""
        own = ROOT_OVERHEAD_BYTES + self.quarantine.allocated_bytes + self.foreign.allocated_bytes
        return own + sum(namespace.charged_bytes for namespace in self.namespaces)


def survey_root(root: Path, device: Device | None = None) -> RootSurvey:
    """All that stands under `root`.

    Raises `RootUnusable`, in one line for a person, if `root` is no store, is of a newer format or
    may not be read.
    """
    return _Surveyor(root, device or ReadOnlyDevice()).survey()


class _Surveyor:
    def __init__(self, root: Path, device: Device) -> None:
        self._root = root
        self._device = device
        self._findings: list[Finding] = []
        self._owner_pid = lock_holder(root)
        self._pauses_left = _HEADER_PAUSES_MAX

    def survey(self) -> RootSurvey:
        try:
            if not self._device.stat(self._root).is_directory:
                raise RootUnusable(f"{self._root}: a file; expected the directory of a store")
            names = self._device.list(self._root)
            space = self._device.space(self._root)
        except DeviceError as exc:
            raise RootUnusable(f"{exc}; expected the directory of a store") from exc
        found = RootSurvey(
            root=self._root,
            taken_s=time.time(),
            owner=self._owner(names),
            owner_pid=self._owner_pid,
            file_system_bytes=space.total_bytes,
            available_bytes=space.available_bytes,
            status=read_status(self._root, self._device),
            findings=self._findings,
        )
        for name in names:
            path = self._root / name
            with self._telling(path):
                stat = self._device.stat(path)
                if name == METADATA and not stat.is_directory:
                    found.metadata.add(stat)
                elif is_namespace_directory(name) and stat.is_directory:
                    found.namespaces.append(self._namespace(path, stat))
                elif name == QUARANTINE:
                    found.quarantine += self._weigh(path)
                elif name == STATUS:
                    self._status(path, found)
                else:
                    self._add_other(path, found)
        return found

    def _owner(self, names: list[str]) -> dict[str, Any]:
        """From the root's metadata, which is what makes a directory a store."""
        path = self._root / METADATA
        try:
            raw = self._device.read_file(path)
            attributes = read_metadata(raw, str(path))["attributes"]["kvtier"]
        except DeviceError as exc:
            if exc.errno != errno.ENOENT:
                raise RootUnusable(str(exc)) from exc
            if not any(is_namespace_directory(name) for name in names):
                raise RootUnusable(f"{self._root}: not the root of a store: no {METADATA}") from exc
            self._find(Trouble.HALF_DELETED, path, "missing; the next opening makes it anew")
            return {}
        except StorageError as exc:
            raise RootUnusable(str(exc)) from exc
        if "owner" not in attributes:
            raise RootUnusable(f"{self._root}: part of a store, not the root of one")
        owner = attributes["owner"]
        return owner if isinstance(owner, dict) else {}

    def _find(self, trouble: Trouble, path: Path, text: str) -> None:
        self._findings.append(Finding(trouble, path, text))

    @contextlib.contextmanager
    def _telling(self, path: Path) -> Iterator[None]:
        """What can't be seen is told; what is gone meanwhile is nothing."""
        try:
            yield
        except DeviceError as exc:
            if exc.errno not in (errno.ENOENT, errno.ENOTDIR):
                self._find(Trouble.UNREADABLE, path, str(exc))

    def _weigh(self, path: Path) -> Weight:
        """Of a file, or of all files below a directory; links are not followed."""
        weight = Weight()
        with self._telling(path):
            stat = self._device.stat(path)
            if not stat.is_directory:
                weight.add(stat)
                return weight
            for name in self._device.list(path):
                weight += self._weigh(path / name)
        return weight

    def _add_other(self, path: Path, found: RootSurvey | NamespaceSurvey) -> None:
        """What is no part of a store, or is going to be its metadata."""
        weight = self._foreign(path)
        if path.name == METADATA + PARTIAL_SUFFIX:
            found.metadata += weight
        else:
            found.foreign += weight

    def _foreign(self, path: Path) -> Weight:
        weight = self._weigh(path)
        if path.name.endswith(PARTIAL_SUFFIX):
            if self._owner_pid is not None:  # it is making it now
                return weight
            self._find(Trouble.LEFTOVER, path, "half-made; the next opening removes it")
        else:
            size = f"{weight.allocated_bytes} bytes"
            self._find(Trouble.FOREIGN, path, f"not kvtier's; {size} count against the budget")
        return weight

    def _status(self, directory: Path, found: RootSurvey) -> None:
        for name in self._list(directory):
            if name == METADATA:
                found.metadata += self._weigh(directory / name)
            else:
                self._add_other(directory / name, found)

    # -- one namespace --------------------------------------------------------------------------

    def _namespace(self, directory: Path, stat: FileStat) -> NamespaceSurvey:
        found = NamespaceSurvey(directory, opened_s=stat.modified_s)
        self._read_identity(found)
        self._read_geometry(found)
        for name in self._list(directory):
            path = directory / name
            if name not in (METADATA, ROWS):
                self._add_other(path, found)
        rows = directory / ROWS
        for name in self._list(rows):
            path = rows / name
            if name not in (METADATA, "c"):
                self._add_other(path, found)
        for path in (directory / METADATA, rows / METADATA):
            with self._telling(path):
                found.metadata.add(self._device.stat(path))
        numbers = []
        for name in self._list(rows / "c"):
            if name.isascii() and name.isdigit() and str(int(name)) == name:
                numbers.append(int(name))
            else:
                found.foreign += self._foreign(rows / "c" / name)
        for number in sorted(numbers):
            for name in self._list(rows / "c" / str(number)):
                path = rows / "c" / str(number) / name
                if name != "0":
                    found.foreign += self._foreign(path)
                    continue
                with self._telling(path):
                    self._segment(found, SegmentId(number))
        self._find_twins(found)
        return found

    def _list(self, directory: Path) -> list[str]:
        names: list[str] = []
        with self._telling(directory):
            names += self._device.list(directory)
        return names

    def _read_identity(self, found: NamespaceSurvey) -> None:
        path = found.directory / METADATA
        try:
            raw = self._device.read_file(path)
            found.opened_s = self._device.stat(path).modified_s
            attributes = read_metadata(raw, str(path))["attributes"]["kvtier"]
            found.facts = facts_of(attributes) or found.facts
            identity = Identity(
                attributes["model"],
                attributes["identity"],
                attributes.get("element_bytes", 1),
                attributes.get("codec", NO_CODEC),
            )
            is_of_its_name = identity.namespace == found.fingerprint
        except DeviceError as exc:
            if exc.errno == errno.ENOENT:
                self._find(Trouble.HALF_DELETED, found.directory, f"no {METADATA}")
            else:
                self._find(Trouble.UNREADABLE, path, str(exc))
        except LayoutMismatch as exc:
            self._find(Trouble.NEWER_FORMAT, path, str(exc))
        except (StorageError, KeyError, TypeError, AttributeError, ValueError) as exc:
            self._find(Trouble.BAD_METADATA, path, str(exc))  # of another type, as a rule
        else:
            if is_of_its_name:
                found.identity = identity
            else:
                self._find(
                    Trouble.BAD_METADATA, path, f"the identity is that of {identity.directory}"
                )

    def _read_geometry(self, found: NamespaceSurvey) -> None:
        path = found.directory / ROWS / METADATA
        try:
            raw = self._device.read_file(path)
        except DeviceError as exc:
            if exc.errno == errno.ENOENT:
                self._find(Trouble.HALF_DELETED, path, "missing")
            else:
                self._find(Trouble.UNREADABLE, path, str(exc))
            return
        codecs = [None] if found.identity is None else [found.identity.row_codec]
        if found.identity is None:  # its metadata is lost, so the array's own has to say
            names = [name for name in CODEC_NAMES if name != NO_CODEC]
            codecs += [Codec(name, size) for name in names for size in ELEMENT_BYTES]
        error: StorageError | None = None
        for codec in codecs:
            try:
                found.geometry, _ = read_geometry(raw, str(path), codec)
                found.codec = codec
            except LayoutMismatch as exc:
                self._find(Trouble.NEWER_FORMAT, path, str(exc))
                return
            except CorruptRecord as exc:
                error = error or exc
            else:
                return
        self._find(Trouble.BAD_METADATA, path, str(error))

    # -- one segment ----------------------------------------------------------------------------

    def _segment(self, found: NamespaceSurvey, number: SegmentId) -> None:
        path = segment_path(found.directory / ROWS, number)
        weight = Weight()
        stat = self._device.stat(path)
        weight.add(stat)
        if found.geometry is None:
            found.unread_segments += weight
            return
        classes = found.geometry.size_classes() if found.codec else (found.geometry,)
        geometry = next((c for c in classes if c.segment_bytes >= stat.size_bytes), classes[-1])
        if stat.size_bytes != geometry.segment_bytes:
            trouble = Trouble.WRONG_SIZE
            if stat.size_bytes < geometry.segment_bytes:
                trouble = Trouble.CUT_SHORT
            text = f"{stat.size_bytes} bytes; expected {geometry.segment_bytes}"
            self._find(trouble, path, text)
        try:
            entries = self._read_table(path, geometry, found.fingerprint)
        except DeviceError:
            found.unread_segments += weight
            raise
        if entries is None:
            self._find(Trouble.TORN_HEADER, path, "no copy of the key table is whole: no rows")
            entries = new_entries(geometry)
        if stat.size_bytes < geometry.segment_bytes:
            self._drop_rows_beyond(entries, stat.size_bytes)
        found.segments.append(SegmentSurvey(number, path, geometry, weight, entries))

    def _drop_rows_beyond(self, entries: Entries, size_bytes: int) -> None:
        """Those that a file of that size does not hold."""
        is_lost = entries["offset"] + entries["length"] > size_bytes
        entries[is_lost] = np.zeros((), ENTRY)

    def _read_table(
        self, path: Path, geometry: SegmentGeometry, namespace: bytes
    ) -> Entries | None:
        """The newest key table; None if no copy is whole."""
        fd = self._device.open(path)
        try:
            for pause in range(_HEADER_PAUSES + 1):
                entries = newest_table(self._device, fd, geometry, namespace)
                if entries is not None or pause == _HEADER_PAUSES or not self._pauses_left:
                    break
                self._pauses_left -= 1
                time.sleep(_HEADER_PAUSE_S)
        finally:
            self._device.close(fd)
        return entries

    def _find_twins(self, found: NamespaceSurvey) -> None:
        """Take the older place of a key that is named twice out of its table, as opening does."""
        hashes = [_hash_keys(segment.entries)[segment.named] for segment in found.segments]
        if not hashes:
            return
        ordered = np.sort(np.concatenate(hashes))
        alike = ordered[1:][ordered[1:] == ordered[:-1]]
        if not len(alike):
            return
        newest: dict[bytes, tuple[int, SegmentSurvey, int]] = {}
        for segment, of_segment in zip(found.segments, hashes, strict=True):
            for slot in segment.named[np.isin(of_segment, alike)].tolist():
                key = segment.key(slot)
                place = (int(segment.entries["last_use"][slot]), segment, slot)
                other = newest.get(key, place)
                older, newer = sorted((other, place), key=lambda p: p[0])
                newest[key] = newer
                if older is newer:
                    continue
                older[1].entries[older[2]] = np.zeros((), ENTRY)
                if self._owner_pid is not None:  # it went from there to here while we looked
                    continue
                text = f"{key.hex()} also in slot {newer[2]} of {newer[1].path}"
                self._find(Trouble.NAMED_TWICE, older[1].path, f"slot {older[2]}: {text}")
        for segment in found.segments:
            segment.forget_named()


def newest_table(
    device: Device, fd: int, geometry: SegmentGeometry, namespace: bytes
) -> Entries | None:
    """The newest key table that is whole in the header of an open segment file, read page by page
    at page boundaries; None if no copy is.  Raises `DeviceError`."""

    def read(size_bytes: int, parity: int) -> memoryview:
        part = aligned_buffer(size_bytes)
        with contextlib.suppress(CorruptRecord):  # of a short file the rest stays zeros
            read_fully(device, fd, [part], geometry.table_offset(parity), "")
        return part

    claims = [claimed_generation(read(PAGE_BYTES, parity)) for parity in (0, 1)]
    for parity in sorted((0, 1), key=lambda parity: claims[parity], reverse=True):
        decoded = decode_table(geometry, read(geometry.table_bytes, parity), namespace)
        if decoded is not None and decoded[0] % 2 == parity:
            drop_strays(geometry, decoded[1])
            return decoded[1]
    return None


_KEY_WORDS = slice((ENTRY.itemsize - MAX_KEY_BYTES) // 8, None)  # the key ends an entry
_FACTORS = np.random.default_rng(1).integers(1, 1 << 63, MAX_KEY_BYTES // 8, np.uint64) | 1


def _hash_keys(entries: Entries) -> npt.NDArray[np.uint64]:
    """64 bits of each entry's key, equal for equal keys."""
    words = entries.view("<u8").reshape(len(entries), -1)[:, _KEY_WORDS]
    with np.errstate(over="ignore"):
        hashes: npt.NDArray[np.uint64] = words @ _FACTORS
    return hashes


def places_of(namespace: NamespaceSurvey, key: bytes) -> Iterator[tuple[SegmentSurvey, SlotId]]:
    """Where rows stand whose key begins with `key`."""
    if len(key) > MAX_KEY_BYTES:
        return
    prefix = np.frombuffer(key, np.uint8)
    for segment in namespace.segments:
        keys = np.ascontiguousarray(segment.entries["key"]).view(np.uint8)
        keys = keys.reshape(-1, MAX_KEY_BYTES)
        is_alike = (keys[:, : len(prefix)] == prefix).all(axis=1)
        is_alike &= segment.entries["key_bytes"] >= len(prefix)
        for slot in np.flatnonzero(is_alike & (segment.entries["key_bytes"] > 0)).tolist():
            yield segment, SlotId(slot)
