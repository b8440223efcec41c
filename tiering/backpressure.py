"""When a secondary tier is offered rows, and when not.  Pure; one thread; `now` in seconds.

A cascade pins its chunks in the region until the tier is through with them.  So a tier that is
slow, stands still or refuses is not offered more than it takes in good time, and a chunk that is
not offered is not pinned: it stays where it is, and is offered when the tier takes rows again.

Time is counted per row: rows of several sizes, those of KV-cache groups, come mixed in every offer.
"""

from __future__ import annotations

from enum import Enum

SLOW_S = 2.0  # rows are not pinned for much longer than that, as far as the tier's speed tells
_QUICK_S = 0.5  # once it was slow, the rows under way must be done in that time for more to follow
STALL_S = 5.0  # with rows under way and none done for that long, no more follow
_FAILED_JOBS = 3  # in a row, without a single row stored; one may be a bad place on the disk
_BACKOFF_S_MIN = 1.0
_BACKOFF_S_MAX = 16.0  # the store's own probes come at most 60 s apart, and only with an offer
_WEIGHT = 0.3  # of the latest job in the average


class HeldBack(Enum):
    """Why a chunk was not offered at once."""

    SHARE = "region share"
    """As many rows as may be pinned at once are under way."""
    SLOW = "slow"
    """What is under way will take long, at the speed of late."""
    STALLED = "stalled"
    """Rows are under way, and none has been done for `STALL_S`."""
    FAILING = "failing"
    """The last jobs failed or hang."""
    DISK = "disk state"
    """The tier says that it takes no writes."""


class WriteGate:
    """Says how many rows one tier may be offered.  Rows under way are those of its jobs."""

    def __init__(self, rows_max: int) -> None:
        """At most `rows_max` rows are under way at once."""
        self.rows_max = rows_max
        self.rows_under_way = 0
        self.rows_stuck = 0
        """Of jobs that ended, but whose write hangs: their slots are not free."""
        self.seconds_per_row: float | None = None
        """Of the rows under way, each; an average over the jobs of late, None before the first."""
        self.closed: HeldBack | None = None
        """FAILING or DISK, until a row is stored or the tier takes writes again."""
        self._is_slow = False
        self._progress_at = 0.0
        self._failed_jobs = 0
        self._probe_at = 0.0
        self._backoff_s = _BACKOFF_S_MIN

    def grant(self, wanted: int, now: float, *, takes_writes: bool) -> tuple[int, HeldBack | None]:
        """How many of `wanted` rows to offer now, and why not all of them.

        The caller offers as many.  Of a tier that is closed that is one row now and then, which
        shows whether it is back.
        """
        self._note_state(now, takes_writes=takes_writes)
        if self.closed is not None:
            if self.rows_under_way or now < self._probe_at:
                return 0, self.closed
            self._back_off(now)
            return min(1, wanted), self.closed
        if self.rows_under_way and now - self._progress_at >= STALL_S:
            return 0, HeldBack.STALLED
        room, reason = self.rows_max - self.rows_under_way - self.rows_stuck, HeldBack.SHARE
        quick = self._quick_room()
        if quick < min(room, wanted):
            room, reason = quick, HeldBack.SLOW
        granted = max(0, min(room, wanted))
        return granted, None if granted == wanted else reason

    def _quick_room(self) -> int:
        """How many more rows will be done in good time; at least one if none is under way."""
        if not self.seconds_per_row:
            return self.rows_max
        if self._is_slow and self.rows_under_way * self.seconds_per_row > _QUICK_S:
            return 0
        room = int(SLOW_S / self.seconds_per_row) - self.rows_under_way
        self._is_slow = room <= 0
        return max(room, 0 if self.rows_under_way else 1)

    def _note_state(self, now: float, *, takes_writes: bool) -> None:
        if takes_writes and self.closed is HeldBack.DISK:
            self._open()
        elif not takes_writes and self.closed is None:
            self._close(HeldBack.DISK, now)

    def started(self, rows: int, now: float) -> int:
        """A job of so many rows was submitted; how many are under way now, it included."""
        if not self.rows_under_way:
            self._progress_at = now
        self.rows_under_way += rows
        return self.rows_under_way

    def finished(
        self, rows: int, ahead: int, now: float, *, stored: int, failed: int, seconds: float
    ) -> None:
        """A job of `rows` ended, `seconds` after it was submitted as the last of `ahead` rows.

        `stored` were written by it, `failed` because of the device; the others the tier did not
        want.
        """
        self.rows_under_way -= rows
        assert self.rows_under_way >= 0, "more rows ended than began"
        self._progress_at = now
        if stored:
            sample = seconds / ahead
            last = sample if self.seconds_per_row is None else self.seconds_per_row
            self.seconds_per_row = last + _WEIGHT * (sample - last)
            self._open()
        elif failed:
            self._failed_jobs += 1
            if self._failed_jobs >= _FAILED_JOBS and self.closed is None:
                self._close(HeldBack.FAILING, now)

    def _close(self, reason: HeldBack, now: float) -> None:
        self.closed = reason
        self._backoff_s = _BACKOFF_S_MIN
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._probe_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)

    def _open(self) -> None:
        self.closed = None
        self._failed_jobs = 0
