"""Names and places of rows: distinct types, so that swapped arguments fail in mypy."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, NewType

PAGE_BYTES = 4096  # alignment of every offset, length and buffer of an O_DIRECT transfer

RowKey = NewType("RowKey", bytes)
"""Name of a row: 1 to `MAX_KEY_BYTES` bytes, compared whole.  vLLM's offload keys have 36."""

MAX_KEY_BYTES = 72  # sha512 + group index, with 4 bytes to spare; fixed by the key table's entry

SegmentId = NewType("SegmentId", int)
"""Number of a segment in its namespace: zarr shard `c/<id>/0`."""

SlotId = NewType("SlotId", int)
"""Index of a slot in its segment, 0 to slots_per_segment - 1."""


class Location(NamedTuple):
    """Where a row stands on disk."""

    segment: SegmentId
    slot: SlotId


class RowOutcome(IntEnum):
    """What became of one row of a read or write job.  Values travel on the wire as one byte."""

    OK = 0
    """Read and verified, or written and published."""
    ALREADY_STORED = 1
    """Write only: the key was resident; nothing was written."""
    MISSING = 2
    """Read only: the key is not in the store."""
    CORRUPT = 3
    """Read only: the bytes failed their checksum; the row has been dropped."""
    DECLINED = 4
    """Write only: no room, the disk takes no writes now, too many wait already, or the same key
    is being written."""
    FAILED = 5
    """The device refused; nothing was published and nothing is left behind."""
    HUNG = 6
    """The device has not answered by the deadline.  A miss or a failed write, but its buffer stays
    the store's until the release that follows when the device lets go of it."""


STORED = frozenset({RowOutcome.OK, RowOutcome.ALREADY_STORED})


def round_up(count: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `count`."""
    return -(-count // multiple) * multiple
