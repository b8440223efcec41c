"""Damage a store so that no checksum can tell: the negative control of an evaluation.

A score that restored KV does not carry proves nothing. So rows are given other bytes, and whatever
would betray them (trailer, key table, shard index) is made to agree, as if those bytes had been
stored. The store must be stopped.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from scripts.serve_demo import rows_on_disk
from storage.checksum import TRAILER_BYTES, crc32c
from storage.errors import StorageError
from storage.header import (
    Record,
    SegmentGeometry,
    decode_header,
    encode_index,
    encode_table,
    key_of,
    set_entry,
)
from storage.namespace import read_geometry
from storage.types import SlotId

ZEROED_SHARE = 0.25
_SEED = 0


class Damage(Enum):
    ZEROED = "25 % of rows zeroed"
    SWAPPED = "rows changed places"


class CannotTamper(Exception):
    """The store is not one whose rows can be given other bytes; one line."""


def tamper(root: Path, damage: Damage) -> int:
    """Damage every namespace of a store of kvtier's; how many rows hold other bytes now."""
    names = [rows.namespace for rows in rows_on_disk(root)]
    return sum(_tamper_namespace(root / name, damage) for name in names)


def tamper_files(root: Path, damage: Damage) -> int:
    """The same for vLLM's `fs` tier, which keeps a file per row and no checksum."""
    files = sorted(root.rglob("*.bin"))
    rows = [file.read_bytes() for file in files]
    changed = dict(_damaged(rows, damage))
    for i, row in changed.items():
        files[i].write_bytes(row)
    return len(changed)


def _tamper_namespace(namespace: Path, damage: Damage) -> int:
    metadata = namespace / "rows" / "zarr.json"
    try:
        geometry, _ = read_geometry(metadata.read_bytes(), str(metadata))
    except StorageError as error:  # under a codec, too
        raise CannotTamper(str(error)) from error
    fingerprint = bytes.fromhex(namespace.name.rpartition("-")[2])
    segments = sorted((namespace / "rows" / "c").glob("*/0"))
    places = [
        (segment, slot) for segment in segments for slot in _slots(segment, geometry, fingerprint)
    ]
    rows = [_read_row(segment, geometry, slot) for segment, slot in places]
    changed = dict(_damaged(rows, damage))
    for segment in segments:
        own = {places[i][1]: row for i, row in changed.items() if places[i][0] == segment}
        _rewrite(segment, geometry, fingerprint, own)
    return len(changed)


def _damaged(rows: list[bytes], damage: Damage) -> Iterator[tuple[int, bytes]]:
    """(index, other bytes) of the rows that get some."""
    rng = random.Random(_SEED)
    for i, row in enumerate(rows):
        if damage is Damage.SWAPPED:
            # Of one far away: neighbours are chunks of the same prompt, and hold its answer too.
            yield i, rows[(i + len(rows) // 2) % len(rows)]
        elif rng.random() < ZEROED_SHARE:
            yield i, bytes(len(row))


def _slots(segment: Path, geometry: SegmentGeometry, namespace: bytes) -> list[SlotId]:
    with segment.open("rb") as file:
        header = decode_header(geometry, file.read(geometry.header_bytes), namespace)
    slots = map(SlotId, range(geometry.slots_per_segment))
    return [slot for slot in slots if key_of(header.entries, slot) is not None]


def _read_row(segment: Path, geometry: SegmentGeometry, slot: SlotId) -> bytes:
    with segment.open("rb") as file:
        file.seek(geometry.row_offset(slot))
        return file.read(geometry.row_bytes)


def _rewrite(
    segment: Path, geometry: SegmentGeometry, namespace: bytes, rows: dict[SlotId, bytes]
) -> None:
    """Put rows in their slots under the names that stand there, and make both tables agree."""
    with segment.open("r+b") as file:
        header = decode_header(geometry, file.read(geometry.header_bytes), namespace)
        for slot, row in rows.items():
            key = key_of(header.entries, slot)
            assert key is not None, slot
            record = Record(geometry.record_bytes, crc32c(row))
            last_use = int(header.entries["last_use"][slot])
            set_entry(geometry, header.entries, slot, key, record, last_use)
            file.seek(geometry.row_offset(slot))
            file.write(row + record.checksum.to_bytes(TRAILER_BYTES, "little"))
        file.seek(0)
        file.write(encode_index(geometry, header.entries))
        for generation in (header.generation + 1, header.generation + 2):
            file.seek(geometry.table_offset(generation))
            file.write(encode_table(geometry, header.entries, generation, namespace))
