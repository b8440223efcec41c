"""What an engine and a store process say to each other: small typed messages, never data.

A frame is a little-endian uint32 length and that many bytes of msgpack: a list of messages, in
order.  The region's file descriptor travels once, with the frame that holds `Attach`.  Replies are
arrays, without the names of fields: the engine's scheduler takes them in.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import fields, replace

from storage.facts import RowFacts
from storage.options import StoreOptions
from storage.types import RowKey

PROTOCOL_VERSION = 4  # fields of replies are known by their place: a change of them raises it
FRAME_HEAD = struct.Struct("<I")
MAX_FRAME_BYTES = 64 << 20  # far above what a batch of jobs takes; more is a stranger talking


class SmallerRows(msgspec.Struct, frozen=True):
    """Rows of the KV-cache `groups`, by number, that are smaller than the largest; they stand at
    the start of a slot."""

    groups: tuple[int, ...]
    identity: dict[str, Any]
    row_bytes: int
    facts: RowFacts | None = None


class Attach(msgspec.Struct, tag="attach", frozen=True):
    """First message of an engine.  Row i of its region stands at `rows_offset + i * row_bytes`."""

    protocol_version: int
    options: StoreOptions
    model: str
    identity: dict[str, Any]
    element_bytes: int
    row_bytes: int
    row_count: int
    rows_offset: int
    facts: RowFacts | None = None
    smaller: tuple[SmallerRows, ...] = ()
    """Rows of groups that have namespaces of their own; all others are of `row_bytes`."""
    stages_reads: bool = False
    """Read by way of the store's memory, so that no read calls a row HUNG: see `staging`."""


class Read(msgspec.Struct, tag="read", frozen=True):
    """Copy rows from disk into region rows; answered by one `Done`, and a `Released` for rows that
    it calls HUNG."""

    job_id: int
    keys: list[bytes]
    slots: list[int]


class Write(msgspec.Struct, tag="write", frozen=True):
    """Copy region rows to disk; answered by one `Done`."""

    job_id: int
    keys: list[bytes]
    slots: list[int]


class Touch(msgspec.Struct, tag="touch", frozen=True):
    """The chunks of one request, first to last, were used in the region."""

    keys: list[bytes]


class Clear(msgspec.Struct, tag="clear", frozen=True):
    """Drop every row of the namespace, on disk too; answered by one `Done` with one outcome."""

    job_id: int


class Attached(msgspec.Struct, tag="attached", frozen=True, array_like=True):
    """The root is open.  `Published` messages with all present keys follow, then `Ready`."""

    pid: int
    slots_per_segment: int
    segment_bytes: int
    direct: bool


class Ready(msgspec.Struct, tag="ready", frozen=True, array_like=True):
    """The engine's replica of the index is complete; from here on it is kept up to date."""


class Refused(msgspec.Struct, tag="refused", frozen=True, array_like=True):
    """The store can't be opened; `reason` is for the user.  The connection ends."""

    reason: str


class Published(msgspec.Struct, tag="published", frozen=True, array_like=True):
    keys: list[RowKey]


class Withdrawn(msgspec.Struct, tag="withdrawn", frozen=True, array_like=True):
    keys: list[RowKey]


class Done(msgspec.Struct, tag="done", frozen=True, array_like=True):
    """`outcomes[i]` is the `RowOutcome` of the job's i-th key; of `Clear`, OK or FAILED."""

    job_id: int
    outcomes: bytes
    bytes_moved: int
    seconds: float


class Released(msgspec.Struct, tag="released", frozen=True, array_like=True):
    """The device has let go of the region rows at these `positions` of a job whose `Done` called
    them HUNG: they are the engine's again."""

    job_id: int
    positions: list[int]


class RootUsage(msgspec.Struct, frozen=True):
    """Of one drive of a store."""

    budget_bytes: int
    used_bytes: int
    state: str


