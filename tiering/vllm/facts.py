"""From vLLM's configuration to ours: parallelism, per-layer facts, identity.  Decides nothing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from storage.errors import ConfigError
from storage.namespace import Identity, Json
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism
from tiering.weights import weights_fingerprint

ROW_FORMAT = 1  # of the bytes in a row; raised when `RowLayout` would place them elsewhere


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a connector sees and a spec does not.

    `layers` maps layer names to facts.  On workers they are each layer's own; in the scheduler a
    group of unlike layers is flattened to one of them, so the scheduler takes its row layout from
    the region instead.
    """

    parallel: Parallelism
    layers: Mapping[str, LayerFacts]
    group_layers: tuple[tuple[str, ...], ...]
    """Layer names of each offloaded KV-cache group."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
        groups = [
            kv_cache_config.kv_cache_groups[group_id]
            for group_id in get_offloading_group_ids(kv_cache_config)
        ]
        layers = {
            name: _layer_facts(name, spec)
            for group in kv_cache_config.kv_cache_groups
            for name, spec in _layer_specs(group)
        }
        names = tuple(tuple(group.layer_names) for group in groups)
        return cls(parallelism(vllm_config.parallel_config), layers, names)


def parallelism(parallel_config: Any) -> Parallelism:
    """How vLLM divides the model.  Only its `mp` and `uni` executors run ranks as processes of
    this node that can share a region."""
    single = parallel_config.world_size == 1
    is_local = parallel_config.nnodes_within_dp == 1
    return Parallelism(
        tp=parallel_config.tensor_parallel_size,
        pp=parallel_config.pipeline_parallel_size,
        dcp=parallel_config.decode_context_parallel_size,
        pcp=parallel_config.prefill_context_parallel_size,
        world_size=parallel_config.world_size,
        shares_region=single
        or (is_local and parallel_config.distributed_executor_backend in ("mp", "uni")),
    )


def _layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    spec = group.kv_cache_spec
    own = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    for name in group.layer_names:
        yield name, own.get(name, spec)


def _layer_facts(name: str, spec: Any) -> LayerFacts:
    return LayerFacts(
        name=name,
        page_bytes=spec.page_size_bytes,
        max_tp_shards=getattr(spec, "max_tp_shards", None),
        context_sharded=getattr(spec, "dcp_sharded", True),
    )


def row_layers(facts: EngineFacts, kv_caches: Any) -> list[LayerFacts]:
    """The layers of the row: one per canonical tensor, in the order of `kv_caches.tensors`.

    Layers that share a tensor are taken as replicated only if all of them are, alike.
    """
    names: list[list[str]] = [[] for _ in kv_caches.tensors]
    for group_names, refs in zip(facts.group_layers, kv_caches.group_data_refs, strict=True):
        if len(refs) == len(group_names):
            for name, ref in zip(group_names, refs, strict=True):
                names[ref.tensor_idx].append(name)
        else:  # packed: whole blocks of all layers in one tensor
            for ref in refs:
                names[ref.tensor_idx] += group_names
    return [
        _merge([facts.layers[name] for name in tensor_names], tensor.page_size_bytes)
        for tensor_names, tensor in zip(names, kv_caches.tensors, strict=True)
    ]


def _merge(layers: list[LayerFacts], page_bytes: int) -> LayerFacts:
    shards = {layer.max_tp_shards for layer in layers}
    return LayerFacts(
        name=" ".join(layer.name for layer in layers),
        page_bytes=page_bytes,
        max_tp_shards=shards.pop() if len(shards) == 1 else None,
        context_sharded=any(layer.context_sharded for layer in layers),
    )


def identity(vllm_config: Any, offloading_config: Any, layout: RowLayout) -> Identity:
    """What shapes the bytes of a row, as far as vLLM tells.

    Raises `ConfigError` naming what can't be established.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    fields: dict[str, Json] = {
        "engine": f"vllm {vllm_version}",
        "row_format": ROW_FORMAT,
        "weights": _weights(model),
        "config": _config_digest(model.hf_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "kv_cache_dtype": offloading_config.model.dtype,
        "kv_cache_layout": offloading_config.kv_cache_layout,
        "platform": f"{current_platform.device_type} {current_platform.get_device_name()}",
        "attention_backend": str(vllm_config.attention_config.backend),
        "model_runner": 2 if vllm_config.use_v2_model_runner else 1,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": _hash_seed(cache.prefix_caching_hash_algo),
        "tokens_per_hash": offloading_config.cache.tokens_per_hash,
        "tokens_per_block": [group.tokens_per_block for group in offloading_config.groups],
        "blocks_per_chunk": layout.blocks_per_chunk,
        "groups": [list(group.layer_names) for group in offloading_config.groups],
        "layers": [[layer.name, layer.page_bytes, layer.shards] for layer in layout.layers],
        "ranks": layout.ranks if layout.depends_on_ranks else None,
    }
    return Identity(_display_name(model), fields)


def _display_name(model: Any) -> str:
    """The model's name: of a local directory its last part, since the path shapes no byte."""
    name = str(model.model)
    return Path(name).name if Path(name).is_dir() else name


def _weights(model: Any) -> str:
    directory = Path(str(model.model))
    if directory.is_dir():
        return f"files {weights_fingerprint(directory)}"
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if not commit:
        raise ConfigError(
            "--revision", "a commit of the model, or a local directory", str(model.model)
        )
    return f"commit {commit}"


def _config_digest(hf_config: Any) -> str:
    """Of the model's own configuration: RoPE, attention and all; not of where it lies."""
    plain = {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_ABOUT_BYTES}
    encoded = json.dumps(plain, sort_keys=True, default=str)  # it takes dicts with integer keys
    return hashlib.sha256(encoded.encode()).hexdigest()[:32]


_NOT_ABOUT_BYTES = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})


def _hash_seed(algorithm: str) -> str | None:
    """The seed of vLLM's block hashes.  Without PYTHONHASHSEED sha256 has a fixed one; the others
    draw one per process, so that nothing stored would ever be found again."""
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and not algorithm.startswith("sha256"):
        raise ConfigError(
            "PYTHONHASHSEED", f"a fixed seed, for --prefix-caching-hash-algo {algorithm}", seed
        )
    return seed
