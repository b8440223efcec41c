"""From vLLM's configuration to a namespace's identity: all that shapes the bytes of a row.

What is in it is listed by name, field by field of vLLM's configuration: a test knows every field,
those that shape nothing too, and fails when a version of vLLM brings one that nobody has judged.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform

from storage.errors import ConfigError
from storage.namespace import Identity, Json
from tiering.rows import RowLayout, row_identity
from tiering.weights import SAMPLED, weights_fingerprint

ROW_FORMAT = 2  # of the bytes in a row; raised when `RowLayout` would place them elsewhere

# Fields that shape bytes and aren't resolved into one of the values below.  One that stands at
# vLLM's default is left out, so that what people compare is short.
MODEL_FIELDS = (
    "quantization_config",
    "disable_sliding_window",
    "model_class_overrides",
    "model_impl",
    "convert",
    "config_format",
)
CACHE_FIELDS = (
    "kv_cache_dtype_skip_layers",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "mamba_cache_mode",
    "use_replayssm",
    "use_kda_recoverssm",
    "kv_sharing_fast_prefill",
    "swa_bounded_replay",
)
LOAD_FIELDS = ("load_format", "model_loader_extra_config", "ignore_patterns")
ATTENTION_FIELDS = (
    "backend_per_kind",
    "flash_attn_version",
    "use_trtllm_attention",
    "disable_flashinfer_q_quantization",
    "mla_prefill_backend",
    "use_prefill_query_quantization",
    "indexer_kv_dtype",
    "indexer_sparse_logits",
    "hisparse_config",
    "use_non_causal",
    "sparse_mla_force_mqa",
)
MAMBA_FIELDS = ("backend", "enable_stochastic_rounding")
MULTIMODAL_FIELDS = (
    "mm_hasher_algorithm",
    "mm_encoder_attn_dtype",
    "mm_device_do_normalize",
    "video_pruning_rate",
    "video_pruning_method",
    "allow_missing_mm_embeddings",
)
SPECULATIVE_FIELDS = ("attention_backend", "kv_cache_dtype", "parallel_drafting")


def identities(
    vllm_config: Any, offloading_config: Any, layout: RowLayout, weights: str = SAMPLED
) -> list[Identity]:
    """What shapes the bytes of a row, as far as vLLM tells: for each of `layout.kinds()`.

    `weights` is how weight files are compared, one of `WEIGHTS_FINGERPRINTS`.  Raises `ConfigError`
    naming what can't be established.
    """
    rows: dict[str, Json] = {
        "row_format": ROW_FORMAT,
        "blocks_per_chunk": layout.blocks_per_chunk,
    }
    if layout.blocks_per_chunk > 1:
        # There were rows under the name of a chunk that a window had left in part: what stands in
        # the rest of them is anybody's, and their checksums agree.
        rows["chunks"] = "whole"
    common = identity_of_rows(vllm_config, offloading_config, rows, weights)
    return [
        replace(common, fields={**common.fields, **row_identity(layout, kind)})
        for kind in layout.kinds()
    ]


def identity_of_rows(
    vllm_config: Any,
    offloading_config: Any,
    rows: Mapping[str, Json],
    weights: str = SAMPLED,
) -> Identity:
    """As `identities`, of rows whose own layout `rows` describes."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    if vllm_config.weight_transfer_config is not None:
        raise ConfigError(
            "--weight-transfer-config",
            "none where a disk keeps KV: weights that come while the engine runs are not those of "
            "the files that its rows are known by",
            "one",
        )
    values: dict[str, Json] = {
        "engine": f"vllm {vllm_version}",
        **_model_identity(vllm_config, model, vllm_config.load_config, weights),
        "draft": _draft_identity(vllm_config, weights),
        "kv_cache_dtype": offloading_config.model.dtype,
        "kv_cache_layout": offloading_config.kv_cache_layout,
        "platform": f"{current_platform.device_type} {current_platform.get_device_name()}",
        "attention_backend": plain_value(vllm_config.attention_config.backend),
        "attention": _changed(vllm_config.attention_config, ATTENTION_FIELDS),
        "cache": _changed(cache, CACHE_FIELDS),
        "mamba": _changed(vllm_config.mamba_config, MAMBA_FIELDS),
        "diffusion": plain_value(vllm_config.diffusion_config),
        "additional_config": plain_value(vllm_config.additional_config or {}),
        "model_runner": 2 if vllm_config.use_v2_model_runner else 1,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": _hash_seed(cache.prefix_caching_hash_algo),
        "tokens_per_hash": offloading_config.cache.tokens_per_hash,
        "tokens_per_block": [group.tokens_per_block for group in offloading_config.groups],
        "groups": [list(group.layer_names) for group in offloading_config.groups],
        **rows,
    }
    architectures = getattr(model.hf_config, "architectures", None) or ["model"]
    return Identity(architectures[0], values, element_bytes(offloading_config.model.dtype))


