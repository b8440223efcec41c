"""The header of a segment: how one Zarr v3 shard describes itself.  Pure bytes; opens no file.

A segment file, every part starting on a 4 KiB boundary:

    [shard index][key table A][key table B][slot 0][slot 1] ...

- Shard index: what the `sharding_indexed` codec with `index_location: start` expects.  Per slot
  (offset, nbytes) as little-endian uint64, both 2^64-1 for a slot without a row; then the crc32c
  of all that.
- Key table: `magic, generation, slot count, namespace, crc32c, slot pages` and per slot one
  `ENTRY`.  Two copies take turns; the valid one with the higher generation counts, so a torn write
  loses one update and never the table.  A table of another namespace is none: its keys name other
  bytes.  The index is a function of the table and is made anew from it when it is torn.
- Slot: a record, padded to whole pages.  Without a codec: `row_bytes` of row and their crc32c (the
  trailer that Zarr's inner `crc32c` codec appends).  Under a codec: a Blosc frame and its crc32c.

Under a codec a namespace has segments of several slot sizes, as a slab allocator has size classes.
Every class has the same number of slots and the same header, and segment files of its own size.
In the largest class rows stand raw: behind a frame's head that says so, which ends a page, so that
the row itself starts on one and moves without a copy.

The table holds each record's checksum as well.  A name and bytes that do not belong together (a
crash between two writes, rows that changed places) differ there, whatever the trailer says.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage.checksum import TRAILER_BYTES, crc32c
from storage.types import MAX_KEY_BYTES, PAGE_BYTES, SlotId, round_up

EMPTY = 2**64 - 1  # Zarr's offset and nbytes of a chunk that is not there

ENTRY = np.dtype(
    [
        ("key_bytes", "<u4"),  # 0: no row in this slot
        ("checksum", "<u4"),  # crc32c of the record without its trailer
        ("offset", "<u8"),  # of the record, from the start of the file
        ("length", "<u8"),  # of the record
        ("last_use", "<u8"),  # a count that grows with every use in the namespace; not a time
        ("key", f"V{MAX_KEY_BYTES}"),
    ]
)
_ENTRY = struct.Struct(f"<IIQQQ{MAX_KEY_BYTES}s")  # the same: faster than numpy for one entry
_NAME = struct.Struct(f"<I28x{MAX_KEY_BYTES}s")  # its key_bytes and key
assert _ENTRY.size == _NAME.size == ENTRY.itemsize
SLOT_HEADER_BYTES = 16 + 2 * ENTRY.itemsize  # its part of the index and of two tables
Entries = npt.NDArray[np.void]  # ENTRY[slots_per_segment]

_TABLE_MAGIC = b"kvtkeys1"
NAMESPACE_BYTES = 16  # of a namespace's fingerprint
# magic, generation, slots, namespace, crc32c of head (with 0 here) and entries, pages of a slot
# under a codec
_TABLE_HEAD = struct.Struct(f"<8sQQ{NAMESPACE_BYTES}sII")

MAX_SLOTS = 1024  # a table of 100 KB, rewritten with each publication, is as large as it gets
_TARGET_SEGMENTS = 512  # of a full budget: few enough for a directory, many enough to give back
_MIN_SEGMENT_BYTES = 4 << 20  # below this a header write costs as much as the rows it publishes
_MAX_SEGMENT_BYTES = 1 << 30
FRAME_HEAD_BYTES = 16  # of a Blosc frame: versions, flags, sizes
_CLASS_STEPS = 32  # classes of slots are so many steps apart over a row: 1.6 % lost on average
_CLASS_STEPS_MIN = 8  # a row that shrinks further stands in a slot of 1/4 of its size


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """Where everything stands in a segment; all figures follow from these.

    Without a codec all segments of a namespace have one geometry, under a codec one of
    `size_classes`.
    """

    row_bytes: int
    slots_per_segment: int
    slot_pages: int = 0
    """Of a slot under a codec; 0 without one."""

    def __post_init__(self) -> None:
        assert self.row_bytes > 0, self.row_bytes
        assert self.row_bytes % PAGE_BYTES == 0, self.row_bytes
        assert 1 <= self.slots_per_segment <= MAX_SLOTS, self.slots_per_segment

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next.  Without a codec the row and a page for its trailer."""
        return self.slot_pages * PAGE_BYTES or self.row_bytes + PAGE_BYTES

    @property
    def is_packed(self) -> bool:
        """Whether slots hold frames that are smaller than their rows."""
        return 0 < self.stride < self.row_bytes + PAGE_BYTES

    @property
    def lead_bytes(self) -> int:
        """From the start of a slot to its record: before a raw row its frame's head ends a page."""
        return PAGE_BYTES - FRAME_HEAD_BYTES if self.slot_pages and not self.is_packed else 0

    @property
    def record_bytes(self) -> int:
        """Of a record, which the shard index calls a chunk: row and trailer, behind a frame's head
        where rows stand raw under a codec; at most so many where they are packed."""
        if self.is_packed:
            return self.stride
        head_bytes = FRAME_HEAD_BYTES if self.slot_pages else 0
        return head_bytes + self.row_bytes + TRAILER_BYTES

    def takes(self, frame_bytes: int) -> bool:
        """Whether a frame of that size and its trailer fit a packed slot."""
        return self.is_packed and frame_bytes + TRAILER_BYTES <= self.record_bytes

    @property
    def index_bytes(self) -> int:
        return 16 * self.slots_per_segment + TRAILER_BYTES

    @property
    def table_bytes(self) -> int:
        """Of one copy of the key table, padded to a page."""
        return round_up(_TABLE_HEAD.size + ENTRY.itemsize * self.slots_per_segment, PAGE_BYTES)

    def table_offset(self, generation: int) -> int:
        """Where the copy of that generation stands: even ones first, odd ones second."""
        return round_up(self.index_bytes, PAGE_BYTES) + (generation % 2) * self.table_bytes

    @property
    def header_bytes(self) -> int:
        return round_up(self.index_bytes, PAGE_BYTES) + 2 * self.table_bytes

    @property
    def segment_bytes(self) -> int:
        return self.header_bytes + self.slots_per_segment * self.stride

    def row_offset(self, slot: int) -> int:
        """Where `slot` begins."""
        return self.header_bytes + slot * self.stride

    def size_classes(self) -> tuple[SegmentGeometry, ...]:
        """The geometries of a namespace under a codec, slots ascending; the last is for raw rows.

        `self` is the geometry without a codec.  Rows too small to gain a page have one class.
        """
        row_pages = self.row_bytes // PAGE_BYTES
        packed = {
            round_up(self.row_bytes * step // _CLASS_STEPS, PAGE_BYTES) // PAGE_BYTES
            for step in range(_CLASS_STEPS_MIN, _CLASS_STEPS)
        }
        pages = [*sorted(pages for pages in packed if pages < row_pages), row_pages + 2]
        return tuple(SegmentGeometry(self.row_bytes, self.slots_per_segment, p) for p in pages)

    @classmethod
    def choose(
        cls, row_bytes: int, budget_bytes: int, segment_bytes: int | None = None
    ) -> SegmentGeometry:
        """A geometry for rows of `row_bytes` in a root of `budget_bytes`.

        A segment is about 1/512 of the budget, between 4 MiB and 1 GiB, or about `segment_bytes`
        where that is given; never more than 1/4 of the budget, never fewer than one slot.
        """
        target = segment_bytes or min(
            max(budget_bytes // _TARGET_SEGMENTS, _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES
        )
        target = min(target, budget_bytes // 4)
        slots = max(1, min(MAX_SLOTS, target // (row_bytes + PAGE_BYTES + SLOT_HEADER_BYTES)))
        return cls(row_bytes, slots)

    @classmethod
    def of_segment(
        cls, row_bytes: int, segment_bytes: int, *, is_coded: bool = False
    ) -> SegmentGeometry | None:
        """The geometry without a codec of a namespace in which a whole segment file has that size,
        or None if in none it has.  Under a codec (`is_coded`) it may be one of several."""
        for slots in range(1, MAX_SLOTS + 1):
            geometry = cls(row_bytes, slots)
            classes = geometry.size_classes() if is_coded else (geometry,)
            if any(c.segment_bytes == segment_bytes for c in classes):
                return geometry
        return None


class Record(NamedTuple):
    """What stands in a slot: `length` bytes, the last four being the trailer, which `checksum`
    over the others must equal."""

    length: int
    checksum: int


def new_entries(geometry: SegmentGeometry) -> Entries:
    """A table of empty slots."""
    return np.zeros(geometry.slots_per_segment, ENTRY)


def encode_index(geometry: SegmentGeometry, entries: Entries) -> bytes:
    """The shard index of `entries`, padded to a page."""
    index = np.full((geometry.slots_per_segment, 2), EMPTY, "<u8")
    used = entries["key_bytes"] > 0
    index[used, 0] = entries["offset"][used]
    index[used, 1] = entries["length"][used]
    raw = index.tobytes()
    raw += crc32c(raw).to_bytes(TRAILER_BYTES, "little")
    return raw.ljust(round_up(len(raw), PAGE_BYTES), b"\0")


def encode_table(
    geometry: SegmentGeometry, entries: Entries, generation: int, namespace: bytes
) -> bytes:
    """One copy of the key table, padded to a page."""
    assert len(namespace) == NAMESPACE_BYTES
    body = entries.tobytes()
    checksum = _table_checksum(geometry, generation, namespace, body)
    head = (_TABLE_MAGIC, generation, geometry.slots_per_segment, namespace)
    raw = _TABLE_HEAD.pack(*head, checksum, geometry.slot_pages) + body
    return raw.ljust(geometry.table_bytes, b"\0")


def _table_checksum(
    geometry: SegmentGeometry, generation: int, namespace: bytes, body: bytes | memoryview
) -> int:
    head = (_TABLE_MAGIC, generation, geometry.slots_per_segment, namespace)
    return crc32c(body, crc32c(_TABLE_HEAD.pack(*head, 0, geometry.slot_pages)))


def claimed_generation(head: bytes | memoryview) -> int:
    """What the first page of a copy says, which may be anything; -1 if not even its magic is
    there."""
    magic, generation, *_ = _TABLE_HEAD.unpack_from(head)
    return int(generation) if magic == _TABLE_MAGIC else -1


def decode_table(
    geometry: SegmentGeometry, raw: bytes | memoryview, namespace: bytes
) -> tuple[int, Entries] | None:
    """(generation, entries) of a copy, or None if it is torn, foreign or was never written.

    The entries are a view of `raw`.
    """
    magic, generation, slots, found, checksum, pages = _TABLE_HEAD.unpack_from(raw)
    expected = (_TABLE_MAGIC, geometry.slots_per_segment, namespace, geometry.slot_pages)
    if (magic, slots, found, pages) != expected:
        return None
    body = raw[_TABLE_HEAD.size : _TABLE_HEAD.size + ENTRY.itemsize * slots]
    if _table_checksum(geometry, generation, namespace, body) != checksum:
        return None
    return generation, np.frombuffer(body, ENTRY)


@dataclass(frozen=True, slots=True)
class DecodedHeader:
    """What a header on disk says.

    `whole` is False when a copy of the table or the index must be written anew: after a torn
    write, or when the header was never written at all (then `entries` are all empty).
    """

    generation: int
    entries: Entries
    whole: bool


def decode_header(
    geometry: SegmentGeometry, raw: bytes | memoryview, namespace: bytes
) -> DecodedHeader:
    """The newest state that `raw`, the first `header_bytes` of a segment, holds; a copy.

    Entries that point outside their own slot are dropped: no valid writer makes them.
    """
    copies = []
    for parity in (0, 1):
        start = geometry.table_offset(parity)
        decoded = decode_table(geometry, raw[start : start + geometry.table_bytes], namespace)
        if decoded is not None and decoded[0] % 2 == parity:
            copies.append(decoded)
    if not copies:
        return DecodedHeader(0, new_entries(geometry), whole=False)
    generation, newest = max(copies, key=lambda copy: copy[0])
    entries = newest.copy()
    are_valid = drop_strays(geometry, entries)
    index = encode_index(geometry, entries)
    whole = len(copies) == 2 and raw[: len(index)] == index and are_valid
    return DecodedHeader(generation, entries, whole)


def drop_strays(geometry: SegmentGeometry, entries: Entries) -> bool:
    """Drop entries that point outside their own slot; whether there were none."""
    used = entries["key_bytes"] > 0
    first = geometry.row_offset(0) + geometry.lead_bytes
    offsets = first + geometry.stride * np.arange(len(entries), dtype=np.uint64)
    valid = used & (entries["offset"] == offsets) & (entries["key_bytes"] <= MAX_KEY_BYTES)
    if geometry.is_packed:
        valid &= entries["length"] > FRAME_HEAD_BYTES + TRAILER_BYTES
        valid &= entries["length"] <= geometry.record_bytes
    else:
        valid &= entries["length"] == geometry.record_bytes
    strays = used & ~valid
    if not strays.any():
        return True
    entries[strays] = np.zeros((), ENTRY)
    return False


def key_of(entries: Entries, slot: int) -> bytes | None:
    """The key in `slot`, or None for an empty one."""
    size, key = _NAME.unpack_from(entries.data, slot * ENTRY.itemsize)
    return key[:size] if size else None


def set_entry(
    geometry: SegmentGeometry,
    entries: Entries,
    slot: SlotId,
    key: bytes,
    record: Record,
    last_use: int,
) -> None:
    """Name the row in `slot`."""
    _ENTRY.pack_into(
        entries.data,
        slot * ENTRY.itemsize,
        len(key),
        record.checksum,
        geometry.row_offset(slot) + geometry.lead_bytes,
        record.length,
        last_use,
        key,
    )


def clear_entry(entries: Entries, slot: SlotId) -> None:
    """Leave `slot` without a row."""
    _ENTRY.pack_into(entries.data, slot * ENTRY.itemsize, 0, 0, 0, 0, 0, b"")
