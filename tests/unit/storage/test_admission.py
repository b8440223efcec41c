"""The learned rule beside both fixed ones, on traffic that nobody fitted it to."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.replay import replay
from storage.admission import (
    ADMISSION,
    ALWAYS,
    GHOST_GENERATIONS,
    NEVER,
    RELUCTANT,
    SECOND_TOUCH,
    Ghost,
    LearnedAdmission,
    RuleAdmission,
    WriteBudget,
    digest_of,
)
from storage.types import RowKey
from tiering.traces import Trace

Requests = list[list[int]]


def keys(*numbers: int) -> list[RowKey]:
    return [RowKey(b"%d" % number) for number in numbers]


def document(number: int, chunks: int) -> list[int]:
    return [number * 1000 + i for i in range(chunks)]


# -- traffic ------------------------------------------------------------------------------------


def scan_flood(rng: random.Random) -> Requests:
    """Popular documents, and a flood of prompts that never come again."""
    return [
        document(min(int(rng.paretovariate(0.8)), 400), 8)
        if rng.random() < 0.3
        else document(1000 + number, 12)
        for number in range(2500)
    ]


def loop(chunks: int) -> Callable[[random.Random], Requests]:
    """The same documents again and again."""
    return lambda _rng: [document(i % (chunks // 8), 8) for i in range(2000)]


def zipf(rng: random.Random) -> Requests:
    """Many documents behind a few shared system prompts."""
    weights = [1 / (rank + 1) ** 0.8 for rank in range(2000)]
    picked = rng.choices(range(2000), weights, k=2500)
    return [document(5000 + d % 20, 4) + document(d, 6) for d in picked]


def sessions(active: int) -> Callable[[random.Random], Requests]:
    """Conversations that grow with every turn, and end."""

    def requests(rng: random.Random) -> Requests:
        found, turns, started = [], {}, 0
        for _ in range(2500):
            if len(turns) < active:
                started += 1
                turns[started] = 2
            who = rng.choice(list(turns))
            turns[who] += 2
            found.append(document(0, 3) + document(who, turns[who]))
            if rng.random() < 0.15:
                del turns[who]
        return found

    return requests


def phases(rng: random.Random) -> Requests:
    """The one, then the other."""
    return scan_flood(rng) + sessions(40)(rng) + loop(1200)(rng) + zipf(rng) + scan_flood(rng)


def one_shot(_rng: random.Random) -> Requests:
    return [document(number, 10) for number in range(1500)]


TRAFFIC = {
    "scan flood": scan_flood,
    "loop over 1.1 disks": loop(1100),
    "loop over 2 disks": loop(2000),
    "loop that fits": loop(900),
    "zipf behind shared prefixes": zipf,
    "few sessions": sessions(40),
    "many sessions": sessions(300),
    "phases": phases,
    "one shot": one_shot,
}


@pytest.mark.slow
@pytest.mark.parametrize("slots", [200, 1000])
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_learned_is_as_good_as_the_better_rule(traffic: str, slots: int) -> None:
    seed = 20
    requests = TRAFFIC[traffic](random.Random(seed))
    trace = Trace(traffic, [keys(*request) for request in requests])
    capacity = slots / trace.unique_count
    cells = {
        name: replay(trace, min(1.0, capacity), 0.0, name, "lru", belady=False)
        for name in ADMISSION
    }
    best = max(cells["always"].hit_rate, cells["second-touch"].hit_rate)
    assert cells["learned"].hit_rate >= 0.97 * best, f"seed {seed}"


def test_where_both_rules_lose_a_part_is_kept() -> None:
    """A loop over slightly more than fits: least recently used finds nothing at all."""
    trace = Trace("loop", [keys(*request) for request in loop(1100)(random.Random(0))])
    rates = {
        name: replay(trace, 1000 / trace.unique_count, 0.0, name, "lru", belady=False).hit_rate
        for name in ADMISSION
    }
    assert rates["always"] == 0
    assert rates["second-touch"] < 0.1
    assert rates["learned"] > 0.7


def test_a_flood_that_nobody_reads_is_not_written_for_ever() -> None:
    trace = Trace("flood", [keys(*request) for request in one_shot(random.Random(0))])
    cell = replay(trace, 0.02, 0.0, "learned", "lru", belady=False)
    assert cell.writes < 0.1


# -- decisions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ADMISSION)
def test_while_there_is_room_everything_is_admitted(name: str) -> None:
    policy = ADMISSION[name]()
    for number in range(50):
        offered = keys(*document(number, 4))
        assert policy.offer(offered, slots=1000, free=4) == 4


@pytest.mark.parametrize("name", ADMISSION)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["read", "touch", "offer"]),
            st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=8),
            st.integers(0, 8),
        ),
        max_size=60,
    )
)
def test_a_first_part_of_a_chain_is_admitted(
    name: str, steps: list[tuple[str, list[int], int]]
) -> None:
    policy = ADMISSION[name]()
    for what, numbers, free in steps:
        if what == "read":
            policy.read(keys(*numbers), slots=8)
        elif what == "touch":
            policy.touch(keys(*numbers))
        else:
            count = policy.offer(keys(*numbers), slots=8, free=free)
            assert min(free, len(numbers)) <= count <= len(numbers)


def test_second_touch_admits_at_second_touch() -> None:
    policy = RuleAdmission(SECOND_TOUCH)
    assert policy.offer(keys(1, 2, 3), slots=100, free=0) == 0
    assert policy.offer(keys(1, 2, 3, 4), slots=100, free=0) == 3
    assert policy.offer(keys(9, 1), slots=100, free=0) == 0, "no prefix, no use"
    assert policy.offer(keys(10, 1, 11), slots=100, free=1) == 2


def test_the_reluctant_rule_takes_one_offer_in_sixteen_whole() -> None:
    policy = RuleAdmission(RELUCTANT)
    taken = [policy.offer(keys(*document(n, 3)), slots=10**6, free=0) for n in range(1600)]
    assert set(taken) == {0, 3}
    assert 60 < taken.count(3) < 140


def test_until_a_turnover_has_been_seen_everything_is_admitted() -> None:
    policy = LearnedAdmission()
    for number in range(25):
        assert policy.offer(keys(*document(number, 4)), slots=104, free=0) == 4
    assert policy.rule is ALWAYS
    for number in range(100, 150):
        policy.offer(keys(*document(number, 4)), slots=104, free=0)
    assert policy.rule is not ALWAYS


# -- memory -------------------------------------------------------------------------------------


def test_a_ghost_forgets_after_its_generations_and_stays_small() -> None:
    slots, ghost = 1000, Ghost()
    first = digest_of(b"first")
    assert ghost.see(first, slots) == NEVER
    assert ghost.see(first, slots) == 0
    for number in range((GHOST_GENERATIONS + 1) * slots):
        ghost.see(digest_of(b"%d" % number), slots)
    assert ghost.see(first, slots) == NEVER
    assert ghost.size_bytes <= 10.1 * slots


def test_a_ghost_tells_the_age_of_a_sighting_in_turnovers() -> None:
    slots = 500
    for age in range(GHOST_GENERATIONS):
        ghost = Ghost()
        name = digest_of(b"name")
        ghost.see(name, slots)
        for number in range(age * slots + slots // 2):
            ghost.see(digest_of(b"%d" % number), slots)
        assert ghost.see(name, slots) == age


def test_few_unseen_names_look_seen() -> None:
    slots, ghost = 20_000, Ghost()
    looked_seen = [
        ghost.see(digest_of(b"%d" % number), slots) != NEVER
        for number in range(2 * GHOST_GENERATIONS * slots)
    ]
    assert sum(looked_seen[GHOST_GENERATIONS * slots :]) < 0.03 * GHOST_GENERATIONS * slots


def test_a_shadow_of_a_large_disk_is_bounded() -> None:
    """Names come and go on a disk of 100,000 slots, filled as it grew."""
    policy = LearnedAdmission()
    for number in range(30_000):
        slots = min(100_000, 1000 + number * 4)
        policy.offer(keys(*document(number, 4)), slots=slots, free=4 if slots < 100_000 else 0)
    shadows = [len(shadow) for shadow in policy.shadows]
    assert max(shadows) <= 4096
    assert min(shadows) > 1000


# -- the drive's budget of writes ---------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(0, 20_000), st.integers(1, 300)), max_size=200),
    st.integers(1, 2000),
)
def test_no_24_hours_take_more_than_a_day_s_bytes(
    steps: list[tuple[float, int]], bytes_per_day: int
) -> None:
    now, taken = 0.0, []
    budget = WriteBudget(bytes_per_day, now)
    for wait_s, size_bytes in steps:
        now += wait_s
        if budget.take(size_bytes, now):
            taken.append((now, size_bytes))
    for start, _ in taken:
        window = sum(size for at, size in taken if start <= at <= start + 86_400)
        assert window <= bytes_per_day + 1e-6


def test_a_budget_of_writes_comes_back_with_time() -> None:
    budget = WriteBudget(800, 0.0)
    assert budget.take(100, 0.0), "an eighth of a day's bytes at once"
    assert not budget.take(1, 0.0)
    assert budget.take(70, 8640.0), "a tenth of a day later: a tenth of the other seven eighths"
    assert not budget.take(1, 8640.0)
