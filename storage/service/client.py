"""StoreClient: the only face of the disk store towards `tiering`.

Every call but `connect` and `close` returns at once, without waiting and without disk I/O: lookups
are answered from a replica of the index, jobs are messages, results are polled.  Not thread-safe:
one thread, the scheduler's, makes all calls.

The store process may die.  Then all its I/O has ended (a process is gone only when its threads
have left the kernel), its jobs are reported as failed, lookups miss, and a new process is started
after a back-off.  Or it stands still: then its jobs are HUNG and lookups miss until it says
something again, and nothing is started, for it still has the root and the region.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from storage.changes import Changes
from storage.errors import StorageError
from storage.facts import RowFacts
from storage.namespace import NONCE, Identity
from storage.options import StoreOptions
from storage.service import messages
from storage.service.connection import Connection
from storage.service.messages import (
    Attach,
    Attached,
    Clear,
    Done,
    Published,
    Read,
    Ready,
    Refused,
    Released,
    Request,
    SmallerRows,
    Touch,
    Usage,
    Withdrawn,
    Write,
)
from storage.service.replica import IndexReplica
from storage.service.silence import SilenceWatch
from storage.service.spawn import Spawn, spawn_store_process
from storage.space import DiskState
from storage.types import RowKey, RowOutcome

log = logging.getLogger("kvtier.client")

_UNSENT_BYTES_MAX = 4 << 20  # for a store that does not listen; above it jobs are declined
_BACKOFF_S_MIN = 1.0
_BACKOFF_S_MAX = 60.0
_SOUND_S = 60.0  # a process that served for so long did not end of what it does at its start
_EXIT_TIMEOUT_S = 40.0  # of the store process: longer than its own wait for I/O
_KILL_TIMEOUT_S = 5.0  # after SIGKILL; only a hung disk takes longer
_REFUSING = {DiskState.READ_ONLY.value, DiskState.SUSPENDED.value}


class StoreRefused(StorageError):
    """The store process can't open the root; the message is its one-line reason."""


@dataclass(frozen=True, slots=True)
class RegionRows:
    """Where rows stand in the region: row i at `rows_offset + i * row_bytes` of the file `fd`."""

    fd: int
    rows_offset: int
    row_bytes: int
    row_count: int


class FinishedJob(NamedTuple):
    """Reported once per job.  `outcomes[i]` belongs to the job's i-th key.  Where it is HUNG, the
    key's slot stays the store's until `take_released` names it."""

    job_id: int
    outcomes: list[RowOutcome]
    bytes_moved: int
    seconds: float


_SENT_AT_ONCE = (Read, Clear)
_OUTCOMES = tuple(RowOutcome)  # by code
_HUNG = RowOutcome.HUNG


def _decode_outcomes(codes: bytes) -> list[RowOutcome]:
    if max(codes, default=0) >= len(_OUTCOMES):
        raise ValueError(f"outcome {max(codes)}")
    return [_OUTCOMES[code] for code in codes]


