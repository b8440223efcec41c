"""Several roots, one per drive, as one store.

Each drive keeps its own budget, lock, states and segments: one that dies costs its rows and nothing
else.  A row goes where there is room, most room first; where there is none, to the drive whose next
row to go is the coldest of all, so that together they evict like one.  A drive that takes no writes
is given none until its next probe is due.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from storage.device import Device
from storage.errors import DeviceError, RootUnusable
from storage.facts import RowFacts
from storage.header import SegmentGeometry
from storage.jobs import JobResult, RowCounters, remove_from_all, total, wait
from storage.namespace import Identity, WantedRows
from storage.options import StoreOptions
from storage.rowstore import RowStore
from storage.space import DiskState
from storage.store import CloseReport, DiskStore, StoreUsage
from storage.types import RowKey, RowOutcome

log = logging.getLogger("kvtier.storage")


_SEVERITY = {state.value: number for number, state in enumerate(DiskState)}
_SUMMED = (
    "budget_bytes",
    "effective_bytes",
    "used_bytes",
    "enospc",
    "enospc_other",
    "external_removals",
    "rows",
    "segments",
)


def open_store(options: StoreOptions) -> DiskStore | DriveStore:
    """The root of `options`, or that and its further drives as one store."""
    if not options.more_drives:
        return DiskStore.open(options)
    first = replace(options, more_drives=())
    others = (
        replace(first, root=drive.root, budget_bytes=drive.budget_bytes)
        for drive in options.more_drives
    )
    return DriveStore.open([first, *others])


class Drive(NamedTuple):
    """One root, and the namespace's rows in it."""

    store: DiskStore
    rows: RowStore


