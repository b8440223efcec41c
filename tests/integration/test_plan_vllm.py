"""plan: what `tiering.model_config` makes of a model's configuration, beside vLLM's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from tiering.model_config import read_model_config
from tiering.planning import row_size

TOKENS = 64
ENGINE = SimpleNamespace(
    scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
    cache_config=SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)
    ),
    speculative_config=None,
    model_config=SimpleNamespace(hf_config=None),
)


def full(heads: int, size: int) -> KVCacheSpec:
    return FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16
    )


def windowed(heads: int, size: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=heads,
        head_size=size,
        dtype=torch.bfloat16,
        sliding_window=1024,
    )


def latent() -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1
    )


def sparse_fp8() -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
        max_tp_shards=1,
    )


def indexer() -> KVCacheSpec:
    return MLAAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=1,
        head_size=132,
        dtype=torch.uint8,
        max_tp_shards=1,
        cache_role=SparseCacheRole.INDEXER,
    )


HEADED = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
LATENT = {"num_hidden_layers": 5, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
CASES: list[tuple[dict[str, Any], str | None, list[KVCacheSpec]]] = [
    ({"model_type": "llama", "num_hidden_layers": 6, **HEADED}, None, [full(8, 128)] * 6),
    ({"model_type": "deepseek_v3", **LATENT}, None, [latent()] * 5),
    (
        {"model_type": "deepseek_v32", "index_head_dim": 128, **LATENT},
        "fp8",
        [sparse_fp8(), indexer()] * 5,
    ),
    (
        {"model_type": "gemma3_text", "num_hidden_layers": 14, "sliding_window": 1024, **HEADED},
        None,
        [windowed(8, 128) if (i + 1) % 6 else full(8, 128) for i in range(14)],
    ),
    (
        {"model_type": "gpt_oss", "num_hidden_layers": 7, "sliding_window": 1024, **HEADED},
        None,
        [windowed(8, 128) if (i + 1) % 2 else full(8, 128) for i in range(7)],
    ),
    (
        {"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 1024, **HEADED},
        None,
        [windowed(8, 128)] * 4,
    ),
]


@pytest.mark.parametrize(
    ("config", "dtype", "specs"), CASES, ids=[case[0]["model_type"] for case in CASES]
)
def test_plan_sizes_a_model_as_vllm_does(
    tmp_path: Path, config: dict[str, Any], dtype: str | None, specs: list[KVCacheSpec]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = row_size(read_model_config(tmp_path, dtype, TOKENS), 1, 1)
    groups = get_kv_cache_groups(ENGINE, {f"layer {i}": spec for i, spec in enumerate(specs)})
    assert size.groups == len(groups)
    page_bytes = size.row_bytes // max(len(group.layer_names) for group in groups)
    if size.groups > 1:
        layers = sorted(len(group.layer_names) for group in groups)
        assert sorted(size.rows) == [count * page_bytes for count in layers]
    # A block of the widest group; the others leave part of it unused.
    assert size.worker_bytes_per_block == max(
        group.kv_cache_spec.page_size_bytes
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        else group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for group in groups
    )
