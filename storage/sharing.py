"""Which namespace gives a segment to which, when the budget is used up.  Pure.

A namespace without a segment gets one from that with the coldest row.  One that has some gets more,
as long as it holds less than an equal share, from those that hold more than that and whose coldest
row is colder than its own; so two that are equally busy settle, and take nothing from each other.
Nobody gives its last segment.
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


def choose_donor(
    asker: Holding, wanted_bytes: int, others: Sequence[Holding], budget_bytes: int
) -> int | None:
    """Position in `others` of who gives way to a segment of `wanted_bytes`, if anybody."""
    candidates = [n for n, other in enumerate(others) if other.segments > 1]
    if asker.segments:
        share = budget_bytes // (len(others) + 1)
        if asker.charged_bytes + wanted_bytes > share or asker.coldest_use is None:
            return None
        candidates = [
            n
            for n in candidates
            if others[n].charged_bytes > share and _coldness(others[n]) < asker.coldest_use
        ]
    return min(candidates, key=lambda n: _coldness(others[n]), default=None)


def _coldness(holding: Holding) -> int:
    return -1 if holding.coldest_use is None else holding.coldest_use