class DriveStore:
    """Roots that this process owns, as one store.  Safe from any thread.

    `open` goes on without a root that can't be used, as long as one can; of settings that can't
    work it raises as `DiskStore.open`.
    """

    def __init__(self, stores: Sequence[DiskStore]) -> None:
        self.stores = list(stores)

    @classmethod
    def open(
        cls,
        drives: Sequence[StoreOptions],
        device: Callable[[int], Device | None] = lambda _number: None,
        now: Callable[[], float] = time.monotonic,
    ) -> DriveStore:
        """Take every root; `device` makes that of each, by its position."""
        stores: list[DiskStore] = []
        reason: RootUnusable | None = None
        try:
            for number, options in enumerate(drives):
                try:
                    stores.append(DiskStore.open(options, device(number), now))
                except RootUnusable as exc:
                    log.warning("going on without %s: %s", options.root, exc)
                    reason = exc
        except BaseException:
            for store in stores:
                store.close()
            raise
        if not stores:
            raise reason or RootUnusable("roots: expected at least one")
        return cls(stores)

    def open_rows(
        self, identity: Identity, row_bytes: int, facts: RowFacts | None = None
    ) -> DriveRows:
        """`open_all` of one namespace."""
        return self.open_all([WantedRows(identity, row_bytes, facts)])[0]

    def open_all(self, wanted: Sequence[WantedRows]) -> list[DriveRows]:
        """As `DiskStore.open_all`; a drive that can't open the namespaces is left out."""
        opened = []
        reason: RootUnusable | None = None
        for store in self.stores:
            try:
                opened.append([Drive(store, rows) for rows in store.open_all(wanted)])
            except RootUnusable as exc:
                log.warning("going on without %s: %s", store.root, exc)
                reason = exc
        if not opened:
            raise reason or RootUnusable("roots: expected at least one")
        return [DriveRows(drives) for drives in zip(*opened, strict=True)]

    @property
    def direct(self) -> bool:
        """Whether every drive takes O_DIRECT."""
        return all(store.direct for store in self.stores)

    def usage(self) -> StoreUsage:
        """Figures of all drives together; state and what belongs to it are those of the worst."""
        usages = [store.usage() for store in self.stores]
        worst = max(usages, key=lambda usage: _SEVERITY[usage.state])
        changes: Counter[str] = Counter()
        for usage in usages:
            changes.update(usage.state_changes)
        sums = {name: sum(getattr(usage, name) for usage in usages) for name in _SUMMED}
        return worst._replace(**sums, state_changes=dict(changes))

    def usages(self) -> dict[str, StoreUsage]:
        """Figures of each root, by its path."""
        return {str(store.root): store.usage() for store in self.stores}

    def has_root(self) -> bool:
        """As `DiskStore.has_root`, of every drive."""
        return all(store.has_root() for store in self.stores)

    def maintain(self) -> None:
        """As `DiskStore.maintain`."""
        for store in self.stores:
            store.maintain()

    def write_status(self) -> None:
        """As `DiskStore.write_status`."""
        for store in self.stores:
            store.write_status()

    def close(self, timeout_s: float = 30.0) -> CloseReport:
        """As `DiskStore.close`, of all drives at once."""
        reports: list[CloseReport] = []
        threads = [
            threading.Thread(target=lambda s=store: reports.append(s.close(timeout_s)))
            for store in self.stores
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return CloseReport(
            all(report.is_ended for report in reports),
            sum(report.dropped_rows for report in reports),
        )


class DriveRows:
    """The rows of one namespace over several drives, with the interface of `RowStore`."""

    def __init__(self, drives: Sequence[Drive]) -> None:
        self._drives = list(drives)
        self._lock = threading.Lock()
        self._writing: dict[RowKey, int] = {}  # which drive a key is on its way to
        self._drop_twins()

    def _drop_twins(self) -> None:
        """A drive that was away may hold rows that were stored again elsewhere: one is enough."""
        seen: set[RowKey] = set()
        for drive in self._drives:
            twins = [key for key in drive.rows.keys() if key in seen]  # noqa: SIM118
            try:
                drive.rows.remove(twins)
            except DeviceError as exc:
                log.warning("rows that are stored twice: %s", exc)
            seen.update(drive.rows.keys())

    @property
    def row_bytes(self) -> int:
        return self._drives[0].rows.row_bytes

    @property
    def geometry(self) -> SegmentGeometry:
        """Of the segments on the first drive; others may have more or fewer slots."""
        return self._drives[0].rows.geometry

    @property
    def drives(self) -> list[Drive]:
        return list(self._drives)

    # -- asking ---------------------------------------------------------------------------------

    def __contains__(self, key: RowKey) -> bool:
        return self._find(key) is not None

    def __len__(self) -> int:
        return sum(len(drive.rows) for drive in self._drives)

    def keys(self) -> list[RowKey]:
        """All keys, drive by drive, least recently used first in each."""
        return [key for drive in self._drives for key in drive.rows.keys()]  # noqa: SIM118

    def count(self) -> RowCounters:
        """The sums over all drives."""
        return total(drive.rows.count() for drive in self._drives)

    def subscribe(self, on_change: Callable[[Sequence[RowKey], Sequence[RowKey]], None]) -> None:
        """Tell all keys that are there, and from then on every change; drives one by one."""
        for drive in self._drives:
            with drive.store.lock:
                on_change(drive.rows.keys(), ())
                drive.rows.on_change = on_change

    def _find(self, key: RowKey) -> int | None:
        return next((n for n, drive in enumerate(self._drives) if key in drive.rows), None)

    # -- doing ----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[RowKey]) -> None:
        """Mark the chunks of one request, first to last, as used now."""
        for key in reversed(keys):
            number = self._find(key)
            if number is not None:
                self._drives[number].rows.touch([key])

    def submit_read(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = lambda _positions: None,
    ) -> None:
        """As `RowStore.submit_read`."""
        groups: dict[int, list[int]] = {}
        for position, key in enumerate(keys):
            groups.setdefault(self._find(key) or 0, []).append(position)
        self.touch(keys)

        def run(number: int, gather: Gather) -> None:
            positions = groups[number]
            self._drives[number].rows.submit_read(
                [keys[p] for p in positions],
                [buffers[p] for p in positions],
                gather.taker(positions),
                gather.releaser(positions),
            )

        self._run(keys, buffers, groups, run, on_done, on_release)

    def submit_write(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = lambda _positions: None,
    ) -> None:
        """As `RowStore.submit_write`."""
        groups = self._place(keys)

        def run(number: int, gather: Gather) -> None:
            positions = groups[number]
            mine = [keys[p] for p in positions]
            take = gather.taker(positions)

            def done(result: JobResult) -> None:
                with self._lock:
                    for key in mine:
                        self._writing.pop(key, None)
                take(result)

            self._drives[number].rows.submit_write(
                mine, [buffers[p] for p in positions], done, gather.releaser(positions)
            )

        self._run(keys, buffers, groups, run, on_done, on_release)

    def read(self, keys: Sequence[RowKey], buffers: Sequence[memoryview]) -> JobResult:
        """`submit_read`, waiting for the result."""
        return wait(lambda done: self.submit_read(keys, buffers, done))

    def write(self, keys: Sequence[RowKey], buffers: Sequence[memoryview]) -> JobResult:
        """`submit_write`, waiting for the result."""
        return wait(lambda done: self.submit_write(keys, buffers, done))

    def remove(self, keys: Iterable[RowKey]) -> int:
        """As `RowStore.remove`; every drive is asked before an error is raised."""
        keys = list(keys)
        return remove_from_all(partial(drive.rows.remove, keys) for drive in self._drives)

    def _run(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        groups: dict[int, list[int]],
        run: Callable[[int, Gather], None],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None],
    ) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
        if not keys:
            on_done(JobResult([], 0, 0.0))
            return

        def report(result: JobResult) -> None:
            self.touch(keys)  # in the order of the whole job, whichever drive was quicker
            on_done(result)

        gather = Gather(len(keys), len(groups), report, on_release)
        for number in groups:
            run(number, gather)

    # -- placing --------------------------------------------------------------------------------

    def _place(self, keys: Sequence[RowKey]) -> dict[int, list[int]]:
        """Which positions of a job each drive gets.  What is resident, or on its way, stays."""
        groups: dict[int, list[int]] = {}
        with self._lock:
            takers = [n for n, d in enumerate(self._drives) if d.store.takes_writes()]
            room = {n: self._drives[n].rows.room() for n in takers}
            job = frozenset(keys)
            cold = {n: self._drives[n].rows.coldest_uses(len(keys), job) for n in takers}
            for position, key in enumerate(keys):
                number = self._find(key)
                if number is None:
                    number = self._writing.get(key)
                if number is None:
                    number = _choose(room, cold)
                    self._writing[key] = number
                groups.setdefault(number, []).append(position)
        return groups


