"""row_layout, replica, dedup: which byte of a row belongs to whom."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.rows import RowLayout, one_line
from tiering.topology import LayerFacts, Parallelism


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    ranks = draw(st.sampled_from([1, 2, 4, 8, 16]))
    layers = [
        LayerFacts(f"layer{i}", draw(st.integers(1, 300)), draw(st.sampled_from([None, 1, 2, 4])))
        for i in range(draw(st.integers(1, 5)))
    ]
    parallel = Parallelism(tp=ranks, world_size=ranks)
    return RowLayout.of(layers, parallel, draw(st.integers(1, 4)))


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
        assert len(own) == len(layout.layers) * layout.blocks_per_chunk


@given(layouts())
def test_ranks_take_turns(layout: RowLayout) -> None:
    """Over `replicas` consecutive slots every rank writes each of its pages exactly once."""
    for layer in layout.layers:
        replicas = layout.replicas(layer)
        turns = Counter(
            rank
            for slot in range(replicas)
            for block in range(layout.blocks_per_chunk)
            for rank in range(layout.ranks)
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


def test_single_copies_make_the_same_row_at_every_tp() -> None:
    layers = [LayerFacts("a", 3072, max_tp_shards=1), LayerFacts("b", 640, max_tp_shards=1)]
    rows = {RowLayout.of(layers, Parallelism(tp=n, world_size=n), 2).layers for n in (1, 2, 4, 8)}
    assert len(rows) == 1


def test_a_layout_travels_as_json_and_its_digest_tells_it_apart() -> None:
    layers = [LayerFacts("a", 3072, 1), LayerFacts("b", 512, None)]
    one = RowLayout.of(layers, Parallelism(tp=2, world_size=2), 1)
    two = RowLayout.of(layers, Parallelism(tp=2, world_size=2), 2)
    assert msgspec.json.decode(msgspec.json.encode(one), type=RowLayout) == one
    assert one.digest != two.digest
    assert one.depends_on_ranks
    assert one_line(one, ["reason"]).endswith("not deduplicated: reason")
