"""Who applies all changes that the region tells knows its chunks, after any history."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from storage.types import RowKey, RowOutcome
from tests.unit.tiering.test_manager import (
    PENDING,
    ManagerMachine,
    keys,
    lookups,
    make,
    store,
)
from tiering.manager import TieringManager
from tiering.primary import ChunkState


def told(manager: TieringManager) -> tuple[list[RowKey], list[RowKey]]:
    return manager.primary.take_changes(100)


def test_events_of_the_region_on_the_way_of_chunks() -> None:
    manager, tier, _ = make(2, 7)
    assert manager.primary.change_count == 0, "nobody follows"
    store(manager, 1)
    manager.primary.follow()
    assert told(manager) == ([], keys(1)), "what was there before"
    plan = manager.prepare_store(keys(2))
    assert plan is not None
    assert told(manager) == ([], []), "not before it is complete"
    manager.complete_store(plan.keys, success=False)
    assert told(manager) == ([], [])
    store(manager, 2)
    assert told(manager) == ([], keys(2))
    tier.finish_all()
    manager.poll()
    assert lookups(manager, "r", 7) == [PENDING]
    manager.end_step()
    assert told(manager) == (keys(1), []), "evicted for what is on its way"
    tier.finish_all(RowOutcome.CORRUPT)
    manager.end_step()
    assert told(manager) == ([], [])
    tier.present.update(keys(8))
    assert lookups(manager, "r", 8) == [PENDING]
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    assert told(manager) == ([], keys(8)), "promoted"
    assert manager.reset()
    assert sorted(told(manager)[0]) == keys(2, 8)


class FollowedManager(ManagerMachine):
    """The manager's histories, followed, with resets of the cache in between."""

    def __init__(self) -> None:
        super().__init__()
        self.manager.primary.follow()
        self.known: set[RowKey] = set()

    @rule(limit=st.integers(0, 3))
    def take(self, limit: int) -> None:
        removed, stored = self.manager.primary.take_changes(limit)
        assert self.known.issuperset(removed)
        assert self.known.isdisjoint(stored)
        self.known = self.known.difference(removed).union(stored)

    @precondition(lambda self: not (self.loads or self.stores or self.tier.jobs or self.hung))
    @rule()
    def reset(self) -> None:
        """It waits for what is moving, in earnest: so nothing is."""
        assert self.manager.reset()

    @invariant()
    def what_waits_is_bounded(self) -> None:
        assert self.manager.primary.change_count <= 8

    def teardown(self) -> None:
        super().teardown()
        self.take(100)
        primary = self.manager.primary
        ready = {key for key in keys(*range(20)) if primary.state(key) is ChunkState.READY}
        assert self.known == ready


TestFollowedManager = FollowedManager.TestCase
TestFollowedManager.settings = settings(max_examples=50)
del ManagerMachine  # or its own tests run here again
