"""What a model's config.json says of its KV, and which models are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ConfigError, StorageError
from tiering.model_config import read_model_config
from tiering.planning import row_size
from tiering.presets import PresetError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
INDEXED = LATENT | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048}
GEMMA = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


def written(directory: Path, config: dict[str, Any]) -> Path:
    path = directory / "some-model" / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return path


def test_plan_of_deepseek_v2_lite_from_its_config_equals_what_was_measured(tmp_path: Path) -> None:
    lite = LATENT | {"model_type": "deepseek_v2", "num_hidden_layers": 27}
    size = row_size(read_model_config(written(tmp_path, lite)), 2, 1)
    assert size.worker_bytes_per_block == 497_664
    assert (size.row_bytes_without_dedup, size.row_bytes) == (995_328, 499_712)
    assert size.model == "some-model"


@pytest.mark.parametrize(
    ("config", "dtype", "token_bytes", "groups"),
    [
        (LLAMA, None, 32 * 8 * 2 * 128 * 2, 1),
        (LLAMA, "fp8", 32 * 8 * 2 * 128, 1),
        (LLAMA | {"torch_dtype": "float32"}, None, 32 * 8 * 2 * 128 * 4, 1),
        (LLAMA | {"num_key_value_heads": None}, "fp16", 32 * 32 * 2 * 128 * 2, 1),
        (LLAMA | {"head_dim": 64}, None, 32 * 8 * 2 * 64 * 2, 1),
        (LLAMA | {"model_type": "mistral", "sliding_window": 4096}, None, 32 * 8 * 512, 1),
        (
            LLAMA | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
            None,
            32 * 8 * 512,
            1,
        ),
        (
            {
                "model_type": "gpt_bigcode",
                "n_layer": 40,
                "n_head": 48,
                "n_embd": 6144,
                "multi_query": True,
            },
            None,
            40 * 2 * 128 * 2,
            1,
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 60,
                "num_attention_heads": 128,
                "num_kv_heads": 8,
                "hidden_size": 8192,
                "multi_query": True,
                "new_decoder_architecture": True,
            },
            None,
            60 * 8 * 2 * 64 * 2,
            1,
        ),
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, None, 36864, 1),
        (LATENT, None, 61 * 576 * 2, 1),
        (LATENT, "fp8", 61 * 576, 1),
        (INDEXED, None, 61 * (576 * 2 + 132), 1),
        (INDEXED, "fp8", 61 * (656 + 132), 1),
        # 10 layers see everything, 52 have windows: groups of 10.
        (GEMMA, None, 10 * 16 * 2 * 128 * 2, 7),
        ({"model_type": "gemma3", "text_config": GEMMA}, None, 10 * 16 * 2 * 128 * 2, 7),
        (GPT_OSS, None, 12 * 8 * 2 * 64 * 2, 2),
        # 13 and 12 layers stand in groups of 13 rather than of 12.
        (
            GPT_OSS
            | {"num_hidden_layers": 25, "layer_types": [*GPT_OSS["layer_types"], "full_attention"]},
            None,
            13 * 8 * 2 * 64 * 2,
            2,
        ),
    ],
)
def test_plan_knows_the_kv_of_a_model(
    tmp_path: Path, config: dict[str, Any], dtype: str | None, token_bytes: int, groups: int
) -> None:
    model = read_model_config(written(tmp_path, config).parent, dtype, 16)
    size = row_size(model, 1, 1)
    assert size.worker_bytes_per_block == 16 * token_bytes
    assert size.groups == groups
    twice = row_size(read_model_config(written(tmp_path, config), dtype, 32), 1, 1)
    assert twice.worker_bytes_per_block == 2 * size.worker_bytes_per_block


def test_plan_takes_blocks_of_64_tokens_for_sparse_kernels(tmp_path: Path) -> None:
    assert read_model_config(written(tmp_path, INDEXED)).tokens_per_block == 64
    assert read_model_config(written(tmp_path, LATENT)).tokens_per_block == 16


def test_plan_counts_a_row_in_every_group(tmp_path: Path) -> None:
    size = row_size(read_model_config(written(tmp_path, GPT_OSS)), 1, 1)
    assert size.region_holds(2 * size.row_bytes) == size.tokens_per_chunk
    rows = size.disk_rows(10**10)
    assert size.disk_holds(10**10) == rows // 2 * size.tokens_per_chunk


def test_plan_weighs_the_row_of_each_group_on_disk(tmp_path: Path) -> None:
    """52 layers with windows in six groups: of 9 and of 8 layers, where 10 see everything."""
    size = row_size(read_model_config(written(tmp_path, GEMMA)), 1, 1)
    layer = 16 * 16 * 2 * 128 * 2
    assert [row // layer for row in size.rows] == [9, 9, 9, 9, 8, 8, 10]
    assert size.row_bytes == 10 * layer == max(size.rows)
    assert size.unit_bytes() * 16 == sum(size.rows) == 62 * layer
    padded = dataclasses.replace(size, rows=(size.row_bytes,) * 7)
    assert padded.disk_holds(10**12) < 0.9 * size.disk_holds(10**12)


def test_plan_shares_heads_that_several_ranks_hold(tmp_path: Path) -> None:
    model = read_model_config(written(tmp_path, LLAMA))
    by_tp = {tp: row_size(model, tp, 1) for tp in (1, 2, 8, 16)}
    assert len({size.row_bytes for size in by_tp.values()}) == 1
    assert [by_tp[tp].factor for tp in (1, 2, 8, 16)] == [1, 1, 1, 2]
    with pytest.raises(ConfigError, match="tp: expected a divisor or a multiple of 8"):
        row_size(model, 3, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba2"}, "model_type 'mamba2'.*recurrent state.*--worker-bytes"),
        ({"model_type": "jamba"}, "recurrent"),
        ({"model_type": "qwen3_next"}, "recurrent"),
        ({"model_type": "whisper"}, "encoder"),
        ({"model_type": "deepseek_v4"}, "--preset deepseek-v4-flash"),
        ({"model_type": "brand_new"}, "'brand_new'.*not among"),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma9"}}, "'gemma9'"),
        (GPT_OSS | {"layer_types": ["linear_attention"] * 24}, "layers of type linear_attention"),
        (INDEXED | {"model_type": "glm_moe_dsa", "index_topk_freq": 4}, "share an indexer"),
        (
            LLAMA | {"model_type": "qwen3", "sliding_window": 9, "use_sliding_window": True},
            "no layer_types",
        ),
        ({"architectures": ["X"]}, "no model_type"),
        ({"model_type": "llama"}, "num_hidden_layers|num_attention_heads"),
        (LLAMA | {"num_key_value_heads": [8] * 32}, "num_key_value_heads: expected a number"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers: expected a number above 0, got 0"),
        ([], "Expected `object`"),
    ],
)
def test_plan_refuses_in_one_line_what_it_does_not_understand(
    tmp_path: Path, config: Any, message: str
) -> None:
    path = written(tmp_path, config)
    with pytest.raises(PresetError, match=message) as caught:
        read_model_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_plan_refuses_a_file_that_is_not_there_and_a_dtype_that_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"config\.json: No such file"):
        read_model_config(tmp_path)
    with pytest.raises(ConfigError, match="--dtype: expected one of fp32, bf16, fp16, fp8"):
        read_model_config(written(tmp_path, LLAMA), "int3")
