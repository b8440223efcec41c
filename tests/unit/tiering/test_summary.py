from __future__ import annotations

from tiering.rows import RowLayout
from tiering.summary import capacity_line, dedup_line, reasons, replicas_by_group
from tiering.topology import LayerFacts, Parallelism

MIXED = [LayerFacts(f"mla{i}", 4096, 1) for i in range(60)] + [LayerFacts("draft", 4096)]
GROUPS = [[f"mla{i}" for i in range(60)], ["draft"]]


def layout(tp: int, layers: list[LayerFacts] = MIXED) -> RowLayout:
    return RowLayout.of(layers, Parallelism(tp=tp, world_size=tp), 1)


def test_dedup_line_says_what_is_shared_and_what_is_not() -> None:
    line = dedup_line(layout(8), GROUPS)
    assert line == (
        f"row of {68 * 4096} bytes; {61 * 8 * 4096} without dedup (7.18x); 8 rank(s); "
        "1 block(s) per chunk; group 0: 60 layer(s) with 8 replica(s); "
        "group 1: 1 layer(s) with 1 replica(s); "
        "not deduplicated: 1 layer(s): how it splits over ranks is not known"
    )


def test_one_rank_has_nothing_to_share() -> None:
    assert "replica" not in dedup_line(layout(1), GROUPS)
    assert reasons(layout(1)) == ""


def test_layers_that_share_memory_are_counted_by_name() -> None:
    shared = layout(2, [LayerFacts("a b", 4096, 1), LayerFacts("c", 4096)])
    assert replicas_by_group(shared, [["a", "c"], ["b"]]) == [{2: 1, 1: 1}, {2: 1}]


def test_capacities_are_in_tokens_of_all_groups() -> None:
    line = capacity_line(2, 64, {"region": (11, 61 * 4096), "disk": (100, 4096)})
    assert line.startswith("region of 11 rows, 2.75 MB, 320 tokens; disk of 100 rows")
