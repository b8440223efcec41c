"""A namespace as one Zarr store of its own, to be shipped; and back into a root.

    <export>/zarr.json      group; attributes.kvtier: identity, codec and facts as in a root, and
                            the version of the export
             rows/          uint8[rows, row_bytes], one zarr chunk per row, sharded; codecs as in a
                            root: bytes, [blosc,] crc32c
             keys/          uint8[rows, MAX_KEY_BYTES], zeros behind a key's end
             key_bytes/     uint32[rows]
             last_use/      uint64[rows]; rows stand in its order, least recently used first
             checksums/     uint32[rows]: crc32c of each row's bytes

Written and read with zarr's own API, unlike a root.  Every row is verified on its way out, against
trailer and key table, and on its way in, against its checksum here: zarr's own cannot tell a shard
that was cut short from rows of zeros.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec

from storage.checksum import crc32c
from storage.codec import NO_CODEC, Codec
from storage.device import PARTIAL_SUFFIX, aligned_buffer
from storage.errors import ConfigError, CorruptRecord, LayoutMismatch, RootUnusable
from storage.facts import RowFacts, facts_of
from storage.inspection import RowInspector
from storage.namespace import Identity, namespace_metadata
from storage.rowstore import RowStore
from storage.survey import NamespaceSurvey, SegmentSurvey
from storage.types import MAX_KEY_BYTES, PAGE_BYTES, STORED, RowKey, RowOutcome, SlotId

EXPORT_VERSION = 1
_BATCH_ROWS = 64  # moved at once, and in one shard of the export
_BATCH_BYTES = 64 << 20  # ... but no more than so much


@dataclass
class ExportReport:
    """`rows_damaged` are not in the export; `rows_gone` were overwritten meanwhile."""

    rows: int = 0
    rows_damaged: int = 0
    rows_gone: int = 0


@dataclass
class ImportReport:
    """`rows` are those of the export; each ends as one of the others."""

    rows: int = 0
    rows_stored: int = 0
    rows_there_already: int = 0
    rows_refused: int = 0
    """By the store: no room, or a disk that takes no writes."""
    rows_resident: int = 0
    """Of them, those that are there at the end: where the budget is small, later ones push out
    earlier ones."""


def export_namespace(
    namespace: NamespaceSurvey, target: Path, advance: Callable[[int], None]
) -> ExportReport:
    """Write `target`, which is not there before and is there whole or not at all.

    `advance` is told of bytes of rows.  Safe beside a running store.  Raises `ConfigError` for a
    target that is there, `RootUnusable` for a namespace whose metadata is lost, `OSError`.
    """
    if namespace.identity is None or namespace.geometry is None:
        raise RootUnusable(f"{namespace.directory}: its metadata is lost: nobody could import it")
    if target.exists():
        raise ConfigError("destination", "a path where nothing is", str(target))
    partial = target.with_name(target.name + PARTIAL_SUFFIX)
    if partial.exists():
        raise ConfigError(
            "destination", f"no {partial}, which an export left half-made", str(target)
        )
    try:
        report = _write(namespace, namespace.identity, partial, advance)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return report


def _write(
    namespace: NamespaceSurvey, identity: Identity, path: Path, advance: Callable[[int], None]
) -> ExportReport:
    row_bytes = namespace.row_bytes
    rows = sorted(
        (int(segment.entries["last_use"][slot]), position, int(slot))
        for position, segment in enumerate(namespace.segments)
        for slot in segment.named
    )
    batch = batch_rows(row_bytes)
    group = zarr.create_group(path, attributes=_attributes(identity, namespace.facts))
    columns: dict[str, Any] = {
        "keys": group.create_array("keys", shape=(len(rows), MAX_KEY_BYTES), **_column("u1")),
        "key_bytes": group.create_array("key_bytes", shape=(len(rows),), **_column("u4")),
        "last_use": group.create_array("last_use", shape=(len(rows),), **_column("u8")),
        "checksums": group.create_array("checksums", shape=(len(rows),), **_column("u4")),
    }
    array = group.create_array(
        "rows",
        shape=(len(rows), row_bytes),
        chunks=(1, row_bytes),
        shards=(batch, row_bytes),
        dtype="u1",
        fill_value=0,
        compressors=_codecs(namespace.codec),
    )
    report = ExportReport()
    inspector = RowInspector(namespace)
    kept: dict[str, list[Any]] = {name: [] for name in columns}
    content = np.empty((batch, row_bytes), np.uint8)
    for chosen in _batches(rows, batch):
        found: list[tuple[int, SegmentSurvey, SlotId, bytes]] = []
        in_place = sorted(chosen, key=lambda row: row[1:])
        for position, of_segment in groupby(in_place, key=lambda row: row[1]):
            segment = namespace.segments[position]
            slots = [SlotId(slot) for _, _, slot in of_segment]
            for row in inspector.rows(segment, slots):
                if row.fault is not None:
                    report.rows_damaged += 1
                elif row.row is None:
                    report.rows_gone += 1
                else:
                    use = int(segment.entries["last_use"][row.slot])
                    found.append((use, segment, row.slot, bytes(row.row)))
                advance(row_bytes)
        found.sort(key=lambda one: one[0])
        for index, (use, segment, slot, raw) in enumerate(found):
            key = segment.key(slot)
            content[index] = np.frombuffer(raw, np.uint8)
            kept["keys"].append(np.frombuffer(key.ljust(MAX_KEY_BYTES, b"\0"), np.uint8))
            kept["key_bytes"].append(len(key))
            kept["last_use"].append(use)
            kept["checksums"].append(crc32c(raw))
        array[report.rows : report.rows + len(found)] = content[: len(found)]
        report.rows += len(found)
    array.resize((report.rows, row_bytes))
    for name, column in columns.items():
        column.resize((report.rows, *column.shape[1:]))
        if report.rows:
            column[:] = np.array(kept[name], column.dtype)
    return report


def batch_rows(row_bytes: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))


def _batches(rows: list[tuple[int, int, int]], size: int) -> Iterator[list[tuple[int, int, int]]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _attributes(identity: Identity, facts: RowFacts) -> dict[str, Any]:
    attributes = msgspec.json.decode(namespace_metadata(identity, facts), type=dict[str, Any])
    ours: dict[str, Any] = attributes["attributes"]["kvtier"]
    return {"kvtier": ours | {"export_version": EXPORT_VERSION}}


def _column(kind: str) -> dict[str, Any]:
    return {"dtype": kind, "fill_value": 0, "compressors": [Crc32cCodec()]}


def _codecs(codec: Codec | None) -> list[Any]:
    if codec is None:
        return [Crc32cCodec()]
    return [BloscCodec(**codec.zarr_metadata["configuration"]), Crc32cCodec()]


class Export:
    """An export that was opened: `identity`, `facts`, and its rows.

    Raises `CorruptRecord` for what is no export or is damaged, `LayoutMismatch` for one of a newer
    version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._group = zarr.open_group(path, mode="r")
            ours: Any = self._group.attrs["kvtier"]
            version = ours["export_version"]
            self.identity = Identity(
                ours["model"],
                ours["identity"],
                ours.get("element_bytes", 1),
                ours.get("codec", NO_CODEC),
            )
            fingerprint = ours["fingerprint"]
            self.facts = facts_of(ours)
            self._rows = self._array("rows")
            self.row_count, self.row_bytes = map(int, self._rows.shape)
            self.keys = self._keys()
            self._checksums = np.asarray(self._column("checksums"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptRecord(str(path), f"no export of a kvtier namespace ({exc})") from exc
        if not isinstance(version, int) or version > EXPORT_VERSION:
            raise LayoutMismatch(f"{path}: export_version", f"at most {EXPORT_VERSION}", version)
        if self.identity.fingerprint != fingerprint:
            raise CorruptRecord(str(path), "the identity does not have its fingerprint")
        if self.row_bytes <= 0 or self.row_bytes % PAGE_BYTES:
            raise CorruptRecord(str(path), f"rows of {self.row_bytes} bytes")

    def _array(self, name: str) -> zarr.Array[Any]:
        array = self._group[name]
        if not isinstance(array, zarr.Array):
            raise TypeError(f"{name} is no array")
        return array

    def _column(self, name: str) -> Any:
        array = self._array(name)
        if array.shape[0] != self.row_count:
            raise ValueError(f"{name}: {array.shape[0]} of {self.row_count} rows")
        return array[:]

    def _keys(self) -> list[RowKey]:
        """Least recently used first."""
        padded, sizes = np.asarray(self._column("keys")), self._column("key_bytes").tolist()
        if not all(1 <= size <= MAX_KEY_BYTES for size in sizes):
            raise ValueError("key_bytes out of range")
        keys = [RowKey(row.tobytes()[:size]) for row, size in zip(padded, sizes, strict=True)]
        if len(set(keys)) < len(keys):
            raise ValueError("a key that is there twice")
        return keys

    def batches(self) -> Iterator[tuple[list[RowKey], list[memoryview]]]:
        """All rows, in order, verified; the buffers are good until the next batch."""
        size = batch_rows(self.row_bytes)
        area = aligned_buffer(size * self.row_bytes)
        buffers = [area[i * self.row_bytes : (i + 1) * self.row_bytes] for i in range(size)]
        for start in range(0, self.row_count, size):
            keys = self.keys[start : start + size]
            try:
                content = np.asarray(self._rows[start : start + len(keys)])
            except (OSError, ValueError, RuntimeError) as exc:
                raise CorruptRecord(str(self.path), f"rows from {start}: {exc}") from exc
            for index, (key, row) in enumerate(zip(keys, content, strict=True)):
                buffers[index][:] = memoryview(row)
                if crc32c(buffers[index]) != self._checksums[start + index]:
                    raise CorruptRecord(f"{self.path} row {key.hex()}", "not what was exported")
            yield keys, buffers[: len(keys)]


def import_rows(export: Export, rows: RowStore, advance: Callable[[int], None]) -> ImportReport:
    """Write the rows of an export to a namespace of its identity, the order of use kept."""
    report = ImportReport(rows=export.row_count)
    for keys, buffers in export.batches():
        # The first of a job is its most recent.
        outcomes = rows.write(keys[::-1], buffers[::-1]).outcomes
        report.rows_there_already += outcomes.count(RowOutcome.ALREADY_STORED)
        report.rows_stored += outcomes.count(RowOutcome.OK)
        report.rows_refused += sum(outcome not in STORED for outcome in outcomes)
        advance(len(keys) * export.row_bytes)
    report.rows_resident = sum(key in rows for key in export.keys)
    return report
