"""Requests that end or are preempted in the middle of something, and when the engine may rest."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import cast

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from storage.service.messages import Published, Ready, encode_frame
from storage.types import RowOutcome
from tests.unit.tiering.fakes import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    FakeTier,
    is_idle,
    keys,
    lookups,
    make,
    store,
)
from tiering.manager import TieringManager
from tiering.primary import PrimaryTier


def test_one_cancelled_while_its_chunks_come_leaves_them_to_others() -> None:
    manager, tier, _ = make(4, 1, 2)
    lookups(manager, "cancelled", 1, 2)
    manager.end_step()
    assert lookups(manager, "other", 1) == [PENDING]
    manager.finish("cancelled")
    assert manager.has_pending_work()
    tier.finish_all()
    manager.end_step()
    assert lookups(manager, "other", 1, 2) == [HIT, HIT]
    manager.finish("other")
    assert is_idle(manager)
    assert manager.held_count == 0


def test_one_cancelled_in_the_step_of_its_lookup_does_not_stop_who_joined_it() -> None:
    manager, tier, _ = make(4, 1)
    lookups(manager, "cancelled", 1)
    assert lookups(manager, "other", 1) == [PENDING]
    manager.finish("cancelled")
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert lookups(manager, "other", 1) == [HIT]


def test_one_cancelled_while_it_loads_keeps_its_chunks_pinned_until_the_workers_are_through() -> (
    None
):
    manager, tier, _ = make(2, 1, 2)
    lookups(manager, "r", 1, 2)
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert lookups(manager, "r", 1, 2) == [HIT, HIT]
    manager.prepare_load(keys(1, 2), "r")
    manager.finish("r")
    assert manager.prepare_store(keys(7)) is None, "the device still reads both slots"
    assert manager.primary.pin_count == 2
    manager.complete_load(set(keys(1, 2)))
    assert is_idle(manager)
    assert manager.prepare_store(keys(7)) is not None


def test_one_cancelled_while_it_waits_for_a_slot_is_no_longer_waited_for() -> None:
    manager, tier, _ = make(2, 1, 2)
    plan = manager.prepare_store(keys(8, 9))
    assert plan is not None
    assert lookups(manager, "cancelled", 1) == [RETRY]
    assert lookups(manager, "next", 2) == [RETRY]
    manager.complete_store(set(plan.keys), success=False)
    manager.finish("cancelled")
    manager.end_step()
    assert lookups(manager, "next", 2) == [PENDING]
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    manager.finish("next")
    assert is_idle(manager)


def test_a_preempted_request_stores_what_was_under_way_and_finds_it_again() -> None:
    """vLLM flushes its stores, then asks for the request as if it were new."""
    manager, tier, _ = make(4)
    manager.begin("r")
    assert lookups(manager, "r", 1, 2) == [MISS, MISS]
    plan = manager.prepare_store(keys(1, 2), "r")
    assert plan is not None
    manager.end_step()
    assert lookups(manager, "r", 1) == [PENDING], "while its store is under way"
    manager.complete_store(set(plan.keys))  # flushed
    manager.end_step()
    assert lookups(manager, "r", 1, 2) == [HIT, HIT]
    manager.prepare_load(keys(1, 2), "r")
    manager.complete_load(set(keys(1, 2)))
    manager.finish("r")
    tier.finish_all()
    manager.end_step()
    assert is_idle(manager)


def test_the_engine_keeps_stepping_until_the_last_result_is_in() -> None:
    fast, large = FakeTier(), FakeTier()
    large.present.update(keys(1))
    manager = TieringManager(PrimaryTier(8), {"fast": fast, "large": large})
    assert not manager.has_pending_work()
    lookups(manager, "r", 1)
    assert manager.has_pending_work(), "a read is not even sent"
    manager.end_step()
    assert manager.has_pending_work(), "a read is under way"
    large.finish_all()
    assert manager.has_pending_work(), "its result is not taken in"
    manager.end_step()
    assert not manager.has_pending_work()
    manager.prepare_load(keys(1), "r")
    manager.complete_load(keys(1))
    assert manager.has_pending_work(), "a write to the other tier"
    fast.finish_all(RowOutcome.FAILED)
    assert manager.has_pending_work()
    manager.end_step()
    assert not manager.has_pending_work()


def test_at_the_end_of_the_engine_what_was_held_back_is_written() -> None:
    for takes_writes in (True, False):
        manager, tier, _ = make(8)
        store(manager, 1, 2, 3, 4, 5, 6)
        store(manager, 7)
        assert [names for _, names in tier.jobs.values()] == [keys(1, 2, 3, 4)]
        tier.takes_writes = takes_writes
        manager.close()
        rest = [keys(5, 6), keys(7)] if takes_writes else []
        assert [names for _, names in tier.jobs.values()] == [keys(1, 2, 3, 4), *rest]
        assert tier.closed


class DeafStore:
    """A store process that is up, has some rows, and never listens again."""

    pid = 4711
    connection: socket.socket

    def spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        self.connection = connection.dup()
        self.connection.sendall(encode_frame([Published(list(keys(*range(50)))), Ready()]))
        return cast("subprocess.Popen[bytes]", self)

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("store", timeout)

    def kill(self) -> None:
        self.poll = lambda: 0  # type: ignore[method-assign]
        self.connection.close()


def test_no_call_waits_for_a_store_that_does_not_listen() -> None:
    """One that did would hang here: nothing is ever answered, and the socket is full."""
    deaf = DeafStore()
    fd = os.memfd_create("region")
    options = StoreOptions(Path("/nowhere"), 1 << 20)
    client = StoreClient(options, Identity("model", {}), RegionRows(fd, 0, 4096, 4096), deaf.spawn)
    os.close(fd)
    client.connect(60.0)
    manager = TieringManager(PrimaryTier(4096), {"disk": client})
    for number in range(3000):
        lookups(manager, f"r{number}", number % 50)
        plan = manager.prepare_store(keys(100 + number), f"r{number}")
        if plan is not None:
            manager.complete_store(set(plan.keys))
            assert lookups(manager, f"r{number}", 100 + number) == [HIT]
            manager.prepare_load(keys(100 + number), f"r{number}")
            manager.complete_load(keys(100 + number))
        manager.finish(f"r{number}")
        manager.end_step()
    assert manager.primary.busy_count <= 2048 + 50, "half of the region, and the reads"
    assert manager.has_pending_work()
    deaf.kill()
    manager.end_step()
    assert is_idle(manager)
