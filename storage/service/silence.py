"""Whether a store process stands still.  Pure: told what happened, and by which clock.

The store ends every job by a deadline, whatever its disk does.  One that misses a deadline and says
nothing else either is not slow: it is stopped, or starved of everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SILENCE_S = 5.0  # beyond a deadline: on a busy machine a store may be late


class SilenceWatch:
    """Jobs that a store owes an answer, each within its time."""

    def __init__(
        self, read_timeout_s: float, write_timeout_s: float, now: Callable[[], float]
    ) -> None:
        self._timeouts_s = {True: read_timeout_s, False: write_timeout_s}
        self._now = now
        self._heard_at = 0.0
        self._no_sooner = math.inf  # nothing stands still before that time
        self._due: dict[bool, dict[int, float]] = {True: {}, False: {}}  # is_read -> job -> when

    def begin(self, job_id: int, *, is_read: bool) -> None:
        due = self._due[is_read][job_id] = self._now() + self._timeouts_s[is_read]
        self._no_sooner = min(self._no_sooner, due + SILENCE_S)

    def end(self, job_id: int) -> None:
        """The job was answered, if it was one of these."""
        for due in self._due.values():
            due.pop(job_id, None)

    def heard(self) -> None:
        """The store said something, whatever it was."""
        self._heard_at = self._now()

    def stands_still(self) -> bool:
        now = self._now()
        if now <= self._no_sooner:
            return False
        # Jobs of a kind are due in the order in which they began.
        oldest = min(next(iter(due.values()), math.inf) for due in self._due.values())
        latest_sign = max(oldest, self._heard_at + self._timeouts_s[True])
        self._no_sooner = latest_sign + SILENCE_S
        return now > self._no_sooner

    def give_up(self) -> list[int]:
        """The jobs that are owed; they are not waited for any longer."""
        owed = [job_id for due in self._due.values() for job_id in due]
        for due in self._due.values():
            due.clear()
        return owed
