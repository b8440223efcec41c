"""The manager over a disk that is slow, refuses, fails or stands still."""

from __future__ import annotations

from storage.types import RowOutcome
from tests.unit.tiering.fakes import (
    HIT,
    MISS,
    PENDING,
    counters,
    is_idle,
    keys,
    lookups,
    make,
    store,
)
from tiering.backpressure import STALL_S, HeldBack

# -- writes ---------------------------------------------------------------------------------------


def test_cascades_pin_half_of_the_region_at_most_and_the_rest_follows() -> None:
    manager, tier, _ = make(8)
    store(manager, *range(8))
    assert manager.primary.busy_count == 4
    assert counters(manager).held_back[HeldBack.SHARE] == 4
    assert manager.has_pending_work()
    tier.finish_all()
    manager.end_step()
    assert manager.primary.busy_count == 4, "the other four"
    assert manager.has_pending_work()
    tier.finish_all()
    manager.end_step()
    assert is_idle(manager)
    assert tier.present == set(keys(*range(8)))
    assert counters(manager).lost == 0


def test_what_is_held_back_of_two_requests_is_not_written_as_one() -> None:
    """A job is the chunks of one request, first to last: its order and its fate are one."""
    manager, tier, _ = make(8)
    store(manager, 1, 2, 3, 4, 5)
    store(manager, 6, 7)
    assert tier.jobs == {1: ("write", keys(1, 2, 3, 4))}
    tier.finish_all()
    manager.end_step()
    assert tier.jobs == {2: ("write", keys(5)), 3: ("write", keys(6, 7))}


def test_a_chunk_that_is_held_back_may_be_evicted_and_that_is_counted() -> None:
    manager, tier, _ = make(4)
    tier.takes_writes = False
    store(manager, 1, 2, 3, 4)
    assert manager.primary.busy_count == 0, "nothing is pinned for a disk that takes no writes"
    assert not tier.jobs
    assert not manager.has_pending_work(), "an idle engine is not kept stepping for it"
    store(manager, 5, 6)
    assert counters(manager).lost == 2
    tier.takes_writes = True
    manager.end_step()
    assert tier.jobs == {1: ("write", keys(1, 2))}
    tier.finish_all()
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert tier.present == set(keys(1, 2, 5, 6))
    assert counters(manager).held_back[HeldBack.DISK] == 6


def test_a_disk_that_says_nothing_of_its_recovery_is_found_out_by_a_probe() -> None:
    manager, tier, clock = make(8)
    tier.takes_writes = False
    store(manager, 1, 2, 3)
    for _ in range(12):
        clock.now += 1.0
        manager.end_step()
        tier.finish_all(RowOutcome.DECLINED)
    assert counters(manager).writes_not_stored == 3, "probes after 1, 3 and 7 s"
    clock.now += 8.0
    manager.end_step()
    [(kind, names)] = tier.jobs.values()
    assert (kind, len(names)) == ("write", 1)
    tier.takes_writes = True
    tier.finish_all()
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert tier.present == set(keys(1, 2, 3)), "the refused ones were not forgotten"
    assert is_idle(manager)


def test_a_disk_of_200_ms_per_row_pins_what_it_writes_in_two_seconds() -> None:
    manager, tier, clock = make(1000)
    store(manager, 0)
    tier.finish(1, seconds=0.2)
    manager.end_step()
    store(manager, *range(1, 400))
    assert manager.primary.busy_count == 10
    assert counters(manager).held_back[HeldBack.SLOW] == 389
    for _ in range(200):  # it goes on like that, and everything is stored in the end
        for job_id, (_, names) in list(tier.jobs.items()):
            tier.finish(job_id, seconds=0.2 * len(names))
        clock.now += 2.0
        manager.end_step()
        assert manager.primary.busy_count <= 11
    assert len(tier.present) == 400
    assert is_idle(manager)


