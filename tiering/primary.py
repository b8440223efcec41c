"""The primary tier: which chunk stands in which slot of the region, and who is using it.

Bookkeeping only; no bytes, files, clocks or locks.  The manager serialises calls.

A chunk is STORING (device -> region), READING (disk -> region) or READY.  Only READY chunks can be
pinned, and only those that are READY and not pinned can be evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from storage.changes import ChangeLog, Changes
from storage.eviction import LeastRecentlyUsed
from storage.types import RowKey
from tiering.slots import SlotPool


class ChunkState(Enum):
    STORING = "storing"
    READING = "reading"
    READY = "ready"


@dataclass(slots=True)
class _Chunk:
    slot: int
    state: ChunkState
    number: int  # counts allocations: the order in which chunks came
    pins: int = 0


class PrimaryTier:
    """The chunks of one region of `slot_count` slots."""

    def __init__(self, slot_count: int) -> None:
        self._slots = SlotPool(slot_count)
        self._chunks: dict[RowKey, _Chunk] = {}
        self._evictable: LeastRecentlyUsed[RowKey] = LeastRecentlyUsed()
        self._allocations = 0
        self.evictions = 0
        self._changes: ChangeLog | None = None

    # -- asking ---------------------------------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return self._slots.slot_count

    @property
    def used_count(self) -> int:
        """Slots that hold a chunk, in whatever state."""
        return self.slot_count - self._slots.free_count

    @property
    def pin_count(self) -> int:
        """References that forbid eviction now: 0 when idle."""
        return sum(chunk.pins for chunk in self._chunks.values())

    @property
    def busy_count(self) -> int:
        """Chunks that are pinned, STORING or READING: 0 when idle."""
        return self.used_count - len(self._evictable)

    def state(self, key: RowKey) -> ChunkState | None:
        """None if the region has no such chunk."""
        chunk = self._chunks.get(key)
        return chunk.state if chunk else None

    def slot(self, key: RowKey) -> int:
        return self._chunks[key].slot

    def in_order(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """`keys`, all present, in the order in which they were allocated."""
        return sorted(keys, key=lambda key: self._chunks[key].number)

    # -- allocate, then publish or abandon ------------------------------------------------------

    def room(self, is_protected: Callable[[RowKey], bool], enough: int) -> int:
        """How many slots `allocate` could give now; stops counting at `enough`."""
        free = self._slots.free_count
        if free >= enough:
            return enough
        return free + len(self._evictable.victims(enough - free, is_protected))

    def allocate(
        self,
        keys: Sequence[RowKey],
        state: ChunkState,
        is_protected: Callable[[RowKey], bool],
    ) -> list[RowKey] | None:
        """Give each new key a slot, evicting the least recently used chunks that may go.

        Returns the evicted keys, or None if there are too few; then nothing has changed.
        """
        assert state is not ChunkState.READY
        shortage = len(keys) - self._slots.free_count
        victims = self._evictable.victims(shortage, is_protected) if shortage > 0 else []
        if len(victims) < shortage:
            return None
        for victim in victims:
            self._forget(victim)
        self.evictions += len(victims)
        for key, slot in zip(keys, self._slots.allocate(len(keys)), strict=True):
            assert key not in self._chunks, f"{key.hex()} is in the region already"
            self._allocations += 1
            self._chunks[key] = _Chunk(slot, state, self._allocations)
        return victims

    def publish(self, keys: Iterable[RowKey]) -> None:
        """The bytes of STORING or READING chunks are complete: they are READY."""
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.state is not ChunkState.READY, f"{key.hex()} was published twice"
            chunk.state = ChunkState.READY
            self._evictable.add(key)
            if self._changes is not None:
                self._changes.note_stored([key])

    def abandon(self, keys: Iterable[RowKey]) -> None:
        """STORING or READING chunks failed: their slots are free."""
        for key in keys:
            chunk = self._chunks.pop(key)
            assert chunk.state is not ChunkState.READY, f"{key.hex()} is published"
            self._slots.release([chunk.slot])

    # -- pin, unpin, touch ----------------------------------------------------------------------

    def pin(self, keys: Sequence[RowKey]) -> list[int]:
        """Forbid eviction of READY chunks; their slots."""
        slots = []
        for key in keys:
            chunk = self._chunks[key]
            assert chunk.state is ChunkState.READY, f"{key.hex()} is {chunk.state.value}"
            if chunk.pins == 0:
                self._evictable.remove(key)
            chunk.pins += 1
            slots.append(chunk.slot)
        return slots

    def unpin(self, keys: Sequence[RowKey]) -> None:
        """Undo one `pin` of the chunks of one request, first to last; they count as used now."""
        for key in reversed(keys):  # leaf first: the last one added is the most recent
            chunk = self._chunks[key]
            assert chunk.pins > 0, f"{key.hex()} is not pinned"
            chunk.pins -= 1
            if chunk.pins == 0:
                self._evictable.add(key)

    def touch(self, keys: Iterable[RowKey]) -> None:
        """The chunks of one request, first to last, were used."""
        self._evictable.touch_chain(keys)

    def clear(self) -> None:
        """Forget every chunk.  The caller knows that no transfer uses a slot."""
        if self._changes is not None:
            self._changes.note_lost(self._ready())
        self._slots.release(chunk.slot for chunk in self._chunks.values())
        self._chunks.clear()
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
        return {k for k, chunk in self._chunks.items() if chunk.state is ChunkState.READY}

    def _forget(self, key: RowKey) -> None:
        self._evictable.remove(key)
        self._slots.release([self._chunks.pop(key).slot])
        if self._changes is not None:
            self._changes.note_removed([key])
