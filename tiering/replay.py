"""A trace played against the store's own policies, without a disk.  Pure.

A request's chunk is a hit only if all chunks before it hit; then all its chunks are offered for
storing.  The policies are asked as the store asks them.
"""

from __future__ import annotations

from collections.abc import Sequence

from storage.admission import ADMISSION
from storage.eviction import EVICTION, LeastRecentlyUsed, RowLinks
from storage.types import RowKey
from tiering.traces import Trace

DEFAULT_ADMISSION, DEFAULT_EVICTION = next(iter(ADMISSION)), next(iter(EVICTION))


class PlayedDisk:
    """The names that a `RowStore` of `slots` slots would hold, and how it would decide."""

    def __init__(self, slots: int, admission: str, eviction: str) -> None:
        self.slots = slots
        self.rows_written = 0
        self._rows: dict[RowKey, int] = {}
        self._names = [RowKey(b"")] * slots  # by row
        self._free: list[int] = list(range(slots))
        self._admission = ADMISSION[admission]()
        self._eviction = EVICTION[eviction](RowLinks())

    def __contains__(self, key: RowKey) -> bool:
        return key in self._rows

    def read(self, keys: Sequence[RowKey]) -> None:
        """Rows that are there are read."""
        if keys:
            self._admission.read(keys, slots=self.slots)
            self.touch(keys)

    def use_above(self, keys: Sequence[RowKey]) -> None:
        """Chunks of one request that are there were used from the region."""
        if keys:
            self._admission.touch(keys)

    def offer(self, keys: Sequence[RowKey]) -> None:
        """Rows are offered for writing."""
        if not keys:
            return
        count = self._admission.offer(keys, slots=self.slots, free=len(self._free))
        new = [key for key in keys[:count] if key not in self._rows]
        self._evict(len(new) - len(self._free), set(keys))
        new = new[: len(self._free)]
        for key in reversed(new):
            row = self._rows[key] = self._free.pop()
            self._names[row] = key
            self._eviction.add(row)
        self.rows_written += len(new)

    def _evict(self, count: int, job: set[RowKey]) -> None:
        """As many rows leave as can: none of the job."""
        if count <= 0:
            return
        for row in self._eviction.victims(count, lambda row: self._names[row] in job):
            self._eviction.remove(row)
            del self._rows[self._names[row]]
            self._free.append(row)

    def touch(self, keys: Sequence[RowKey]) -> None:
        """The chunks of one request, first to last, were used: the leaf ages first."""
        for key in reversed(keys):
            if key in self._rows:
                self._eviction.touch(self._rows[key])


class PlayedRegion:
    """The names in a region of `slots` slots, 0 for none."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._order: LeastRecentlyUsed[RowKey] = LeastRecentlyUsed()

    def __contains__(self, key: RowKey) -> bool:
        return key in self._order

    def take_in(self, keys: Sequence[RowKey]) -> None:
        """All chunks of a request pass through; of too long a one its first chunks stay."""
        for key in reversed(keys[: self._slots]):
            if key in self._order:
                self._order.touch(key)
            else:
                self._order.add(key)
        excess = max(0, len(self._order) - self._slots)
        for victim in self._order.victims(excess, lambda _: False):
            self._order.remove(victim)


def play_disk(trace: Trace, slots: int) -> tuple[float, int]:
    """(hit rate, rows written) of a disk of `slots` slots alone, under the default policies."""
    if not slots:
        return 0.0, 0
    disk = PlayedDisk(slots, DEFAULT_ADMISSION, DEFAULT_EVICTION)
    hits, _ = play(trace, disk, PlayedRegion(0))
    return hits / trace.reference_count, disk.rows_written


def play(trace: Trace, disk: PlayedDisk, front: PlayedRegion) -> tuple[int, int]:
    """(chunks found, and of these the ones that the region did not have)."""
    hits = disk_hits = 0
    for request in trace.requests:
        found = 0
        read = []
        for key in request:
            if key not in front:
                if key not in disk:
                    break
                read.append(key)
            found += 1
        hits += found
        disk_hits += len(read)
        disk.read(read)
        disk.use_above([key for key in request[:found] if key in front and key in disk])
        front_only = [key for key in request[:found] if key in front and key not in disk]
        disk.offer([*front_only, *request[found:]])
        disk.touch(request)
        front.take_in(request)
    return hits, disk_hits
