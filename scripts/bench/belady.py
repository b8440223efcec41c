"""What no cache can pass on a trace: that of one which knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from storage.types import RowKey
from tiering.traces import Trace

_NEVER = 1 << 62


def belady_hit_rate(trace: Trace, slots: int) -> float:
    """Of a cache of `slots` chunks that knows the future: it keeps what is used again soonest."""
    next_uses = _next_uses(trace.requests)
    kept: dict[RowKey, tuple[int, int]] = {}  # key -> (next use, depth), negative: furthest first
    furthest: list[tuple[int, int, RowKey]] = []  # a heap; entries that `kept` contradicts are old
    hits = 0
    for request, uses in zip(trace.requests, next_uses, strict=True):
        hits += _prefix_length(request, kept)
        for depth, (key, use) in enumerate(zip(request, uses, strict=True)):
            if use == _NEVER:
                kept.pop(key, None)
                continue
            kept[key] = (-use, -depth)
            heapq.heappush(furthest, (-use, -depth, key))
        while len(kept) > slots:
            use, depth, key = heapq.heappop(furthest)
            if kept.get(key) == (use, depth):
                del kept[key]
    return hits / trace.reference_count


def _next_uses(requests: Sequence[Sequence[RowKey]]) -> list[list[int]]:
    """Per request and chunk the number of the next request that uses the chunk."""
    found: list[list[int]] = []
    later: dict[RowKey, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        found.append([later.get(key, _NEVER) for key in requests[number]])
        later.update(dict.fromkeys(requests[number], number))
    return found[::-1]


def _prefix_length(request: Sequence[RowKey], kept: dict[RowKey, tuple[int, int]]) -> int:
    for number, key in enumerate(request):
        if key not in kept:
            return number
    return len(request)
