"""Which namespace gives a segment to which, when the budget is used up.  Pure.

A namespace without a segment gets one from that with the coldest row.  One that has some gets more,
as long as it holds less than an equal share, from those that hold more than that and whose coldest
row is colder than its own; so two that are equally busy settle, and take nothing from each other.
Namespaces of one engine are no rivals, and know no share: whichever has rows that were used far
longer ago gives.  Nobody gives its last segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """What a namespace has: its charge in bytes, segments, and the last use of its coldest row
    (None: it has no row)."""

    charged_bytes: int
    segments: int
    coldest_use: int | None
    engine: str = ""
    """Equal for namespaces that one engine opened together; empty: this one alone."""


_FAR_LONGER = 1.5  # times as long ago: a segment that is taken for less would soon be taken back


def choose_donor(
    asker: Holding, wanted_bytes: int, others: Sequence[Holding], budget_bytes: int, now_use: int
) -> int | None:
    """Position in `others` of who gives way to a segment of `wanted_bytes`, if anybody.  Times are
    uses, the present one `now_use`."""
    candidates = [n for n, other in enumerate(others) if other.segments > 1]
    if asker.segments:
        if asker.coldest_use is None:
            return None
        share = budget_bytes // (len(others) + 1)
        may_grow = asker.charged_bytes + wanted_bytes <= share
        far = now_use - _FAR_LONGER * (now_use - asker.coldest_use)
        candidates = [
            n
            for n in candidates
            if (
                coldness(others[n]) < far
                if others[n].engine and others[n].engine == asker.engine
                else may_grow
                and others[n].charged_bytes > share
                and coldness(others[n]) < asker.coldest_use
            )
        ]
    return min(candidates, key=lambda n: coldness(others[n]), default=None)


def coldness(holding: Holding) -> int:
    """The less, the sooner a row of it may go."""
    return -1 if holding.coldest_use is None else holding.coldest_use
