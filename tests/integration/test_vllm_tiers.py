"""spec: several secondary tiers below one region, in the real `vllm serve`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.serving import Metrics, VllmServer
from storage.namespace import is_namespace_directory
from storage.testing.rows import bytes_on_disk
from tests.integration.conftest import (
    StartServer,
    answers,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    tokens_from,
    transfer_config,
)
from tests.integration.settling import reset_cache, settled_metrics

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

PROMPTS = byte_prompts(3)
FAST, LARGE = "fast", "large"


def metrics_when(server: VllmServer, is_so: Callable[[Metrics], bool]) -> Metrics:
    return settled_metrics(server, is_so, "not every chunk reached its tiers")


def stored(metrics: Metrics) -> float:
    return metrics.value("kvtier:chunks_stored_total")


def rows(metrics: Metrics, tier: str) -> float:
    return metrics.value("kvtier:rows_written_total", tier=tier, outcome="ok")


def hits(metrics: Metrics, tier: str) -> float:
    return metrics.value("kvtier:chunk_hits_total", tier=tier)


def test_spec_two_disk_tiers_outlive_the_loss_of_the_first(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Cold, then restarted without what the first tier had: the second one gives every token, and
    fills the first one again.  Then vLLM resets its cache: nothing of before is found, and both
    tiers go on, each in a namespace of its own."""
    roots = {name: tmp_path / name for name in (FAST, LARGE)}
    config = dict(transfer_config(tmp_path))
    config["kv_connector_extra_config"] = {
        "cpu_bytes_to_use": "64MiB",
        "secondary_tiers": [
            {"type": "disk", "name": name, "root": str(root), "budget": "256MB"}
            for name, root in roots.items()
        ],
    }
    server = start_server("tiny-llama", config)
    cold = answers(server, PROMPTS)
    metrics = metrics_when(server, lambda m: 0 < stored(m) == rows(m, FAST) == rows(m, LARGE))
    assert tokens_from(metrics, "disk") == 0
    server.stop()
    for root in roots.values():
        await_store_gone(root)
        assert bytes_on_disk(root) > 0

    shutil.rmtree(roots[FAST])
    server = start_server("tiny-llama", config, env={"VLLM_SERVER_DEV_MODE": "1"})
    assert answers(server, PROMPTS) == cold
    metrics = metrics_when(server, lambda m: rows(m, FAST) >= hits(m, LARGE) > 0)
    assert tokens_from(metrics, "disk") >= 0.95 * sum(len(prompt) for prompt in PROMPTS)
    assert hits(metrics, FAST) == 0
    read = metrics.value("kvtier:rows_read_total", tier=LARGE, outcome="ok")
    assert hits(metrics, LARGE) == read > 0
    assert metrics.value("kvtier:promotions_failed_total") == 0

    before = metrics
    reset_cache(server, external=True)
    assert answers(server, PROMPTS) == cold
    metrics = metrics_when(
        server,
        lambda m: all(
            rows(m, tier) - rows(before, tier) >= stored(m) - stored(before) > 0 for tier in roots
        ),
    )
    for tier in (FAST, LARGE):
        assert hits(metrics, tier) == hits(before, tier)
        assert metrics.value("kvtier:store_restarts_total", tier=tier) == 0
        assert sum(is_namespace_directory(path.name) for path in roots[tier].iterdir()) == 2
    server.stop()
