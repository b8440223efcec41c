from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.eviction import LeastRecentlyUsed


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
