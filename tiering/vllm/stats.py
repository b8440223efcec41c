"""Our metrics on their way into vLLM's `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from tiering.metrics import Increments, Kind, Metric, Sample

_METADATA = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}


def metric_definitions(metrics: Iterable[Metric]) -> dict[str, Any]:
    """As vLLM wants them from a spec or a tier, by name."""
    return {
        metric.name: _METADATA[metric.kind](documentation=metric.help, labelnames=metric.labels)
        for metric in metrics
    }


def connector_stats(samples: Iterable[Sample], increments: Increments) -> Any:
    """What was added since the last call, and gauges as they are."""
    stats = OffloadingConnectorStats()
    for sample in samples:
        metric, labels = sample.metric, sample.labels
        if metric.kind is Kind.GAUGE:
            stats.set_gauge(metric.name, sample.value, labels)
        elif (increment := increments.of(sample)) is not None:
            stats.increase_counter(metric.name, increment, labels)
    return stats
