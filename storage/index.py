"""Key -> place, in memory.  Pure: it says what the headers say, and who is reading.

Compact, because a large drive has millions of rows: the keys stand once, in the segments' tables,
and here are 12 to 24 bytes per row, an open-addressing table of cells `hash << 32 | number + 1`
(0: empty), linear probing, deletion by shifting back.  A row's *number* is its index in zarr's
array, `segment * slots_per_segment + slot`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from storage.types import MAX_KEY_BYTES, Location, RowKey, SegmentId, SlotId

_HASH_BITS = 32
_NUMBER_MASK = (1 << _HASH_BITS) - 1
_MIN_CELLS = 8
ROWS_MAX = _NUMBER_MASK - 1  # numbers below it: a cell holds one more

Numbers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def hash_of(key: bytes) -> int:
    """32 bits that differ from process to process, so that nobody can choose colliding keys."""
    return hash(key.ljust(MAX_KEY_BYTES, b"\0")) & _NUMBER_MASK


def hashes_of(padded_keys: Sequence[bytes]) -> Hashes:
    """64 bits of many keys, each padded with zeros to `MAX_KEY_BYTES`; the low ones are `hash_of`
    the key."""
    return np.fromiter(map(hash, padded_keys), np.int64, len(padded_keys)).view(np.uint64)


class RowIndex:
    """The published rows of a namespace, and the pins of reads under way.

    `key_at` says which key the tables have for a row's number: of every row that is published, from
    before `publish` until after `withdraw`.  The caller serialises calls.  A pinned row is not
    evicted and its slot not overwritten.
    """

    def __init__(self, slots_per_segment: int, key_at: Callable[[int], bytes]) -> None:
        self._slots_per_segment = slots_per_segment
        self._key_at = key_at
        self._count = 0
        self._cells = _empty_cells(_MIN_CELLS)
        self._mask = _MIN_CELLS - 1
        self._pins: dict[Location, int] = {}

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: bytes) -> bool:
        return self._find(key) >= 0

    def __iter__(self) -> Iterator[RowKey]:
        for cell in self._cells:
            if cell:
                yield RowKey(self._key_at(_number(cell)))

    # -- places and numbers ---------------------------------------------------------------------

    def number(self, place: Location) -> int:
        return place.segment * self._slots_per_segment + place.slot

    def place(self, number: int) -> Location:
        segment, slot = divmod(number, self._slots_per_segment)
        return Location(SegmentId(segment), SlotId(slot))

    # -- rows -----------------------------------------------------------------------------------

    def get(self, key: RowKey) -> Location | None:
        position = self._find(key)
        return None if position < 0 else self.place(_number(self._cells[position]))

    def publish(self, key: RowKey, place: Location) -> None:
        if 3 * (self._count + 1) > 2 * len(self._cells):
            self._rebuild(np.frombuffer(self._cells, np.uint64), self._count + 1)
        hashed = hash_of(key)
        position = hashed & self._mask
        while cell := self._cells[position]:
            is_other = cell >> _HASH_BITS != hashed or self._key_at(_number(cell)) != key
            assert is_other, f"{key.hex()} is published already"
            position = (position + 1) & self._mask
        self._cells[position] = hashed << _HASH_BITS | (self.number(place) + 1)
        self._count += 1

    def load(self, hashes: Hashes, numbers: Numbers) -> None:
        """Publish rows at once, into an empty index: different keys, given by `hashes_of`."""
        assert not self._count
        self._rebuild(hashes << np.uint64(_HASH_BITS) | (numbers + 1).astype(np.uint64), 0)

    def withdraw(self, key: RowKey) -> Location:
        """Raises `KeyError` for a key that is not there."""
        hole = self._find(key)
        if hole < 0:
            raise KeyError(key)
        place = self.place(_number(self._cells[hole]))
        self._take_out(hole)
        return place

    def withdraw_row(self, key: RowKey, number: int) -> None:
        """`withdraw` a row whose number is known.  Raises `KeyError` if it is not there."""
        cells, mask = self._cells, self._mask
        hashed = hash_of(key)
        wanted = hashed << _HASH_BITS | (number + 1)
        position = hashed & mask
        while (cell := cells[position]) != wanted:
            if not cell:
                raise KeyError(key)
            position = (position + 1) & mask
        self._take_out(position)

    def _take_out(self, hole: int) -> None:
        """Empty a cell, so that every other is still found."""
        cells, mask = self._cells, self._mask
        self._count -= 1
        position = (hole + 1) & mask
        while cell := cells[position]:
            home = (cell >> _HASH_BITS) & mask
            if (position - home) & mask >= (position - hole) & mask:
                cells[hole] = cell  # its own probe would end at the hole
                hole = position
            position = (position + 1) & mask
        cells[hole] = 0

    def _find(self, key: bytes) -> int:
        """Position of its cell, or -1."""
        cells, mask = self._cells, self._mask
        hashed = hash_of(key)
        position = hashed & mask
        while cell := cells[position]:
            if cell >> _HASH_BITS == hashed and self._key_at((cell & _NUMBER_MASK) - 1) == key:
                return position
            position = (position + 1) & mask
        return -1

    def _rebuild(self, cells: Hashes, count: int) -> None:
        """A table of `cells`, those that are not empty, with room for `count` rows at least."""
        cells = cells[cells > 0]
        size = _MIN_CELLS
        while 2 * size < 3 * max(count, len(cells)):
            size *= 2
        self._cells = _empty_cells(size)
        self._mask = size - 1
        self._count = len(cells)
        # In the order of their homes each stands at its home, or behind the one before it.
        homes = (cells >> np.uint64(_HASH_BITS)) & np.uint64(self._mask)
        order = np.argsort(homes)
        steps = np.arange(len(cells))
        positions = np.maximum.accumulate(homes[order].astype(np.int64) - steps) + steps
        fits = positions < size
        table = np.frombuffer(self._cells, np.uint64)
        table[positions[fits]] = cells[order][fits]
        position = 0
        for cell in cells[order][~fits].tolist():  # past the end: a few, from the start again
            while self._cells[position]:
                position += 1
            self._cells[position] = cell

    # -- pins -----------------------------------------------------------------------------------

    def pin(self, place: Location) -> None:
        self._pins[place] = self._pins.get(place, 0) + 1

    def unpin(self, place: Location) -> None:
        count = self._pins[place] - 1
        assert count >= 0
        if count:
            self._pins[place] = count
        else:
            del self._pins[place]

    def is_pinned(self, key: RowKey) -> bool:
        place = self.get(key)
        if place is None:
            raise KeyError(key)
        return place in self._pins

    def place_is_pinned(self, place: Location) -> bool:
        return place in self._pins

    def has_pins_in(self, segment: SegmentId) -> bool:
        """Whether rows of a segment are being read."""
        return any(place.segment == segment for place in self._pins)

    @property
    def pin_count(self) -> int:
        return sum(self._pins.values())


def _number(cell: int) -> int:
    return (cell & _NUMBER_MASK) - 1


def _empty_cells(count: int) -> array[int]:
    return array("Q", bytes(8 * count))
