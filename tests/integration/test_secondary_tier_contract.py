"""Our disk below vLLM's own tiering manager and region: histories of stores, evictions and
promotions, with faults; every byte that is found is compared."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import Locality, Medium
from vllm.v1.kv_offload.config import OffloadingCacheConfig

from storage.device import LocalDevice
from storage.service import server
from storage.store import DiskStore
from storage.testing.faulty import FaultyDevice, Wait
from tests.integration.vllm_tiers import (
    ROW_BYTES,
    Engine,
    key_of,
    known_identity,
    number_of,
    patience,
    threaded_store,
)
from tiering import tier as tier_module
from tiering.cli.main import main

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("known_identity")]
__all__ = ["known_identity", "threaded_store"]

SLOTS = 6
CHUNKS = range(20)

STORES = st.tuples(st.just("store"), st.lists(st.sampled_from(CHUNKS), min_size=1, unique=True))
LOADS = st.tuples(st.just("load"), st.lists(st.sampled_from(CHUNKS), min_size=1, max_size=4))
HISTORIES = st.lists(st.one_of(STORES, LOADS), min_size=4, max_size=16)


def disk(root: Path, **settings: Any) -> dict[str, Any]:
    return {"type": "disk", "root": str(root), "budget": "8MB", "admission": "always", **settings}


@pytest.fixture
def root(memory_path: Path) -> Path:
    return memory_path / "store"


@pytest.mark.usefixtures("threaded_store")
@settings(max_examples=25)
@given(history=HISTORIES)
def test_secondary_tier_never_gives_a_wrong_byte_and_loses_nothing(
    history: list[tuple[str, list[int]]], memory_path: Path
) -> None:
    """The model is a set: what was stored and is on disk is found, with its bytes, in whichever
    slot vLLM gives it."""
    root = memory_path / os.urandom(8).hex()
    stored: set[int] = set()
    with closing(Engine(SLOTS, disk(root))) as engine:
        for verb, numbers in history:
            if verb == "store":
                if engine.store(numbers[:SLOTS]):
                    stored.update(numbers[:SLOTS])
            else:
                engine.settle()  # a region full of chunks on their way is a miss in vLLM
                for number in numbers:
                    assert engine.load(number, patience()) is (number in stored)
        engine.settle()
        assert len(engine.client) == len(stored)
    with closing(Engine(SLOTS, disk(root))) as again:
        for number in CHUNKS:
            again.settle()
            assert again.load(number, patience()) is (number in stored), "lost by a restart"


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_promotes_the_chunks_of_a_job_into_other_slots(root: Path) -> None:
    engine = Engine(SLOTS, disk(root))
    assert engine.store(range(6))
    engine.settle()
    assert engine.store(range(10, 16)), "the first are evicted from the region"
    engine.settle()
    for number in (5, 3, 1, 0, 2, 4):
        assert engine.load(number, patience())
    usage = engine.client.usage
    assert (usage.rows_read, usage.bytes_read) == (6, 6 * ROW_BYTES)
    assert (usage.rows_written, usage.bytes_written) == (12, 12 * ROW_BYTES)
    engine.close()


@pytest.mark.usefixtures("threaded_store")
@pytest.mark.parametrize("is_first", [True, False])
def test_secondary_tier_beside_vllms_fs_tier(root: Path, memory_path: Path, is_first: bool) -> None:
    tiers = [disk(root), {"type": "fs", "root_dir": str(memory_path / "fs")}]
    engine = Engine(SLOTS, *(tiers if is_first else reversed(tiers)))
    for first in (0, 6, 12):
        assert engine.store(range(first, first + 6))
        engine.settle()
    assert len(engine.client) == 18
    assert len(list((memory_path / "fs").rglob("*.bin"))) == 18
    for number in range(18):
        assert engine.load(number, patience())
    engine.close()


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_under_vllms_back_pressure(root: Path) -> None:
    """vLLM measures our stores, and gives us none while they are too slow; loads go on."""
    slow = {"backpressure_cls": "EMABackpressureDetector", "warmup_completions": 1}
    slow |= {"high_water_s": 1e-9, "low_water_s": 1e-9, "policy_cls": "DropStorePolicy"}
    engine = Engine(SLOTS, disk(root, backpressure=slow))
    for number in range(3):
        assert engine.store([number])
        engine.settle()
    assert engine.disk.bp_detector.is_under_pressure()
    before = engine.client.usage.rows_offered
    assert engine.store(range(10, 16)), "into the region alone"
    engine.settle()
    assert engine.client.usage.rows_offered == before
    assert engine.load(0, patience())
    engine.close()


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_tells_events_of_what_is_on_disk(root: Path) -> None:
    """Stored and removed, and at a start what is found; nothing where events are off."""

    def told(engine: Engine) -> dict[int, bool]:
        """Chunks, and whether the last event of each said stored."""
        engine.settle()
        events = [event for event in engine.events if event.medium is Medium.STORAGE]
        engine.events.clear()
        assert {event.locality for event in events} <= {Locality.LOCAL}
        return {number_of(key): not event.removed for event in events for key in event.keys}

    settings = disk(root, budget="1MB", segment_size="64KiB", reserve=0)
    engine = Engine(SLOTS, settings, enable_kv_cache_events=True)
    assert engine.store(range(6))
    assert told(engine) == dict.fromkeys(range(6), True)
    assert told(engine) == {}
    for first in range(6, 126, 6):
        assert engine.store(range(first, first + 6))
        engine.settle()
    later = told(engine)
    on_disk = {n for n in range(126) if key_of(n) in engine.client}
    assert 0 < len(on_disk) < 126
    assert {n for n in range(126) if later.get(n, n < 6)} == on_disk
    engine.close()

    again = Engine(SLOTS, settings, enable_kv_cache_events=True)
    assert told(again) == dict.fromkeys(on_disk, True)
    again.close()
    silent = Engine(SLOTS, settings)
    assert silent.store([3])
    assert told(silent) == {}
    silent.close()


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_is_seen_by_the_tools(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They know of a row what vLLM's configuration says of it."""
    engine = Engine(SLOTS, disk(root), cache=OffloadingCacheConfig(16, 2))
    assert engine.store(range(3))
    engine.settle()
    engine.close()
    assert main(["du", str(root), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    [namespace] = found["namespaces"]
    assert (namespace["model"], namespace["rows"]) == ("model", 3)
    assert (namespace["row_bytes"], namespace["tokens"]) == (2 * ROW_BYTES, 3 * 2 * 16)
    assert namespace["bytes_without_dedup"] == 3 * 2 * ROW_BYTES
    assert main(["verify", str(root)]) == 0
    capsys.readouterr()
    assert main(["ls", str(root)]) == 0
    assert "model" in capsys.readouterr().out


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FaultyDevice:
    made = FaultyDevice(LocalDevice())
    monkeypatch.setattr(server, "open_store", lambda options: DiskStore.open(options, made))
    return made


@pytest.fixture
def hang() -> Iterator[Wait]:
    """A call that does not return before the test ends, or says so."""
    wait = Wait(threading.Event(), threading.Event())
    yield wait
    wait.event.set()


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_keeps_the_slots_of_a_store_that_hangs(
    root: Path, device: FaultyDevice, hang: Wait
) -> None:
    """vLLM must not give a slot away that the kernel still reads."""
    engine = Engine(SLOTS, disk(root, write_timeout_s=0.3))
    device.add(hang, "pwritev", when=lambda op: op.size_bytes == ROW_BYTES + 4096, times=1)
    assert engine.store([1])
    is_patient = patience()
    while not hang.reached.wait(0.01):
        assert is_patient()
        engine.step()  # which sends what waits
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        engine.step()
        time.sleep(0.01)
    assert engine.manager.has_pending_work(), "reported before the disk let go"
    assert not engine.store(range(10, 16)), "the slot of chunk 1 is pinned"
    assert engine.store(range(10, 15))
    hang.event.set()
    engine.settle()
    assert engine.store(range(20, 26))
    engine.settle()
    engine.close()


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_misses_what_hangs_and_gives_the_slot_back(
    root: Path, device: FaultyDevice, hang: Wait
) -> None:
    """A request does not wait for a disk that hangs, and what the disk delivers in the end goes
    nowhere: other chunks have the slot."""
    engine = Engine(SLOTS, disk(root, read_timeout_s=2.0))
    assert engine.store(range(6))
    engine.settle()
    assert engine.store(range(10, 16))
    engine.settle()
    device.add(hang, "preadv", when=lambda op: op.size_bytes >= ROW_BYTES, times=1)
    assert not engine.load(0, patience())
    assert hang.reached.is_set()
    assert not engine.manager.has_pending_work()
    assert engine.store(range(20, 26)), "every slot is free"
    hang.event.set()
    engine.settle()
    for number in (1, *range(20, 26)):
        assert engine.load(number, patience())
        engine.settle()
    engine.close()


def test_secondary_tier_survives_the_death_of_its_process(root: Path) -> None:
    """A real process, killed while it writes and again while it reads."""
    engine = Engine(SLOTS, disk(root))
    assert engine.store(range(4))
    assert engine.client.store_pid is not None
    os.kill(engine.client.store_pid, signal.SIGKILL)
    engine.settle()
    assert not any(engine.load(number, patience()) for number in range(10, 14))
    _until_up(engine)
    assert engine.store(range(4, 10)), "the first are evicted from the region"
    engine.settle()
    on_disk = {number for number in range(10) if engine.load(number, patience())}
    assert on_disk >= set(range(4, 10))
    engine.close()


def test_secondary_tier_kills_a_process_that_does_not_answer(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a stopped one, which says neither that a row is there nor that it hangs."""
    engine = Engine(SLOTS, disk(root, read_timeout_s=1.0))
    assert engine.store(range(6))
    engine.settle()
    assert engine.store(range(10, 16))
    engine.settle()
    assert engine.client.store_pid is not None
    os.kill(engine.client.store_pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:  # while nobody else may be late
        patch.setattr(tier_module, "_STILL_S", 0.1)
        patch.setattr("storage.service.silence.SILENCE_S", 0.2)
        assert not engine.load(0, patience()), "a miss, and no hang"
        engine.settle()
    _until_up(engine)
    engine.settle()
    assert engine.load(1, patience())
    engine.close()


def _until_up(engine: Engine) -> None:
    is_patient = patience()
    while not engine.client.is_up:
        assert is_patient(), "no new store process"
        engine.step()
        time.sleep(0.01)


@pytest.mark.usefixtures("threaded_store")
def test_secondary_tier_goes_on_after_a_reset_without_what_it_had(root: Path) -> None:
    """Nobody says whether the weights are still those of the namespace."""
    engine = Engine(SLOTS, disk(root))
    assert engine.store(range(6))
    engine.settle()
    for first in (10, 20):
        engine.manager.reset_cache()
        assert not engine.load(0, patience())
        _until_up(engine)
        assert not engine.load(0, patience())
        assert engine.store(range(first, first + 6))
        engine.settle()
        engine.manager.primary_tier.reset_cache()
        assert engine.load(first, patience()), "from disk"
    assert engine.client.restarts == 0, "nothing failed"
    engine.manager.reset_cache()
    assert not engine.load(20, patience())
    engine.close()
    again = Engine(SLOTS, disk(root))
    assert not again.load(10, patience())
    assert not again.load(20, patience())
    assert again.load(0, patience()), "a restart has established the weights"
    again.close()
