"""Traces of requests as chunk ids.

A trace is a file NAME.jsonl.gz, or NAME.jsonl, with one JSON object a line, in the order of
arrival: `t`, seconds, and `chunks`, the ids of the request's full chunks from its first token on.
Equal ids mean equal content and an equal prefix.  Other fields are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from storage.errors import StorageError
from storage.types import RowKey

SUFFIX = ".jsonl.gz"
_GZIP_MAGIC = b"\x1f\x8b"


class BadTrace(StorageError):
    """A file, a folder or a line that can't be replayed; the message is one line for the user."""


class _Line(msgspec.Struct):
    t: float
    chunks: list[int]


@dataclass(frozen=True)
class Trace:
    """`requests[i]` are the names of a request's chunks, first to last."""

    name: str
    requests: Sequence[Sequence[RowKey]]
    seconds: float = 0.0
    """From the first request to the last."""

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
    return [read_trace(path) for path in paths]


def read_trace(path: Path) -> Trace:
    """The trace in one file.  Raises `BadTrace` that names the line."""
    decoder = msgspec.json.Decoder(_Line)
    names: dict[int, RowKey] = {}
    requests: list[list[RowKey]] = []
    times: list[float] = []
    number = 0
    try:
        with open(path, "rb") as file:
            is_packed = path.name.endswith(".gz") or file.read(2) == _GZIP_MAGIC
        with gzip.open(path) if is_packed else open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                found = decoder.decode(line)
                chunks = found.chunks
                times.append(found.t)
                if len(set(chunks)) < len(chunks):
                    raise BadTrace(f"{path}, line {number}: a chunk comes twice in one request")
                request = [names.setdefault(c, RowKey(b"%d" % c)) for c in chunks]
                requests.append(request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
        raise BadTrace(f"{path}, line {number}: {exc}") from exc
    except (OSError, EOFError, zlib.error) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise BadTrace(f"{path}: {reason}") from exc
    if not names:
        raise BadTrace(f"{path}: expected requests with chunks, found none")
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return Trace(name, requests, max(times) - min(times))
