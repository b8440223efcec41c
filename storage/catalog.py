"""What a namespace holds, in memory: which key is where, in which order rows go, who reads them.

Bookkeeping only.  All methods are called under the owner's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from storage.eviction import EVICTION, EvictionPolicy, RowLinks
from storage.index import RowIndex
from storage.pool import SegmentPool
from storage.segment import Segment
from storage.types import Location, RowKey


class Catalog:
    """Index, recency and segments of one namespace, kept in step."""

    def __init__(self, pool: SegmentPool, eviction: str) -> None:
        """`eviction` is one of `storage.eviction.EVICTION`."""
        self.pool = pool
        self.index = RowIndex(pool.geometry.slots_per_segment, pool.key)
        links = RowLinks()
        self.policies = {size_class: EVICTION[eviction](links) for size_class in pool.classes}
        self.on_change: Callable[[Sequence[RowKey], Sequence[RowKey]], None] | None = None
        """Called with (published, withdrawn) keys, in order."""

    def key(self, number: int) -> RowKey:
        """Of a published row, by its number."""
        return RowKey(self.pool.key(number))

    def last_use(self, number: int) -> int:
        place = self.index.place(number)
        return int(self.pool[place.segment].entries["last_use"][place.slot])

    def policy_at(self, place: Location) -> EvictionPolicy:
        return self.policies[self.pool[place.segment].geometry]

    def keys(self) -> list[RowKey]:
        """All keys, least recently used first."""
        if len(self.policies) == 1:
            (policy,) = self.policies.values()
            return [self.key(number) for number in policy]
        numbers = [number for policy in self.policies.values() for number in policy]
        return [self.key(number) for number in sorted(numbers, key=self.last_use)]

    def cold_keys(self, before: int) -> list[RowKey]:
        """Keys not used since the use `before`, least recently used first."""
        found = []
        for policy in self.policies.values():
            numbers = takewhile(lambda number: self.last_use(number) < before, policy)
            found += [(self.last_use(number), self.key(number)) for number in numbers]
        if len(self.policies) > 1:
            found.sort()
        return [key for _, key in found]

    def coldest_use(self) -> int | None:
        """The last use of the row that would go first; None without rows."""
        oldest = (next(iter(policy), None) for policy in self.policies.values())
        return min((self.last_use(n) for n in oldest if n is not None), default=None)

    def is_held(self, number: int) -> bool:
        """Whether a row must not be evicted: it is being read, or its segment is going anyway."""
        place = self.index.place(number)
        return self.index.place_is_pinned(place) or self.pool.is_going(place.segment)

    # -- changes --------------------------------------------------------------------------------

    def touch(self, key: RowKey) -> Location | None:
        """A row was used; its place, if the order of use is that in which rows go."""
        place = self.index.get(key)
        if place is None or not self.policy_at(place).touch(self.index.number(place)):
            return None
        return place

    def publish(self, key: RowKey, place: Location, policy: EvictionPolicy) -> None:
        """The row that the table names in a slot is there, and the most recent of its class."""
        self.index.publish(key, place)
        policy.add(self.index.number(place))

    def evict(
        self, keys: Sequence[RowKey], numbers: Sequence[int], policy: EvictionPolicy
    ) -> list[Location]:
        """Take rows of one class out, given by key and number; their slots, in order, which are
        the caller's."""
        for key, number in zip(keys, numbers, strict=True):
            self.index.withdraw_row(key, number)
            policy.remove(number)
        places = [self.index.place(number) for number in sorted(numbers)]
        for place in places:
            self.pool.withdraw(place, free=False)
        return places

    def withdraw(self, key: RowKey, *, free: bool) -> Location:
        """Take a row out of index, order and table; its slot is free, or the caller's."""
        place = self.index.withdraw(key)
        self.policy_at(place).remove(self.index.number(place))
        self.pool.withdraw(place, free=free)
        return place

    def drop(self, keys: Sequence[RowKey]) -> None:
        """Rows that are not what was stored are gone; their slots are the caller's."""
        for key in keys:
            self.withdraw(key, free=False)
        self.announce((), keys)

    def drop_rows(self, segment: Segment) -> list[RowKey]:
        """Take all rows out of a segment that goes; no one is reading them."""
        keys = [RowKey(key) for _, key, _ in segment.rows()]
        assert not any(self.index.is_pinned(key) for key in keys), "rows are being read"
        for key in keys:
            self.withdraw(key, free=True)
        self.announce((), keys)
        return keys

    def move(self, key: RowKey, target: Location) -> None:
        """A row stands in another slot of the same class now, which the table names already; its
        place in the order of use stays.  The old slot is free."""
        source = self.index.withdraw(key)
        self.index.publish(key, target)
        numbers = self.index.number(source), self.index.number(target)
        self.policy_at(source).replace(*numbers)
        self.pool.withdraw(source, free=True)

    def announce(self, published: Sequence[RowKey], withdrawn: Sequence[RowKey]) -> None:
        if self.on_change is not None and (published or withdrawn):
            self.on_change(published, withdrawn)
