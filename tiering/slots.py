"""Free slots of the region.  Integers only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class SlotPool:
    """Slots 0 to slot_count - 1.  A slot is free or somebody's; the pool does not know whose."""

    def __init__(self, slot_count: int) -> None:
        assert slot_count >= 0, slot_count
        self.slot_count = slot_count
        self._free = deque(range(slot_count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` slots, those free the longest first."""
        assert self.can_allocate(count), f"{count} of {len(self._free)} free slots"
        pop = self._free.popleft
        return [pop() for _ in range(count)]

    def allocate_one(self) -> int:
        """As `allocate(1)`."""
        return self._free.popleft()

    def release(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)
        assert len(self._free) <= self.slot_count, "a slot was released twice"
