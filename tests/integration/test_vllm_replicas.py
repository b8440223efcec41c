"""Replica dedup in the real `vllm serve`: what TP 2 stores is one copy, and TP 1 reads it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from scripts.models import MODELS, ROOT
from scripts.serve_demo import rows_on_disk
from scripts.serve_report import ACCEPTED, DRAFTED
from scripts.serving import Metrics, VllmServer
from storage.types import RowKey
from tests.integration.conftest import (
    StartServer,
    answers,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    settled,
    short_prompts,
    tokens_from,
    transfer_config,
)
from tests.integration.settling import current_metrics
from tests.integration.zarr_reading import assert_zarr_equals_store

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

PROMPTS = byte_prompts(4)
SHARE_ON_DISK = 0.95  # of a prompt: all but its last, partial block


def _lengths(prompts: Sequence[str]) -> int:
    return sum(len(prompt) for prompt in prompts)


def test_replicas_of_an_mla_model_take_no_disk_and_carry_over_from_tp2_to_tp1(
    start_server: StartServer, tmp_path: Path
) -> None:
    """1,000 prompts of 4 blocks each at TP 2; then at TP 1 on that store, and on one of its own."""
    short = short_prompts(1000, 70)
    at_tp2, at_tp1 = tmp_path / "tp2", tmp_path / "tp1"
    server = start_server("tiny-mla", transfer_config(at_tp2), tp=2)
    expected = answers(server, PROMPTS)
    first_tokens = server.complete_all(short, 1)
    metrics = settled(server)
    rows_at_tp2 = metrics.value("kvtier:disk_rows")
    row_bytes = metrics.value("kvtier:row_bytes", dedup="on")
    assert rows_at_tp2 >= 4 * len(short)
    assert row_bytes == MODELS["tiny-mla"].row_bytes()
    assert metrics.value("kvtier:row_bytes", dedup="off") > row_bytes
    server.stop()
    await_store_gone(at_tp2)

    server = start_server("tiny-mla", transfer_config(at_tp2), tp=1)
    assert answers(server, PROMPTS) == expected
    assert server.complete_all(short[:100], 1) == first_tokens[:100]
    read = tokens_from(server.metrics(), "disk")
    assert read >= SHARE_ON_DISK * _lengths(PROMPTS) + 4 * 16 * 100
    assert [rows.row_bytes for rows in rows_on_disk(at_tp2)] == [row_bytes]
    server.stop()

    server = start_server("tiny-mla", transfer_config(at_tp1), tp=1)
    assert answers(server, PROMPTS) == expected
    assert server.complete_all(short, 1) == first_tokens
    assert settled(server).value("kvtier:disk_rows") == rows_at_tp2
    server.stop()
    assert _allocated(at_tp2) == pytest.approx(_allocated(at_tp1), rel=0.01)


def _allocated(root: Path) -> int:
    """Bytes by `st_blocks` of all files below `root`."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*"))