class Usage(msgspec.Struct, tag="usage", frozen=True, array_like=True):
    """Figures of the root and of this namespace since it was opened; sent when they change.

    The first are those of `StoreUsage`, the others those of `RowCounters`.
    """

    budget_bytes: int = 0
    effective_bytes: int = 0
    used_bytes: int = 0
    state: str = ""
    state_reason: str = ""
    limit: str = ""
    health: str = ""
    errno: int = 0
    enospc: int = 0
    enospc_other: int = 0
    external_removals: int = 0
    state_changes: dict[str, int] = {}
    roots: dict[str, RootUsage] = {}
    """By path; the figures above are those of all roots together."""
    rows: int = 0
    segments: int = 0
    rows_read: int = 0
    bytes_read: int = 0
    rows_missing: int = 0
    rows_corrupt: int = 0
    reads_failed: int = 0
    reads_hung: int = 0
    reads_expired: int = 0
    rows_offered: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    rows_already_stored: int = 0
    declined_full: int = 0
    declined_busy: int = 0
    declined_disk: int = 0
    declined_twice: int = 0
    declined_admission: int = 0
    declined_write_budget: int = 0
    writes_failed: int = 0
    writes_hung: int = 0
    rows_evicted: int = 0
    rows_given_up: int = 0
    rows_moved: int = 0
    rows_scrubbed: int = 0
    rows_scrubbed_corrupt: int = 0
    scrub_passes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    rows_encoded: int = 0
    rows_raw: int = 0
    bytes_before_codec: int = 0
    bytes_after_codec: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    def after(self, before: Usage) -> Usage:
        """These figures, with what a process before this one had counted: so counters never go
        back.  What is not counted is as it is now."""
        sums = {name: getattr(self, name) + getattr(before, name) for name in _COUNTED}
        changes = Counter(before.state_changes)
        changes.update(self.state_changes)
        return replace(self, **sums, state_changes=dict(changes))


_MEASURED = frozenset(
    {"budget_bytes", "effective_bytes", "used_bytes", "errno", "rows", "segments"}
)
_COUNTED = tuple(
    field.name
    for field in fields(Usage)
    if field.type in (int, float) and field.name not in _MEASURED
)


Request = Attach | Read | Write | Touch | Clear
Reply = Attached | Ready | Refused | Published | Withdrawn | Done | Released | Usage


def _encode_path(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value).__name__} in a message")


def _decode_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(f"{kind.__name__} in a message")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_path)
request_decoder = msgspec.msgpack.Decoder(list[Request], dec_hook=_decode_path)
reply_decoder = msgspec.msgpack.Decoder(list[Reply])


def encode_frame(messages: Sequence[Request] | Sequence[Reply]) -> bytes:
    body = _encoder.encode(messages)
    return FRAME_HEAD.pack(len(body)) + body


class FrameSplitter:
    """Bytes as they arrive, out comes each frame's body."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[memoryview]:
        """The bodies of the frames that `data` completes; they may be views of it.  Raises
        `ValueError` on nonsense."""
        if not self._buffer:
            bodies, used = _whole_frames(memoryview(data))
            self._buffer += data[used:]
            return bodies
        self._buffer += data
        if len(self._buffer) < FRAME_HEAD.size or len(self._buffer) < _frame_end(self._buffer, 0):
            return []
        whole = memoryview(bytes(self._buffer))
        bodies, used = _whole_frames(whole)
        self._buffer = bytearray(whole[used:])
        return bodies


def _frame_end(data: bytearray | memoryview, start: int) -> int:
    size: int = FRAME_HEAD.unpack_from(data, start)[0]
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {size} bytes: expected at most {MAX_FRAME_BYTES}")
    return start + FRAME_HEAD.size + size


def _whole_frames(data: memoryview) -> tuple[list[memoryview], int]:
    """The bodies of the frames that `data` begins with, and how many bytes they take with their
    heads.  Raises `ValueError` on nonsense."""
    bodies, start = [], 0
    while len(data) - start >= FRAME_HEAD.size:
        end = _frame_end(data, start)
        if len(data) < end:
            break
        bodies.append(data[start + FRAME_HEAD.size : end])
        start = end
    return bodies, start
