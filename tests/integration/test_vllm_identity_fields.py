"""What the identity of a namespace covers, over vLLM's own configuration classes; no server."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.config import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from scripts.make_model import ensure_model
from storage.errors import ConfigError
from storage.namespace import Identity
from tests.integration.conftest import transfer_config
from tiering.rows import RowLayout, row_identity
from tiering.topology import LayerFacts, Parallelism
from tiering.vllm import identity as identity_module
from tiering.vllm.connector import KvtierConnector
from tiering.vllm.identity import display_name, identities
from tiering.weights import CONTENT, SAMPLED

KV_TRANSFER = transfer_config(Path("/nowhere"))


def engine_config(model: Path, **arguments: Any) -> Any:
    """As `vllm serve` makes it of a command line."""
    return EngineArgs(
        model=str(model),
        dtype=arguments.pop("dtype", "float32"),
        max_model_len=arguments.pop("max_model_len", 1024),
        block_size=32,
        enforce_eager=True,
        kv_transfer_config=dict(KV_TRANSFER),
        **arguments,
    ).create_engine_config()


def fingerprint(config: Any, **how: Any) -> str:
    found: str = identity_of(config, **how).fingerprint
    return found


def identity_of(
    config: Any,
    *,
    layout: RowLayout | None = None,
    kv_layout: str = "LBHNC",
    weights: str = SAMPLED,
) -> Any:
    config.cache_config.kv_cache_layout = kv_layout
    dtype = config.model_config.dtype
    spec = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=dtype)
    groups = [KVCacheGroupSpec(["layers.0", "layers.1"], spec)]
    kv_cache_config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    offloading = build_offloading_config(config, kv_cache_config)
    [identity] = identities(config, offloading, layout or row_layout(), weights)
    return identity


def row_layout(
    tp: int = 1, shards: int | None = 1, blocks_per_chunk: int = 1, page_bytes: int = 512
) -> RowLayout:
    layers = [LayerFacts(f"layers.{n}", page_bytes, shards) for n in range(2)]
    return RowLayout.of(layers, Parallelism(tp=tp, world_size=tp), blocks_per_chunk)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that tests may change, one at a time, and leave as it was."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    shutil.copytree(ensure_model("tiny-llama"), directory)
    return directory


@pytest.fixture(scope="module")
def made(model: Path) -> Any:
    return engine_config(model)


@pytest.fixture
def config(made: Any) -> Any:
    return copy.deepcopy(made)


OTHER_BYTES: dict[str, Callable[[Any], object]] = {
    "dtype": lambda c: setattr(c.model_config, "dtype", torch.bfloat16),
    "quantization": lambda c: setattr(c.model_config, "quantization", "fp8"),
    "quantized layers": lambda c: setattr(c.model_config, "quantization_config", {"ignore": "a"}),
    "rope theta": lambda c: c.model_config.hf_config.rope_parameters.update(rope_theta=5e5),
    "rope scaling": lambda c: c.model_config.hf_config.rope_parameters.update(
        rope_type="yarn", factor=2.0
    ),
    "attention bias": lambda c: setattr(c.model_config.hf_config, "attention_bias", True),
    "norm": lambda c: setattr(c.model_config.hf_config, "rms_norm_eps", 1e-3),
    "sliding window": lambda c: setattr(c.model_config.hf_config, "sliding_window", 64),
    "sliding window off": lambda c: setattr(c.model_config, "disable_sliding_window", True),
    "runner": lambda c: setattr(c.model_config, "runner_type", "pooling"),
    "convert": lambda c: setattr(c.model_config, "convert", "embed"),
    "model_impl": lambda c: setattr(c.model_config, "model_impl", "transformers"),
    "model class": lambda c: setattr(c.model_config, "model_class_overrides", {"A": "m:B"}),
    "kv_cache_dtype": lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e4m3"),
    "kv_cache_dtype, another fp8": lambda c: setattr(c.cache_config, "cache_dtype", "fp8_e5m2"),
    "layers without fp8": lambda c: setattr(c.cache_config, "kv_cache_dtype_skip_layers", ["0"]),
    "mamba state": lambda c: setattr(c.cache_config, "mamba_ssm_cache_dtype", "float16"),
    "mamba mode": lambda c: setattr(c.cache_config, "mamba_cache_mode", "align"),
    "mamba rounding": lambda c: setattr(c.mamba_config, "enable_stochastic_rounding", True),
    "hash algorithm": lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
    "dummy weights": lambda c: setattr(c.load_config, "load_format", "dummy"),
    "weights left out": lambda c: setattr(c.load_config, "ignore_patterns", ["a*"]),
    "attention backend": lambda c: setattr(c.attention_config, "backend", a_backend()),
    "non-causal": lambda c: setattr(c.attention_config, "use_non_causal", True),
    "indexer": lambda c: setattr(c.attention_config, "indexer_kv_dtype", "fp8"),
    "diffusion": lambda c: setattr(c, "diffusion_config", {"canvas_length": 8}),
    "platform's own": lambda c: setattr(c, "additional_config", {"torchair": True}),
    "remote code": lambda c: setattr(c.model_config, "trust_remote_code", True),
}  # fmt: skip


def a_backend() -> Any:
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    return registry.AttentionBackendEnum.FLEX_ATTENTION


@pytest.mark.parametrize("what", OTHER_BYTES)
def test_identity_tells_apart_what_shapes_the_bytes(config: Any, what: str) -> None:
    before = fingerprint(config)
    OTHER_BYTES[what](config)
    assert fingerprint(config) != before


SAME_BYTES: dict[str, Callable[[Any], object]] = {
    "max_num_seqs": lambda c: setattr(c.scheduler_config, "max_num_seqs", 3),
    "chunked prefill": lambda c: setattr(c.scheduler_config, "max_num_batched_tokens", 64),
    "async scheduling": lambda c: setattr(c.scheduler_config, "async_scheduling", True),
    "served name": lambda c: setattr(c.model_config, "served_model_name", "other"),
    "memory": lambda c: setattr(c.cache_config, "gpu_memory_utilization", 0.3),
    "blocks": lambda c: setattr(c.cache_config, "num_gpu_blocks_override", 9),
    "context": lambda c: setattr(c.model_config, "max_model_len", 2048),
    "seed": lambda c: setattr(c.model_config, "seed", 7),
    "eager": lambda c: setattr(c.model_config, "enforce_eager", False),
    "tokenizer": lambda c: setattr(c.model_config, "tokenizer", "elsewhere"),
    "generation": lambda c: setattr(
        c.model_config, "override_generation_config", {"temperature": 0.5}
    ),
    "logprobs": lambda c: setattr(c.model_config, "max_logprobs", 5),
    "kv_role": lambda c: setattr(c.kv_transfer_config, "kv_role", "kv_producer"),
    "engine_id": lambda c: setattr(c.kv_transfer_config, "engine_id", "other"),
    "data parallel rank": lambda c: setattr(c.parallel_config, "data_parallel_index", 1),
    "executor": lambda c: setattr(c.parallel_config, "distributed_executor_backend", "mp"),
    "prefix caching on the device": lambda c: setattr(
        c.cache_config, "enable_prefix_caching", False
    ),
    "drafts without a model": lambda c: setattr(
        c,
        "speculative_config",
        types.SimpleNamespace(draft_model_config=c.model_config, method="ngram"),
    ),
}


@pytest.mark.parametrize("what", SAME_BYTES)
def test_identity_leaves_out_what_shapes_nothing(config: Any, what: str) -> None:
    before = fingerprint(config)
    SAME_BYTES[what](config)
    assert fingerprint(config) == before


def test_identity_covers_the_row(config: Any) -> None:
    plain = fingerprint(config)
    others = [row_layout(blocks_per_chunk=2), row_layout(page_bytes=1024), row_layout(2, None)]
    assert len({plain, *(fingerprint(config, layout=other) for other in others)}) == 4
    assert fingerprint(config, layout=row_layout(tp=2)) == plain, "single copies carry over"
    assert fingerprint(config, kv_layout="LBNHC") != plain
    assert row_identity(row_layout()) == row_identity(row_layout(tp=2))


def test_identity_knows_no_rows_of_chunks_that_were_stored_in_part(config: Any) -> None:
    """As stores have them from before chunks of several blocks were stored whole or not at all."""
    fields = identity_of(config, layout=row_layout(blocks_per_chunk=2)).fields
    assert fields["chunks"] == "whole"
    before = {name: value for name, value in fields.items() if name != "chunks"}
    assert Identity("model", fields).fingerprint != Identity("model", before).fingerprint
    assert "chunks" not in identity_of(config).fields, "of one block: what is there is found"


def test_identity_resolves_dtype_auto(model: Path) -> None:
    """The dtype that "auto" comes to counts, not the word."""
    auto = engine_config(model, dtype="auto")
    named = engine_config(model, dtype=str(auto.model_config.dtype).removeprefix("torch."))
    assert fingerprint(auto) == fingerprint(named)


def test_identity_takes_hf_overrides_as_they_come_out(model: Path, config: Any) -> None:
    rope = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    overridden = fingerprint(engine_config(model, hf_overrides=rope))
    assert overridden != fingerprint(config)
    config.model_config.hf_config.rope_parameters.update(rope["rope_parameters"])
    assert fingerprint(config) == overridden, "however it came about"


def test_identity_covers_the_context_where_it_chooses_the_rope(config: Any) -> None:
    config.model_config.hf_config.rope_parameters.update(rope_type="longrope")
    before = fingerprint(config)
    config.model_config.max_model_len = 4096
    assert fingerprint(config) != before


def test_identity_follows_the_weights_and_not_the_path(
    model: Path, config: Any, tmp_path: Path
) -> None:
    before = identity_of(config)
    moved = tmp_path / "another name"
    shutil.copytree(model, moved)
    elsewhere = identity_of(engine_config(moved))
    assert elsewhere.fingerprint == before.fingerprint
    assert elsewhere.directory == before.directory
    change_last_byte(moved / "model.safetensors")
    assert fingerprint(engine_config(moved)) != before.fingerprint


def change_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        byte = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))


def test_identity_of_made_weights_follows_the_ranks_that_make_them(
    model: Path, tmp_path: Path
) -> None:
    """Rows of single copies carry over between ranks of one model, and these are two."""
    shutil.copy(model / "config.json", tmp_path)  # and no weights
    config = engine_config(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    found = set()
    for ranks in (1, 1, 2):
        config.parallel_config.tensor_parallel_size = ranks
        found.add(fingerprint(config, layout=row_layout(tp=ranks)))
    assert len(found) == 2
    config.model_config.quantization = "awq"  # integers, which nobody sets to anything
    assert fingerprint(config) != fingerprint(config)


def test_identity_follows_the_code_that_comes_with_a_model(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    (directory / "modeling.py").write_text("a = 1")
    trusted = engine_config(directory, trust_remote_code=True)
    before = fingerprint(trusted)
    (directory / "modeling.py").write_text("a = 2")
    assert fingerprint(trusted) != before


def test_identity_follows_the_draft_model(model: Path, config: Any, tmp_path: Path) -> None:
    """Its KV stands in the same rows."""
    draft = tmp_path / "draft"
    shutil.copytree(model, draft)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    drafted = engine_config(model, speculative_config=speculative)
    before = fingerprint(drafted)
    assert before != fingerprint(config)
    more = engine_config(model, speculative_config={**speculative, "num_speculative_tokens": 3})
    assert fingerprint(more) == before
    change_last_byte(draft / "model.safetensors")
    assert fingerprint(drafted) != before
    plain = fingerprint(config)
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert fingerprint(engine_config(model, speculative_config=ngram)) == plain


def test_identity_covers_multimodal_processing(config: Any, tmp_path: Path) -> None:
    kind = importlib.import_module("vllm.config.multimodal").MultiModalConfig
    found = set()
    for changes in ({}, {"video_pruning_rate": 0.5}, {"mm_hasher_algorithm": "sha256"}):
        config.model_config.multimodal_config = kind(**changes)
        found.add(fingerprint(config))
    assert len(found) == 3
    scales = tmp_path / "scales.json"
    for content in ("1", "2"):
        scales.write_text(content)
        config.model_config.multimodal_config = kind()
        config.model_config.multimodal_config.mm_encoder_fp8_scale_path = str(scales)
        found.add(fingerprint(config))
    assert len(found) == 5, "by what the file holds"
    scales.unlink()
    with pytest.raises(ConfigError, match="a file that can be read"):
        fingerprint(config)


def test_identity_refuses_what_it_cannot_establish(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        fingerprint(config)
    config.cache_config.prefix_caching_hash_algo = "sha256"
    config.additional_config = {"what": object()}
    with pytest.raises(ConfigError, match="values that can be compared"):
        fingerprint(config)
    config.additional_config = {}
    config.model_config.model = "org/model"
    with pytest.raises(ConfigError, match="--revision: expected a commit"):
        fingerprint(config)
    config.model_config.revision = "3f2a"
    assert identity_of(config).fields["weights"] == "commit 3f2a"


def test_identity_follows_the_seed_of_the_hashes(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = set()
    for seed in (None, "0", "1"):
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        found.add(fingerprint(config))
    assert len(found) == 3


def test_identity_by_content_is_another(config: Any) -> None:
    sampled, content = identity_of(config), identity_of(config, weights=CONTENT)
    assert sampled.fields["weights"].startswith("sampled ")
    assert content.fields["weights"].startswith("content ")
    assert content.fingerprint != sampled.fingerprint


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("org/model", "org/model"),
        ("{dir}/my-model", "my-model"),
        ("{dir}/models--org--some--model/snapshots/3f2a", "org/some--model"),
    ],
)
def test_identity_has_a_name_for_people(tmp_path: Path, path: str, name: str) -> None:
    model = path.format(dir=tmp_path)
    if model != path:
        Path(model).mkdir(parents=True)
    assert display_name(types.SimpleNamespace(model=model)) == name


def test_identity_of_weights_that_come_later_is_refused(config: Any) -> None:
    config.weight_transfer_config = object()
    with pytest.raises(ConfigError, match="--weight-transfer-config: expected none where a disk"):
        fingerprint(config)


def test_spec_of_a_second_engine_of_the_node_needs_a_root_of_its_own(config: Any) -> None:
    """However vLLM was told of the engines: in one that serves a model without experts, nothing
    but its own rank is left of it."""
    config.parallel_config.data_parallel_index = 3
    config.parallel_config.data_parallel_rank_local = 0
    KvtierConnector.get_required_kvcache_layout(config)
    config.parallel_config.data_parallel_rank_local = 1
    with pytest.raises(ConfigError, match=r"\.disk\.root: expected a root for each of the 2"):
        KvtierConnector.get_required_kvcache_layout(config)
    config.kv_transfer_config.kv_connector_extra_config["disk"]["root"] = "/nowhere/{dp_rank}"
    KvtierConnector.get_required_kvcache_layout(config)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"pooler_config": PoolerConfig(seq_pooling_type="LAST")}, None),
        (
            {"pooler_config": PoolerConfig(seq_pooling_type="MEAN")},
            "LlamaForCausalLM, decoder, which pools by MEAN",
        ),
        (
            {
                "pooler_config": PoolerConfig(seq_pooling_type="MEAN"),
                "enable_prefix_caching": True,
            },
            "LlamaForCausalLM, decoder, which pools by MEAN",
        ),
        (
            {"hf_overrides": {"is_causal": False}},
            "LlamaForCausalLM, encoder_only, which pools by LAST",
        ),
    ],
)
def test_spec_of_a_model_that_cannot_go_on_from_a_prefix_is_refused(
    model: Path, arguments: dict[str, Any], found: str | None
) -> None:
    """A mean over the tokens behind a prefix is not that of the prompt."""
    config = engine_config(model, runner="pooling", **arguments)
    if found is None:
        KvtierConnector.get_required_kvcache_layout(config)
        return
    with pytest.raises(ConfigError) as refused:
        KvtierConnector.get_required_kvcache_layout(config)
    assert str(refused.value) == (
        "--kv-transfer-config: expected none, or a model of which vLLM can reuse a prefix's KV, "
        f"got '{found}'"
    )


# -- every field of vLLM's classes is judged ------------------------------------------------------

# Those whose value stands in the identity in another form.
RESOLVED = {
    "VllmConfig": "model_config cache_config load_config attention_config mamba_config lora_config "
    "speculative_config diffusion_config quant_config kv_transfer_config additional_config "
    "weight_transfer_config",
    "ModelConfig": "model revision dtype hf_config hf_text_config quantization runner seed "
    "max_model_len trust_remote_code code_revision hf_overrides hf_config_path multimodal_config "
    "override_generation_config generation_config",
    "CacheConfig": "block_size kv_cache_layout cache_dtype prefix_caching_hash_algo "
    "prefix_match_unit hash_block_size sliding_window mamba_block_size "
    "mamba_page_size_padded skip_page_size_padded",
    "LoadConfig": "",
    "AttentionConfig": "backend",
    "MambaConfig": "",
    # The first two are in each item's hash.
    "MultiModalConfig": "mm_processor_kwargs media_io_kwargs mm_encoder_fp8_scale_path",
    "SpeculativeConfig": "model method quantization revision code_revision draft_model_config "
    "draft_load_config target_model_config",
    "LoRAConfig": "lora_dtype target_modules enable_tower_connector_lora",  # in an adapter's salt
}

# Those that change how fast, how many, where or what is sampled; and the last digits at most.
SHAPES_NOTHING = {
    "VllmConfig": "parallel_config scheduler_config device_config offload_config "  # row, platform
    "aux_output_config engram_config kernel_config watermark_config structured_outputs_config "
    "observability_config logging_config compilation_config profiler_config kv_events_config "
    "ec_transfer_config ec_manager_config reasoning_config instance_id optimization_level "
    "performance_mode shutdown_timeout watchdog_config",
    "ModelConfig": "model_weights tokenizer tokenizer_mode is_submodel_config "
    "word_embeddings_untied_by_checkpoint allowed_local_media_path allowed_media_domains "
    "tokenizer_revision spec_target_max_model_len allow_deprecated_quantization enforce_eager "
    "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay "
    "disable_cascade_attn skip_tokenizer_init enable_prompt_embeds served_model_name hf_token "
    "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend "
    "sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator "
    "logits_processors io_processor_plugin renderer_num_workers pooler_config",
    "CacheConfig": "user_specified_block_size gpu_memory_utilization is_attention_free "
    "num_gpu_blocks_override enable_prefix_caching prefix_cache_retention_interval "
    "enable_mamba_shared_prefix_checkpoint replayssm_buffer_len num_gpu_blocks num_cpu_blocks "
    "effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency "
    "cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
    "_block_size_resolved simple_cpu_offload_num_blocks",
    "LoadConfig": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    "AttentionConfig": "minimax_m3_msa_decode_backend flash_attn_max_num_splits_for_cuda_graph "
    "tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph "
    "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
    "flex_attn_q_block_size flex_attn_kv_block_size indexer_tp_shard_min_rows "
    "minimax_m3_indexer_cp trtllm_ragged_backend",
    "MambaConfig": "stochastic_rounding_philox_rounds ssu_algorithm",
    "MultiModalConfig": "language_model_only limit_per_prompt enable_mm_embeds "
    "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb "
    "mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_fp8_scale_save_path "
    "mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling mm_tensor_ipc "
    "mm_ipc_gpu_memory_gb",
    "SpeculativeConfig": "enforce_eager num_speculative_tokens draft_tensor_parallel_size "
    "tensor_parallel_size moe_backend max_model_len index_share_for_mtp_iteration "
    "disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction "
    "use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min target_parallel_config "
    "num_speculative_tokens_per_batch_size draft_parallel_config suffix_decoding_max_tree_depth "
    "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
    "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
    "synthetic_acceptance_length enable_adaptive_verification draft_sample_method "
    "dspark_draft_topk disable_lookahead_block_hashes draft_lm_head_quantization "
    "fly_entropy_threshold fly_entropy_top_k fly_window_size xpress_topc",
    "LoRAConfig": "max_lora_rank max_loras fully_sharded_loras max_cpu_loras default_mm_loras "
    "specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras "
    "max_lora_cls_labels",
}

LISTED: dict[str, tuple[str, ...]] = {
    "VllmConfig": (),
    "ModelConfig": identity_module.MODEL_FIELDS,
    "CacheConfig": identity_module.CACHE_FIELDS,
    "LoadConfig": identity_module.LOAD_FIELDS,
    "AttentionConfig": identity_module.ATTENTION_FIELDS,
    "MambaConfig": identity_module.MAMBA_FIELDS,
    "MultiModalConfig": identity_module.MULTIMODAL_FIELDS,
    "SpeculativeConfig": identity_module.SPECULATIVE_FIELDS,
    "LoRAConfig": (),
}


@pytest.mark.parametrize("kind", LISTED)
def test_identity_knows_every_field_of_vllm(kind: str) -> None:
    """A field that a new version brings is judged before that version is served."""
    module = re.sub("Config$", "", kind).lower()
    there = {f.name for f in dataclasses.fields(
        getattr(importlib.import_module(f"vllm.config.{module}"), kind)
    )}  # fmt: skip
    named = [*LISTED[kind], *RESOLVED[kind].split(), *SHAPES_NOTHING[kind].split()]
    assert len(named) == len(set(named)), "judged twice"
    assert there - set(named) == set(), "new"
    assert set(LISTED[kind]) <= there, "gone"


def test_identity_has_values_that_are_empty_where_the_default_is_not() -> None:
    @dataclasses.dataclass
    class Config:
        steps: int = 1
        kinds: str = "all"
        flag: bool | None = None
        names: dict[str, int] | None = None

    changed = identity_module._changed
    names = ("steps", "kinds", "flag", "names")
    assert changed(Config(), names) == {}
    assert changed(Config(names={}), names) == {}
    assert changed(Config(steps=0), names) == {"steps": 0}
    assert changed(Config(kinds=""), names) == {"kinds": ""}
    assert changed(Config(flag=False), names) == {"flag": False}