def test_replicas_of_a_kv_head_are_one_copy_that_carries_over_from_tp2_to_tp1(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Multi-query attention: both ranks hold the only KV head."""
    root = tmp_path / "store"
    server = start_server("tiny-mqa", transfer_config(root), tp=2)
    expected = answers(server, PROMPTS)
    metrics = settled(server)
    assert metrics.value("kvtier:row_bytes", dedup="on") == MODELS["tiny-mqa"].row_bytes()
    assert metrics.value("kvtier:row_bytes", dedup="off") == MODELS["tiny-mqa"].row_bytes() * 2
    server.stop()
    await_store_gone(root)

    server = start_server("tiny-mqa", transfer_config(root), tp=1)
    assert answers(server, PROMPTS) == expected
    assert tokens_from(server.metrics(), "disk") >= SHARE_ON_DISK * _lengths(PROMPTS)
    assert len(rows_on_disk(root)) == 1
    server.stop()


def test_replica_dedup_layer_by_layer_with_a_head_sharded_draft(
    start_server: StartServer, tmp_path: Path
) -> None:
    """MLA layers once and each shard of the draft's layers.

    At another TP such rows, of layers with unlike KV heads, are a miss and never a wrong token.
    What the draft model computes shows in no answer. So after the restart the prompts go on, and
    its KV of the new blocks, which it computes from what was loaded, must be what TP 1 computes.
    """
    preset = MODELS["tiny-mla-gqa-draft"]
    text = (ROOT / "LICENSE").read_text()  # the draft model is sometimes right on prose
    longer = [text[start : start + 1100] for start in range(0, 8000, 1000)]
    prompts = [prompt[:900] for prompt in longer]
    root = tmp_path / "store"
    config = transfer_config(root)
    server = start_server(preset.name, config, tp=2)
    expected = answers(server, prompts)
    drafts = _drafts(server.metrics())
    assert 0 < drafts[ACCEPTED] < drafts[DRAFTED], "the draft model must be right sometimes"
    metrics = settled(server)
    both_copies = preset.row_bytes_without_dedup(2)
    assert preset.row_bytes() < both_copies
    assert metrics.value("kvtier:row_bytes", dedup="on") == preset.row_bytes()
    assert metrics.value("kvtier:row_bytes", dedup="off") == both_copies
    rows_of_prompts = metrics.value("kvtier:disk_rows")
    server.stop()
    await_store_gone(root)

    server = start_server(preset.name, config, tp=2)
    assert answers(server, prompts) == expected
    metrics = server.metrics()
    assert tokens_from(metrics, "disk") >= SHARE_ON_DISK * _lengths(prompts)
    assert _drafts(metrics) == drafts, "the draft model guesses otherwise"
    expected_longer = answers(server, longer)
    assert settled(server).value("kvtier:disk_rows") > rows_of_prompts
    server.stop()
    await_store_gone(root)
    [at_tp2] = rows_on_disk(root)
    assert at_tp2.row_bytes == preset.row_bytes()

    server = start_server(preset.name, config, tp=1)
    assert answers(server, longer) == expected_longer
    assert tokens_from(settled(server), "disk") == 0
    server.stop()
    await_store_gone(root)
    [at_tp1] = (rows for rows in rows_on_disk(root) if rows.namespace != at_tp2.namespace)
    _assert_same_values(*(_rows(root, rows.namespace) for rows in (at_tp2, at_tp1)))


def _rows(root: Path, namespace: str) -> dict[RowKey, npt.NDArray[np.float32]]:
    rows = assert_zarr_equals_store(root, namespace)
    return {key: row.view(np.float32) for key, row in rows.items()}


def _assert_same_values(
    rows: dict[RowKey, npt.NDArray[np.float32]], same: dict[RowKey, npt.NDArray[np.float32]]
) -> None:
    """Up to the rounding of sums over ranks."""
    common = rows.keys() & same.keys()
    assert len(common) >= SHARE_ON_DISK * len(rows)
    for key in common:
        np.testing.assert_allclose(rows[key], same[key], rtol=0, atol=1e-4)


def _drafts(metrics: Metrics) -> dict[str, float]:
    return {name: metrics.value(name) for name in (ACCEPTED, DRAFTED)}


def test_replica_dedup_without_a_disk(start_server: StartServer) -> None:
    """In the region alone: half the bytes from the device, and room for twice the chunks."""
    prompts = byte_prompts(12)
    runs = {
        dedup: _serve_from_region(start_server, prompts, dedup=dedup) for dedup in (True, False)
    }
    (expected, on), (also, off) = runs[True], runs[False]
    assert expected == also
    assert on.value("kvtier:chunks_stored_total") == off.value("kvtier:chunks_stored_total") > 0
    stored = "vllm:kv_offload_store_bytes_total"
    assert on.value(stored) * 2 == off.value(stored) > 0
    assert on.value("kvtier:row_bytes", dedup="on") * 2 == on.value("kvtier:row_bytes", dedup="off")
    assert off.value("kvtier:row_bytes", dedup="on") == on.value("kvtier:row_bytes", dedup="off")
    slots = [run.value("kvtier:region_slots", use="total") for run in (on, off)]
    assert slots[0] == pytest.approx(2 * slots[1], abs=1)


def _serve_from_region(
    start_server: StartServer, prompts: Sequence[str], *, dedup: bool
) -> tuple[list[tuple[int, ...]], Metrics]:
    """Answers and final metrics of an MLA engine at TP 2 whose device holds a part of `prompts`."""
    settings: dict[str, Any] = {
        "cpu_bytes_to_use": "64MiB",
        "blocks_per_chunk": 2,  # rows that need no padding
        "dedup": dedup,
    }
    config = {**transfer_config(Path()), "kv_connector_extra_config": settings}
    server: VllmServer = start_server("tiny-mla", config, tp=2, kv_cache_bytes=2 << 20)
    expected = answers(server, prompts)
    assert tokens_from(server.metrics(), "host") == 0
    # By now the first prompts have left the device.
    assert answers(server, prompts[:4]) == expected[:4]
    metrics = current_metrics(server)
    assert tokens_from(metrics, "host") >= SHARE_ON_DISK * _lengths(prompts[:4])
    server.stop()
    return expected, metrics
