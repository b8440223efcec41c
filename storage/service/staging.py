"""Reads by way of memory of the store's own, for an engine that can't spare a slot.

A call that hangs keeps the buffer that it reads into, and nobody can take the call back.  Where
that buffer is a row of the region, the row is lost until the disk lets go; an engine that has no
word for such rows would wait as long.  Here the device reads into a slab, verified rows are copied
from it into the region, and a row that hangs has failed: its slot is free, and the slab waits
instead.

The price is one copy of each row, on the I/O thread that read it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from storage.device import aligned_buffer
from storage.jobs import JobResult
from storage.types import RowKey, RowOutcome

_SLAB_BYTES = 2 << 20  # of a job at once: so small that a copy finds it in a cache


class Readable(Protocol):
    """What reads rows, such as `RowStore`."""

    def submit_read(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None],
    ) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    keys: list[RowKey]
    rows: list[memoryview]
    report: Callable[[JobResult], None]
    started: float
    outcomes: list[RowOutcome]
    pieces_left: int


@dataclass(slots=True, eq=False)
class _Slab:
    """Memory for the rows of one piece; free again when the device has let go of all of them."""

    memory: memoryview
    is_read: bool = False
    caught: int = 0  # rows that hang

    @property
    def is_free(self) -> bool:
        return self.is_read and self.caught == 0


@dataclass(slots=True, eq=False)
class _Piece:
    job: _Job
    start: int
    keys: list[RowKey]
    rows: list[memoryview] = field(default_factory=list)


class StagedReads:
    """Reads at most `slab_count` pieces at a time.  Safe from any thread; `submit` never waits."""

    def __init__(
        self,
        source: Readable,
        row_bytes: int,
        slab_count: int,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s` is how long a job may wait for a slab; the source has its own from there."""
        self._source = source
        self._row_bytes = row_bytes
        self._rows_per_slab = max(1, _SLAB_BYTES // row_bytes)
        self._slab_count = slab_count
        self._timeout_s = timeout_s
        self._now = now
        self._lock = threading.Lock()
        self._waiting: deque[_Piece] = deque()
        self._free: list[_Slab] = []
        self._made = 0
        self._reading = 0  # pieces whose result is due
        self._is_pumping = False

    def submit(
        self,
        keys: Sequence[RowKey],
        rows: Sequence[memoryview],
        report: Callable[[JobResult], None],
    ) -> None:
        """Read into `rows` of the region; they are touched no more once `report` is called."""
        if not keys:
            report(JobResult([], 0, 0.0))
            return
        starts = range(0, len(keys), self._rows_per_slab)
        outcomes = [RowOutcome.FAILED] * len(keys)
        job = _Job(list(keys), list(rows), report, self._now(), outcomes, len(starts))
        with self._lock:
            for start in starts:
                stop = start + self._rows_per_slab
                self._waiting.append(_Piece(job, start, job.keys[start:stop], job.rows[start:stop]))
        self._pump()

    def _pump(self) -> None:
        """Begin what can begin.  One thread at a time: it sees what others changed meanwhile."""
        with self._lock:
            if self._is_pumping:
                return
            self._is_pumping = True
        while True:
            with self._lock:
                chosen = self._choose()
                if chosen is None:
                    self._is_pumping = False
                    return
            piece, slab = chosen
            if slab is None:
                self._end(piece, [RowOutcome.FAILED] * len(piece.keys))
            else:
                self._begin(piece, slab)

    def _choose(self) -> tuple[_Piece, _Slab | None] | None:
        """The next piece with a slab; without one if it must fail; None if it must wait."""
        if not self._waiting:
            return None
        is_overdue = self._now() - self._waiting[0].job.started > self._timeout_s
        if not is_overdue and self._free:
            slab = self._free.pop()
        elif not is_overdue and self._made < self._slab_count:
            self._made += 1
            slab = _Slab(aligned_buffer(self._rows_per_slab * self._row_bytes))
        elif is_overdue or self._reading == 0:  # the disk has caught all slabs
            return self._waiting.popleft(), None
        else:
            return None
        self._reading += 1
        slab.is_read = False
        return self._waiting.popleft(), slab

    def _begin(self, piece: _Piece, slab: _Slab) -> None:
        size = self._row_bytes
        buffers = [slab.memory[i * size : (i + 1) * size] for i in range(len(piece.keys))]

        def done(result: JobResult) -> None:
            outcomes = list(result.outcomes)
            for position, outcome in enumerate(outcomes):
                if outcome is RowOutcome.OK:
                    _copy(buffers[position], piece.rows[position])
                elif outcome is RowOutcome.HUNG:
                    outcomes[position] = RowOutcome.FAILED
            with self._lock:
                self._reading -= 1
                slab.is_read = True
                slab.caught += result.outcomes.count(RowOutcome.HUNG)
                if slab.is_free:
                    self._free.append(slab)
            self._end(piece, outcomes)
            self._pump()

        def release(positions: list[int]) -> None:
            with self._lock:
                slab.caught -= len(positions)
                if slab.is_free:
                    self._free.append(slab)
            self._pump()

        self._source.submit_read(piece.keys, buffers, done, release)

    def _end(self, piece: _Piece, outcomes: Sequence[RowOutcome]) -> None:
        job = piece.job
        with self._lock:
            job.outcomes[piece.start : piece.start + len(outcomes)] = outcomes
            job.pieces_left -= 1
            if job.pieces_left:
                return
        moved = job.outcomes.count(RowOutcome.OK) * self._row_bytes
        job.report(JobResult(job.outcomes, moved, self._now() - job.started))


def _copy(source: memoryview, target: memoryview) -> None:
    """Of whole rows, without the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
