"""The manager over two secondary tiers: a fast one that is asked first, and a large one."""

from __future__ import annotations

from storage.types import RowOutcome
from tests.unit.tiering.fakes import (
    HIT,
    MISS,
    PENDING,
    Clock,
    FakeTier,
    is_idle,
    keys,
    lookups,
    store,
)
from tiering.manager import Tier, TieringManager
from tiering.primary import PrimaryTier


def make(slots: int) -> tuple[TieringManager, FakeTier, FakeTier, Clock]:
    fast, large, clock = FakeTier(), FakeTier(), Clock()
    tiers = {"fast": fast, "large": large}
    return TieringManager(PrimaryTier(slots), tiers, now=clock), fast, large, clock


def step(manager: TieringManager, *tiers: FakeTier) -> None:
    """Everything that was asked of these tiers ends well."""
    manager.end_step()
    for tier in tiers:
        tier.finish_all()
    manager.end_step()


def test_a_stored_chunk_cascades_to_each_tier_that_lacks_it() -> None:
    manager, fast, large, _ = make(8)
    large.present.update(keys(2))
    store(manager, 1, 2)
    assert fast.jobs == {1: ("write", keys(1, 2))}
    assert large.jobs == {1: ("write", keys(1))}
    fast.finish_all()
    manager.end_step()
    assert manager.has_pending_work(), "the other tier is not through"
    assert manager.primary.busy_count == 1
    step(manager, large)
    assert is_idle(manager)
    assert fast.present == large.present == set(keys(1, 2))


def test_the_first_tier_that_has_a_chunk_gives_it_in_one_job_per_tier() -> None:
    manager, fast, large, _ = make(8)
    fast.present.update(keys(1, 3))
    large.present.update(keys(1, 2, 3, 4))
    assert lookups(manager, "r", 1, 2, 3, 4, 5) == [PENDING] * 4 + [MISS]
    manager.end_step()
    assert fast.jobs == {1: ("read", keys(1, 3))}
    assert large.jobs == {1: ("read", keys(2, 4))}
    step(manager, fast, large)
    assert lookups(manager, "r", 1, 2, 3, 4) == [HIT] * 4
    assert manager.source(keys(2)[0], "r") is Tier.DISK
    assert [t.counters.hits for t in manager.tiers.values()] == [2, 2]


def test_a_read_that_fails_falls_to_the_next_tier() -> None:
    for outcome in (RowOutcome.FAILED, RowOutcome.CORRUPT, RowOutcome.MISSING, RowOutcome.HUNG):
        manager, fast, large, _ = make(8)
        fast.present.update(keys(1))
        large.present.update(keys(1))
        assert lookups(manager, "r", 1) == [PENDING]
        manager.end_step()
        fast.finish_all(outcome)
        manager.end_step()
        assert lookups(manager, "r", 1) == [PENDING], outcome
        step(manager, large)
        assert lookups(manager, "r", 1) == [HIT], outcome
        assert [t.counters.hits for t in manager.tiers.values()] == [0, 1]
        assert [t.counters.promotions_failed for t in manager.tiers.values()] == [1, 0]


def test_a_tier_that_stands_still_is_passed_over() -> None:
    manager, fast, large, clock = make(8)
    fast.present.update(keys(1, 2))
    large.present.update(keys(1, 2))
    lookups(manager, "r", 1)
    manager.end_step()
    clock.now += 5.0
    manager.end_step()
    assert lookups(manager, "s", 2) == [PENDING]
    manager.end_step()
    assert large.jobs == {1: ("read", keys(2))}


def test_a_chunk_from_the_large_tier_comes_to_the_fast_one_when_it_was_loaded() -> None:
    manager, fast, large, _ = make(8)
    large.present.update(keys(1))
    lookups(manager, "r", 1)
    step(manager, large)
    assert lookups(manager, "r", 1) == [HIT]
    manager.prepare_load(keys(1), "r")
    assert (fast.touched, large.touched) == ([], keys(1))
    manager.complete_load(keys(1))
    assert fast.jobs == {1: ("write", keys(1))}
    manager.finish("r")
    step(manager, fast)
    assert is_idle(manager)
    assert large.touched == keys(1, 1)


def test_the_tiers_share_what_cascades_may_pin() -> None:
    manager, fast, large, _ = make(8)
    large.present.update(keys(1, 2, 3, 4))
    fast.present.update(keys(5, 6, 7, 8))
    store(manager, *range(1, 9))
    assert manager.primary.busy_count == 4


def test_one_full_tier_does_not_keep_chunks_from_the_other() -> None:
    manager, fast, large, clock = make(8)
    fast.takes_writes = False
    store(manager, 1)
    step(manager, large)
    assert large.present == set(keys(1))
    assert not fast.jobs
    assert is_idle(manager)
    clock.now += 1.0
    fast.takes_writes = True
    step(manager, fast)
    assert fast.present == set(keys(1))


def test_reset_clears_every_tier_or_is_no_reset() -> None:
    manager, fast, large, _ = make(8)
    for tier in (fast, large):
        tier.present.update(keys(1))
    large.can_clear = False
    assert not manager.reset()
    large.can_clear = True
    assert manager.reset()
    assert lookups(manager, "r", 1) == [MISS]


def test_close_ends_every_tier() -> None:
    manager, fast, large, _ = make(8)
    manager.close()
    assert fast.closed
    assert large.closed
