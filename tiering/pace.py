"""When figures are worth collecting, for an engine that asks for them in every step.  Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

REPORT_S = 2.0  # below any scrape interval; collecting takes as long as a step's other calls


class ReportPace:
    """While more steps follow, figures are due every `REPORT_S`; else as soon as they may have
    changed, since nobody will ask again: who looks at an engine that rests sees the last ones."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._due_at = -math.inf
        self._has_news = True
        self._seen: object = None

    def note(self) -> None:
        """Something happened that figures tell."""
        self._has_news = True

    def is_due(self, *, is_busy: bool, figures: object) -> bool:
        """`is_busy`: more steps follow, which may change anything.  `figures`: what may change
        without a `note`; compared."""
        if is_busy:
            self._has_news = True
            if self._now() < self._due_at:
                return False
        elif not self._has_news and figures == self._seen:
            return False
        self._has_news = is_busy
        self._seen = figures
        self._due_at = self._now() + REPORT_S
        return True
