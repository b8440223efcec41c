"""Presets of models: what each kind of layer stores, so that a row can be sized without the model.

One JSON file per model in `configs/models/`.  Checked once, by `load_preset`; the inside trusts it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec

from storage.errors import ConfigError, StorageError
from tiering.topology import LayerFacts

PRESETS = Path(__file__).parent / "models"  # a link to configs/models; files, once installed


class PresetError(StorageError):
    """A preset that can't be used: which file, where in it, and why."""


class LayerKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`count` layers that store the same."""

    kind: str
    count: int
    page_bytes: int
    """Bytes of one block of one shard: what a rank holds of one layer once TP >= `max_tp_shards`,
    padding included."""
    max_tp_shards: int | None
    """Into how many distinct shards a layer splits: 1 for MLA and its companions, KV heads for
    MHA and GQA, null for what is never taken as replicated."""

    def facts(self, tp: int) -> list[LayerFacts]:
        """The layers as a rank of `tp` holds them.  Raises `ConfigError` for uneven shards."""
        shards = self.max_tp_shards or tp
        if shards % tp and tp % shards:
            raise ConfigError("tp", f"a divisor or a multiple of {shards} ({self.kind})", tp)
        page_bytes = self.page_bytes * max(1, shards // tp)
        return [
            LayerFacts(f"{self.kind} {number}", page_bytes, self.max_tp_shards)
            for number in range(self.count)
        ]


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model as its engine stores it."""

    model: str
    tp: tuple[int, ...]
    """The TP sizes that it is usually served with."""
    tokens_per_block: int | None
    """None where it is not established."""
    layers: tuple[LayerKind, ...]
    note: str
    """Where the figures come from, for people."""
    measured_worker_bytes: int | None = None
    """Bytes of one block on one rank as a running engine reported them, at every size in `tp`."""
    groups: int = 1
    """KV-cache groups of the engine, which take turns in the same memory: a chunk of tokens has at
    most one row in each.  More than one where layers attend over unlike windows."""
    layers_per_group: tuple[int, ...] = ()
    """Of each group, how many of `layers` it uses, from the first on; empty: all of them."""

    def facts(self, tp: int) -> list[LayerFacts]:
        """All layers, in the order of the row.  Raises `ConfigError` for uneven shards."""
        return [layer for kind in self.layers for layer in kind.facts(tp)]


def load_preset(name: str) -> Preset:
    """The preset `name` of `configs/models/`, or the one in the file `name` if that ends in .json.

    Raises `PresetError` that names the file and the key.
    """
    if name.endswith(".json"):
        return read_preset(Path(name))
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), 1, 0.3) or preset_names()
        raise PresetError(f"preset: no {name!r}; did you mean {', '.join(near)}?")
    return read_preset(PRESETS / f"{name}.json")


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_preset(path: Path) -> Preset:
    """Raises `PresetError` for a file that is not there, not a preset, or contradicts itself."""
    try:
        preset = msgspec.json.decode(path.read_bytes(), type=Preset)
    except OSError as exc:
        raise PresetError(f"{path}: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise PresetError(f"{path}: {exc}") from exc
    numbers = [preset.groups, *preset.tp]
    numbers.append(1 if preset.tokens_per_block is None else preset.tokens_per_block)
    for kind in preset.layers:
        numbers += [kind.count, kind.page_bytes, kind.max_tp_shards or 1]
    numbers += preset.layers_per_group
    if not preset.layers or not preset.tp or min(numbers) < 1:
        raise PresetError(f"{path}: expected a layer, a TP size, and numbers above 0 throughout")
    most = sum(kind.count for kind in preset.layers)
    per_group = preset.layers_per_group
    if per_group and (len(per_group) != preset.groups or max(per_group) != most):
        raise PresetError(
            f"{path}: layers_per_group: expected {preset.groups} numbers, the largest of them "
            f"{most}, got {list(per_group)}"
        )
    for tp in preset.tp:
        try:
            found = sum(layer.page_bytes for layer in preset.facts(tp))
        except ConfigError as exc:
            raise PresetError(f"{path}: {exc}") from exc
        if preset.measured_worker_bytes not in (None, found):
            raise PresetError(
                f"{path}: measured_worker_bytes: the layers add up to {found} bytes at TP {tp}, "
                f"got {preset.measured_worker_bytes}"
            )
    return preset


def own_model(worker_bytes: int, tp: int, max_tp_shards: int, tokens_per_block: int) -> Preset:
    """A model of which only the bytes of a block on one of `tp` ranks are known.

    Raises `ConfigError` if they are not those of whole shards.
    """
    shards_held = max(1, max_tp_shards // tp)
    if worker_bytes % shards_held:
        raise ConfigError("--worker-bytes", f"a multiple of {shards_held} shards", worker_bytes)
    layers = (LayerKind("all layers", 1, worker_bytes // shards_held, max_tp_shards),)
    return Preset("your own", (tp,), tokens_per_block, layers, note="")
