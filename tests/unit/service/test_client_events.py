"""Who applies all that `take_changes` tells knows what the store holds, whatever happens to it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from storage.service.messages import Done, Published, Ready, Withdrawn
from storage.store import DiskStore
from storage.types import RowKey, RowOutcome
from tests.unit.service import test_client
from tests.unit.service.test_client import (
    IDENTITY,
    ROW_BYTES,
    TIMEOUT_S,
    FakeRegion,
    key,
    read_back,
    wait,
    wait_until_up,
    write,
)
from tests.unit.service.test_client_alone import Clock, PlayedStore

client, region, options = test_client.client, test_client.region, test_client.options


class Follower:
    """Applies what it takes, in pieces."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.keys: set[RowKey] = set()
        client.follow()

    def take(self, limit: int) -> None:
        removed, stored = self.client.take_changes(limit)
        assert len(removed) + len(stored) <= limit
        assert self.keys.issuperset(removed)
        assert self.keys.isdisjoint(stored)
        self.keys = self.keys.difference(removed).union(stored)

    def catch_up(self) -> set[RowKey]:
        while self.client.change_count:
            self.take(5)
        return self.keys


def present(client: StoreClient, numbers: range) -> set[RowKey]:
    return {key(n) for n in numbers if key(n) in client}


@pytest.mark.slow
def test_a_follower_of_a_real_store(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    """Found at start, stored, evicted, corrupt, lost with the process, found again, cleared."""
    write(client, region, 1000, 1001)
    client.close()
    client = StoreClient(options, IDENTITY, region.description)
    client.connect(TIMEOUT_S)
    with contextlib.closing(client):
        follower = Follower(client)
        assert follower.catch_up() == {key(1000), key(1001)}, "what was there at start"
        names = range(1100)
        for start in range(0, 320, 16):
            write(client, region, *range(start, start + 16))
            follower.take(7)
        assert client.usage.rows_evicted > 0
        assert follower.catch_up() == present(client, names)
        assert len(follower.keys) == client.usage.rows

        _damage_every_row(options.root)
        assert RowOutcome.CORRUPT in read_back(client, region, *range(290, 320))
        assert client.usage.rows_corrupt > 0
        assert follower.catch_up() == present(client, names)
        assert len(follower.keys) == client.usage.rows

        before = set(follower.keys)
        assert client.store_pid is not None
        os.kill(client.store_pid, signal.SIGKILL)
        client.read([key(1)], [0])
        wait(client)
        assert follower.catch_up() == set(), "a store that is not there holds nothing"
        wait_until_up(client)
        assert follower.catch_up() == before == present(client, names)

        client.close()
    with DiskStore.open(options) as store:
        assert set(store.open_rows(IDENTITY, ROW_BYTES).keys()) == follower.keys


def test_a_follower_of_a_store_that_is_cleared(client: StoreClient, region: FakeRegion) -> None:
    write(client, region, 1, 2)
    follower = Follower(client)
    follower.take(1)
    client.clear()
    wait(client)
    assert follower.catch_up() == set()


def _damage_every_row(root: Path) -> None:
    """Overwrite all segments but their headers: every row that is read fails its checksum."""
    for segment in root.glob("*/rows/c/*/0"):
        with segment.open("r+b") as file:
            file.seek(segment.stat().st_size // 2)
            file.write(b"\xa5" * (segment.stat().st_size - segment.stat().st_size // 2))


def test_nothing_is_kept_when_nobody_follows(client: StoreClient, region: FakeRegion) -> None:
    write(client, region, 1, 2)
    assert client.change_count == 0


class FollowedStore(RuleBasedStateMachine):
    """A store process that says and does anything, also while nobody takes."""

    numbers = st.lists(st.integers(0, 9), unique=True, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.store, self.clock = PlayedStore(), Clock()
        self.index: set[RowKey] = set()
        fd = os.memfd_create("region")
        self.client = StoreClient(
            StoreOptions(Path("/nowhere"), 1 << 20),
            Identity("model", {}),
            RegionRows(fd, 4096, 4096, 8),
            self._spawn,  # type: ignore[arg-type]
            self.clock,
        )
        os.close(fd)
        self.client.connect(60.0)
        self.follower = Follower(self.client)

    def _spawn(self, connection: socket.socket) -> object:
        """A process that finds what the last one left."""
        store = self.store
        store.starts += 1
        store.has_ended = False
        store.connection = connection.dup()
        store.say(Published(sorted(self.index)), Ready())
        return store

    @rule(numbers=numbers)
    def publish(self, numbers: list[int]) -> None:
        self.index.update(map(key, numbers))
        self.store.say(Published([key(n) for n in numbers]))
        self.client.poll()

    @rule(numbers=numbers)
    def withdraw(self, numbers: list[int]) -> None:
        self.index.difference_update(map(key, numbers))
        self.store.say(Withdrawn([key(n) for n in numbers]))
        self.client.poll()

    @rule(is_seen=st.booleans(), limit=st.integers(0, 4))
    def die_and_come_back(self, *, is_seen: bool, limit: int) -> None:
        self.store.hang_up()
        self.store.has_ended = True
        self.client.poll()
        assert not any(key(n) in self.client for n in range(10))
        if is_seen:
            self.follower.catch_up()
            assert self.follower.keys == set()
        else:
            self.follower.take(limit)
        self.clock.now += 1000.0
        self.client.poll()
        self.client.poll()

    @rule(goes_on=st.booleans(), is_seen=st.booleans())
    def stand_still(self, *, goes_on: bool, is_seen: bool) -> None:
        """It answers nothing for long; then it goes on, with what happened meanwhile, or dies."""
        job_id = self.client.read([key(0)], [0])
        self.clock.now += 1000.0
        self.client.poll()
        assert not self.client.is_up
        if is_seen:
            assert self.follower.catch_up() == set()
        if goes_on:
            self.store.say(Done(job_id, bytes([RowOutcome.MISSING]), 0, 0.0))
            self.publish([3, 4])
            assert self.client.is_up
        else:
            self.die_and_come_back(is_seen=is_seen, limit=2)

    @rule()
    def clear(self) -> None:
        """The rows are gone, and the next process serves an empty namespace."""
        job_id = self.client.clear()
        self.store.say(Withdrawn(sorted(self.index)), Done(job_id, bytes([RowOutcome.OK]), 0, 0.0))
        self._comes_back_empty()

    @rule()
    def renew(self) -> None:
        """The rows stay, but the next process serves an empty namespace."""
        self.client.renew()
        self._comes_back_empty()

    def _comes_back_empty(self) -> None:
        self.index.clear()
        self.client.poll()
        self.store.hang_up()
        self.store.has_ended = True
        self.client.poll()
        self.clock.now += 1000.0
        self.client.poll()
        self.client.poll()
        assert self.client.is_up

    @rule(limit=st.integers(0, 5))
    def take(self, limit: int) -> None:
        self.follower.take(limit)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        assert self.client.change_count <= 10

    def teardown(self) -> None:
        assert self.follower.catch_up() == self.index
        self.store.has_ended = True
        self.store.hang_up()
        self.client.close()


TestFollowedStore = FollowedStore.TestCase
TestFollowedStore.settings = settings(max_examples=30, stateful_step_count=25)