def _choose(room: dict[int, int], cold: dict[int, list[int]]) -> int:
    """The drive for one more row: most room, else the coldest row to go; takes note of it."""
    if not room:
        return 0  # none takes writes: the first declines it
    number = max(room, key=lambda n: room[n])
    if room[number] > 0:
        room[number] -= 1
        return number
    with_rows = [n for n in cold if cold[n]]
    if not with_rows:
        return number
    number = min(with_rows, key=lambda n: cold[n][0])
    cold[number].pop(0)
    return number


class Gather:
    """Results of a job's parts in several places, put together in the order of its keys."""

    def __init__(
        self,
        key_count: int,
        part_count: int,
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None],
    ) -> None:
        self._outcomes = [RowOutcome.FAILED] * key_count
        self._left = part_count
        self._on_done = on_done
        self._on_release = on_release
        self._moved = 0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def taker(self, positions: Sequence[int]) -> Callable[[JobResult], None]:
        def take(result: JobResult) -> None:
            with self._lock:
                for position, outcome in zip(positions, result.outcomes, strict=True):
                    self._outcomes[position] = outcome
                self._moved += result.bytes_moved
                self._seconds = max(self._seconds, result.seconds)
                self._left -= 1
                is_last = self._left == 0
            if is_last:
                self._on_done(JobResult(self._outcomes, self._moved, self._seconds))

        return take

    def releaser(self, positions: Sequence[int]) -> Callable[[list[int]], None]:
        return lambda released: self._on_release([positions[p] for p in released])