def test_a_disk_whose_writes_stand_still_pins_no_more() -> None:
    manager, tier, clock = make(100)
    store(manager, 1)
    clock.now += STALL_S
    store(manager, 2, 3)
    assert list(tier.jobs) == [1]
    assert counters(manager).held_back[HeldBack.STALLED] == 2
    tier.finish_all()
    manager.end_step()
    assert tier.jobs == {2: ("write", keys(2, 3))}


def test_writes_that_hang_count_as_pinned_until_they_are_let_go() -> None:
    manager, tier, _ = make(8)
    store(manager, *range(8))
    tier.finish_all(RowOutcome.HUNG)
    manager.end_step()
    assert not tier.jobs, "half of the region hangs, and that is enough"
    assert manager.primary.busy_count == 4
    tier.released += [(1, 0), (1, 1)]
    manager.end_step()
    assert [names for _, names in tier.jobs.values()] == [keys(4, 5)]
    tier.released += [(1, 2), (1, 3)]
    for _ in range(3):
        tier.finish_all()
        manager.end_step()
    assert tier.present == set(keys(4, 5, 6, 7))
    assert is_idle(manager)


def test_a_disk_that_fails_every_write_is_left_alone_but_for_probes() -> None:
    manager, tier, clock = make(100)
    for number in range(60):
        store(manager, number)
        tier.finish_all(RowOutcome.FAILED)
        manager.end_step()
        clock.now += 0.1
    assert manager.primary.busy_count == 0
    assert counters(manager).writes_not_stored == 3 + 2, "three failures, probes after 1 and 3 s"
    clock.now += 8.0
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    for _ in range(3):
        tier.finish_all()
        manager.end_step()
    assert len(tier.present) >= 58, "all but those that failed before it was left alone"


# -- reads ----------------------------------------------------------------------------------------


def test_one_request_has_one_budget_however_often_it_is_preempted() -> None:
    manager, tier, clock = make(8, 1, 2, 3, 4, 5, 6)
    waited = 0.0
    manager.begin("r")
    for number in range(1, 7):
        assert lookups(manager, "r", number) in ([PENDING], [MISS])
        manager.end_step()
        if not tier.jobs:
            break
        clock.now += 3.0
        waited += 3.0
        tier.finish_all()
        manager.end_step()
        assert lookups(manager, "r", number) == [HIT]
        manager.prepare_load(keys(number), "r")
        manager.complete_load(keys(number))
        clock.now += 100.0  # it runs, and is preempted
        manager.end_step()
    assert waited == 12.0, "ten seconds, and what the last wait took"
    assert lookups(manager, "r", 6) == [MISS]
    assert manager.counters.promotions_timed_out == 1
    assert lookups(manager, "other", 6) == [PENDING]


def test_a_request_that_loads_without_what_is_still_pending_waits_no_longer() -> None:
    """As one with a sliding window does."""
    manager, tier, clock = make(8)
    store(manager, 1)
    tier.finish_all()
    for number in range(2, 6):
        assert manager.prepare_store(keys(number)) is not None
        manager.end_step()
        assert lookups(manager, "r", 1, number) == [HIT, PENDING]
        manager.prepare_load(keys(1), "r")
        manager.complete_load(keys(1))
        clock.now += 4.0  # it runs, and is preempted
    manager.finish("r")
    assert manager.counters.promotions_timed_out == 0


def test_a_silence_of_the_engine_is_not_all_charged_to_the_request() -> None:
    manager, _, clock = make(8, 1, 2)
    assert lookups(manager, "r", 1) == [PENDING]
    manager.end_step()
    # Others run meanwhile; the read takes some seconds, and nobody asked.
    manager.tiers["disk"].tier.finish_all()  # type: ignore[attr-defined]
    clock.now += 60.0
    manager.end_step()
    assert lookups(manager, "r", 1, 2) == [HIT, PENDING]


