"""Jobs: what is asked of a `RowStore` at once, split into parts, counted down, reported once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from storage.types import RowKey, RowOutcome


@dataclass
class RowCounters:
    """Since the namespace was opened.  Each row of a job counts once, under its outcome."""

    rows_read: int = 0
    bytes_read: int = 0
    rows_missing: int = 0
    rows_corrupt: int = 0
    reads_failed: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    rows_already_stored: int = 0
    writes_declined: int = 0
    writes_failed: int = 0
    rows_evicted: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """Reported once per job.  `outcomes[i]` belongs to the job's i-th key.

    `bytes_moved` counts rows that were read and verified, or written and published.
    `seconds` is from submission to the last row.
    """

    outcomes: list[RowOutcome]
    bytes_moved: int
    seconds: float


class Job:
    """Counts down the parts of a job; the last one reports."""

    def __init__(
        self,
        keys: Sequence[RowKey],
        row_bytes: int,
        part_count: int,
        on_done: Callable[[JobResult], None],
    ) -> None:
        self.keys = keys
        self.key_set = frozenset(keys)
        self.outcomes = [RowOutcome.FAILED] * len(keys)
        self._row_bytes = row_bytes
        self._left = part_count
        self._lock = threading.Lock()
        self._on_done = on_done
        self._started = time.monotonic()

    def part_done(self) -> bool:
        """Whether that was the last part; then the caller calls `report`."""
        with self._lock:
            self._left -= 1
            return self._left == 0

    def report(self) -> None:
        moved = self.outcomes.count(RowOutcome.OK) * self._row_bytes
        self._on_done(JobResult(self.outcomes, moved, time.monotonic() - self._started))


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a job, `start` being the position of the first in it."""

    job: Job
    start: int
    keys: Sequence[RowKey]
    buffers: Sequence[memoryview]
    unfinished: set[int] = field(default_factory=set)
    """Positions of rows that this part is writing and that have no outcome yet."""

    def report(self, position: int, outcome: RowOutcome) -> None:
        self.job.outcomes[self.start + position] = outcome


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
