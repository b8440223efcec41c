from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.eviction import EVICTION, LeastRecentlyUsed, LeastRecentlyUsedRows, RowLinks


def policy_of(names: str) -> LeastRecentlyUsed[str]:
    policy: LeastRecentlyUsed[str] = LeastRecentlyUsed()
    for name in names:
        policy.add(name)
    return policy


def test_a_new_name_goes_last() -> None:
    policy = policy_of("abc")
    policy.touch("a")
    policy.add("d")
    assert policy.victims(9, lambda _: False) == ["b", "c", "a", "d"]


def test_of_a_chain_the_leaf_goes_first() -> None:
    policy = policy_of("xabc")
    policy.touch_chain("abc")
    assert policy.oldest_first() == ["x", "c", "b", "a"]


def test_pinned_names_are_passed_over_and_victims_stay_until_removed() -> None:
    policy = policy_of("abcd")
    assert policy.victims(2, lambda name: name in "ac") == ["b", "d"]
    assert policy.victims(2, lambda _: True) == []
    assert len(policy) == 4
    policy.remove("b")
    assert "b" not in policy
    assert policy.victims(2, lambda name: name in "ac") == ["d"]


def test_unknown_names_are_ignored_and_known_ones_not_added_twice() -> None:
    policy = policy_of("ab")
    policy.touch("z")
    assert policy.oldest_first() == ["a", "b"]
    with pytest.raises(AssertionError):
        policy.add("a")


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.sampled_from("abcdef"))))
def test_order_is_the_order_of_last_use(steps: list[tuple[str, str]]) -> None:
    policy: LeastRecentlyUsed[str] = LeastRecentlyUsed()
    model: list[str] = []
    for what, name in steps:
        known = name in model
        if what == "remove" and known:
            policy.remove(name)
            model.remove(name)
        elif what == "touch":
            policy.touch(name)
            if known:
                model.remove(name)
                model.append(name)
        elif what == "add" and not known:
            policy.add(name)
            model.append(name)
    assert policy.oldest_first() == model


# -- the same for row numbers -------------------------------------------------------------------


def rows_of(*rows: int) -> LeastRecentlyUsedRows:
    policy = LeastRecentlyUsedRows()
    for row in rows:
        policy.add(row)
    return policy


def test_rows_pinned_unknown_and_twice() -> None:
    policy = rows_of(7, 0, 3)
    policy.touch_chain([7, 9, 0])
    assert policy.oldest_first() == [3, 0, 7]
    assert policy.victims(1, lambda row: row == 3) == [0]
    assert 9 not in policy
    assert 1 not in policy
    with pytest.raises(AssertionError):
        policy.add(3)
    with pytest.raises(KeyError):
        policy.remove(9)
    assert len(policy) == 3


@given(
    loaded=st.lists(st.integers(0, 9), unique=True),
    steps=st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), st.integers(0, 9))),
)
def test_rows_go_in_the_order_of_last_use(loaded: list[int], steps: list[tuple[str, int]]) -> None:
    policy: LeastRecentlyUsed[int] = LeastRecentlyUsed()
    rows = LeastRecentlyUsedRows()
    rows.load(np.array(loaded, np.int64))
    for row in loaded:
        policy.add(row)
    for what, row in steps:
        if what == "touch" or (what == "add") != (row in policy):
            getattr(policy, what)(row)
            getattr(rows, what)(row)
        assert rows.oldest_first() == policy.oldest_first()
        assert len(rows) == len(policy)
        assert (row in rows) == (row in policy)


def test_orders_of_different_rows_share_links() -> None:
    links = RowLinks()
    even, odd = LeastRecentlyUsedRows(links), LeastRecentlyUsedRows(links)
    for row in range(6):
        (odd if row % 2 else even).add(row)
    even.touch(0)
    odd.remove(3)
    assert even.oldest_first() == [2, 4, 0]
    assert odd.oldest_first() == [1, 5]
    even.add(3)
    assert even.oldest_first() == [2, 4, 0, 3]


def test_first_in_first_out_follows_no_use() -> None:
    policy = EVICTION["fifo"](RowLinks())
    for row in (3, 1, 2):
        policy.add(row)
    assert not policy.touch(3)
    assert policy.victims(2, lambda row: row == 1) == [3, 2]


def test_the_default_is_recency() -> None:
    policy = EVICTION[next(iter(EVICTION))](RowLinks())
    for row in (3, 1, 2):
        policy.add(row)
    assert policy.touch(3)
    assert policy.victims(9, lambda _: False) == [1, 2, 3]
