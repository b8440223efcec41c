"""No metric without a check: each was held against what a test counted, with a value to count."""

from __future__ import annotations

from pathlib import Path

from tests.unit.tiering import metrics_of_manager, metrics_of_store
from tests.unit.tiering.metrics_truth import Between, Observation, Series
from tiering.metrics import ALL, CHUNK_HITS, CHUNK_QUERIES, Sample

HISTORIES = metrics_of_store.HISTORIES | metrics_of_manager.HISTORIES


def without_names(series: Series) -> Series:
    """Roots and second tiers are named by the test."""
    metric, labels = series
    named = zip(metric.labels, labels, strict=True)
    return metric, tuple(
        "" if name == "root" else "disk" if label == "fast" else label for name, label in named
    )


def test_metrics_say_what_was_counted_and_every_series_has_moved(memory_path: Path) -> None:
    """A new metric, or a new value of a label, needs a history that counts it."""
    observations: dict[str, Observation] = {}
    for name, history in HISTORIES.items():
        (memory_path / name).mkdir()
        observations[name] = history(memory_path / name)
    lies = {name: one.lies() for name, one in observations.items() if one.lies()}
    assert lies == {}
    said = {without_names(series) for one in observations.values() for series in one.values()}
    moved = {without_names(series) for one in observations.values() for series in one.moved()}
    assert {metric.name for metric in ALL} == {metric.name for metric, _ in moved}
    assert {(metric.name, labels) for metric, labels in said - moved} == set()


def test_metrics_that_lie_are_found_out() -> None:
    """More, less, where nothing was counted, and not at all."""
    queries, hits = (CHUNK_QUERIES, ("region",)), (CHUNK_HITS, ("region",))
    said = [Sample(*queries, 3.0), Sample(*hits, 2.0)]
    assert Observation(said, {queries: 3, hits: Between(1, 2)}).lies() == []
    for truth in ({queries: 2}, {queries: 4}, {hits: Between(2.5, 9)}):
        assert len(Observation(said, truth).lies()) == 1
    disk = (CHUNK_HITS, ("disk",))
    assert len(Observation(said, {disk: 1}).lies()) == 2, "one is not there, one was not counted"
