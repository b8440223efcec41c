"""What a metric says beside what the test itself has counted.

A history does things to a real part of kvtier, counts them by its own means (outcomes that it was
handed, files, seconds on its own clock), and returns the samples with that truth.  Each metric
must be checked by some history, and each series must have moved in one: see
`test_metrics_truth.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tiering.metrics import Metric, Sample

Series = tuple[Metric, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Between:
    """A truth that is known within bounds only, these included: seconds, charged bytes."""

    low: float
    high: float


Truth = dict[Series, float | Between]


@dataclass
class Observation:
    """`truth` names every series that is not 0 of each metric that it names."""

    samples: list[Sample]
    truth: Truth = field(default_factory=dict)

    def values(self) -> dict[Series, float]:
        found = {(sample.metric, sample.labels): sample.value for sample in self.samples}
        assert len(found) == len(self.samples), "a series stands twice"
        return found

    def checked(self) -> set[Metric]:
        return {metric for metric, _ in self.truth}

    def moved(self) -> set[Series]:
        """Series that were seen with a value that a broken counter does not have by chance."""
        return {series for series, value in self.truth.items() if value != 0}

    def lies(self) -> list[str]:
        """Every difference between what is said and what was counted."""
        found = []
        values = self.values()
        for series, value in values.items():
            if series[0] in self.checked():
                truth = self.truth.get(series, 0)
                if not _agrees(value, truth):
                    found.append(f"{_name(series)} says {value}, counted {truth}")
        found += [f"{_name(s)} is not there" for s in self.truth if s not in values]
        return found


def _agrees(value: float, truth: float | Between) -> bool:
    if isinstance(truth, Between):
        return truth.low <= value <= truth.high
    return value == truth


def _name(series: Series) -> str:
    metric, labels = series
    pairs = ", ".join(f"{k}={v}" for k, v in zip(metric.labels, labels, strict=True))
    return f"{metric.name}{{{pairs}}}"


History = Callable[[Path], Observation]


def of_disk(metric: Metric, *labels: str) -> Series:
    """A series of the tier "disk", which has `labels` beside it."""
    return metric, ("disk", *labels) if "tier" in metric.labels else labels


def by_label(metric: Metric, counts: Mapping[str, float | Between], *before: str) -> Truth:
    """The truth of a metric of the disk by its last label; `before` are the labels before it."""
    return {of_disk(metric, *before, label): count for label, count in counts.items()}
