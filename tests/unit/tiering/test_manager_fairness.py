"""A full region is not a miss: requests wait their turn, and each gets through."""

from __future__ import annotations

import random

import pytest

from storage.types import RowKey
from tests.unit.tiering.engine_simulation import (
    STEP_S,
    SimulatedEngine,
    SimulatedRequest,
    Stage,
    content,
)
from tests.unit.tiering.fakes import PENDING, RETRY, keys, lookups, make, store
from tiering.requests import HOLD_S

SLOTS = 8
STEPS_MAX = 20_000


def chains(randomness: random.Random, count: int, longest: int) -> list[list[RowKey]]:
    """Chunks of so many requests: each begins with the prefix of one of three documents."""
    found = []
    for number in range(count):
        length = randomness.randint(1, longest)
        document, shared = randomness.randrange(3), randomness.randint(0, length)
        names = [f"document {document} chunk {i}" for i in range(shared)]
        names += [f"request {number} chunk {i}" for i in range(length - shared)]
        found.append([RowKey(name.encode()) for name in names])
    return found


def run(
    engine: SimulatedEngine, work: list[list[RowKey]], *, at_once: int, shuffled: bool
) -> list[SimulatedRequest]:
    """Until every request has ended and nothing is owed; at most `at_once` are there at a time."""
    left = list(enumerate(work))
    for _ in range(STEPS_MAX):
        there = sum(request.stage is not Stage.ENDED for request in engine.requests)
        while left and there < at_once:
            number, chain = left.pop(0)
            engine.arrive(f"r{number}", chain)
            there += 1
        engine.step(shuffled=shuffled)
        owed = engine.disk.is_busy
        assert engine.manager.primary.used_count <= SLOTS
        if engine.is_done and not left and not owed and not engine.manager.has_pending_work():
            return engine.requests
    raise AssertionError("a deadlock")


def assert_nothing_is_left(engine: SimulatedEngine) -> None:
    manager = engine.manager
    assert manager.primary.busy_count == 0
    assert manager.primary.pin_count == 0
    assert manager.held_count == 0
    assert not manager._requests
    assert manager.tiers["disk"].gate.rows_under_way == 0
    for key in manager.primary._ready():
        assert engine.slots[manager.primary.slot(key)] == content(key)
    assert all(value == content(key) for key, value in engine.disk.rows.items())


@pytest.mark.parametrize("seed", range(12))
def test_what_a_healthy_disk_holds_is_never_computed(seed: int) -> None:
    """Up to 30 requests at once over 8 slots, all chunks on disk, stores of others in between."""
    randomness = random.Random(seed)
    engine = SimulatedEngine(
        randomness, slot_count=SLOTS, running_max=randomness.choice([2, 8]), timeout_s=1e6
    )
    work = chains(randomness, 60, 20)
    new = set(randomness.sample(range(60), 15))  # these find nothing, and store
    for number, chain in enumerate(work):
        if number not in new:
            engine.disk.rows.update({key: content(key) for key in chain})
    on_disk = set(engine.disk.rows)
    at_once = randomness.choice([2, 8, 30])
    requests = run(engine, work, at_once=at_once, shuffled=seed % 2 == 1)
    assert engine.manager.counters.promotions_timed_out == 0
    for request in requests:
        found = 0
        while found < len(request.chain) and request.chain[found] in on_disk:
            found += 1
        assert request.hits is not None
        assert request.hits >= min(found, SLOTS), f"{request.name} was told to compute"
        assert request.oldest_pending_steps <= 40, "the oldest always gets through"
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("seed", range(24))
def test_whatever_happens_each_request_is_answered_in_time_and_nothing_is_left(seed: int) -> None:
    """Rows fail in every way, requests are cancelled and preempted in every stage."""
    randomness = random.Random(1000 + seed)
    timeout_s = randomness.choice([2.0, 10.0])
    engine = SimulatedEngine(
        randomness,
        slot_count=SLOTS,
        failures=randomness.choice([0.02, 0.2, 0.6]),
        latency_max=randomness.choice([1, 4, 30]),
        running_max=randomness.choice([2, 8, 30]),
        preempts=randomness.choice([0.0, 0.1]),
        cancels=randomness.choice([0.0, 0.02, 0.1]),
        timeout_s=timeout_s,
    )
    work = chains(randomness, 60, 20)
    for chain in work:
        if randomness.random() < 0.7:
            engine.disk.rows.update({key: content(key) for key in chain})
    at_once = randomness.choice([3, 10, 30])
    requests = run(engine, work, at_once=at_once, shuffled=seed % 2 == 1)
    for request in requests:
        assert request.is_cancelled or request.hits is not None
        assert request.pending_steps <= timeout_s / STEP_S + 2
    assert_nothing_is_left(engine)


def test_one_request_larger_than_the_region_loads_what_fits_though_stores_go_on() -> None:
    engine = SimulatedEngine(random.Random(1), slot_count=SLOTS)
    large = [RowKey(b"large %d" % i) for i in range(20)]
    engine.disk.rows.update({key: content(key) for key in large})
    stores = [[RowKey(b"other %d %d" % (n, i)) for i in range(3)] for n in range(20)]
    requests = run(engine, [*stores[:5], large, *stores[5:]], at_once=6, shuffled=False)
    [request] = [r for r in requests if r.chain is large]
    assert request.hits == SLOTS
    assert_nothing_is_left(engine)


def test_a_slot_that_becomes_free_goes_to_who_waits_and_not_to_a_later_store() -> None:
    manager, tier, _ = make(2, 1, 2, 3)
    manager.begin("early")
    manager.begin("waits")
    manager.begin("late")
    plan = manager.prepare_store(keys(8, 9), "early")
    assert plan is not None
    assert lookups(manager, "waits", 1) == [RETRY]
    manager.complete_store(set(plan.keys), success=False)
    assert manager.prepare_store(keys(7), "late") is None
    assert manager.prepare_store(keys(7)) is None, "nor to one of nobody"
    assert manager.prepare_store(keys(6), "early") is not None, "who came first is first"
    manager.end_step()
    assert lookups(manager, "waits", 1) == [PENDING]
    manager.finish("waits")
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert manager.prepare_store(keys(7), "late") is not None


def test_one_who_waits_and_does_not_ask_again_holds_nobody_up() -> None:
    manager, tier, clock = make(1, 1, 2)
    store(manager, 9)
    assert lookups(manager, "silent", 1) == [RETRY]
    tier.finish_all()
    for _ in range(3):
        manager.end_step()
        assert lookups(manager, "late", 2) == [RETRY]
        clock.now += HOLD_S / 2.9
    manager.end_step()
    assert lookups(manager, "late", 2) == [PENDING]


def test_a_stream_of_later_requests_starves_nobody() -> None:
    """Asked in the order of a scheduler that prefers the latest."""
    engine = SimulatedEngine(random.Random(2), slot_count=SLOTS, running_max=100)
    first = [RowKey(b"first %d" % i) for i in range(8)]
    others = [[RowKey(b"other %d %d" % (n, i)) for i in range(3)] for n in range(300)]
    for chain in (first, *others):
        engine.disk.rows.update({key: content(key) for key in chain})
    engine.arrive("busy", others[0])
    engine.step()
    old = engine.arrive("old", first)
    for number, chain in enumerate(others[1:]):
        engine.requests.insert(0, engine.requests.pop())  # the latest comes first
        engine.arrive(f"late {number}", chain)
        engine.step()
        if old.hits is not None:
            break
    assert old.hits == 8
    assert old.pending_steps <= 20
