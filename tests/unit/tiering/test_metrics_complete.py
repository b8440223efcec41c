"""No metric without a check: each was held against what a test counted, with a value to count."""

from __future__ import annotations

from pathlib import Path

from tests.unit.tiering import test_metrics_manager, test_metrics_store
from tests.unit.tiering.metrics_truth import Series
from tiering.metrics import ALL

HISTORIES = test_metrics_store.HISTORIES | test_metrics_manager.HISTORIES


def without_names(series: Series) -> Series:
    """Roots and second tiers are named by the test."""
    metric, labels = series
    named = zip(metric.labels, labels, strict=True)
    return metric, tuple(
        "" if name == "root" else "disk" if label == "fast" else label for name, label in named
    )


def test_every_metrics_series_is_checked_with_a_value_that_moved(memory_path: Path) -> None:
    """A new metric, or a new value of a label, needs a history that counts it."""
    observations = []
    for number, history in enumerate(HISTORIES.values()):
        (memory_path / str(number)).mkdir()
        observations.append(history(memory_path / str(number)))
    said = {without_names(series) for one in observations for series in one.values()}
    moved = {without_names(series) for one in observations for series in one.moved()}
    assert {metric.name for metric in ALL} == {metric.name for metric, _ in moved}
    assert {(metric.name, labels) for metric, labels in said - moved} == set()
