"""The arithmetic of planning: what fits, what it wears, what to recommend."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import ConfigError
from storage.header import SegmentGeometry
from storage.space import SEGMENT_OVERHEAD_BYTES
from tiering.planning import Endurance, HitPoint, budget_of, knee, region_for, row_size
from tiering.presets import load_preset, own_model

LITE = row_size(load_preset("deepseek-v2-lite"), 2, 1)


@given(st.integers(4096, 10**8), st.integers(10**6, 10**13), st.booleans())
def test_planned_rows_stay_within_the_budget(worker_bytes: int, budget: int, dedup: bool) -> None:
    size = row_size(own_model(worker_bytes, 4, 1, 16), 4, 1)
    row_bytes = size.row_bytes if dedup else size.row_bytes_without_dedup
    rows = size.disk_rows(budget, dedup=dedup)
    geometry = SegmentGeometry.choose(row_bytes, budget)
    segments, rest = divmod(rows, geometry.slots_per_segment)
    assert rest == 0
    assert segments * (geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES) <= budget
    assert (segments + 2) * (geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES) > budget


@given(st.integers(1, 10**9))
def test_the_planned_budget_holds_the_tokens_and_not_much_more(tokens: int) -> None:
    budget = LITE.budget_for(tokens)
    assert LITE.disk_holds(budget) >= tokens
    assert LITE.disk_holds(int(budget * 0.9)) < tokens


def test_a_planned_region_holds_the_prompts_in_flight() -> None:
    region = region_for(LITE, 262_144)
    assert region % (1 << 30) == 0
    assert LITE.region_holds(region) >= 262_144
    assert LITE.region_holds(region - (1 << 30)) < 262_144


def test_a_plan_counts_chunks_where_the_tokens_of_a_block_are_not_known() -> None:
    size = row_size(load_preset("deepseek-v4-flash"), 8, 1)
    assert (size.unit, size.tokens_per_gb) == ("chunks", None)
    assert size.region_holds(10**9) == 10**9 // 5_013_504
    assert size.disk_holds(10**11) == size.disk_rows(10**11)
    assert (LITE.unit, LITE.tokens_per_gb) == ("tokens", 16 * 10**9 // 499_712)


def test_the_planned_budget_leaves_the_stores_reserve() -> None:
    assert budget_of(50 * 10**9) == 49_500_000_000
    assert budget_of(10**13) == 10**13 - (1 << 30)


def test_the_knee_of_a_plan_is_the_smallest_disk_that_is_good_enough() -> None:
    points = [HitPoint(size, rate, None) for size, rate in ((1, 0.2), (2, 0.49), (3, 0.5))]
    assert knee(points).budget_bytes == 2
    assert knee(points[:1]).budget_bytes == 1


def test_planned_endurance() -> None:
    total = Endurance.parse("1.2PB", None, 5)
    assert total.bytes_per_day == pytest.approx(1.2e15 / 5 / 365, rel=1e-9)
    assert total.years_at(total.bytes_per_day / 2) == pytest.approx(10)
    assert total.years_at(0) == math.inf
    daily = Endurance.parse("0.3 dwpd", 2 * 10**12, 3)
    assert daily.bytes_per_day == pytest.approx(0.6e12, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "drive", "years", "field"),
    [
        ("1DWPD", None, 5, "--endurance"),
        ("0DWPD", 10**12, 5, "--endurance"),
        ("lots", 10**12, 5, "--endurance"),
        ("1PB", 10**12, 0, "--years"),
        ("1PB", 10**12, math.nan, "--years"),
        ("1PB", 10**12, math.inf, "--years"),
    ],
)
def test_planned_endurance_that_makes_no_sense_is_refused(
    text: str, drive: int | None, years: float, field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Endurance.parse(text, drive, years)
    assert caught.value.field == field