def test_a_disk_that_stands_still_costs_one_wait_and_not_one_per_request() -> None:
    manager, tier, clock = make(8, *range(50))
    assert lookups(manager, "first", 0) == [PENDING]
    waited = {}
    for number in range(1, 50):
        manager.end_step()
        clock.now += 1.0
        name = f"r{number}"
        waited[name] = 0
        while lookups(manager, name, number) != [MISS]:
            waited[name] += 1
            clock.now += 1.0
            manager.end_step()
        manager.finish(name)
    assert waited["r1"] == 4, "until the stall is noticed, after half of what a request may wait"
    assert sum(waited.values()) == 4
    assert lookups(manager, "first", 0) == [MISS], "nor does anybody wait for what is under way"
    assert counters(manager).lookups_refused >= 48
    kinds = [names for kind, names in tier.jobs.values() if kind == "read"]
    assert len(kinds) == 3, "two reads of requests and one probe"


def test_a_probe_brings_the_disk_back() -> None:
    manager, tier, clock = make(8, *range(9))
    lookups(manager, "r", 0)
    manager.end_step()
    clock.now += 5.0
    manager.end_step()
    assert manager.tiers["disk"].breaker.is_open
    clock.now += 1.0
    assert lookups(manager, "s", 1) == [MISS], "nobody waits for the probe"
    manager.end_step()
    assert len(tier.jobs) == 2
    tier.finish(2)
    manager.end_step()
    assert not manager.tiers["disk"].breaker.is_open
    assert lookups(manager, "t", 1, 2) == [HIT, PENDING]
    manager.finish("r")
    manager.finish("s")
    manager.finish("t")
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert is_idle(manager)
    assert manager.held_count == 0


def test_a_probe_that_a_reset_drops_is_not_the_last_one() -> None:
    manager, tier, clock = make(8, *range(9))
    lookups(manager, "r", 0)
    manager.end_step()
    clock.now += 5.0
    manager.end_step()
    tier.finish_all(RowOutcome.FAILED)
    manager.end_step()
    clock.now += 3.0
    assert lookups(manager, "s", 1) == [MISS]
    assert manager.primary.busy_count == 1, "the probe has a slot"
    assert manager.reset()
    tier.present.update(keys(2))
    assert lookups(manager, "t", 2) == [MISS]
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert lookups(manager, "u", 2) == [HIT]


def test_reads_that_fail_time_after_time_are_not_tried_for_every_request() -> None:
    manager, tier, clock = make(8, *range(100))
    submitted = 0
    for number in range(100):
        lookups(manager, f"r{number}", number)
        manager.end_step()
        submitted += len(tier.jobs)
        tier.finish_all(RowOutcome.FAILED)
        manager.end_step()
        manager.finish(f"r{number}")
        clock.now += 0.05
    assert submitted == 3 + 2, "three failures, probes after 1 and 3 s"
    assert is_idle(manager)
    clock.now += 4.0
    assert lookups(manager, "probe", 50) == [MISS]
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert lookups(manager, "r", 0) == [PENDING], "it was the disk, and not that row"


def test_a_chunk_whose_read_hangs_can_be_stored_again() -> None:
    manager, tier, _ = make(4, 1)
    lookups(manager, "r", 1)
    manager.end_step()
    tier.finish_all(RowOutcome.HUNG)
    manager.end_step()
    tier.present.clear()
    assert lookups(manager, "r", 1) == [MISS]
    store(manager, 1)
    assert lookups(manager, "s", 1) == [HIT]
    assert manager.primary.used_count == 2, "its slot, and the one that the disk may still write"
    tier.released.append((1, 0))
    tier.finish_all()
    manager.end_step()
    assert manager.primary.used_count == 1
    assert is_idle(manager)


def test_a_request_does_not_wait_for_slots_that_hang() -> None:
    manager, tier, _ = make(2, 1, 2, 3)
    lookups(manager, "r", 1)
    manager.end_step()
    tier.finish_all(RowOutcome.HUNG)
    manager.end_step()
    assert lookups(manager, "s", 2, 3) == [PENDING, MISS], "one slot is all there is"