def element_bytes(kv_cache_dtype: str) -> int:
    """Of the KV's numbers.  Formats that pack or mix them (fp8, int4, ...) are taken by bytes."""
    dtype = getattr(torch, kv_cache_dtype, None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 1


def _model_identity(vllm_config: Any, model: Any, load: Any, weights: str) -> dict[str, Json]:
    is_read = load.load_format != "dummy"
    values: dict[str, Json] = {
        "weights": _weights(model, weights) if is_read else "dummy",
        "load": _changed(load, LOAD_FIELDS),
        "config": _config_digest(model.hf_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "runner": model.runner_type,
        "model": _changed(model, MODEL_FIELDS),
        "context": _context(model),
    }
    if model.trust_remote_code:
        values["code"] = _code(model)
    if not is_read:
        values["made"] = _made_weights(vllm_config.parallel_config, model)
    if model.multimodal_config is not None:
        values["multimodal"] = _changed(model.multimodal_config, MULTIMODAL_FIELDS)
        values["encoder_scales"] = _file_digest(model.multimodal_config.mm_encoder_fp8_scale_path)
    return values


def _draft_identity(vllm_config: Any, weights: str) -> Json:
    """Of the model that drafts, whose KV stands in the same rows; None if there is none."""
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    # Methods that draft without a model name the target's own.
    if draft is None or draft is vllm_config.model_config:
        return None
    load = speculative.draft_load_config or vllm_config.load_config
    return {
        "method": speculative.method,
        **_model_identity(vllm_config, draft, load, weights),
        "speculative": _changed(speculative, SPECULATIVE_FIELDS),
    }


def _context(model: Any) -> Json:
    """What `--max-model-len` changes in the bytes: nothing, but for models that choose RoPE factors
    (LongRoPE) or an attention temperature (Llama 4) by it.  None for all others."""
    described = json.dumps(_config_values(model.hf_config), default=str)
    if '"longrope"' not in described and '"llama4' not in described:
        return None
    generation = {
        **(model.try_get_generation_config() or {}),
        **(model.override_generation_config or {}),
    }
    return [model.max_model_len, plain_value(generation.get("attn_temperature_tuning"))]


def display_name(model: Any) -> str:
    """The model's name, for people: the path of a local directory shapes no byte."""
    path = Path(str(model.model))
    if not path.is_dir():
        return path.name if path.is_file() else str(path)
    repository = path.parents[1].name if path.parent.name == "snapshots" else ""
    if repository.startswith("models--"):  # the cache of the hub
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.resolve().name


def _weights(model: Any, how: str) -> str:
    path = Path(str(model.model))
    if path.exists():
        return weights_fingerprint(path, how)
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not commit:
        raise ConfigError(
            "--revision", "a commit of the model, or a local directory", str(model.model)
        )
    return f"commit {commit}"


def _made_weights(parallel: Any, model: Any) -> Json:
    """Of weights that vLLM makes instead of reading them.  Each rank makes its own part as if it
    were the whole, so that another number of ranks is another model; and integers, those of a
    quantised one, are whatever stood in memory, so that each start is."""
    made: list[Json] = [
        model.seed,
        parallel.tensor_parallel_size,
        parallel.data_parallel_size,
        parallel.enable_expert_parallel,
    ]
    return made if model.quantization is None else [*made, os.urandom(16).hex()]


def _code(model: Any) -> Json:
    """Of the code that comes with a model."""
    digest = hashlib.sha256()
    for path in sorted(Path(str(model.model)).rglob("*.py")):  # none of a model on the hub
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return [digest.hexdigest()[:32], plain_value(model.code_revision)]


def _file_digest(path: str | None) -> Json:
    """Of a file that vLLM's configuration names.  Raises `ConfigError` if it can't be read."""
    if path is None:
        return None
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError as exc:
        raise ConfigError("vLLM's configuration", "a file that can be read", str(exc)) from exc


def _config_digest(hf_config: Any) -> str:
    """Of the model's own configuration: RoPE, attention and all; not of where it lies."""
    encoded = json.dumps(_config_values(hf_config), sort_keys=True, default=str)
    return hashlib.sha256(encoded.encode()).hexdigest()[:32]


def _config_values(hf_config: Any) -> dict[str, Any]:
    return {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_ABOUT_BYTES}


_NOT_ABOUT_BYTES = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})


def _changed(config: Any, names: Iterable[str]) -> dict[str, Json]:
    """Those of the named fields of a configuration of vLLM that aren't at its defaults."""
    defaults = {field.name: field.default for field in fields(config)}
    found = {}
    for name in names:
        value, default = getattr(config, name), defaults[name]
        # Nothing instead of nothing, such as {} for None, changes nothing; False may, and 0 for 1.
        is_nothing = not value and value is not False and (default is MISSING or not default)
        if value != default and not is_nothing:
            found[name] = plain_value(value)
    return found


def plain_value(value: Any) -> Json:
    """As JSON that is the same in every process.  Raises `ConfigError` for an object whose text
    would be another each time."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): plain_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(str(plain_value(v)) for v in value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if is_dataclass(value):
        return {f.name: plain_value(getattr(value, f.name)) for f in fields(value)}
    text = str(value)
    if " at 0x" in text:
        raise ConfigError("vLLM's configuration", "values that can be compared", text)
    return text


def _hash_seed(algorithm: str) -> str | None:
    """The seed of vLLM's block hashes.  Without PYTHONHASHSEED sha256 has a fixed one; the others
    draw one per process, so that nothing stored would ever be found again."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and not algorithm.startswith("sha256"):
        raise ConfigError(
            "PYTHONHASHSEED", f"a fixed seed, for --prefix-caching-hash-algo {algorithm}", seed
        )
    return seed
