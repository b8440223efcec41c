"""From vLLM's configuration to ours: parallelism and per-layer facts.  Decides nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tiering.topology import KvHeads, LayerFacts, Parallelism


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
    kv_heads: int | None = None
    """KV heads of every head-sharded layer of the engine, each counted once, where all of them
    are known to have as many."""
    block_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens in a page of each layer that holds KV heads and nothing else."""
    tokens_first: bool | None = None
    """Whether a page holds, token after token, all heads, or head after head all tokens."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, *, dedup: bool = True) -> EngineFacts:
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
        parallel = parallelism(vllm_config.parallel_config, dedup=dedup)
        block_tokens = {
            name: spec.block_size
            for group in kv_cache_config.kv_cache_groups
            for name, spec in _layer_specs(group)
            if type(spec) in (FullAttentionSpec, SlidingWindowSpec)  # MLA is a subclass
        }
        return cls(
            parallel,
            layers,
            names,
            uniform_kv_heads(vllm_config),
            block_tokens,
            _tokens_first(kv_cache_config.kv_cache_layout),
        )


def _tokens_first(kv_cache_layout: str | None) -> bool | None:
    """From the name of a layout; None for one in which a page is not in one piece."""
    if kv_cache_layout is None:
        return None
    layout = KVCacheLayout[kv_cache_layout]
    _block, heads, tokens, _content = range(4)  # of the logical view that the order permutes
    order = layout.layer_view_order
    return order.index(tokens) < order.index(heads) if layout.is_block_compact else None


def parallelism(parallel_config: Any, *, dedup: bool = True) -> Parallelism:
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
        dedup=dedup,
    )


def uniform_kv_heads(vllm_config: Any) -> int | None:
    """KV heads of all head-sharded layers, or None where they may differ or are not known.

    A page says how many heads a rank has, not how many ranks have the same: of 8 heads and of 4,
    each of 8 ranks holds one.  Only a number that holds for every layer tells the two apart.
    """
    model = vllm_config.model_config
    total = model.get_total_num_kv_heads()
    arch = model.model_arch_config
    counts = {total, *_kv_head_counts(model.hf_text_config.to_dict())}
    counts |= {o[_KV_HEADS] for o in arch.per_layer_overrides or () if _KV_HEADS in o}
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.draft_model_config is not None:
        draft = speculative.draft_model_config
        counts |= {draft.get_total_num_kv_heads(), *_kv_head_counts(draft.hf_text_config.to_dict())}
    return total if counts == {total} else None


_KV_HEADS = "total_num_kv_heads"
_SPEAKS_OF_KV_HEADS = re.compile(
    r"key_value_heads|kv_n?_?heads|heads?_kv|kv_groups|attention_groups|heads_in_group"
)


def _kv_head_counts(config: Any) -> Iterator[object]:
    """Every value that a model's configuration has under a name that speaks of KV heads, and
    something that is no number for a configuration that describes its blocks one by one."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if isinstance(value, Mapping | list | tuple):
                yield from _kv_head_counts(value)
            if _SPEAKS_OF_KV_HEADS.search(str(name)) and value is not None:
                yield tuple(value) if isinstance(value, list) else value
            elif name == "block_configs" and value:
                yield name
    elif isinstance(config, list | tuple):
        for value in config:
            yield from _kv_head_counts(value)


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


