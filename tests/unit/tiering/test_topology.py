from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.topology import (
    KvHeads,
    LayerFacts,
    Parallelism,
    head_stretches,
    kv_tp_replicas,
    reason_for_copies,
    replicas_floor,
    replicated_layout,
    shard_count,
)

MLA = LayerFacts("mla", 1024, max_tp_shards=1)
GQA2 = LayerFacts("gqa2", 1024, max_tp_shards=2)
UNKNOWN = LayerFacts("unknown", 1024)


def tp(size: int, **other: Any) -> Parallelism:
    return Parallelism(tp=size, world_size=size, **other)


@pytest.mark.parametrize(
    ("layer", "ranks", "shards"),
    [(MLA, 1, 1), (MLA, 8, 1), (GQA2, 8, 2), (GQA2, 1, 1), (UNKNOWN, 8, 8), (UNKNOWN, 1, 1)],
)
def test_shards_of_known_layers(layer: LayerFacts, ranks: int, shards: int) -> None:
    assert shard_count(layer, tp(ranks)) == shards


def test_uneven_division_is_reported_as_vllm_does_but_never_trusted() -> None:
    three = LayerFacts("three", 1024, max_tp_shards=3)
    assert replicas_floor(three, tp(8)) == 2
    assert shard_count(three, tp(8)) == 8


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        (Parallelism(tp=2, pp=2, world_size=4), "pipeline"),
        (Parallelism(tp=2, dcp=2, world_size=2), "decode context"),
        (Parallelism(tp=2, pcp=2, world_size=4), "prefill context"),
        (Parallelism(tp=2, world_size=2, shares_region=False), "share"),
        (Parallelism(tp=2, world_size=4), "world size"),
        (Parallelism(tp=2, world_size=2, dedup=False), "dedup is off"),
    ],
)
def test_what_is_not_proven_turns_replication_off(parallel: Parallelism, reason: str) -> None:
    assert any(reason in refusal for refusal in parallel.refusals())
    assert shard_count(MLA, parallel) == parallel.world_size
    assert not replicated_layout([MLA], parallel)


def test_one_head_sharded_layer_makes_the_gcd_one_and_costs_the_others_nothing() -> None:
    layers = [*[MLA] * 60, UNKNOWN]
    assert kv_tp_replicas(layers, tp(8)) == 1
    assert not replicated_layout(layers, tp(8))
    assert shard_count(MLA, tp(8)) == 1


def test_all_mla_is_the_replicated_layout() -> None:
    assert kv_tp_replicas([MLA, MLA], tp(8)) == 8
    assert replicated_layout([MLA, MLA], tp(8))
    assert not replicated_layout([MLA], tp(1))
    assert kv_tp_replicas([], tp(8)) == 1


HEADS8 = LayerFacts("heads8", 1024, heads=KvHeads(8, 4))


@pytest.mark.parametrize(
    ("ranks", "shards", "stretches"), [(1, 1, 4), (8, 8, 4), (16, 8, 4), (3, 3, None), (6, 6, None)]
)
def test_kv_heads_are_shared_by_the_ranks_that_hold_the_same(
    ranks: int, shards: int, stretches: int | None
) -> None:
    assert shard_count(HEADS8, tp(ranks)) == shards
    assert head_stretches(HEADS8, tp(ranks)) == stretches


def test_proven_heads_do_not_change_what_vllm_reports() -> None:
    assert kv_tp_replicas([HEADS8], tp(16)) == 1
    assert not replicated_layout([LayerFacts("mqa", 64, heads=KvHeads(1))], tp(2))


def test_heads_that_contradict_the_engine_are_not_put_in_order() -> None:
    layer = LayerFacts("x", 1024, max_tp_shards=2, heads=KvHeads(8, 4))
    assert head_stretches(layer, tp(4)) is None
    assert shard_count(layer, tp(4)) == 2


@pytest.mark.parametrize("refused", [{"dcp": 2}, {"shares_region": False}, {"dedup": False}])
def test_heads_are_not_put_in_order_where_replication_is_refused(refused: Any) -> None:
    assert head_stretches(HEADS8, tp(2, **refused)) is None


@pytest.mark.parametrize(
    ("layer", "ranks", "reason"),
    [
        (MLA, 8, None),
        (GQA2, 4, None),
        (UNKNOWN, 1, None),
        (UNKNOWN, 8, "not known"),
        (HEADS8, 8, "other KV heads"),
        (HEADS8, 16, None),
        (HEADS8, 3, "other KV heads"),
        (LayerFacts("three", 64, 3), 8, "evenly"),
    ],
)
def test_every_copy_has_its_reason(layer: LayerFacts, ranks: int, reason: str | None) -> None:
    found = reason_for_copies(layer, tp(ranks))
    assert found is None if reason is None else found is not None and reason in found


@given(st.integers(1, 16), st.integers(0, 20))
def test_shards_always_divide_the_ranks(ranks: int, most: int) -> None:
    shards = shard_count(LayerFacts("x", 64, max_tp_shards=most or None), tp(ranks))
    assert 1 <= shards <= ranks
    assert ranks % shards == 0
