"""row_layout, replica, dedup: which byte of a row belongs to whom."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.rows import GroupLayer, RowLayout, row_identity, rows_differ
from tiering.topology import KvHeads, LayerFacts, Parallelism


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
    blocks_per_chunk = draw(st.integers(1, 4))
    if draw(st.booleans()):
        parallel = Parallelism(tp=ranks, world_size=ranks, dedup=draw(st.booleans()))
        layers = draw(st.lists(layer_facts(), min_size=1, max_size=5))
        return RowLayout.of(layers, parallel, blocks_per_chunk)
    by_rank = [draw(st.lists(layer_facts(), min_size=1, max_size=3)) for _ in range(ranks)]
    return RowLayout.of_unlike_ranks([alone(layers) for layers in by_rank], blocks_per_chunk)


def alone(layers: list[LayerFacts]) -> dict[int, list[GroupLayer]]:
    """The layers of a single group, each with a tensor of its own."""
    return {0: [GroupLayer(facts, i, facts.page_bytes) for i, facts in enumerate(layers)]}


@st.composite
def layer_facts(draw: st.DrawFn) -> LayerFacts:
    name = f"layer{draw(st.integers(0, 99))}"
    stretches = draw(st.sampled_from([1, 2, 3, 8]))
    page_bytes = draw(st.integers(1, 100)) * stretches
    kind = draw(st.sampled_from(["unknown", "shards", "heads"]))
    if kind == "heads":
        heads = KvHeads(draw(st.sampled_from([1, 2, 3, 4, 8])), stretches)
        return LayerFacts(name, page_bytes, heads=heads)
    shards = draw(st.sampled_from([1, 2, 3, 4])) if kind == "shards" else None
    return LayerFacts(name, page_bytes, shards)


@given(layouts(), st.integers(0, 1000))
def test_every_byte_is_written_by_exactly_one_rank(layout: RowLayout, slot: int) -> None:
    painted = np.zeros(layout.row_bytes, int)
    for rank in range(layout.ranks):
        for start, stop in layout.written_ranges(rank, slot):
            painted[start:stop] += 1
    assert (painted[: layout.payload_bytes] == 1).all()
    assert (painted[layout.payload_bytes :] == 0).all()


@given(layouts(), st.integers(0, 1000))
def test_a_rank_writes_only_what_it_would_load(layout: RowLayout, slot: int) -> None:
    for rank in range(layout.ranks):
        own = set(layout.read_ranges(rank))
        assert set(layout.written_ranges(rank, slot)) <= own
        page_bytes = sum(layer.page_bytes for layer in layout.layers_of(rank))
        assert sum(stop - start for start, stop in own) == layout.blocks_per_chunk * page_bytes


@given(layouts())
def test_ranks_take_turns(layout: RowLayout) -> None:
    """Over `replicas` consecutive slots every rank writes each of its pages exactly once."""
    for layer in layout.layers:
        replicas = layer.replicas
        turns = Counter(
            rank
            for slot in range(replicas)
            for block in range(layout.blocks_per_chunk)
            for rank in range(layout.ranks)
            if layer.is_on(rank)
            if layout.is_writer(layer, rank, slot, block)
        )
        assert set(turns.values()) == {layout.blocks_per_chunk}


@pytest.mark.parametrize(
    ("worker_bytes", "ranks", "without", "with_dedup"),
    [
        (497_664, 2, 995_328, 499_712),  # DeepSeek-V2-Lite
        (5_012_992, 8, 40_103_936, 5_013_504),  # DeepSeek-V4-Flash
        (4_008_960, 8, 32_071_680, 4_009_984),  # GLM-5.3
        (3_452_416, 8, 27_619_328, 3_452_928),  # DeepSeek-V3.2-Exp
    ],
)
def test_known_rows(worker_bytes: int, ranks: int, without: int, with_dedup: int) -> None:
    layers = [LayerFacts("mla", worker_bytes, max_tp_shards=1)]
    layout = RowLayout.of(layers, Parallelism(tp=ranks, world_size=ranks), 1)
    assert (layout.row_bytes_without_dedup, layout.row_bytes) == (without, with_dedup)
    assert not layout.depends_on_ranks


@given(layouts(), st.integers(0, 1000))
def test_writers_loads_are_even_over_any_run_of_chunks(layout: RowLayout, first: int) -> None:
    """Over tp x replicas consecutive slots, from wherever they start, to within one chunk."""
    count = layout.ranks * max(layer.replicas for layer in layout.layers)
    for layer in layout.layers:
        pages = Counter(
            rank
            for slot in range(first, first + count)
            for block in range(layout.blocks_per_chunk)
            for rank in range(layout.ranks)
            if layer.is_on(rank)
            if layout.is_writer(layer, rank, slot, block)
        )
        assert max(pages.values()) - min(pages.values()) <= layout.blocks_per_chunk


def test_single_copies_make_the_same_row_at_every_tp() -> None:
    layers = [LayerFacts("a", 3072, max_tp_shards=1), LayerFacts("b", 640, max_tp_shards=1)]
    made = [RowLayout.of(layers, Parallelism(tp=n, world_size=n), 2) for n in (1, 2, 4, 8)]
    assert len({layout.row_bytes for layout in made}) == 1
    assert all(row_identity(layout) == row_identity(made[0]) for layout in made)


def test_head_order_makes_the_same_row_at_every_tp_that_divides_the_heads() -> None:
    def layout(tp: int) -> RowLayout:
        whole = 8 * 4 * 64  # 8 heads of 64 bytes in 4 stretches
        layers = [LayerFacts("a", whole // min(tp, 8), heads=KvHeads(8, 4))]
        return RowLayout.of(layers, Parallelism(tp=tp, world_size=tp), 2)

    made = [layout(tp) for tp in (1, 2, 4, 8, 16)]
    assert [m.layers[0].shards for m in made] == [1, 2, 4, 8, 8]
    assert len({m.row_bytes for m in made}) == 1
    assert all(row_identity(m) == row_identity(made[0]) for m in made)
    assert not any(m.depends_on_ranks for m in made)


@pytest.mark.parametrize("tp", [3, 6])
def test_heads_that_do_not_divide_evenly_are_kept_per_rank(tp: int) -> None:
    layers = [LayerFacts("a", 1024, heads=KvHeads(4, 4))]
    layout = RowLayout.of(layers, Parallelism(tp=tp, world_size=tp), 1)
    assert layout.layers[0].shards == tp
    assert layout.depends_on_ranks
    assert row_identity(layout)["ranks"] == tp


def test_stages_of_a_pipeline_share_nothing() -> None:
    stages = [[LayerFacts("0", 4096, 1)], [LayerFacts("1", 2048, 1), LayerFacts("2", 2048, 1)]]
    layout = RowLayout.of_unlike_ranks([alone(layers) for layers in stages], 1)
    assert layout.row_bytes == layout.row_bytes_without_dedup == 8192
    assert [layer.name for layer in layout.layers_of(1)] == ["1 of rank 1", "2 of rank 1"]
    assert layout.depends_on_ranks
    assert (layout.kv_tp_replicas, layout.replicated_layout) == (1, False)


def test_without_dedup_every_rank_has_its_copy() -> None:
    layers = [LayerFacts("a", 3072, 1), LayerFacts("b", 1024, heads=KvHeads(1))]
    off = RowLayout.of(layers, Parallelism(tp=4, world_size=4, dedup=False), 1)
    assert off.row_bytes == off.row_bytes_without_dedup == 16384
    assert off.copies == {"dedup is off in the settings": 2}


@given(layouts(), layouts())
def test_a_difference_names_both_rows(one: RowLayout, other: RowLayout) -> None:
    if one != other:
        what, first, second = rows_differ(one, other)
        assert what
        assert f"{one.row_bytes} bytes" in first
        assert f"{other.row_bytes} bytes" in second


def test_a_layout_travels_as_json_and_its_digest_tells_it_apart() -> None:
    layers = [LayerFacts("a", 3072, 1), LayerFacts("b", 512, None)]
    one = RowLayout.of(layers, Parallelism(tp=2, world_size=2), 1)
    two = RowLayout.of(layers, Parallelism(tp=2, world_size=2), 2)
    assert msgspec.json.decode(msgspec.json.encode(one), type=RowLayout) == one
    assert one.digest != two.digest
    assert one.depends_on_ranks
    assert one.copies == {"how it splits over ranks is not known": 1}
