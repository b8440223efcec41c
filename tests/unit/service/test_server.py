"""The store process's parts, in this process."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from storage.errors import DeviceError
from storage.options import StoreOptions
from storage.service import server
from storage.service.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Attach,
    Clear,
    Done,
    FrameSplitter,
    Published,
    Ready,
    Refused,
    Reply,
    Usage,
    Withdrawn,
    encode_frame,
    reply_decoder,
)
from storage.service.server import Outbox, Session
from storage.types import MAX_KEY_BYTES, RowOutcome

ROW_BYTES = 4096


class Replies(Outbox):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.said: list[Reply] = []

    def put(self, reply: Reply) -> None:
        self.said.append(reply)


def attach(root: Path, *, version: int = PROTOCOL_VERSION, rows: int = 4) -> Attach:
    return Attach(
        protocol_version=version,
        options=StoreOptions(root, 4_000_000, io_threads=1, reserve_bytes=0, lock_timeout_s=0.1),
        model="model",
        identity={},
        element_bytes=2,
        row_bytes=ROW_BYTES,
        row_count=rows,
        rows_offset=4096,
    )


@pytest.fixture
def region_fd() -> int:
    fd = os.memfd_create("region")
    os.ftruncate(fd, 4096 + 4 * ROW_BYTES)
    return fd


def test_no_frame_is_larger_than_the_other_side_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of a large store is more than one frame may hold, and is queued at once."""
    per_message = server._KEYS_PER_MESSAGE * (MAX_KEY_BYTES + 2)
    assert server._MESSAGES_PER_FRAME * per_message < MAX_FRAME_BYTES
    monkeypatch.setattr(server, "_MESSAGES_PER_FRAME", 3)
    ours, theirs = socket.socketpair()
    batches: list[list[Reply]] = []

    def receive() -> None:
        splitter = FrameSplitter()
        while data := theirs.recv(1 << 20):
            batches.extend(reply_decoder.decode(body) for body in splitter.feed(data))

    receiver = threading.Thread(target=receive)
    outbox = Outbox(ours)
    sent = [Published([bytes(1000) + bytes([number])] * 100) for number in range(50)]
    for published in sent:  # 5 MB: the socket is full until somebody receives
        outbox.put(published)
    receiver.start()
    outbox.close()
    ours.close()
    receiver.join()
    theirs.close()
    assert [reply for batch in batches for reply in batch] == sent
    assert max(len(batch) for batch in batches) == 3


def test_changes_of_many_keys_are_several_messages(tmp_path: Path, region_fd: int) -> None:
    outbox = Replies()
    session = Session(attach(tmp_path / "store"), region_fd, outbox)
    os.close(region_fd)
    keys = [number.to_bytes(8, "big") for number in range(2 * server._KEYS_PER_MESSAGE + 1)]
    session._on_change([], keys)  # type: ignore[arg-type]
    session.close()
    assert [len(m.keys) for m in outbox.said if isinstance(m, Withdrawn)] == [4096, 4096, 1]


def test_a_clear_that_the_disk_refused_is_no_success(
    tmp_path: Path, region_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Replies()
    session = Session(attach(tmp_path / "store"), region_fd, outbox)
    os.close(region_fd)

    def refuse(_: object) -> int:
        raise DeviceError("write", "header", 5)

    session.handle(Clear(1))
    monkeypatch.setattr(session.rows, "remove", refuse)
    session.handle(Clear(2))
    session.close()
    done = [m for m in outbox.said if isinstance(m, Done)]
    assert [(m.job_id, list(m.outcomes)) for m in done] == [
        (1, [RowOutcome.OK]),
        (2, [RowOutcome.FAILED]),
    ]


@pytest.mark.parametrize(
    ("version", "rows", "reason"),
    [
        (PROTOCOL_VERSION + 1, 4, "use one kvtier version on both sides"),
        (PROTOCOL_VERSION, 5, "region: expected"),
    ],
    ids=["other version", "region too small"],
)
def test_an_engine_that_does_not_fit_is_refused(
    tmp_path: Path, region_fd: int, version: int, rows: int, reason: str
) -> None:
    ours, theirs = socket.socketpair()
    message = attach(tmp_path / "store", version=version, rows=rows)
    socket.send_fds(ours, [encode_frame([message])], [region_fd])
    os.close(region_fd)
    server.serve(theirs)
    theirs.close()
    [[refused]] = [reply_decoder.decode(b) for b in FrameSplitter().feed(ours.recv(1 << 16))]
    ours.close()
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    assert not (tmp_path / "store").exists()


def test_serve_ends_when_somebody_removes_the_root(
    tmp_path: Path, region_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by growing in a directory of that name, which nobody has locked."""
    monkeypatch.setattr(server, "_STATUS_S", 0.02)
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [encode_frame([attach(tmp_path / "store")])], [region_fd])
    os.close(region_fd)
    serving = threading.Thread(target=server.serve, args=(theirs,))
    serving.start()
    splitter = FrameSplitter()
    said: list[object] = []
    while Ready() not in said:
        said += [r for b in splitter.feed(ours.recv(1 << 16)) for r in reply_decoder.decode(b)]
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").mkdir()
    serving.join(30)
    assert not serving.is_alive()
    ours.close()
    theirs.close()
    assert list((tmp_path / "store").iterdir()) == []


def test_serve_ends_with_the_socket_and_gives_the_root_up(tmp_path: Path, region_fd: int) -> None:
    for _ in range(2):
        ours, theirs = socket.socketpair()
        socket.send_fds(ours, [encode_frame([attach(tmp_path / "store")])], [region_fd])
        ours.shutdown(socket.SHUT_WR)
        server.serve(theirs)
        theirs.close()
        body = FrameSplitter().feed(ours.recv(1 << 16))
        ours.close()
        assert Ready() in [reply for frame in body for reply in reply_decoder.decode(frame)]
    os.close(region_fd)


def test_the_figures_told_last_are_the_newest(
    tmp_path: Path, region_fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads that tell them at once, the first to look does not speak last."""
    outbox = Replies()
    session = Session(attach(tmp_path / "store"), region_fd, outbox)
    os.close(region_fd)
    looked, others_spoke = threading.Event(), threading.Event()
    numbers = itertools.count(1)

    def figures(*_: object) -> Usage:
        number = next(numbers)
        looked.set()
        if number == 1:
            others_spoke.wait(0.2)
        return Usage(rows=number)

    monkeypatch.setattr(server, "figures_of", figures)
    first = threading.Thread(target=session.send_usage)
    first.start()
    assert looked.wait(60)
    session.send_usage()
    others_spoke.set()
    first.join()
    session.close()
    assert [reply.rows for reply in outbox.said if isinstance(reply, Usage)] == [1, 2]
