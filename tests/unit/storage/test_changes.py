"""A follower that applies what it takes ends up with the set, whatever happened to it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.changes import ChangeLog
from storage.types import RowKey

KEYS = [RowKey(bytes([number])) for number in range(12)]
some = st.lists(st.sampled_from(KEYS), unique=True)


def test_first_what_is_gone_then_what_came_in_order_then_what_was_found() -> None:
    log = ChangeLog(KEYS[:2])
    assert sorted(log.take(10).stored) == KEYS[:2]
    log.note_found(KEYS[2:4])
    log.note_stored([KEYS[9], KEYS[7]])
    log.note_removed([KEYS[0]])
    assert len(log) == 5
    assert log.take(2) == ([KEYS[0]], [KEYS[9]])
    assert log.take(1) == ([], [KEYS[7]])
    assert sorted(log.take(10).stored) == KEYS[2:4]
    assert log.take(10) == ([], [])


def test_what_comes_and_goes_in_between_is_not_told() -> None:
    log = ChangeLog(KEYS[:1])
    log.note_removed(KEYS[:1])
    log.note_stored(KEYS[1:2])
    log.note_removed(KEYS[1:2])
    assert len(log) == 0
    log.note_stored(KEYS[2:3])
    log.take(10)
    log.note_removed(KEYS[2:3])
    log.note_stored(KEYS[2:3])
    assert log.take(10) == ([], [])


class Followed(RuleBasedStateMachine):
    """A set, its log, and a follower that takes in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = set(KEYS[:3])
        self.log = ChangeLog(self.keys)
        self.known: set[RowKey] = set()

    @rule(keys=some, can_wait=st.booleans())
    def come(self, keys: list[RowKey], *, can_wait: bool) -> None:
        new = [key for key in keys if key not in self.keys]
        self.keys.update(new)
        (self.log.note_found if can_wait else self.log.note_stored)(new)

    @rule(keys=some)
    def go(self, keys: list[RowKey]) -> None:
        gone = [key for key in keys if key in self.keys]
        self.keys.difference_update(gone)
        self.log.note_removed(gone)

    @rule()
    def lose_all(self) -> None:
        self.log.note_lost(self.keys)
        self.keys = set()

    @rule(keys=some)
    def lose_all_and_find_again(self, keys: list[RowKey]) -> None:
        self.log.note_lost(set(self.keys))
        self.keys = set(keys)
        self.log.note_all_found(self.keys)

    @rule(limit=st.integers(0, 5))
    def take(self, limit: int) -> None:
        removed, stored = self.log.take(limit)
        assert len(removed) + len(stored) <= limit
        assert self.known.issuperset(removed), "told gone, but never told there"
        assert self.known.isdisjoint(stored), "told there twice"
        self.known -= set(removed)
        self.known |= set(stored)

    @invariant()
    def what_is_kept_is_bounded_and_leads_to_the_set(self) -> None:
        assert len(self.log) <= len(self.keys | self.known)
        assert (len(self.log) == 0) == (self.known == self.keys)

    def teardown(self) -> None:
        self.take(1000)
        assert self.known == self.keys


TestFollowed = Followed.TestCase
TestFollowed.settings = settings(max_examples=50)
