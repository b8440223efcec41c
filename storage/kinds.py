"""Rows of several sizes as one: those of the KV-cache groups of one engine.

Each size is a namespace of its own.  A key belongs to the one that has its group's number, which is
what keys end in, or else to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from storage.drives import DriveRows, Gather
from storage.header import SegmentGeometry
from storage.jobs import JobResult, RowCounters, remove_from_all, total
from storage.rowstore import RowStore
from storage.types import RowKey

GROUP_BYTES = 4  # of a group's number at the end of a key, big-endian

Rows = RowStore | DriveRows


class KindRows:
    """`largest` and, by group number, smaller rows, with the interface of `RowStore`.

    Buffers have the bytes of the largest row; of a smaller one the first bytes count.
    """

    def __init__(self, largest: Rows, smaller: Mapping[int, Rows]) -> None:
        self._largest = largest
        self._smaller = dict(smaller)
        self._all = [largest, *dict.fromkeys(smaller.values())]

    @property
    def geometry(self) -> SegmentGeometry:
        """Of the segments of the largest rows."""
        return self._largest.geometry

    def __len__(self) -> int:
        return sum(map(len, self._all))

    def keys(self) -> list[RowKey]:
        """All keys, size by size, least recently used first in each."""
        return [key for rows in self._all for key in rows.keys()]  # noqa: SIM118

    def count(self) -> RowCounters:
        """The sums over all sizes."""
        return total(rows.count() for rows in self._all)

    def subscribe(self, on_change: Callable[[Sequence[RowKey], Sequence[RowKey]], None]) -> None:
        """Tell all keys that are there, and from then on every change; size by size."""
        for rows in self._all:
            rows.subscribe(on_change)

    def touch(self, keys: Sequence[RowKey]) -> None:
        """The chunks of one request, first to last, were used now."""
        for rows, positions in self._divided(keys):
            rows.touch([keys[p] for p in positions])

    def submit_read(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = lambda _positions: None,
    ) -> None:
        """As `RowStore.submit_read`."""
        self._submit(keys, buffers, on_done, on_release, lambda rows: rows.submit_read)

    def submit_write(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = lambda _positions: None,
    ) -> None:
        """As `RowStore.submit_write`."""
        self._submit(keys, buffers, on_done, on_release, lambda rows: rows.submit_write)

    def remove(self, keys: Iterable[RowKey]) -> int:
        """As `RowStore.remove`; every size is asked before an error is raised."""
        keys = list(keys)
        return remove_from_all(
            partial(rows.remove, [keys[p] for p in positions])
            for rows, positions in self._divided(keys)
        )

    def _submit(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None],
        method: Callable[[Rows], Callable[..., None]],
    ) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
        parts = self._divided(keys)
        if not parts:
            on_done(JobResult([], 0, 0.0))
            return
        gather = Gather(len(keys), len(parts), on_done, on_release)
        for rows, positions in parts:
            method(rows)(
                [keys[p] for p in positions],
                [buffers[p][: rows.row_bytes] for p in positions],
                gather.taker(positions),
                gather.releaser(positions),
            )

    def _divided(self, keys: Sequence[RowKey]) -> list[tuple[Rows, list[int]]]:
        """Which positions of `keys` belong to the rows of each size."""
        found: dict[Rows, list[int]] = {}
        for position, key in enumerate(keys):
            number = int.from_bytes(key[-GROUP_BYTES:], "big")
            found.setdefault(self._smaller.get(number, self._largest), []).append(position)
        return list(found.items())
