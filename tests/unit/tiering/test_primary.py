"""The primary tier and its slots, against a dict as the model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from storage.types import RowKey
from tiering.primary import ChunkState, PrimaryTier
from tiering.slots import SlotPool


def key(number: int) -> RowKey:
    return RowKey(number.to_bytes(4, "big"))


def never(_: RowKey) -> bool:
    return False


def filled(*numbers: int, slots: int = 4) -> PrimaryTier:
    tier = PrimaryTier(slots)
    for number in numbers:
        assert tier.allocate([key(number)], ChunkState.STORING, never) == []
        tier.publish([key(number)])
    return tier


def test_slots_are_given_and_taken_back() -> None:
    pool = SlotPool(3)
    assert pool.allocate(2) == [0, 1]
    assert not pool.can_allocate(2)
    pool.release([0])
    assert sorted(pool.allocate(2)) == [0, 2]
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_the_least_recently_used_chunk_goes_first() -> None:
    tier = filled(1, 2, 3, 4)
    tier.touch([key(1)])
    assert tier.allocate([key(5)], ChunkState.READING, never) == [key(2)]


def test_a_chain_ages_from_its_leaf() -> None:
    tier = filled(1, 2, 3, 4)
    tier.touch([key(1), key(2), key(3), key(4)])
    assert tier.allocate([key(5), key(6)], ChunkState.STORING, never) == [key(4), key(3)]


def test_unpinning_a_chain_ages_its_leaf_first() -> None:
    tier = filled(1, 2, 3, 4)
    chain = [key(2), key(3)]
    tier.pin(chain)
    tier.unpin(chain)
    order = tier.allocate([key(i) for i in range(5, 9)], ChunkState.STORING, never)
    assert order == [key(1), key(4), key(3), key(2)]


def test_all_or_nothing() -> None:
    tier = filled(1, 2, 3, 4)
    tier.pin([key(1), key(2), key(3)])
    assert tier.allocate([key(5), key(6)], ChunkState.STORING, never) is None
    assert tier.state(key(4)) is ChunkState.READY
    assert tier.state(key(5)) is None
    assert tier.room(never, 10) == 1


def test_one_is_allocated_as_many_are() -> None:
    """It takes the place of the least recent that may go; where none may, nothing changes."""
    tier = filled(1, 2, 3, 4)
    held = {key(1), key(2)}
    slot = tier.slot(key(3))
    assert tier.allocate_one(key(5), ChunkState.READING, held.__contains__) == [key(3)]
    assert (tier.slot(key(5)), tier.state(key(5))) == (slot, ChunkState.READING)
    assert tier.number(key(5)) > tier.number(key(4))
    assert tier.allocate_one(key(6), ChunkState.STORING, lambda _: True) is None
    assert (tier.used_count, tier.busy_count, tier.evictions) == (4, 1, 1)
    with pytest.raises(AssertionError):
        tier.allocate_one(key(5), ChunkState.STORING, None)


class PrimaryMachine(RuleBasedStateMachine):
    """Random histories: no slot has two chunks, and only what may go goes."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = PrimaryTier(5)
        self.states: dict[RowKey, ChunkState] = {}
        self.slots: dict[RowKey, int] = {}
        self.pins: dict[RowKey, int] = {}
        self.next = 0

    @rule(count=st.integers(1, 3), state=st.sampled_from(list(ChunkState)[:2]))
    def allocate(self, count: int, state: ChunkState) -> None:
        keys = [key(self.next + i) for i in range(count)]
        self.next += count
        self._allocated(keys, state, self.tier.allocate(keys, state, never))

    @rule(state=st.sampled_from(list(ChunkState)[:2]), protects=st.sampled_from([never, None]))
    def allocate_one(self, state: ChunkState, protects: Callable[[RowKey], bool] | None) -> None:
        one = key(self.next)
        self.next += 1
        self._allocated([one], state, self.tier.allocate_one(one, state, protects))

    def _allocated(
        self, keys: list[RowKey], state: ChunkState, evicted: list[RowKey] | None
    ) -> None:
        ready = [k for k, s in self.states.items() if s is ChunkState.READY]
        idle = [k for k in ready if not self.pins.get(k)]
        if evicted is None:
            assert 5 - len(self.states) + len(idle) < len(keys)
            return
        for gone in evicted:
            assert gone in idle
            del self.states[gone], self.slots[gone]
        for k in keys:
            self.states[k] = state
            self.slots[k] = self.tier.slot(k)

    def _some(self, data: st.DataObject, *states: ChunkState) -> RowKey:
        return data.draw(st.sampled_from([k for k, s in self.states.items() if s in states]))

    @precondition(lambda self: any(s is not ChunkState.READY for s in self.states.values()))
    @rule(data=st.data(), ok=st.booleans())
    def finish(self, data: st.DataObject, ok: bool) -> None:
        k = self._some(data, ChunkState.STORING, ChunkState.READING)
        if ok:
            self.tier.publish([k])
            self.states[k] = ChunkState.READY
        else:
            self.tier.abandon([k])
            del self.states[k], self.slots[k]

    @precondition(lambda self: ChunkState.READY in self.states.values())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        k = self._some(data, ChunkState.READY)
        assert self.tier.pin([k]) == [self.slots[k]]
        self.pins[k] = self.pins.get(k, 0) + 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        k = data.draw(st.sampled_from([k for k, n in self.pins.items() if n]))
        self.tier.unpin([k])
        self.pins[k] -= 1

    @invariant()
    def agrees(self) -> None:
        assert len(set(self.slots.values())) == len(self.slots)
        assert self.tier.used_count == len(self.states)
        assert self.tier.pin_count == sum(self.pins.values())
        for k, state in self.states.items():
            assert self.tier.state(k) is state
            assert self.tier.slot(k) == self.slots[k]


TestPrimaryMachine = PrimaryMachine.TestCase
