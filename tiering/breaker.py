"""When a secondary tier is asked for rows, and when not.  Pure; one thread; `now` in seconds.

A disk that stands still would cost every request the whole time that it may wait.  So once reads
have stood still, or failed time after time, the tier's rows are misses at once, for everybody; a
read that nobody waits for is tried now and then, and the first one that succeeds brings it back.
"""

from __future__ import annotations

import math

_FAILED_JOBS = 3  # in a row, without a single row read; one may be a bad place on the disk
_BACKOFF_S_MIN = 1.0
_BACKOFF_S_MAX = 60.0


class ReadBreaker:
    """Of one tier.  Open: nobody waits for its rows."""

    def __init__(self, stall_s: float) -> None:
        """`stall_s`: with reads under way, how long without the end of one is a stall."""
        self.is_open = False
        self.times_opened = 0
        self._stall_s = stall_s
        self._under_way = 0
        self._progress_at = 0.0
        self._failed_jobs = 0
        self._probe_at = math.inf  # while it is open; infinite while a probe is under way
        self._backoff_s = _BACKOFF_S_MIN

    def started(self, now: float) -> None:
        """A job was submitted."""
        if not self._under_way:
            self._progress_at = now
        self._under_way += 1

    def finished(self, now: float, *, answered: int, failed: int) -> None:
        """A job ended: the device gave `answered` rows, whole or corrupt, and failed on `failed`.

        A row that the tier did not have says nothing.
        """
        self._under_way -= 1
        assert self._under_way >= 0, "more jobs ended than began"
        self._progress_at = now
        if answered:
            self.is_open = False
            self._failed_jobs = 0
            self._backoff_s = _BACKOFF_S_MIN
        elif failed:
            self._failed_jobs += 1
            if self.is_open or self._failed_jobs >= _FAILED_JOBS:
                self._open(now)
        elif self.is_open and self._probe_at == math.inf:
            self._probe_at = now

    def check(self, now: float) -> None:
        """Time has passed: notice a stall."""
        if self._under_way and not self.is_open and now - self._progress_at >= self._stall_s:
            self._open(now)

    def may_probe(self, now: float) -> bool:
        """While it is open: whether one read should be tried now."""
        return now >= self._probe_at

    def probe(self) -> None:
        """That read is on its way: no other one until it has ended."""
        self._probe_at = math.inf

    def cancel_probe(self, now: float) -> None:
        """It is not submitted after all."""
        self._probe_at = now

    def _open(self, now: float) -> None:
        if not self.is_open:
            self.is_open = True
            self.times_opened += 1
        self._probe_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)
