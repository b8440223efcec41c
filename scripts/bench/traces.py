"""Traces of requests as chunk ids, and what no cache can pass on them.

A trace is a file NAME.jsonl.gz with one JSON object a line, in the order of arrival: `t`, seconds,
and `chunks`, the ids of the request's full chunks from its first token on.  Equal ids mean equal
content and an equal prefix.  Other fields are ignored.
"""

from __future__ import annotations

import gzip
import heapq
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from storage.types import RowKey

SUFFIX = ".jsonl.gz"
_NEVER = 1 << 62


class BadTrace(ValueError):
    """A folder or a line that can't be replayed; the message is one line for the user."""


class _Line(msgspec.Struct):
    t: float
    chunks: list[int]


@dataclass(frozen=True)
class Trace:
    """`requests[i]` are the names of a request's chunks, first to last."""

    name: str
    requests: Sequence[Sequence[RowKey]]

    @cached_property
    def reference_count(self) -> int:
        return sum(map(len, self.requests))

    @cached_property
    def unique_count(self) -> int:
        return len(set().union(*self.requests))

    @property
    def infinite_hit_rate(self) -> float:
        """Of a cache that keeps everything."""
        return 1 - self.unique_count / self.reference_count


def read_traces(folder: Path) -> list[Trace]:
    """All traces of a folder, by name.  Raises `BadTrace`."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except OSError as exc:
        raise BadTrace(f"{folder}: {exc.strerror}") from exc
    if not paths:
        raise BadTrace(f"{folder}: expected files *{SUFFIX}, found none")
    return [_read_trace(path) for path in paths]


def _read_trace(path: Path) -> Trace:
    decoder = msgspec.json.Decoder(_Line)
    names: dict[int, RowKey] = {}
    requests: list[list[RowKey]] = []
    number = 0
    try:
        with gzip.open(path) as lines:
            for number, line in enumerate(lines, 1):
                chunks = decoder.decode(line).chunks
                if len(set(chunks)) < len(chunks):
                    raise BadTrace(f"{path}, line {number}: a chunk comes twice in one request")
                request = [names.setdefault(c, RowKey(b"%d" % c)) for c in chunks]
                requests.append(request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadTrace(f"{path}, line {number}: {exc}") from exc
    except (OSError, EOFError, zlib.error) as exc:
        raise BadTrace(f"{path}: {exc}") from exc
    if not names:
        raise BadTrace(f"{path}: expected requests with chunks, found none")
    return Trace(path.name.removesuffix(SUFFIX), requests)


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
