"""The manager over one secondary tier."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.service.client import FinishedJob
from storage.types import RowKey, RowOutcome
from tests.unit.tiering.fakes import (
    HIT,
    MISS,
    PENDING,
    RETRY,
    Clock,
    FakeTier,
    counters,
    is_idle,
    keys,
    lookups,
    make,
    store,
)
from tiering.manager import Tier, TieringManager
from tiering.primary import ChunkState, PrimaryTier
from tiering.requests import HOLD_S


def test_the_way_of_a_chunk() -> None:
    manager, tier, _ = make(4)
    store(manager, 1, 2)
    assert tier.jobs == {1: ("write", keys(1, 2))}
    assert manager.has_pending_work()
    tier.finish_all()
    manager.end_step()
    assert is_idle(manager)
    for others in ((3, 4), (5, 6)):  # the last two evict 1 and 2 from the region
        store(manager, *others)
        tier.finish_all()
        manager.end_step()

    assert lookups(manager, "r", 1, 2, 9) == [PENDING, PENDING, MISS]
    manager.end_step()
    assert tier.jobs == {4: ("read", keys(1, 2))}, "one job per request"
    assert lookups(manager, "r", 1, 2) == [PENDING, PENDING]
    tier.finish_all()
    manager.poll()
    assert lookups(manager, "r", 1, 2) == [HIT, HIT]
    assert manager.source(keys(1)[0], "r") is Tier.DISK
    slots = manager.prepare_load(keys(1, 2), "r")
    assert len(set(slots)) == 2
    assert tier.touched == keys(1, 2)
    manager.complete_load(set(keys(1, 2)))
    manager.finish("r")
    assert is_idle(manager)
    assert counters(manager).hits == 2
    assert (manager.counters.region_hits, manager.counters.misses) == (0, 1)


def test_a_read_that_hangs_is_a_miss_and_keeps_its_slot_until_released() -> None:
    manager, tier, _ = make(2, 1)
    assert lookups(manager, "r", 1) == [PENDING]
    manager.end_step()
    tier.finish(1, RowOutcome.HUNG)
    manager.end_step()
    assert lookups(manager, "r", 1) == [MISS]
    assert not manager.has_pending_work()
    assert manager.primary.busy_count == 1
    store(manager, 2)
    assert manager.prepare_store(keys(3, 4)) is None, "the disk may still write into that slot"
    tier.released.append((1, 0))
    manager.poll()
    assert manager.primary.busy_count == 1, "the write of 2"
    tier.finish_all()
    manager.poll()
    assert is_idle(manager)
    store(manager, 3, 4)


def test_a_write_that_hangs_keeps_its_chunk_in_the_region_until_released() -> None:
    manager, tier, _ = make(1)
    store(manager, 1)
    tier.finish(1, RowOutcome.HUNG)
    manager.poll()
    assert counters(manager).writes_not_stored == 1
    assert manager.prepare_store(keys(2)) is None, "the disk may still read from that slot"
    assert lookups(manager, "r", 1) == [HIT]
    manager.finish("r")
    tier.released.append((1, 0))
    manager.poll()
    assert is_idle(manager)
    store(manager, 2)


class PickyTier(FakeTier):
    """Ends every write at once, and declines some keys while it has no room for them."""

    def __init__(self, *declined: int) -> None:
        super().__init__()
        self.declined = set(keys(*declined))
        self.offers: list[list[RowKey]] = []

    def write(self, names: Sequence[RowKey], slots: Sequence[int]) -> int:
        job_id = super().write(names, slots)
        self.offers.append(list(names))
        del self.jobs[job_id]
        outcomes = [
            RowOutcome.DECLINED if name in self.declined else RowOutcome.OK for name in names
        ]
        self.present.update(set(names) - self.declined)
        self._finished.append(FinishedJob(job_id, outcomes, 0, 0.0))
        return job_id


def use(manager: TieringManager, request: str, *numbers: int) -> None:
    """A request finds chunks in the region and loads them."""
    assert lookups(manager, request, *numbers) == [HIT] * len(numbers)
    manager.prepare_load(keys(*numbers), request)
    manager.complete_load(keys(*numbers))
    manager.finish(request)


def test_b63_a_declined_chunk_is_offered_again_and_no_hole_stays() -> None:
    """Steps of 0.1 s, in each of which a request uses the prefix; room comes at step 50."""
    tier, clock = PickyTier(2, 3), Clock()
    manager = TieringManager(PrimaryTier(12), {"disk": tier}, now=clock)
    prefix = range(6)
    store(manager, *prefix)
    manager.end_step()
    assert counters(manager).writes_not_stored == 2, "per key, not the whole job"
    assert tier.present == set(keys(0, 1, 4, 5))
    for step in range(66):
        if step == 50:
            assert len(tier.offers) <= 10
            tier.declined.clear()
        clock.now += 0.1
        use(manager, str(step), *prefix)
        manager.end_step()
    assert tier.present == set(keys(*prefix))
    assert all(offer == keys(2, 3) for offer in tier.offers[1:]), "never what is stored"
    assert is_idle(manager)


def test_what_nobody_uses_is_not_offered_again() -> None:
    tier, clock = PickyTier(1), Clock()
    manager = TieringManager(PrimaryTier(2), {"disk": tier}, now=clock)
    store(manager, 1)
    for _ in range(100):
        clock.now += 1
        manager.end_step()
    assert len(tier.offers) == 1
    for number in (2, 3):  # the second evicts it
        store(manager, number)
        manager.end_step()
    tier.declined.clear()
    store(manager, 1)
    assert tier.offers[-1] == keys(1), "computed again, it is offered at once"


def test_a_chunk_that_the_disk_evicted_is_offered_again_when_it_is_used() -> None:
    tier, clock = PickyTier(), Clock()
    manager = TieringManager(PrimaryTier(2), {"disk": tier}, now=clock)
    store(manager, 1)
    manager.end_step()
    tier.present.clear()
    use(manager, "r", 1)
    assert tier.offers == [keys(1), keys(1)]


def test_a_request_s_parts_age_as_one_chain() -> None:
    manager, tier, _ = make(8)
    manager.begin("r")
    for part in ((1, 2), (3, 4)):
        plan = manager.prepare_store(keys(*part), "r")
        assert plan is not None
        manager.complete_store(set(plan.keys))
        tier.finish_all()
        manager.end_step()
    manager.finish("r")
    assert tier.touched == keys(1, 2, 3, 4)
    victims = [
        manager.primary.allocate([key], ChunkState.STORING, lambda _: False)
        for key in keys(*range(10, 18))
    ]
    assert [v for v in victims if v] == [keys(4), keys(3), keys(2), keys(1)]


def test_a_chunk_that_is_stored_again_is_not_written_again() -> None:
    manager, tier, _ = make(4, 1)
    store(manager, 1, 2)
    assert tier.jobs == {1: ("write", keys(2))}
    plan = manager.prepare_store(keys(1, 2))
    assert plan is not None
    assert plan.keys == []


def test_the_cascade_is_in_the_order_of_the_prompt_although_acks_come_as_a_set() -> None:
    manager, tier, _ = make(8)
    order = keys(7, 3, 5, 1)
    plan = manager.prepare_store(order)
    assert plan is not None
    manager.complete_store(set(order))
    assert tier.jobs[1] == ("write", order)


def test_a_failed_store_is_forgotten() -> None:
    manager, tier, _ = make(2)
    assert manager.prepare_store(keys(1)) is not None
    assert lookups(manager, "r", 1) == [PENDING]
    manager.complete_store(set(keys(1)), success=False)
    assert lookups(manager, "r", 1) == [MISS]
    assert tier.jobs == {}
    assert is_idle(manager)


def test_rows_being_written_are_not_evicted() -> None:
    manager, tier, _ = make(2)
    store(manager, 1)
    assert manager.prepare_store(keys(2, 3)) is None
    tier.finish_all()
    manager.poll()
    assert manager.prepare_store(keys(2, 3)) is not None


def test_a_failed_write_lets_go_and_is_counted() -> None:
    manager, tier, _ = make(2)
    store(manager, 1)
    tier.finish_all(RowOutcome.DECLINED)
    manager.poll()
    assert is_idle(manager)
    assert counters(manager).writes_not_stored == 1
    assert keys(1)[0] not in tier


def test_a_failed_read_is_a_miss_at_once_and_is_not_tried_again_soon() -> None:
    manager, tier, clock = make(4, 1)
    assert lookups(manager, "r", 1) == [PENDING]
    manager.end_step()
    tier.finish_all(RowOutcome.FAILED)
    manager.poll()
    assert [lookups(manager, f"r{i}", 1) for i in range(100)] == [[MISS]] * 100
    manager.end_step()
    assert tier.jobs == {}
    assert counters(manager).promotions_failed == 1
    assert is_idle(manager)
    clock.now += 31
    assert lookups(manager, "later", 1) == [PENDING]


def test_a_row_that_was_stored_again_is_found_at_once() -> None:
    manager, tier, _ = make(1, 1)
    assert lookups(manager, "r", 1) == [PENDING]
    manager.end_step()
    tier.finish_all(RowOutcome.CORRUPT)
    manager.poll()
    assert lookups(manager, "r", 1) == [MISS]
    manager.finish("r")
    store(manager, 1)
    tier.finish_all()
    manager.poll()
    store(manager, 2)
    tier.finish_all()
    manager.poll()
    assert lookups(manager, "s", 1) == [PENDING]


def test_only_the_failed_rows_of_a_read_are_lost() -> None:
    manager, tier, _ = make(4, 1, 2, 3)
    lookups(manager, "r", 1, 2, 3)
    manager.end_step()
    [job_id] = tier.jobs
    tier.jobs.clear()
    outcomes = [RowOutcome.OK, RowOutcome.CORRUPT, RowOutcome.OK]
    tier._finished.append(FinishedJob(job_id, outcomes, 0, 0.0))
    manager.poll()
    assert lookups(manager, "r", 1, 2, 3) == [HIT, MISS, HIT]


def test_a_hung_disk_is_a_miss_after_the_deadline_and_its_slots_stay_taken() -> None:
    manager, tier, clock = make(2, 1, 2)
    assert lookups(manager, "r", 1, 2) == [PENDING, PENDING]
    for _ in range(4):
        manager.end_step()
        assert lookups(manager, "r", 1, 2) == [PENDING, PENDING]
        clock.now += 1.2
    clock.now += 0.2
    manager.end_step()
    assert lookups(manager, "r", 1, 2) == [MISS, MISS]
    assert manager.prepare_store(keys(3)) is None, "the read may still land in both slots"
    manager.finish("r")
    tier.finish_all()
    manager.poll()
    assert is_idle(manager)
    assert manager.prepare_store(keys(3)) is not None


def test_a_request_larger_than_the_region_loads_what_fits() -> None:
    manager, tier, _ = make(2, 1, 2, 3)
    assert lookups(manager, "r", 1, 2, 3) == [PENDING, PENDING, MISS]
    manager.end_step()
    tier.finish_all()
    manager.poll()
    assert lookups(manager, "r", 1, 2, 3) == [HIT, HIT, MISS]
    manager.prepare_load(keys(1, 2), "r")
    manager.complete_load(set(keys(1, 2)))
    assert is_idle(manager)


def test_two_requests_over_a_region_for_one_both_get_through_the_older_first() -> None:
    manager, tier, _ = make(2, 1, 2, 3, 4)
    manager.begin("old")
    manager.begin("young")
    assert lookups(manager, "young", 3, 4) == [PENDING, PENDING]
    manager.end_step()
    tier.finish_all()
    manager.poll()
    assert lookups(manager, "young", 3, 4) == [HIT, HIT]  # held, not yet loaded
    assert lookups(manager, "old", 1, 2) == [PENDING, PENDING], "the older may take them"
    assert lookups(manager, "young", 3, 4) == [RETRY, RETRY], "the younger waits"
    manager.end_step()
    tier.finish_all()
    manager.poll()
    assert lookups(manager, "young", 3, 4) == [RETRY, RETRY]
    assert lookups(manager, "old", 1, 2) == [HIT, HIT]
    manager.prepare_load(keys(1, 2), "old")
    assert lookups(manager, "young", 3, 4) == [RETRY, RETRY], "pinned by the load"
    manager.complete_load(set(keys(1, 2)))
    manager.end_step()
    assert lookups(manager, "young", 3, 4) == [PENDING, PENDING]


def test_stores_do_not_take_what_a_request_waits_for_but_a_silent_one_loses_its_holds() -> None:
    manager, tier, clock = make(1)
    store(manager, 1)
    tier.finish_all()
    manager.end_step()
    assert lookups(manager, "r", 1) == [HIT]
    for _ in range(3):
        assert manager.prepare_store(keys(2)) is None
        clock.now += HOLD_S
        manager.end_step()
    assert manager.prepare_store(keys(2)) is not None


def test_more_chunks_than_slots_are_stored_as_far_as_they_fit() -> None:
    manager, _, _ = make(2)
    plan = manager.prepare_store(keys(1, 2, 3))
    assert plan is not None
    assert plan.keys == keys(1, 2)
    assert manager.counters.stores_declined == 1


def test_finishing_with_promotions_not_yet_sent_leaks_nothing() -> None:
    manager, tier, _ = make(2, 1)
    lookups(manager, "r", 1)
    manager.finish("r")
    manager.end_step()
    tier.finish_all()
    manager.poll()
    assert is_idle(manager)


def test_reset_forgets_everything_also_below() -> None:
    manager, tier, _ = make(4, 9)
    store(manager, 1, 2)
    assert manager.prepare_store(keys(3)) is not None  # the engine disowns this one
    lookups(manager, "r", 9)
    tier.finish_all()
    assert manager.reset()
    assert tier.present == set()
    assert lookups(manager, "r", 1, 2, 3, 9) == [MISS] * 4
    assert manager.primary.used_count == 0
    assert is_idle(manager)


def test_after_a_reset_the_tiers_go_on() -> None:
    manager, tier, _ = make(4)
    store(manager, 1)
    tier.finish_all()
    assert manager.reset()
    manager.end_step()
    store(manager, 1)
    assert list(tier.jobs.values()) == [("write", keys(1))]
    assert lookups(manager, "r", 1) == [HIT]


def test_a_reset_that_the_disk_did_not_take_is_no_reset() -> None:
    """Else a store process that is down now would serve the old rows once it is back, and rows of
    new weights would be written among them."""
    manager, tier, _ = make(4, 9)
    tier.can_clear = False
    assert not manager.reset()
    store(manager, 1)
    assert tier.jobs == {}
    tier.can_clear = True
    assert manager.reset()
    assert lookups(manager, "r", 1, 9) == [MISS, MISS]
    store(manager, 1)
    assert list(tier.jobs.values()) == [("write", keys(1))]


def test_a_reset_drains_what_moves_and_promotes_nothing_of_before() -> None:
    manager, tier, _ = make(8, 8, 9)
    store(manager, 1, 2)
    lookups(manager, "sent", 8)
    manager.end_step()
    lookups(manager, "unsent", 9)
    job_ids = list(tier.jobs)
    polls = 0
    really_poll = tier.poll

    def poll() -> list[FinishedJob]:
        nonlocal polls
        polls += 1
        if polls in (3, 6):
            tier.finish(job_ids.pop())
        return really_poll()

    tier.poll = poll  # type: ignore[method-assign]
    assert manager.reset()
    assert not job_ids, "it waited for both"
    assert lookups(manager, "sent", 8, 9, 1) == [MISS] * 3
    assert manager.primary.used_count == 0
    assert manager.held_count == 0
    assert is_idle(manager)


def test_a_request_may_leave_the_disk_out() -> None:
    manager, tier, _ = make(2, 9)
    [key] = keys(9)
    assert manager.lookup(key, "r", below=False) is MISS
    assert tier.jobs == {}
    store(manager, 1)
    [key] = keys(1)
    assert manager.lookup(key, "r", below=False) is HIT


def test_failed_reads_are_not_counted_as_what_the_request_has() -> None:
    manager, tier, _ = make(2, 1, 2, 3)
    store(manager, 7)  # pinned by its write
    assert lookups(manager, "r", 1) == [PENDING]
    manager.end_step()
    tier.finish(2, RowOutcome.FAILED)
    manager.poll()
    assert lookups(manager, "r", 2, 3) == [PENDING, RETRY], "another's slot will be free"


def test_without_a_disk_the_region_alone_serves() -> None:
    manager = TieringManager(PrimaryTier(2))
    store(manager, 1)
    assert lookups(manager, "r", 1, 2) == [HIT, MISS]
    manager.prepare_load(keys(1), "r")
    manager.complete_load(set(keys(1)))
    assert is_idle(manager)
    manager.close()


def test_a_store_that_a_rank_never_acknowledges_costs_its_slots_and_nothing_else() -> None:
    manager, tier, clock = make(4)
    plan = manager.prepare_store(keys(1, 2))
    assert plan is not None
    for _ in range(4):
        assert lookups(manager, "r", 1) == [PENDING]
        clock.now += 1.25
        manager.end_step()
    assert lookups(manager, "r", 1, 2) == [MISS, MISS], "who waited long enough computes"
    assert lookups(manager, "next", 1, 2) == [MISS, MISS], "and nobody else waits"
    manager.finish("r")
    assert manager.prepare_store(keys(3)) is not None
    assert lookups(manager, "next", 3) == [PENDING], "as for a store that has just begun"
    manager.complete_store(keys(3))
    for numbers in ((3, 4), (5, 6)):
        store(manager, *numbers)
        manager.end_step()
        tier.finish_all()
        manager.end_step()
    assert lookups(manager, "s", 5, 6) == [HIT, HIT]
    assert manager.prepare_load(keys(5, 6), "s")
    manager.complete_load(set(keys(5, 6)))
    assert manager.primary.busy_count == 2, "those of the lost store alone"


def test_a_store_that_a_rank_failed_leaves_no_chunk_and_no_slot() -> None:
    manager, tier, _ = make(2)
    plan = manager.prepare_store(keys(1, 2))
    assert plan is not None
    manager.complete_store(set(plan.keys), success=False)
    assert lookups(manager, "r", 1, 2) == [MISS, MISS]
    manager.finish("r")
    assert not tier.jobs, "nothing was cascaded"
    assert manager.primary.used_count == 0
    store(manager, 1, 2)
    assert lookups(manager, "s", 1, 2) == [HIT, HIT]


class ManagerMachine(RuleBasedStateMachine):
    """Random interleavings of requests, results and time; when all is done nothing is held."""

    requests = st.sampled_from(["a", "b", "c"])
    numbers = st.integers(0, 8)

    def __init__(self) -> None:
        super().__init__()
        self.manager, self.tier, self.clock = make(4, 0, 1, 2, 3, 4, 5)
        self.loads: list[set[RowKey]] = []
        self.stores: list[set[RowKey]] = []
        self.hung: list[tuple[int, int]] = []

    @rule(request=requests, start=numbers, count=st.integers(1, 6))
    def look_up_and_load(self, request: str, start: int, count: int) -> None:
        chain = keys(*range(start, start + count))
        hits = []
        for key in chain:
            result = self.manager.lookup(key, request)
            if result is not HIT:
                break
            hits.append(key)
        if hits:
            slots = self.manager.prepare_load(hits, request)
            assert len(set(slots)) == len(hits)
            self.loads.append(set(hits))

    @rule(start=numbers, count=st.integers(1, 6))
    def begin_store(self, start: int, count: int) -> None:
        plan = self.manager.prepare_store(keys(*range(start, start + count)))
        if plan is not None and plan.keys:
            assert len(set(plan.slots)) == len(plan.keys)
            self.stores.append(set(plan.keys))

    @precondition(lambda self: self.loads)
    @rule()
    def end_load(self) -> None:
        self.manager.complete_load(self.loads.pop(0))

    @precondition(lambda self: self.stores)
    @rule(success=st.booleans())
    def end_store(self, success: bool) -> None:
        self.manager.complete_store(self.stores.pop(0), success=success)

    @precondition(lambda self: self.tier.jobs)
    @rule(outcome=st.sampled_from([RowOutcome.OK, RowOutcome.CORRUPT, RowOutcome.FAILED]))
    def end_job(self, outcome: RowOutcome) -> None:
        self.tier.finish(next(iter(self.tier.jobs)), outcome)

    @precondition(lambda self: self.tier.jobs)
    @rule()
    def hang(self) -> None:
        job_id, (_, names) = next(iter(self.tier.jobs.items()))
        self.hung += [(job_id, position) for position in range(len(names))]
        self.tier.finish(job_id, RowOutcome.HUNG)

    @precondition(lambda self: self.hung)
    @rule()
    def let_go(self) -> None:
        self.manager.poll()  # a release comes after the report
        self.tier.released.append(self.hung.pop())

    @rule(takes_writes=st.booleans())
    def change_state(self, takes_writes: bool) -> None:
        self.tier.takes_writes = takes_writes

    @rule()
    def step(self) -> None:
        self.manager.end_step()

    @rule(request=requests)
    def finish(self, request: str) -> None:
        self.manager.finish(request)

    @rule(seconds=st.sampled_from([0.1, HOLD_S, 11.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def never_more_than_the_region(self) -> None:
        assert 0 <= self.manager.primary.busy_count <= self.manager.primary.used_count <= 4

    def teardown(self) -> None:
        for request in ("a", "b", "c"):
            self.manager.finish(request)
        for load in self.loads:
            self.manager.complete_load(load)
        for stored in self.stores:
            self.manager.complete_store(stored)
        self.tier.takes_writes = True
        self.manager.poll()
        self.tier.released += self.hung
        for _ in range(6):
            self.tier.finish_all()
            self.manager.end_step()
        assert is_idle(self.manager)
        assert self.manager.primary.pin_count == 0
        assert self.manager.held_count == 0


TestManagerMachine = ManagerMachine.TestCase