class StoreClient:
    """Attach to a private store process.  See the module's docstring for the rules."""

    def __init__(
        self,
        options: StoreOptions,
        identity: Identity,
        rows: RegionRows,
        spawn: Spawn = spawn_store_process,
        now: Callable[[], float] = time.monotonic,
        facts: RowFacts | None = None,
        smaller: Sequence[SmallerRows] = (),
        *,
        stages_reads: bool = False,
    ) -> None:
        """`facts` are for those who look at the store; see `RowFacts`.  KV-cache groups whose rows
        are `smaller` than those of `rows` have namespaces of their own.  With `stages_reads` a read
        that hangs has FAILED, and leaves its slot, at the price of a copy of each row."""
        self.usage = Usage()
        """The latest figures, as sent with each finished job; counted over all store processes."""
        self.restarts = 0
        self._usage_before: Usage | None = None  # of processes that ended
        self._options = options
        self._identity = identity
        self._facts = facts
        self._smaller = tuple(smaller)
        self._stages_reads = stages_reads
        self._rows = replace(rows, fd=os.dup(rows.fd))
        self._spawn = spawn
        self._now = now
        self._replica = IndexReplica()  # hidden while the process stands still
        self._jobs: dict[int, int] = {}  # job id -> number of outcomes
        self._given_up: dict[int, int] = {}  # as `_jobs`, of jobs reported as HUNG unanswered
        self._silence = SilenceWatch(options.read_timeout_s, options.write_timeout_s, now)
        self._a_drive_takes_writes = True
        self._clearing: int | None = None  # job id of the last `clear`
        self._is_renewing = False  # from a `clear` until a process serves the new namespace
        self._is_hanging_up = False  # the first part of that: until the old process is gone
        self._hung: dict[int, set[int]] = {}  # job id -> positions not released yet
        self._released: list[tuple[int, int]] = []
        self._next_job_id = 0
        self._finished: list[FinishedJob] = []
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._touched: list[list[RowKey]] = []  # since the last poll
        self._ready = False
        self._refusal: str | None = None
        self._restart_at = 0.0
        self._backoff_s = _BACKOFF_S_MIN
        self._ready_since = 0.0
        self._closed = False

    # -- life -----------------------------------------------------------------------------------

    def connect(self, timeout_s: float) -> None:
        """Start the store process and wait until its index is here.  May block: for start-up only.

        A disk that has not been opened after `timeout_s` is a miss until it has been.  Raises
        `StoreRefused` with the reason; then the process is gone.
        """
        try:
            self._start()
        except OSError as exc:
            self.close()
            raise StoreRefused(f"store process not started: {exc}") from exc
        deadline = self._now() + timeout_s
        while not self._ready:
            if self._connection is None or self._refusal is not None:
                reason = self._refusal or "the store process ended at start; its log says why"
                self.close()
                raise StoreRefused(reason)
            left = deadline - self._now()
            if left <= 0:
                log.warning(
                    "store process %s has not opened %s in %g s; the disk tier misses until it has",
                    self.store_pid,
                    self._options.root,
                    timeout_s,
                )
                return
            self._connection.wait(left)
            self._send_pending()
            self._receive()

    def close(self) -> None:
        """End the store process, which first ends the I/O that it was asked for.  May block."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        self._put_touches()
        self._hang_up(deadline)
        if self._process is not None:
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("store process %d hangs in I/O and is killed", self._process.pid)
                self._process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_KILL_TIMEOUT_S)
        self._disconnect()
        self._reap()
        os.close(self._rows.fd)

    def abort(self) -> None:
        """Kill a store process that does not answer.  As after any death of it, its jobs are
        reported as failed once it is gone."""
        if self._process is not None:
            self._process.kill()

    def _hang_up(self, deadline: float) -> None:
        """Say what is left to say, and hear what the store says until it hangs up too."""
        is_shut = False
        while self._connection is not None and (left := deadline - time.monotonic()) > 0:
            if not self._connection.unsent_bytes and not is_shut:
                is_shut = True
                self._connection.hang_up()
            self._connection.wait(left)
            self._send_pending()
            self._receive()

    @property
    def is_up(self) -> bool:
        """Whether the store process serves: else lookups miss and jobs fail at once."""
        return self._ready and not self._replica.is_hidden

    @property
    def takes_writes(self) -> bool:
        """Whether a drive takes writes, as far as is known: else they are declined at once."""
        return self.is_up and self._a_drive_takes_writes

    @property
    def write_rows_max(self) -> int:
        """Rows that may wait to be written; the store declines more."""
        return max(1, self._options.write_queue_bytes // self._rows.row_bytes)

    @property
    def store_pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def pending_jobs(self) -> int:
        """Jobs whose result has not been polled yet."""
        return len(self._jobs) + len(self._finished)

    @property
    def unsent_bytes(self) -> int:
        """Messages that wait for the store process to take them."""
        return 0 if self._connection is None else self._connection.unsent_bytes

    # -- asking and doing -----------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        """Whether the store has `key`, as far as is known here.  A stale yes is a clean miss."""
        return key in self._replica.found

    def missing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """Those of `keys` that are not `in` it."""
        return self._replica.missing(keys)

    def __len__(self) -> int:
        return len(self._replica)

    def follow(self) -> None:
        """From here on `take_changes` tells how what lookups find changes, from all of it on."""
        self._replica.follow()

    @property
    def change_count(self) -> int:
        """Changes to take; 0 if nobody follows."""
        return self._replica.change_count

    def take_changes(self, limit: int) -> Changes:
        """The next keys, `limit` at most, that the store holds no more, and that it holds now.

        Only after `follow`.  Who applies all of them knows what `in` answers, whatever happened: a
        store process that is gone or stands still holds nothing, and one that came back what it
        then found.
        """
        return self._replica.take_changes(limit)

    def read(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        """Copy rows from disk to region rows `slots`; the job's id.  The slots are the store's
        until the job is reported."""
        return self._submit(Read(self._next_job_id, list(keys), list(slots)))

    def write(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        """Copy region rows `slots` to disk, the chunks of one request first to last; the job's id.
        The slots must not change until the job is reported.  Sent by the next poll or read."""
        return self._submit(Write(self._next_job_id, list(keys), list(slots)))

    def clear(self) -> int:
        """Drop every row of the namespace, also on disk; the job's id.  All other jobs have ended.

        The job has one outcome: unless it is OK, rows may still be there, or come back.  From then
        on rows stand in a namespace of their own, which this client alone finds again: what shaped
        the old ones is no longer known to shape the new ones.  Until a store process serves it,
        lookups miss and jobs fail.
        """
        assert not self._jobs, "clear while rows move"
        if self._is_renewing:  # nothing was written since the last time
            self._next_job_id += 1
            self._finish(self._next_job_id - 1, 1, RowOutcome.OK)
            return self._next_job_id - 1
        self._clearing = self._submit(Clear(self._next_job_id))
        return self._clearing

    def renew(self) -> None:
        """Leave every row of the namespace as it is, and go on in an empty one, which this client
        alone finds again, like after `clear`.  All jobs have ended."""
        assert not self._jobs, "renew while rows move"
        if self._is_renewing:
            return
        self._take_fresh_identity()
        if self._connection is not None:
            self._leave_namespace()

    def touch(self, keys: Iterable[RowKey]) -> None:
        """The chunks of one request, first to last, were used in the region.  Those that the store
        has not are left out.  Sent by the next poll."""
        if self._ready:
            self._touched.append(list(keys))

    def _put_touches(self) -> None:
        touched, self._touched = self._touched, []
        found = self._replica.found
        for keys in touched:
            known: list[bytes] = [key for key in keys if key in found]
            if known and self._has_room():
                self._put(Touch(known))

    def poll(self) -> list[FinishedJob]:
        """Jobs that ended since the last call; keeps the replica and the usage up to date."""
        if self._connection is not None:
            if self._touched:
                self._put_touches()
            if self._connection.unsent_bytes:
                self._send_pending()
            if self._connection is not None and self._connection.has_something():
                self._receive()
            self._notice_silence()
        elif self._reap() and not self._closed and self._now() >= self._restart_at:
            self._restart()
        finished, self._finished = self._finished, []
        return finished

    def take_released(self) -> list[tuple[int, int]]:
        """(job id, position) of HUNG rows whose slots the store has let go of since the last
        call: by the end of their I/O, or of the store process.  Call it after `poll`."""
        released, self._released = self._released, []
        return released

    def _submit(self, request: Read | Write | Clear) -> int:
        self._next_job_id += 1
        count = 1 if isinstance(request, Clear) else len(request.keys)
        if not self.is_up:
            self._finish(request.job_id, count, RowOutcome.FAILED)
        elif not self._has_room():
            is_write = isinstance(request, Write)
            outcome = RowOutcome.DECLINED if is_write else RowOutcome.FAILED
            self._finish(request.job_id, count, outcome)
        else:
            self._jobs[request.job_id] = count
            if not isinstance(request, Clear):
                self._silence.begin(request.job_id, is_read=isinstance(request, Read))
            self._put(request)
        return request.job_id

    def _finish(self, job_id: int, count: int, outcome: RowOutcome) -> None:
        self._finished.append(FinishedJob(job_id, [outcome] * count, 0, 0.0))

    # -- silence --------------------------------------------------------------------------------

    def _notice_silence(self) -> None:
        """Of a store that stands still no job is waited for any longer."""
        if not self._silence.stands_still():
            return
        log.warning("the store process stands still; the disk tier misses until it goes on")
        self._replica.hide()
        for job_id in self._silence.give_up():
            count = self._given_up[job_id] = self._jobs.pop(job_id)
            self._hung[job_id] = set(range(count))
            self._finish(job_id, count, RowOutcome.HUNG)

    def _heard(self) -> None:
        self._silence.heard()
        if self._replica.is_hidden:
            log.warning("the store process goes on")
            self._replica.show()

    # -- connection -----------------------------------------------------------------------------

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                self._process = self._spawn(theirs)
        except OSError:
            ours.close()
            raise
        attach = Attach(
            protocol_version=messages.PROTOCOL_VERSION,
            options=self._options,
            model=self._identity.model,
            identity=self._identity.fields,
            element_bytes=self._identity.element_bytes,
            row_bytes=self._rows.row_bytes,
            row_count=self._rows.row_count,
            rows_offset=self._rows.rows_offset,
            facts=self._facts,
            smaller=self._smaller,
            stages_reads=self._stages_reads,
        )
        self._connection = Connection(ours)
        try:
            self._connection.attach(attach, self._rows.fd)
        except OSError:  # it ended at once
            self._lost()

    def _restart(self) -> None:
        self._usage_before = self.usage
        self._restart_at = self._now() + self._backoff_s
        if not self._is_hanging_up:
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)
            self.restarts += 1
        self._is_hanging_up = False
        try:
            self._start()
        except OSError as exc:
            log.warning("store process not started: %s", exc)

    def _has_room(self) -> bool:
        """Whether the store process listens, or has not been silent for long."""
        if self.unsent_bytes >= _UNSENT_BYTES_MAX:
            self._send_pending()
        return self.unsent_bytes < _UNSENT_BYTES_MAX

    def _put(self, request: Request) -> None:
        """Sent with all that was put before it: at once if somebody waits for it, else by the next
        poll.  A send wakes the store process, which may then take the caller's core."""
        if self._connection is None:
            return  # it was just lost, and its jobs with it
        self._connection.put(request)
        if isinstance(request, _SENT_AT_ONCE):
            self._send_pending()

    def _send_pending(self) -> None:
        if self._connection is not None:
            try:
                self._connection.send()
            except OSError:
                self._lost()

    def _receive(self) -> None:
        if self._connection is None:
            return
        try:
            size = self._connection.receive()
        except (OSError, EOFError):
            self._lost()
            return
        if not size:
            return
        self._heard()
        try:
            for reply in self._connection.replies(size):
                self._handle(reply)
        except (ValueError, msgspec.MsgspecError) as exc:
            log.error("the store process talks nonsense and is killed: %s", exc)
            if self._process is not None:
                self._process.kill()
            self._lost()

    def _handle(self, reply: messages.Reply) -> None:
        match reply:
            case Done(job_id, outcomes, bytes_moved, seconds):
                owed = self._jobs if job_id in self._jobs else self._given_up
                count = owed.get(job_id)
                if count != len(outcomes):
                    raise ValueError(f"{len(outcomes)} outcomes of job {job_id}")
                decoded = _decode_outcomes(outcomes)
                hung = set()
                if _HUNG in outcomes:
                    hung = {i for i, o in enumerate(decoded) if o is _HUNG}
                if self._given_up.pop(job_id, None) is not None:
                    self._release(job_id, sorted(self._hung[job_id] - hung))
                    return
                del self._jobs[job_id]
                self._silence.end(job_id)
                self._finished.append(FinishedJob(job_id, decoded, bytes_moved, seconds))
                if hung:
                    self._hung[job_id] = hung
                if job_id == self._clearing and decoded == [RowOutcome.OK]:
                    self._take_fresh_identity()
                    self._leave_namespace()
            case Released(job_id, positions):
                self._release(job_id, positions)
            case Published() if self._is_hanging_up:
                pass  # to a namespace that was left
            case Published(keys):
                self._replica.publish(keys, were_there=not self._ready)
            case Withdrawn(keys):
                self._replica.withdraw(keys)
            case Usage():
                before = self._usage_before
                self.usage = reply if before is None else reply.after(before)
                states = {of.state for of in reply.roots.values()}
                self._a_drive_takes_writes = not states or not states <= _REFUSING
            case Attached(pid, slots_per_segment, segment_bytes, direct):
                log.info(
                    "store process %d: segments of %d rows, %d bytes, %s I/O",
                    pid,
                    slots_per_segment,
                    segment_bytes,
                    "direct" if direct else "buffered",
                )
            case Ready():
                self._ready = True
                self._is_renewing = False
                self._ready_since = self._now()
            case Refused(reason):
                self._refusal = reason
                log.error("store refused: %s", reason)

    def _release(self, job_id: int, positions: list[int]) -> None:
        left = self._hung.get(job_id, set())
        if not left.issuperset(positions):
            raise ValueError(f"release of rows of job {job_id} that do not hang")
        left.difference_update(positions)
        self._released += [(job_id, position) for position in positions]
        if not left:
            self._hung.pop(job_id, None)

    def _take_fresh_identity(self) -> None:
        self._is_renewing = True
        nonce = secrets.token_hex(16)
        self._identity = self._identity.unrepeatable(nonce)
        self._smaller = tuple(
            msgspec.structs.replace(kind, identity={**kind.identity, NONCE: nonce})
            for kind in self._smaller
        )

    def _leave_namespace(self) -> None:
        """Have the process end; the next one serves the namespace of the identity as it is now."""
        assert self._connection is not None
        self._is_hanging_up = True
        self._ready = False
        self._replica.forget()
        self._connection.hang_up()

    def _lost(self) -> None:
        """The connection is gone, and with it the index; the jobs end with the process."""
        if self._ready and self._now() - self._ready_since >= _SOUND_S:
            self._backoff_s = _BACKOFF_S_MIN
        self._disconnect()
        if self._is_hanging_up:
            self._restart_at = self._now()
        elif not self._closed:
            log.warning("the store process is gone; the disk tier misses until it is back")
            self._restart_at = self._now() + self._backoff_s
        self._reap()

    def _reap(self) -> bool:
        """Whether no process is left.  Until then its threads may use the slots of its jobs."""
        if self._process is not None and self._process.poll() is None:
            return False
        self._process = None
        for job_id, count in self._jobs.items():
            self._finish(job_id, count, RowOutcome.FAILED)
        self._jobs.clear()
        self._given_up.clear()
        self._silence.give_up()
        for job_id, positions in self._hung.items():
            self._released += [(job_id, position) for position in sorted(positions)]
        self._hung.clear()
        return True

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._ready = False
        self._touched.clear()
        self._replica.forget()
