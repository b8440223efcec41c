"""StoreClient against a store process that the test plays: what a real one rarely does."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service import client as client_module
from storage.service.client import RegionRows, StoreClient, StoreRefused
from storage.service.messages import (
    Attach,
    Done,
    FrameSplitter,
    Published,
    Ready,
    Released,
    Reply,
    RootUsage,
    SmallerRows,
    Usage,
    Withdrawn,
    encode_frame,
    request_decoder,
)
from storage.types import RowKey, RowOutcome

KEY = RowKey(b"key")


class PlayedStore:
    """The other end of the socket, and a process that ends when the test says so."""

    pid = 4711

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self.starts = 0
        self.is_killed = False
        self.has_ended = False

    def spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        self.starts += 1
        self.is_killed = self.has_ended = False
        self.connection = connection.dup()
        self.say(Ready())
        return cast("subprocess.Popen[bytes]", self)

    def say(self, *replies: Reply) -> None:
        assert self.connection is not None
        self.connection.sendall(encode_frame(list(replies)))

    def attached(self) -> Attach:
        """What the client said first."""
        assert self.connection is not None
        [body] = FrameSplitter().feed(self.connection.recv(1 << 20))
        [attach] = request_decoder.decode(body)
        assert isinstance(attach, Attach)
        return attach

    def hang_up(self) -> None:
        assert self.connection is not None
        self.connection.close()

    def poll(self) -> int | None:
        return 0 if self.has_ended else None

    def wait(self, timeout: float) -> int:
        if not self.has_ended:
            raise subprocess.TimeoutExpired("store", timeout)
        return 0

    def kill(self) -> None:
        self.is_killed = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> Iterator[PlayedStore]:
    played = PlayedStore()
    yield played
    if played.connection is not None:
        played.hang_up()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def client(store: PlayedStore, clock: Clock) -> Iterator[StoreClient]:
    fd = os.memfd_create("region")
    made = StoreClient(
        StoreOptions(Path("/nowhere"), 1 << 20),
        Identity("model", {}),
        RegionRows(fd, 4096, 4096, 8),
        store.spawn,
        clock,
        smaller=[SmallerRows((1,), {"group": 1}, 4096)],
    )
    os.close(fd)
    made.connect(60.0)
    yield made
    store.has_ended = True
    store.hang_up()
    made.close()


def test_slots_are_nobodys_until_the_process_is_gone(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    """A closed socket is not yet an end: a thread may hang in a read into the slot."""
    job = client.read([KEY], [0])
    store.hang_up()
    assert client.poll() == []
    assert not client.is_up
    clock.now += 1000.0
    assert client.poll() == [], "still alive"
    assert store.starts == 1, "two processes on one region"
    store.has_ended = True
    [finished] = client.poll()
    assert finished.job_id == job
    assert finished.outcomes == [RowOutcome.FAILED]
    assert store.starts == 2
    assert client.poll() == []
    assert client.is_up


def test_a_job_without_keys_ends_like_any_other(client: StoreClient, store: PlayedStore) -> None:
    job = client.read([], [])
    store.say(Done(job, b"", 0, 0.0))
    [finished] = client.poll()
    assert (finished.job_id, finished.outcomes) == (job, [])
    assert not store.is_killed


def test_slots_of_rows_that_hang_are_nobodys_until_released(
    client: StoreClient, store: PlayedStore
) -> None:
    job = client.read([KEY, KEY, KEY], [0, 1, 2])
    store.say(Done(job, bytes([RowOutcome.HUNG, RowOutcome.OK, RowOutcome.HUNG]), 4096, 0.1))
    [finished] = client.poll()
    assert finished.outcomes == [RowOutcome.HUNG, RowOutcome.OK, RowOutcome.HUNG]
    assert client.take_released() == []
    store.say(Released(job, [2]))
    client.poll()
    assert client.take_released() == [(job, 2)]
    store.hang_up()
    client.poll()
    assert client.take_released() == [], "the process may still be there"
    store.has_ended = True
    client.poll()
    assert client.take_released() == [(job, 0)]


@pytest.mark.parametrize(
    "reply",
    [
        Released(0, [0]),
        Done(999, bytes([0]), 0, 0.0),
        Done(0, b"", 0, 0.0),
        Done(0, bytes([0, 0]), 0, 0.0),
        Done(0, bytes([77]), 0, 0.0),
    ],
    ids=["release", "unknown job", "no outcome", "too many outcomes", "unknown outcome"],
)
def test_a_store_that_talks_nonsense_is_killed_and_its_jobs_fail(
    client: StoreClient, store: PlayedStore, reply: Any
) -> None:
    assert client.write([KEY], [0]) == 0
    store.say(reply)
    assert client.poll() == []
    assert store.is_killed
    store.has_ended = True
    [finished] = client.poll()
    assert (finished.job_id, finished.outcomes) == (0, [RowOutcome.FAILED])


def test_a_clear_without_a_store_has_failed(client: StoreClient, store: PlayedStore) -> None:
    store.hang_up()
    store.has_ended = True
    client.poll()
    client.clear()
    [finished] = client.poll()
    assert finished.outcomes == [RowOutcome.FAILED]


@pytest.mark.parametrize(
    ("states", "takes_writes"),
    [
        (["growing"], True),
        (["full"], True),
        (["read-only"], False),
        (["suspended"], False),
        (["growing", "suspended"], True),
        (["read-only", "suspended"], False),
    ],
)
def test_writes_are_taken_as_long_as_one_drive_takes_them(
    client: StoreClient, store: PlayedStore, states: list[str], takes_writes: bool
) -> None:
    assert client.takes_writes, "before anything is known"
    roots = {str(number): RootUsage(9, 5, state) for number, state in enumerate(states)}
    store.say(Usage(state=max(states), roots=roots))
    client.poll()
    assert client.takes_writes is takes_writes
    store.hang_up()
    client.poll()
    assert not client.takes_writes


def clear(client: StoreClient, store: PlayedStore) -> None:
    job_id = client.clear()
    store.say(Done(job_id, bytes([RowOutcome.OK]), 0, 0.0))
    [finished] = client.poll()
    assert finished.outcomes == [RowOutcome.OK]


def test_after_a_clear_nothing_waits_and_the_next_process_is_no_failure(
    client: StoreClient, store: PlayedStore
) -> None:
    clear(client, store)
    assert not client.is_up
    client.write([KEY], [0])
    [finished] = client.poll()
    assert finished.outcomes == [RowOutcome.FAILED]
    client.clear()
    [finished] = client.poll()
    assert finished.outcomes == [RowOutcome.OK], "there is nothing to clear"
    store.hang_up()
    client.poll()
    assert store.starts == 1, "the old process still has the root"
    store.has_ended = True
    client.poll()
    assert store.starts == 2, "at once"
    assert client.restarts == 0
    client.poll()
    assert client.is_up


class SlowStore(PlayedStore):
    """Says nothing at its start."""

    def say(self, *replies: Reply) -> None:
        if Ready() not in replies:
            super().say(*replies)

    def is_open(self) -> None:
        super().say(Published([KEY]), Ready())


def test_a_disk_that_is_not_opened_in_time_is_a_miss_until_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SlowStore()
    fd = os.memfd_create("region")
    rows = RegionRows(fd, 4096, 4096, 8)
    client = StoreClient(StoreOptions(Path("/slow"), 1 << 20), Identity("m", {}), rows, store.spawn)
    client.connect(0.05)
    assert "has not opened /slow" in caplog.text
    assert (client.is_up, len(client)) == (False, 0)
    client.read([KEY], [0])
    assert [job.outcomes for job in client.poll()] == [[RowOutcome.FAILED]]
    store.is_open()
    client.poll()
    assert client.is_up
    assert KEY in client
    assert (store.starts, client.restarts) == (1, 0)
    store.has_ended = True
    store.hang_up()
    client.close()
    os.close(fd)


def test_a_process_that_cannot_be_started_is_refused_by_name() -> None:
    def spawn(connection: socket.socket) -> subprocess.Popen[bytes]:  # noqa: ARG001
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    fd = os.memfd_create("region")
    rows = RegionRows(fd, 4096, 4096, 8)
    client = StoreClient(StoreOptions(Path("/x"), 1 << 20), Identity("m", {}), rows, spawn)
    with pytest.raises(StoreRefused, match=r"^store process not started: .*Resource temporarily"):
        client.connect(5.0)
    os.close(fd)


def test_a_store_that_dies_soon_each_time_is_started_less_and_less_often(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    def seconds_until_started(served_s: float) -> float:
        clock.now += served_s
        store.has_ended = True
        store.hang_up()
        client.poll()  # the end
        died, starts = clock.now, store.starts
        while store.starts == starts:
            clock.now += 0.5
            client.poll()
        client.poll()
        assert client.is_up
        return clock.now - died

    assert [seconds_until_started(3.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert client.restarts == 8
    assert [seconds_until_started(s) for s in (61.0, 61.0, 59.0)] == [1, 1, 2]
    clear(client, store)
    store.hang_up()
    store.has_ended = True
    for _ in range(3):
        client.poll()
    assert client.is_up, "at once: it did not fail"
    assert seconds_until_started(3.0) == 4, "nor is that counted"


def test_each_clear_gives_the_rows_of_every_size_another_name(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    attached = [store.attached()]
    for _ in range(2):
        clear(client, store)
        store.hang_up()
        store.has_ended = True
        for _ in range(3):  # the end, the start, the index
            client.poll()
        assert client.is_up
        attached.append(store.attached())
    names = [
        {str(attach.identity), *(str(kind.identity) for kind in attach.smaller)}
        for attach in attached
    ]
    assert [len(of_one) for of_one in names] == [2, 2, 2]
    assert len(set.union(*names)) == 6
    store.hang_up()  # a crash, after which the rows are found again
    store.has_ended = True
    client.poll()
    clock.now += 100.0
    client.poll()
    assert store.attached() == attached[-1]


def test_what_the_store_says_of_a_namespace_that_was_left_is_not_heard(
    client: StoreClient, store: PlayedStore
) -> None:
    store.say(Published([KEY]))
    client.poll()
    assert KEY in client
    client.renew()
    client.renew()
    assert KEY not in client
    store.say(Published([KEY, RowKey(b"late")]), Withdrawn([KEY]))
    client.poll()
    assert len(client) == 0
    store.hang_up()
    store.has_ended = True
    for _ in range(3):  # the end, the start, the index
        client.poll()
    assert client.is_up
    assert (store.starts, client.restarts) == (2, 0)
    store.say(Published([KEY]))
    client.poll()
    assert KEY in client


def test_a_store_that_died_is_renewed_when_it_comes_back(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    before = store.attached()
    store.hang_up()
    store.has_ended = True
    client.poll()
    client.renew()
    clock.now += 100.0
    client.poll()
    client.poll()
    assert client.is_up
    after = store.attached()
    assert str(after.identity) != str(before.identity)
    assert [str(k.identity) for k in after.smaller] != [str(k.identity) for k in before.smaller]


def test_a_store_that_does_not_come_back_after_a_clear_is_not_started_time_and_again(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    clear(client, store)
    for _ in range(100):
        store.hang_up()
        store.has_ended = True
        client.poll()
        clock.now += 0.1
    assert store.starts <= 2 + 10, "one at once, the others a second apart"


def test_what_is_said_to_a_deaf_store_is_bounded(
    client: StoreClient, store: PlayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_UNSENT_BYTES_MAX", 10_000)
    for _ in range(10_000):
        client.write([KEY], [0])
        client.touch([KEY])
    declined = client.poll()
    assert client.unsent_bytes < 20_000
    assert len(declined) + client.pending_jobs == 10_000
    assert {outcome for job in declined for outcome in job.outcomes} == {RowOutcome.DECLINED}
    client.read([KEY], [0])
    assert client.poll()[0].outcomes == [RowOutcome.FAILED]
    store.hang_up()
    client.poll()
    store.has_ended = True
    client.poll()
    assert client.pending_jobs == 0


def test_closing_does_not_wait_for_ever_for_a_deaf_store(
    client: StoreClient, store: PlayedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_EXIT_TIMEOUT_S", 0.2)
    for _ in range(20_000):
        client.write([KEY], [0])
    assert client.unsent_bytes > 0
    client.close()
    assert store.is_killed


def test_a_large_index_is_taken_in_bit_by_bit(client: StoreClient, store: PlayedStore) -> None:
    keys = [number.to_bytes(36, "big") for number in range(3000)]
    store.say(Published(keys))
    deadline = time.monotonic() + 60.0
    while len(client) < 3000:
        assert time.monotonic() < deadline
        client.poll()


def test_a_store_that_ends_at_once_is_a_refusal(store: PlayedStore) -> None:
    def spawn(connection: socket.socket) -> subprocess.Popen[bytes]:
        connection.shutdown(socket.SHUT_RDWR)
        store.has_ended = True
        return cast("subprocess.Popen[bytes]", store)

    fd = os.memfd_create("region")
    refused = StoreClient(
        StoreOptions(Path("/nowhere"), 1 << 20),
        Identity("model", {}),
        RegionRows(fd, 4096, 4096, 8),
        spawn,
    )
    os.close(fd)
    with pytest.raises(StoreRefused, match="ended at start"):
        refused.connect(60.0)


def test_a_store_that_stands_still_is_waited_for_no_longer(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    """Its jobs are HUNG and their slots its own, until it goes on and answers them after all."""
    store.say(Published([KEY]))
    client.poll()
    read = client.read([KEY, KEY], [0, 1])
    write = client.write([KEY], [2])
    clock.now += 14.0
    assert client.poll() == []
    assert client.is_up
    assert KEY in client
    clock.now += 2.0
    finished = client.poll()
    assert [(job.job_id, job.outcomes) for job in finished] == [
        (read, [RowOutcome.HUNG] * 2),
        (write, [RowOutcome.HUNG]),
    ]
    assert not client.is_up
    assert KEY not in client
    assert client.take_released() == []
    client.read([KEY], [3])
    assert client.poll()[0].outcomes == [RowOutcome.FAILED], "at once"
    assert store.starts == 1

    store.say(Done(read, bytes([RowOutcome.OK, RowOutcome.HUNG]), 4096, 20.0))
    assert client.poll() == [], "it was reported"
    assert client.is_up
    assert KEY in client
    assert client.take_released() == [(read, 0)], "the other one really hangs"
    store.say(Released(read, [1]), Done(write, bytes([RowOutcome.OK]), 4096, 20.0))
    client.poll()
    assert sorted(client.take_released()) == [(read, 1), (write, 0)]
    assert client.pending_jobs == 0


def test_a_store_that_is_killed_while_it_stands_still_lets_go_of_everything(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    job = client.read([KEY, KEY], [0, 1])
    clock.now += 16.0
    client.poll()
    store.hang_up()
    client.poll()
    assert client.take_released() == [], "the process may still be there"
    store.has_ended = True
    assert client.poll() == []
    assert client.take_released() == [(job, 0), (job, 1)]
    clock.now += 2.0
    client.poll()
    assert client.poll() == []
    assert client.is_up, "the next one"


def test_a_store_that_says_anything_does_not_stand_still(
    client: StoreClient, store: PlayedStore, clock: Clock
) -> None:
    client.read([KEY], [0])
    for _ in range(5):
        clock.now += 14.0
        store.say(Published([KEY]))
        assert client.poll() == []
        assert client.is_up
