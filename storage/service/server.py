"""The store process: owns a root and moves rows between it and one engine's region.

Private mode: an engine starts it with one end of a socket pair and it ends with that socket,
however the engine ends.  Threads: the caller's reads the socket, one writes it, the store's move
the rows.  Nothing that the engine waits for waits for the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import mmap
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence

import msgspec

from storage.drives import DriveRows, DriveStore, open_store
from storage.errors import DeviceError, StorageError
from storage.kinds import KindRows
from storage.namespace import Identity, WantedRows
from storage.rowstore import JobResult, RowStore
from storage.service import messages
from storage.service.messages import (
    Attach,
    Attached,
    Clear,
    Done,
    FrameSplitter,
    Published,
    Read,
    Ready,
    Refused,
    Released,
    Reply,
    Request,
    RootUsage,
    Touch,
    Usage,
    Withdrawn,
    Write,
)
from storage.service.staging import StagedReads
from storage.store import DiskStore
from storage.types import RowKey, RowOutcome

log = logging.getLogger("kvtier.service")

_RECEIVE_BYTES = 1 << 20
_KEYS_PER_MESSAGE = 4096  # of the index and its changes
_MESSAGES_PER_FRAME = 128  # with the longest keys, well below `MAX_FRAME_BYTES`
_STATUS_S = 10.0  # how old the figures are that `kvtier watch` shows
_STATUS_PER_FLUSH = 3  # how much recency a crash may lose: 30 s


class Outbox:
    """Sends replies in the order in which they were put, from a thread of its own."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="kvtier-send", daemon=True)
        self._thread.start()

    def put(self, reply: Reply) -> None:
        self._queue.put(reply)

    def close(self) -> None:
        """Send what is queued and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _send(self) -> None:
        ending = False
        while not ending:
            batch = [self._queue.get()]
            while len(batch) < _MESSAGES_PER_FRAME and not self._queue.empty():
                batch.append(self._queue.get())
            ending = None in batch
            replies: list[Reply] = [reply for reply in batch if reply is not None]
            try:
                if replies:
                    self._connection.sendall(messages.encode_frame(replies))
            except OSError:
                return  # the engine is gone; its socket says so to the receiving thread too


class Session:
    """One engine attached to one namespace of one root."""

    def __init__(self, attach: Attach, region_fd: int, outbox: Outbox) -> None:
        self._outbox = outbox
        self._figures_lock = threading.Lock()
        region_bytes = attach.rows_offset + attach.row_count * attach.row_bytes
        found = os.fstat(region_fd).st_size
        if found < region_bytes:
            raise StorageError(f"region: expected {region_bytes} bytes, found {found}")
        self._region = memoryview(mmap.mmap(region_fd, region_bytes, mmap.MAP_SHARED))
        self._attach = attach
        self.store = open_store(attach.options)
        try:
            self.rows = self._open_rows()
            self._staged = self._stage() if attach.stages_reads else None
        except BaseException:
            self.store.close()
            raise

    def _open_rows(self) -> RowStore | DriveRows | KindRows:
        attach = self._attach
        kinds = [(attach.identity, attach.row_bytes, attach.facts)]
        kinds += [(kind.identity, kind.row_bytes, kind.facts) for kind in attach.smaller]
        for _, row_bytes, _ in kinds[1:]:
            if row_bytes > attach.row_bytes:
                raise ValueError(f"rows of {row_bytes} bytes: slots have {attach.row_bytes}")
        opened: Sequence[RowStore | DriveRows] = self.store.open_all(
            [
                WantedRows(Identity(attach.model, fields, attach.element_bytes), row_bytes, facts)
                for fields, row_bytes, facts in kinds
            ]
        )
        if len(opened) == 1:
            return opened[0]
        smaller: dict[int, RowStore | DriveRows] = {}
        for kind, rows in zip(attach.smaller, opened[1:], strict=True):
            smaller |= dict.fromkeys(kind.groups, rows)
        return KindRows(opened[0], smaller)

    def _stage(self) -> StagedReads:
        options = self._attach.options
        return StagedReads(
            self.rows, self._attach.row_bytes, options.io_threads, options.read_timeout_s
        )

    def start(self) -> None:
        """Send the index, and from then on every change of it."""
        geometry = self.rows.geometry
        self._outbox.put(
            Attached(
                os.getpid(), geometry.slots_per_segment, geometry.segment_bytes, self.store.direct
            )
        )
        self.rows.subscribe(self._on_change)
        self.send_usage()
        self._outbox.put(Ready())

    def handle(self, request: Request) -> None:
        """Start what the engine asks for.  Raises `ValueError` for rows outside the region."""
        match request:
            case Read(job_id, keys, slots):
                buffers = [self._row(slot) for slot in slots]
                report, release = self._reporters(job_id)
                if self._staged is not None:
                    self._staged.submit(_row_keys(keys), buffers, report)
                else:
                    self.rows.submit_read(_row_keys(keys), buffers, report, release)
            case Write(job_id, keys, slots):
                buffers = [self._row(slot) for slot in slots]
                self.rows.submit_write(_row_keys(keys), buffers, *self._reporters(job_id))
            case Touch(keys):
                self.rows.touch(_row_keys(keys))
            case Clear(job_id):
                outcome = self._clear()
                self.send_usage()
                self._outbox.put(Done(job_id, bytes([outcome]), 0, 0.0))
            case Attach():
                raise ValueError("attached already")

    def _clear(self) -> RowOutcome:
        try:
            self.rows.remove(self.rows.keys())
        except DeviceError as exc:
            log.error("rows were dropped, but may come back after a crash: %s", exc)
            return RowOutcome.FAILED
        return RowOutcome.OK

    def close(self) -> None:
        """End the I/O under way and close the store."""
        self.store.close()

    def _row(self, slot: int) -> memoryview:
        if not 0 <= slot < self._attach.row_count:
            raise ValueError(f"slot {slot}: expected 0 to {self._attach.row_count - 1}")
        start = self._attach.rows_offset + slot * self._attach.row_bytes
        return self._region[start : start + self._attach.row_bytes]

    def _reporters(
        self, job_id: int
    ) -> tuple[Callable[[JobResult], None], Callable[[list[int]], None]]:
        def report(result: JobResult) -> None:
            self.send_usage()
            outcomes = bytes(result.outcomes)
            self._outbox.put(Done(job_id, outcomes, result.bytes_moved, result.seconds))

        def release(positions: list[int]) -> None:
            self._outbox.put(Released(job_id, positions))

        return report, release

    def _on_change(self, published: Sequence[RowKey], withdrawn: Sequence[RowKey]) -> None:
        for start in range(0, len(withdrawn), _KEYS_PER_MESSAGE):
            self._outbox.put(Withdrawn(list(withdrawn[start : start + _KEYS_PER_MESSAGE])))
        for start in range(0, len(published), _KEYS_PER_MESSAGE):
            self._outbox.put(Published(list(published[start : start + _KEYS_PER_MESSAGE])))

    def send_usage(self) -> None:
        """Tell the engine the present figures.  Those told last are the newest: of two threads that
        end a job at once, the one that looked first must not speak last."""
        with self._figures_lock:
            self._outbox.put(figures_of(self.store, self.rows))


def figures_of(store: DiskStore | DriveStore, rows: RowStore | DriveRows | KindRows) -> Usage:
    """The present figures of a root, or of several, and of the rows of one engine."""
    roots = {
        root: RootUsage(of.budget_bytes, of.used_bytes, of.state)
        for root, of in store.usages().items()
    }
    return Usage(**store.usage()._asdict(), **vars(rows.count()), roots=roots)


def _row_keys(keys: list[bytes]) -> list[RowKey]:
    return [RowKey(key) for key in keys]


def serve(connection: socket.socket) -> None:
    """Serve one engine until its socket ends.  Never raises for what an engine or a disk does."""
    _let_senders_go_on()
    outbox = Outbox(connection)
    session: Session | None = None
    timer: threading.Thread | None = None
    stopping = threading.Event()
    region_fds: list[int] = []
    splitter = FrameSplitter()
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(connection, _RECEIVE_BYTES, 1)
            region_fds += fds
            if not data:
                break
            for body in splitter.feed(data):
                for request in messages.request_decoder.decode(body):
                    if session is not None:
                        session.handle(request)
                        continue
                    session = _attach(request, region_fds, outbox)
                    session.start()
                    timer = threading.Thread(
                        target=_maintain, args=(session, connection, stopping), daemon=True
                    )
                    timer.start()
    except StorageError as exc:
        outbox.put(Refused(str(exc)))
    except (ValueError, msgspec.MsgspecError) as exc:
        log.error("ending: %s", exc)
        outbox.put(Refused(f"protocol: {exc}"))
    except ConnectionError:
        pass  # an engine that was killed
    except Exception as exc:
        log.exception("ending after an error of kvtier's own")
        outbox.put(Refused(f"internal error: {exc!r}; the store's log has the trace"))
    finally:
        stopping.set()
        if session is not None:
            session.close()
        outbox.close()


def _let_senders_go_on() -> None:
    """A message wakes this thread; it shall not take the core of the scheduler that sent it.  For
    this thread alone: those that it starts move rows."""
    with contextlib.suppress(OSError):  # where a sandbox forbids it, it is only slower
        os.sched_setscheduler(0, os.SCHED_BATCH | os.SCHED_RESET_ON_FORK, os.sched_param(0))


def _attach(request: Request, region_fds: list[int], outbox: Outbox) -> Session:
    if not isinstance(request, Attach) or not region_fds:
        raise ValueError("expected attach with the region's file descriptor first")
    if request.protocol_version != messages.PROTOCOL_VERSION:
        raise StorageError(
            f"protocol_version: expected {messages.PROTOCOL_VERSION}, "
            f"got {request.protocol_version}; use one kvtier version on both sides"
        )
    try:
        return Session(request, region_fds[0], outbox)
    finally:
        os.close(region_fds.pop(0))  # the mapping keeps the region


def _maintain(session: Session, connection: socket.socket, stopping: threading.Event) -> None:
    for turn in itertools.count(1):
        if stopping.wait(_STATUS_S):
            return
        if not session.store.has_root():
            log.error("somebody removed the root: ending, so that the next process makes it anew")
            connection.shutdown(socket.SHUT_RD)
            return
        session.store.write_status()
        if turn % _STATUS_PER_FLUSH == 0:
            session.store.maintain()
            session.send_usage()  # the scrubber's figures change without a job
