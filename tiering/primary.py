"""The primary tier: which chunk stands in which slot of the region, and who is using it.

Bookkeeping only; no bytes, files, clocks or locks.  The manager serialises calls.

A chunk is STORING (device -> region), READING (disk -> region) or READY.  Only READY chunks can be
pinned, and only those that are READY and not pinned can be evicted.

The scheduler's thread spends its time here: what is known of a chunk stands in dicts of its own, so
that calls of many chunks are few instructions for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from itertools import count

from storage.changes import ChangeLog, Changes
from storage.eviction import LeastRecentlyUsed
from storage.types import RowKey
from tiering.slots import SlotPool

REGION = "region"  # as the name of a tier; no other one is called so


class ChunkState(Enum):
    STORING = "storing"
    READING = "reading"
    READY = "ready"


STORING, READING, READY = ChunkState  # reading a name is ten times as fast as a member of an enum


class PrimaryTier:
    """The chunks of one region of `slot_count` slots."""

    def __init__(self, slot_count: int) -> None:
        self._free = SlotPool(slot_count)
        self._slots: dict[RowKey, int] = {}  # of every chunk
        self._numbers: dict[RowKey, int] = {}  # of every chunk: the order in which they came
        self._moving: dict[RowKey, ChunkState] = {}  # those that are not READY
        self._pins: dict[RowKey, int] = {}  # of READY chunks; 1 or more
        self._evictable: LeastRecentlyUsed[RowKey] = LeastRecentlyUsed()  # the other READY ones
        self._next_number = count()
        self.evictions = 0
        self.pin_count = 0
        """References that forbid eviction now: 0 when idle."""
        self._changes: ChangeLog | None = None

    # -- asking ---------------------------------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return self._free.slot_count

    @property
    def free_count(self) -> int:
        return self._free.free_count

    @property
    def used_count(self) -> int:
        """Slots that hold a chunk, in whatever state."""
        return self.slot_count - self._free.free_count

    @property
    def busy_count(self) -> int:
        """Chunks that are pinned, STORING or READING: 0 when idle."""
        return self.used_count - len(self._evictable)

    def state(self, key: RowKey) -> ChunkState | None:
        """None if the region has no such chunk."""
        moving = self._moving.get(key)
        if moving is not None:
            return moving
        return READY if key in self._slots else None

    def slot(self, key: RowKey) -> int:
        return self._slots[key]

    def number(self, key: RowKey) -> int:
        """Counts chunks as they come: of one that came later it is higher."""
        return self._numbers[key]

    def slots(self, keys: Iterable[RowKey]) -> list[int]:
        """Of chunks that are all present."""
        return list(map(self._slots.__getitem__, keys))

    def missing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """Those of `keys` that the region has not, in whatever state."""
        present = self._slots
        return [key for key in keys if key not in present]

    def storing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """Those of `keys` that are STORING."""
        state = self._moving.get
        return [key for key in keys if state(key) is STORING]

    def in_order(self, keys: Collection[RowKey]) -> list[RowKey]:
        """`keys`, all present, in the order in which they were allocated."""
        if len(keys) == 1:
            return list(keys)
        return sorted(keys, key=self._numbers.__getitem__)

    # -- allocate, then publish or abandon ------------------------------------------------------

    def room(self, is_protected: Callable[[RowKey], bool] | None, enough: int) -> int:
        """How many slots `allocate` could give now; stops counting at `enough`."""
        free = self._free.free_count
        if free >= enough:
            return enough
        return free + len(self._evictable.victims(enough - free, is_protected))

    def allocate(
        self,
        keys: Sequence[RowKey],
        state: ChunkState,
        is_protected: Callable[[RowKey], bool] | None,
    ) -> list[RowKey] | None:
        """Give each new key a slot, evicting the least recently used chunks that may go; None of
        them `is_protected` means that all may.

        Returns the evicted keys, or None if there are too few; then nothing has changed.
        """
        assert state is not READY
        assert self._slots.keys().isdisjoint(keys), "one of them is in the region already"
        shortage = len(keys) - self._free.free_count
        victims: list[RowKey] = []
        if shortage > 0:
            victims = self._evictable.victims(shortage, is_protected)
            if len(victims) < shortage:
                return None
            self._evict(victims)
        self._slots.update(zip(keys, self._free.allocate(len(keys)), strict=True))
        self._numbers.update(zip(keys, self._next_number, strict=False))
        self._moving.update(dict.fromkeys(keys, state))
        return victims

    def allocate_one(
        self, key: RowKey, state: ChunkState, is_protected: Callable[[RowKey], bool] | None
    ) -> list[RowKey] | None:
        """As `allocate` of a single key: what a lookup of a long prompt on disk does for each."""
        assert state is not READY
        assert key not in self._slots, "it is in the region already"
        evicted: list[RowKey] = []
        if self._free.free_count:
            slot = self._free.allocate_one()
        else:
            evicted = self._evictable.victims(1, is_protected)
            if not evicted:
                return None
            [victim] = evicted
            self._evictable.remove(victim)
            slot = self._slots.pop(victim)
            del self._numbers[victim]
            self.evictions += 1
            if self._changes is not None:
                self._changes.note_removed(evicted)
        self._slots[key] = slot
        self._numbers[key] = next(self._next_number)
        self._moving[key] = state
        return evicted

    def publish(self, keys: Iterable[RowKey]) -> None:
        """The bytes of STORING or READING chunks, first to last, are complete: they are READY, and
        count as used now, the first as the most recent."""
        moving, ready = self._moving, list(keys)
        for key in ready:
            del moving[key]
        self._evictable.add_chain(ready)
        if self._changes is not None:
            self._changes.note_stored(ready)

    def abandon(self, keys: Iterable[RowKey]) -> None:
        """STORING or READING chunks failed: their slots are free."""
        for key in keys:
            del self._moving[key], self._numbers[key]
            self._free.release([self._slots.pop(key)])

    def disown(self, key: RowKey) -> int:
        """A READING chunk failed, but something may still write into its slot: the slot, which is
        nobody's until `free`."""
        state = self._moving.pop(key)
        assert state is READING, f"{key.hex()} is {state.value}"
        del self._numbers[key]
        return self._slots.pop(key)

    def free(self, slot: int) -> None:
        """Undo one `disown`: nothing writes into the slot any more."""
        self._free.release([slot])

    # -- pin, unpin, touch ----------------------------------------------------------------------

    def pin(self, keys: Sequence[RowKey]) -> list[int]:
        """Forbid eviction of READY chunks; their slots."""
        pins = self._pins
        if pins.keys().isdisjoint(keys):
            self._evictable.remove_all(keys)  # only READY ones are there
            pins.update(dict.fromkeys(keys, 1))
        else:
            self._evictable.remove_all([key for key in keys if key not in pins])
            for key in keys:
                pins[key] = pins.get(key, 0) + 1
        self.pin_count += len(keys)
        return list(map(self._slots.__getitem__, keys))

    def unpin(self, keys: Sequence[RowKey]) -> None:
        """Undo one `pin` of the chunks of one request, first to last; they count as used now."""
        pins, idle = self._pins, []
        for key in keys:
            left = pins[key] - 1
            if left:
                pins[key] = left
            else:
                del pins[key]
                idle.append(key)
        self.pin_count -= len(keys)
        self._evictable.add_chain(idle)  # leaf first: the last one added is the most recent

    def touch(self, keys: Iterable[RowKey]) -> None:
        """The chunks of one request, first to last, were used."""
        self._evictable.touch_chain(keys)

    def clear(self) -> None:
        """Forget every chunk.  The caller knows that no transfer uses a slot."""
        if self._changes is not None:
            self._changes.note_lost(self._ready())
        self._free.release(self._slots.values())
        for of_chunks in (self._slots, self._numbers, self._moving, self._pins):
            of_chunks.clear()
        self.pin_count = 0
        self._evictable = LeastRecentlyUsed()

    # -- who wants to know ----------------------------------------------------------------------

    def follow(self) -> None:
        """From here on `take_changes` tells which chunks become READY, and which of those go."""
        self._changes = ChangeLog(self._ready())

    @property
    def change_count(self) -> int:
        """Changes to take; 0 if nobody follows."""
        return 0 if self._changes is None else len(self._changes)

    def take_changes(self, limit: int) -> Changes:
        """The next changes, `limit` at most.  Only after `follow`.  Who applies all of them knows
        the chunks that are READY."""
        assert self._changes is not None, "nobody follows"
        return self._changes.take(limit)

    def _ready(self) -> set[RowKey]:
        return self._slots.keys() - self._moving.keys()

    def _evict(self, victims: list[RowKey]) -> None:
        self._evictable.remove_all(victims)
        self._free.release(list(map(self._slots.pop, victims)))
        numbers = self._numbers
        for key in victims:
            del numbers[key]
        self.evictions += len(victims)
        if self._changes is not None:
            self._changes.note_removed(victims)
