"""Metrics of a store from its own status file, for Prometheus: where vLLM does not export them.

What the status file knows and no more: nothing of the region, of requests or of ranks, and as old
as the store's last writing of it, which `kvtier:status_age_seconds` tells.  Counters are totals
over all openings of the store.  Reads small files at each scrape and takes no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from storage.device import LocalDevice
from storage.errors import DeviceError
from storage.space import DiskState, Limit
from storage.status import StoreStatus, read_status
from tiering import metrics
from tiering.config import DISK_TIER
from tiering.metrics import Kind, Metric, Sample

_ROOT = "root"

STATUS_AGE = Metric(
    "kvtier:status_age_seconds", Kind.GAUGE, "Since the store wrote the figures beside this."
)
DISK_FREE = Metric(
    "kvtier:disk_free_bytes", Kind.GAUGE, "Of the file system, as far as the user may take them."
)
STANDALONE = (STATUS_AGE, DISK_FREE)
"""Metrics that only this exporter has."""


class StatusCollector(Collector):
    """The present status of `roots`, each with a label for its root.

    A root without a status that can be read has no figures but its free space.
    """

    def __init__(self, roots: Sequence[Path], now: Callable[[], float] = time.time) -> None:
        """`now` is in Unix seconds."""
        self._roots = roots
        self._now = now
        self._device = LocalDevice()

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for root in self._roots:
            for metric, labels, value in self._samples(root):
                if metric.name not in families:
                    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                    names = [_ROOT, *metric.labels]
                    families[metric.name] = kind(metric.name, metric.help, labels=names)
                families[metric.name].add_metric([str(root), *labels], value)
        return families.values()

    def _samples(self, root: Path) -> Iterator[Sample]:
        try:
            yield Sample(DISK_FREE, (), self._device.space(root).available_bytes)
        except DeviceError:
            return  # gone, or not mounted now
        status = read_status(root, self._device)
        if status is not None:
            yield Sample(STATUS_AGE, (), max(0.0, self._now() - status.written_s))
            yield from samples_of(status)


def samples_of(status: StoreStatus) -> Iterator[Sample]:
    """What a status says, under the names that vLLM shows for a running engine."""
    counters = status.counters
    yield Sample(metrics.DISK_USED, (DISK_TIER,), status.used_bytes)
    yield Sample(metrics.DISK_BUDGET, (DISK_TIER,), status.budget_bytes)
    yield Sample(metrics.DISK_ROWS, (DISK_TIER,), status.rows)
    yield Sample(metrics.DISK_DEGRADED, (DISK_TIER,), float(status.health == "degraded"))
    for state in DiskState:
        yield Sample(
            metrics.DISK_STATE, (DISK_TIER, state.value), float(status.state == state.value)
        )
    for limit in Limit:
        if limit is not Limit.NONE:
            yield Sample(
                metrics.DISK_LIMIT, (DISK_TIER, limit.value), float(status.limit == limit.value)
            )
    yield Sample(metrics.READ_BYTES, (DISK_TIER,), counters.bytes_read)
    yield Sample(metrics.WRITE_BYTES, (DISK_TIER,), counters.bytes_written)
    yield Sample(metrics.CHUNKS_EVICTED, (DISK_TIER,), counters.rows_evicted)
    for outcome, count in (
        ("ok", counters.rows_read),
        ("missing", counters.rows_missing),
        ("corrupt", counters.rows_corrupt),
    ):
        yield Sample(metrics.ROWS_READ, (DISK_TIER, outcome), count)
    yield Sample(metrics.ROWS_WRITTEN, (DISK_TIER, "ok"), counters.rows_written)