def row_layers(facts: EngineFacts, kv_caches: Any, rank: int) -> list[LayerFacts]:
    """The layers of the row: one per canonical tensor, in the order of `kv_caches.tensors`.

    Layers that share a tensor are taken as replicated only if all of them are, alike.  `rank` is
    the one whose `kv_caches` these are; what comes out is the same on all ranks.
    """
    found: list[list[LayerFacts]] = [[] for _ in kv_caches.tensors]
    for names, refs in zip(facts.group_layers, kv_caches.group_data_refs, strict=True):
        if len(refs) == len(names):
            for name, ref in zip(names, refs, strict=True):
                is_whole = ref.page_size_bytes == kv_caches.tensors[ref.tensor_idx].page_size_bytes
                may_share = is_whole and name in facts.block_tokens
                heads = kv_heads(facts, name, ref.mapping, rank) if may_share else None
                layer = msgspec.structs.replace(facts.layers[name], heads=heads)
                found[ref.tensor_idx].append(layer)
        else:  # packed: whole blocks of all layers in one tensor
            for ref in refs:
                found[ref.tensor_idx] += [facts.layers[name] for name in names]
    return [
        _merge(layers, tensor.page_size_bytes)
        for layers, tensor in zip(found, kv_caches.tensors, strict=True)
    ]


def _merge(layers: list[LayerFacts], page_bytes: int) -> LayerFacts:
    shards = {layer.max_tp_shards for layer in layers}
    heads = {layer.heads for layer in layers}
    return LayerFacts(
        name=" ".join(layer.name for layer in layers),
        page_bytes=page_bytes,
        max_tp_shards=shards.pop() if len(shards) == 1 else None,
        context_sharded=any(layer.context_sharded for layer in layers),
        heads=heads.pop() if len(heads) == 1 else None,
    )


def kv_heads(facts: EngineFacts, name: str, mapping: Any, rank: int) -> KvHeads | None:
    """How the heads of a layer lie in its pages, from vLLM's certified mapping of `rank`'s page
    into the page of a single rank; None if it has none, or one that is not of this kind.

    vLLM certifies a head-sharded layer by its tensor's strides.  Two things it takes for granted,
    and they are checked here: that the layer has as many heads as the model, and, of a page with
    one head, that the strides of that axis mean something.
    """
    tp, total = facts.parallel.tp, facts.kv_heads
    if mapping is None or not mapping.parallelism_agnostic or total is None:
        return None
    shards, rest = divmod(mapping.canonical_page_size_bytes, mapping.local_page_size_bytes)
    replicas = mapping.num_writers
    if rest or shards * replicas != tp or shards != min(tp, total) or total % shards:
        return None
    if mapping.writer_index != rank % replicas:
        return None
    pieces = _pieces(mapping.runs)
    piece_bytes = mapping.local_page_size_bytes // len(pieces)
    if pieces != [
        (stretch * piece_bytes, (stretch * shards + rank // replicas) * piece_bytes, piece_bytes)
        for stretch in range(len(pieces))
    ]:
        return None
    if shards == 1:
        return KvHeads(total)
    stretches = _stretches(len(pieces), facts.block_tokens[name], facts.tokens_first)
    if stretches is None or (total > shards and stretches != len(pieces)):
        return None
    return KvHeads(total, stretches)


def _stretches(pieces: int, tokens: int, tokens_first: bool | None) -> int | None:
    """How often the heads follow each other in a page of `tokens` tokens: once or once per token,
    and twice that if K and V stand apart, which the number of `pieces` of a mapping shows."""
    if tokens_first is None or tokens <= 2 or pieces not in (1, 2, tokens, 2 * tokens):
        return None
    apart = 2 if pieces in (2, 2 * tokens) else 1
    return apart * (tokens if tokens_first else 1)


def _pieces(runs: Any) -> list[tuple[int, int, int]]:
    """(offset in the rank's page, offset in the whole page, bytes) of each piece of a mapping, in
    order; what follows each other in both is one piece."""
    pieces: list[tuple[int, int, int]] = []
    for local, whole, size in sorted(
        (
            run.local_offset + i * run.local_stride,
            run.canonical_offset + i * run.canonical_stride,
            run.fragment_size,
        )
        for run in runs
        for i in range(run.num_fragments)
    ):
        if pieces:
            last_local, last_whole, last_size = pieces[-1]
            if (last_local + last_size, last_whole + last_size) == (local, whole):
                pieces[-1] = (last_local, last_whole, last_size + size)
                continue
        pieces.append((local, whole, size))
    return pieces
