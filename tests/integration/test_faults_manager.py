"""faults: the manager over a real store process whose disk is slow, read-only and hung in turn."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from storage.testing.controlled import Control
from storage.types import RowKey
from tiering.backpressure import HeldBack
from tiering.manager import LookupResult, TieringManager
from tiering.primary import PrimaryTier

HIT, MISS = LookupResult.HIT, LookupResult.MISS
ROW_BYTES = 8192
SLOTS = 256
DEADLINE_S = 60.0  # of a hang; each wait takes a second or two
STEP_S = 0.005
PROGRAM = """
import pathlib, socket, sys
import storage.store
from storage.service.server import serve
from storage.testing.controlled import ControlledDevice
storage.store.LocalDevice = lambda: ControlledDevice(pathlib.Path(sys.argv[1]))
serve(socket.socket(fileno=int(sys.argv[2])))
"""


def key(number: int) -> RowKey:
    return RowKey(number.to_bytes(36, "big"))


class Engine:
    """A region, a manager and a store, with workers that fill and check rows at once."""

    def __init__(self, directory: Path) -> None:
        self.control = directory / "control"
        Control().write(self.control)
        fd = os.memfd_create("region")
        os.ftruncate(fd, SLOTS * ROW_BYTES)
        flat = np.frombuffer(mmap.mmap(fd, SLOTS * ROW_BYTES), np.int64)
        self.rows = flat.reshape(SLOTS, ROW_BYTES // 8)
        options = StoreOptions(
            directory / "store", 64 << 20, admission="always", read_timeout_s=2.0
        )
        rows = RegionRows(fd, 0, ROW_BYTES, SLOTS)
        self.client = StoreClient(options, Identity("m", {}), rows, self._spawn)
        os.close(fd)
        self.client.connect(DEADLINE_S)
        self.manager = TieringManager(
            PrimaryTier(SLOTS), {"disk": self.client}, promotion_timeout_s=2.0
        )
        self.transfers = self.manager.tiers["disk"]
        self.requests = 0
        self.busy_max = 0

    def _spawn(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        number = connection.fileno()
        command = [sys.executable, "-c", PROGRAM, str(self.control), str(number)]
        return subprocess.Popen(command, pass_fds=[number], stdin=subprocess.DEVNULL)

    def step(self) -> None:
        self.manager.end_step()
        self.busy_max = max(self.busy_max, self.manager.primary.busy_count)
        time.sleep(STEP_S)

    def wait(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, "it hangs"
            self.step()

    def store(self, number: int) -> None:
        plan = self.manager.prepare_store([key(number)])
        if plan is None:
            return
        for name, slot in zip(plan.keys, plan.slots, strict=True):
            self.rows[slot] = int.from_bytes(name, "big")
        self.manager.complete_store(set(plan.keys))

    def answer(self, number: int) -> LookupResult:
        """What a new request is told in the end, its row checked."""
        self.requests += 1
        name = f"r{self.requests}"
        results: list[LookupResult] = []

        def is_told() -> bool:
            results.append(self.manager.lookup(key(number), name))
            return results[-1] in (HIT, MISS)

        self.wait(is_told)
        if results[-1] is HIT:
            [slot] = self.manager.prepare_load([key(number)], name)
            assert (self.rows[slot] == number).all()
            self.manager.complete_load([key(number)])
        self.manager.finish(name)
        return results[-1]

    def is_on_disk(self, numbers: range) -> bool:
        return all(key(number) in self.client for number in numbers)

    def is_idle(self) -> bool:
        return self.manager.primary.busy_count == 0 and not self.manager.has_pending_work()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    Control().write(made.control)
    made.manager.close()


def test_faults_of_the_disk_cost_hits_and_nothing_else(engine: Engine) -> None:
    held_back = engine.transfers.counters.held_back
    for number in range(20):
        engine.store(number)
    engine.wait(lambda: engine.is_on_disk(range(20)) and engine.is_idle())

    # Slow: what is written in some seconds is pinned, the rest waits, nothing is lost.
    Control(delay_s={"pwritev": 0.2}).write(engine.control)
    engine.busy_max = 0
    for number in range(20, 40):
        engine.store(number)
    engine.wait(lambda: engine.is_on_disk(range(40)))  # by now it is known to be slow
    for number in range(40, 140):
        engine.store(number)
    engine.step()
    assert held_back[HeldBack.SLOW] > 0
    assert engine.busy_max <= SLOTS // 2
    Control().write(engine.control)
    engine.wait(lambda: engine.is_on_disk(range(140)) and engine.is_idle())

    # Read-only: nothing is pinned for it; it is written when the disk is back.
    Control(errno={"pwritev": 30}).write(engine.control)
    engine.store(140)
    engine.wait(lambda: not engine.client.takes_writes and engine.is_idle())
    for number in range(141, 170):
        engine.store(number)
        assert engine.manager.primary.busy_count <= 1, "a probe"
        engine.step()
    assert held_back[HeldBack.DISK] >= 28
    assert engine.answer(3) is HIT, "reads go on"
    Control().write(engine.control)
    engine.wait(lambda: engine.is_on_disk(range(170)) and engine.is_idle())

    # Hung: one wait, then misses at once; and the region goes on.
    for number in range(1000, 1000 + 2 * SLOTS):  # none of the first ones is in the region
        engine.store(number)
        engine.step()
    engine.wait(engine.is_idle)
    Control(hang=["preadv"]).write(engine.control)
    assert engine.answer(5) is MISS
    assert engine.transfers.breaker.is_open
    steps = engine.manager._requests.step
    assert [engine.answer(number) for number in range(6, 30)] == [MISS] * 24
    assert engine.manager._requests.step == steps, "told in the step in which they asked"
    engine.store(5000)
    assert engine.answer(5000) is HIT
    Control().write(engine.control)
    engine.wait(lambda: engine.answer(7) is HIT)
    engine.wait(engine.is_idle)
    assert engine.manager.primary.pin_count == engine.manager.held_count == 0
    assert engine.transfers.counters.lost == 0
