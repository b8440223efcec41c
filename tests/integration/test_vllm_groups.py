"""A hybrid model in the real `vllm serve`: each KV-cache group stores what it uses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.survey import NamespaceSurvey, survey_root
from tests.integration.conftest import (
    StartServer,
    answers,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    settled,
    tokens_from,
    transfer_config,
)
from tests.integration.settling import current_metrics
from tests.integration.zarr_reading import assert_zarr_equals_store

pytestmark = [needs_vllm, pytest.mark.timeout(600)]

PROMPTS = byte_prompts(4)  # of 900 tokens and more, with a window of 64
BLOCKS_PER_CHUNK = 2
PAGE_BYTES = 32 * 2 * 2 * 32 * 4
"""One layer's KV of a block: 32 tokens, K and V, 2 heads of 32 fp32 numbers."""
LAYERS = {0: 2, 1: 2, 2: 1, 3: 2}
"""Layers of each group: three share the five that have a window, the last has full attention."""


def test_spec_groups_of_a_hybrid_model_store_what_they_use(
    start_server: StartServer, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    config: Any = copy.deepcopy(transfer_config(root))
    config["kv_connector_extra_config"]["blocks_per_chunk"] = BLOCKS_PER_CHUNK
    server = start_server("tiny-gemma3", config)
    cold = answers(server, PROMPTS)
    assert len(set(cold)) == len(cold), "prompts must matter"
    metrics = settled(server)
    assert tokens_from(metrics, "disk") == 0
    written = metrics.value("kvtier:write_bytes_total", tier="disk")
    server.stop()
    await_store_gone(root)

    namespaces = {one.facts.groups: one for one in survey_root(root).namespaces}
    assert set(namespaces) == {(0, 1, 3), (2,)}
    rows = dict.fromkeys(LAYERS, 0)
    for groups, one in namespaces.items():
        assert one.row_bytes == BLOCKS_PER_CHUNK * LAYERS[groups[0]] * PAGE_BYTES
        found = rows_by_group(one)
        assert set(found) <= set(groups)
        rows |= found
        assert len(assert_zarr_equals_store(root, one.name)) == one.row_count
    assert all(rows.values()), "every group stores"
    needed = sum(count * LAYERS[group] for group, count in rows.items())
    assert written == needed * BLOCKS_PER_CHUNK * PAGE_BYTES
    assert written < sum(rows.values()) * max(LAYERS.values()) * BLOCKS_PER_CHUNK * PAGE_BYTES

    server = start_server("tiny-gemma3", config, tp=2)
    assert answers(server, PROMPTS) == cold, "restarted, each rank with a head of every layer"
    metrics = current_metrics(server)
    assert tokens_from(metrics, "disk") >= 0.9 * sum(len(prompt) for prompt in PROMPTS)
    assert metrics.value("kvtier:rows_read_total", outcome="corrupt") == 0
    assert answers(server, PROMPTS) == cold, "warm"
    assert tokens_from(server.metrics(), "disk") == tokens_from(metrics, "disk")
    server.stop()


def rows_by_group(namespace: NamespaceSurvey) -> dict[int, int]:
    """Group -> rows, by what their keys end in."""
    endings = [segment.key_endings(4).view(">u4").ravel() for segment in namespace.segments]
    groups, counts = np.unique(np.concatenate(endings), return_counts=True)
    return dict(zip(groups.tolist(), counts.tolist(), strict=True))
