"""No metric without a check: each was held against what a test counted, with a value to count."""

from __future__ import annotations

from pathlib import Path

from tests.unit.tiering import test_metrics_store
from tests.unit.tiering.metrics_truth import Series


def without_names(series: Series) -> Series:
    """Roots are named by the test."""
    metric, labels = series
    named = zip(metric.labels, labels, strict=True)
    return metric, tuple("" if name == "root" else label for name, label in named)


def test_every_metrics_series_is_checked_with_a_value_that_moved(memory_path: Path) -> None:
    observations = []
    for number, history in enumerate(test_metrics_store.HISTORIES.values()):
        (memory_path / str(number)).mkdir()
        observations.append(history(memory_path / str(number)))
    said = {without_names(series) for one in observations for series in one.values()}
    moved = {without_names(series) for one in observations for series in one.moved()}
    assert {(metric.name, labels) for metric, labels in said - moved} == set()
