from __future__ import annotations

from storage.service.messages import RootUsage, Usage
from tests.unit.tiering.fakes import FakeTier
from tiering.manager import TieringManager
from tiering.metrics import ALL, CHUNK_HITS, Increments, Sample, StoreFigures, collect
from tiering.primary import PrimaryTier
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism

LAYOUT = RowLayout.of([LayerFacts("mla", 4096, 1)], Parallelism(tp=2, world_size=2), 1)


def test_every_metric_is_collected_with_its_labels() -> None:
    manager = TieringManager(PrimaryTier(4), {"disk": FakeTier()})
    usage = Usage(state="full", roots={"/a": RootUsage(9, 5, "full")})
    samples = list(
        collect(
            manager,
            LAYOUT,
            {"disk": StoreFigures(usage, True, 0)},
        )
    )
    assert {sample.metric for sample in samples} == set(ALL)
    assert all(len(sample.labels) == len(sample.metric.labels) for sample in samples)
    values = {(s.metric.name, s.labels): s.value for s in samples}
    assert len(values) == len(samples), "a sample stands twice"
    assert values["kvtier:disk_state", ("disk", "full")] == 1
    assert values["kvtier:disk_state", ("disk", "growing")] == 0
    assert values["kvtier:root_used_bytes", ("disk", "/a")] == 5
    assert values["kvtier:root_state", ("disk", "/a", "full")] == 1
    assert values["kvtier:row_bytes", ("off",)] == 2 * values["kvtier:row_bytes", ("on",)]


def test_a_region_without_a_disk_shows_no_disk() -> None:
    manager = TieringManager(PrimaryTier(4))
    samples = list(collect(manager, LAYOUT, {}))
    assert not any("disk" in sample.metric.name for sample in samples)
    assert not any("disk" in sample.labels for sample in samples)


def test_two_tiers_have_a_series_each() -> None:
    manager = TieringManager(PrimaryTier(4), {"fast": FakeTier(), "large": FakeTier()})
    stores = {
        "fast": StoreFigures(Usage(rows=3), True, 0),
        "large": StoreFigures(Usage(rows=5), False, 0),
    }
    values = {(s.metric.name, s.labels): s.value for s in collect(manager, LAYOUT, stores)}
    for tier, rows, is_up in (("fast", 3, 1), ("large", 5, 0)):
        assert values["kvtier:disk_rows", (tier,)] == rows
        assert values["kvtier:disk_up", (tier,)] == is_up
        assert values["kvtier:chunk_hits", (tier,)] == 0


def test_increments_add_up_and_survive_a_restart_of_the_store() -> None:
    increments = Increments()
    seen = [increments.of(Sample(CHUNK_HITS, ("disk",), value)) for value in (3, 3, 8, 2)]
    assert seen == [3, None, 5, 2]


def test_a_counter_is_exported_before_it_counts() -> None:
    increments = Increments()
    seen = [increments.of(Sample(CHUNK_HITS, ("disk",), value)) for value in (0, 0, 1)]
    assert seen == [0, None, 1]
