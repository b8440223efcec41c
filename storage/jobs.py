"""Jobs: what is asked of a `RowStore` at once, split into parts, counted down, reported once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from storage.codec import CodecCounters
from storage.errors import DeviceError
from storage.types import RowKey, RowOutcome


@dataclass
class RowCounters(CodecCounters):
    """Since the namespace was opened.  Each row of a job counts once, under its outcome:

    rows_offered == rows_written + rows_already_stored + writes_declined + writes_failed
                    + writes_hung.
    """

    rows_read: int = 0
    bytes_read: int = 0
    rows_missing: int = 0
    rows_corrupt: int = 0
    reads_failed: int = 0  # the device said so
    reads_hung: int = 0  # had not returned by their deadline
    reads_expired: int = 0  # had not begun by then, or the disk had caught every thread
    rows_offered: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    rows_already_stored: int = 0
    declined_full: int = 0  # nothing to grow into, and no row that may go
    declined_busy: int = 0  # too much waits to be written, or it waited too long
    declined_disk: int = 0  # the disk takes no writes now
    declined_twice: int = 0  # the same key is being written by another job
    declined_admission: int = 0  # not worth a write, as far as the policy of admission knows
    declined_write_budget: int = 0  # the drive has been given its bytes of the day
    writes_failed: int = 0  # the device said so
    writes_hung: int = 0  # had not returned by their deadline
    rows_evicted: int = 0  # for other rows of the namespace
    rows_given_up: int = 0  # with segments that went: a smaller budget, another namespace, no file
    rows_moved: int = 0  # out of segments that went
    rows_scrubbed: int = 0  # verified by the scrubber
    rows_scrubbed_corrupt: int = 0  # of these
    scrub_passes: int = 0  # over all rows of the namespace
    read_seconds: float = 0.0
    write_seconds: float = 0.0

    @property
    def writes_declined(self) -> int:
        return (
            self.declined_full
            + self.declined_busy
            + self.declined_disk
            + self.declined_twice
            + self.declined_admission
            + self.declined_write_budget
        )


@dataclass(frozen=True, slots=True)
class JobResult:
    """Reported once per job.  `outcomes[i]` belongs to the job's i-th key.

    `bytes_moved` counts rows that were read and verified, or written and published.
    `seconds` is from submission to the last row.
    Rows that are HUNG are followed by a release each, once the device lets go of their buffers.
    """

    outcomes: list[RowOutcome]
    bytes_moved: int
    seconds: float


def _nothing(_positions: list[int]) -> None:
    pass


class Job:
    """Counts down the parts of a job; the last one reports."""

    def __init__(
        self,
        keys: Sequence[RowKey],
        row_bytes: int,
        part_count: int,
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = _nothing,
    ) -> None:
        self.keys = keys
        self.key_set = frozenset(keys)
        self.outcomes = [RowOutcome.FAILED] * len(keys)
        self.on_release = on_release
        self.is_in_order = False
        """Whether all rows were published at once: then their uses are in the order of a chain."""
        self.admitted: int | None = None
        """Of a write: how many rows, from the first, are worth it.  The owner's lock guards it."""
        self.affordable = len(keys)
        """How many rows, from the first, the drive's budget of writes has room for, as far as is
        known.  The owner's lock guards it."""
        self._row_bytes = row_bytes
        self._left = part_count
        self._lock = threading.Lock()
        self._on_done = on_done
        self._started = time.monotonic()

    @property
    def keys_read(self) -> list[RowKey]:
        """Of a read: the keys of the rows that were there."""
        return [
            key
            for key, outcome in zip(self.keys, self.outcomes, strict=True)
            if outcome is RowOutcome.OK
        ]

    def part_done(self) -> bool:
        """Whether that was the last part; then the caller calls `report`."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def report(self) -> None:
        moved = self.outcomes.count(RowOutcome.OK) * self._row_bytes
        self._on_done(JobResult(self.outcomes, moved, time.monotonic() - self._started))


class Part:
    """Some rows of a job, `start` being the position of the first in it.

    The owner's lock guards it.  Positions count from the part's first row.
    """

    def __init__(
        self, job: Job, start: int, keys: Sequence[RowKey], buffers: Sequence[memoryview]
    ) -> None:
        self.job = job
        self.start = start
        self.keys = keys
        self.buffers = buffers
        self.unfinished: set[int] = set()
        """Rows that this part is writing and that have no outcome yet."""
        self.hung: list[int] = []
        """Rows that were reported as HUNG: what becomes of them is told to nobody."""
        self.is_overdue = False
        self._open = set(range(len(keys)))  # rows without an outcome
        self._is_done = False

    def report(self, position: int, outcome: RowOutcome) -> bool:
        """Whether it counts: not of a row that was reported as HUNG."""
        if self.is_overdue:
            return False
        self._open.discard(position)
        self.job.outcomes[self.start + position] = outcome
        return True

    def end(self) -> bool:
        """Its thread is through with it.  False if it was reported before, as overdue."""
        self._is_done = True
        return not self.is_overdue

    def give_up(self) -> bool:
        """The deadline has passed: rows without an outcome are HUNG.  False if it has ended."""
        if self._is_done:
            return False
        self.is_overdue = True
        self.hung = sorted(self._open)
        for position in self.hung:
            self.job.outcomes[self.start + position] = RowOutcome.HUNG
        return True


def total(counts: Iterable[RowCounters]) -> RowCounters:
    """The sums over the parts of a store."""
    each = [vars(count) for count in counts]
    return RowCounters(**{name: sum(of[name] for of in each) for name in each[0]})


def remove_from_all(removals: Iterable[Callable[[], int]]) -> int:
    """How many rows all of `removals` together removed; every one is tried before an error of one
    is raised."""
    gone = 0
    error: DeviceError | None = None
    for remove in removals:
        try:
            gone += remove()
        except DeviceError as exc:
            error = exc
    if error is not None:
        raise error
    return gone


def wait(submit: Callable[[Callable[[JobResult], None]], None]) -> JobResult:
    """Submit a job and wait for its result."""
    done = threading.Event()
    results: list[JobResult] = []

    def on_done(result: JobResult) -> None:
        results.append(result)
        done.set()

    submit(on_done)
    done.wait()
    return results[0]
