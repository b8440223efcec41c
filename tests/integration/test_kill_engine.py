"""kill -9 of a whole engine (scheduler, ranks and all) during stores and loads, then start again.

A prepared process forks an engine per round, so that a round costs a fork and not an interpreter.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from storage.namespace import METADATA, ROWS
from storage.testing.rows import bytes_on_disk
from tests.integration.processes import serves, store_processes

ROUNDS = 60  # with the 200 of test_kill_store; each also opens, serves and checks
BUDGET_BYTES = 3_000_000  # rows are evicted all the time
TIMEOUT_S = 120.0

_NURSERY = """
import os, random, signal, sys
from pathlib import Path
from scripts.simulated_engine import EngineShape, Served, SimulatedEngine, chunk_key
from storage.options import StoreOptions
from tiering.topology import LayerFacts
import torch
torch.set_num_threads(1)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
root, budget, log = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SHAPE = EngineShape(
    (LayerFacts("mla", 6000, 1), LayerFacts("gqa", 2048, None)),
    tp=2, blocks_per_chunk=2, device_blocks=64, region_bytes=12 * 24576,
)

def engine(seed):
    os.setsid()
    choose = random.Random(seed)
    with SimulatedEngine(SHAPE, StoreOptions(root, budget), start_method="fork") as running:
        print(f"up {os.getpid()}", flush=True)
        while True:
            document, length = choose.randrange(12), choose.randint(1, 10)
            served = running.serve([chunk_key(str(document), i) for i in range(length)])
            with open(log, "a") as file:
                file.write(f"{served.wrong_bytes} {served.chunks['disk']}\\n")

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        engine(int(line))
    os.waitpid(child, 0)
    print("gone", flush=True)
"""


@pytest.mark.timeout(900)
def test_kill_of_the_engine_at_random_moments(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "served.log"
    moment = random.Random(20261129)
    nursery = subprocess.Popen(
        [sys.executable, "-c", _NURSERY, str(root), str(BUDGET_BYTES), str(log)],
        cwd=Path(__file__).resolve().parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    try:
        for number in range(ROUNDS):
            nursery.stdin.write(f"{number}\n")
            nursery.stdin.flush()
            word, pid = nursery.stdout.readline().split()
            assert word == "up"
            assert _regions(int(pid)) == [], "the region has a name while it is in use"
            # By what was served, not by the clock: a slow machine must get as far as a fast one.
            _await_requests(log, moment.randint(0, 6))
            time.sleep(moment.uniform(0.0, 0.03))
            if number % 2:
                os.killpg(int(pid), signal.SIGKILL)
            else:
                _kill_all_but_the_store(int(pid))
            assert nursery.stdout.readline() == "gone\n"
            assert bytes_on_disk(root) <= BUDGET_BYTES
    finally:
        nursery.kill()
        nursery.communicate()
    _await_no_store_process(root)
    lines = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    assert sum(wrong for wrong, _ in lines) == 0, "wrong bytes were loaded"
    assert sum(from_disk for _, from_disk in lines) > ROUNDS, "hardly anything came from disk"
    assert not list(root.rglob("*.partial"))
    assert list(root.glob(f"*/{ROWS}/{METADATA}"))


def _await_requests(log: Path, count: int) -> None:
    """Until `count` more requests have been served."""
    deadline = time.monotonic() + TIMEOUT_S
    wanted = _served(log) + count
    while _served(log) < wanted:
        assert time.monotonic() < deadline, "the engine serves nothing"
        time.sleep(0.005)


def _served(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _kill_all_but_the_store(pid: int) -> None:
    """Scheduler and ranks at once; the store process then ends by itself, and writes meanwhile."""
    stores = {process.pid for process in store_processes()}
    engine = psutil.Process(pid)
    for process in [engine, *engine.children(recursive=True)]:
        if process.pid not in stores:
            with contextlib.suppress(psutil.NoSuchProcess):  # a rank ends with its engine
                process.kill()


def _regions(pid: int) -> list[str]:
    """Regions with a name whose engine is `pid`."""
    return [path.name for path in Path("/dev/shm").glob(f"kvtier-simulated-{pid}-*")]


def _await_no_store_process(root: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(serves(process, root) for process in store_processes()):
        assert time.monotonic() < deadline, "a store process outlived its engine"
        time.sleep(0.05)
