"""From vLLM's configuration to ours: parallelism and per-layer facts.  Decides nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

from storage.errors import ConfigError
from tiering.rows import GroupLayer
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
    group_numbers: tuple[int, ...] = ()
    """What the keys of each offloaded group end in; empty: counted from 0."""
    packed_bytes: tuple[int | None, ...] = ()
    """Of each offloaded group, where its last layer ends in a block that holds all of them side by
    side; None or empty: not known."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any, *, dedup: bool = True) -> EngineFacts:
        numbers = tuple(get_offloading_group_ids(kv_cache_config))
        groups = [kv_cache_config.kv_cache_groups[number] for number in numbers]
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
            numbers,
            tuple(_packed_bytes(group_names, layers, kv_cache_config) for group_names in names),
        )


def _packed_bytes(
    names: Iterable[str], layers: Mapping[str, LayerFacts], kv_cache_config: Any
) -> int | None:
    """Where the last of these layers ends, if their pages begin at their offsets in each block."""
    ends = {
        name: placed.offset + len(placed.layers) * layers[name].page_bytes
        for placed in kv_cache_config.kv_cache_tensors
        for name in placed.layers
        if name in layers
    }
    found = [ends.get(name) for name in names]
    return None if None in found else max(end for end in found if end is not None)


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


def refuse_unreusable(vllm_config: Any) -> None:
    """KV of a prefix is of use only to a model that needs nothing else of it.  One that pools over
    every token of a prompt, or has an encoder beside it, would go on from half of what it needs and
    answer wrongly; one that attends both ways has no KV to keep.  Raises `ConfigError`."""
    model = vllm_config.model_config
    if model.is_prefix_caching_supported:
        return
    if model.attn_type == "attention_free" and vllm_config.cache_config.enable_prefix_caching:
        return  # vLLM's word for it is "experimental"
    found = f"{model.architecture}, {model.attn_type}"
    if (pooler := model.pooler_config) is not None:
        pooling = pooler.seq_pooling_type or pooler.tok_pooling_type
        found += f", which pools by {pooling}"
    raise ConfigError(
        "--kv-transfer-config", "none, or a model of which vLLM can reuse a prefix's KV", found
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


def group_layers(facts: EngineFacts, kv_caches: Any, rank: int) -> dict[int, list[GroupLayer]]:
    """The layers of each offloaded group's row, by the group's number: one per canonical tensor
    that it uses, in the order of `kv_caches.tensors`.

    Layers that share a tensor in one group are taken as replicated only if all of them are, alike.
    `rank` is the one whose `kv_caches` these are; what comes out is the same on all ranks.
    Raises `ConfigError` for blocks that do not hold what vLLM would copy.
    """
    numbers = facts.group_numbers or tuple(range(len(facts.group_layers)))
    packed = facts.packed_bytes or (None,) * len(numbers)
    groups = zip(numbers, facts.group_layers, packed, kv_caches.group_data_refs, strict=True)
    found = {}
    for number, names, packed_bytes, refs in groups:
        parts: dict[int, list[LayerFacts]] = {}
        if not _is_packed(facts, names, refs):
            for name, ref in zip(names, refs, strict=True):
                may_share = name in facts.block_tokens
                heads = kv_heads(facts, name, ref.mapping, rank) if may_share else None
                layer = msgspec.structs.replace(
                    facts.layers[name], page_bytes=ref.page_size_bytes, heads=heads
                )
                parts.setdefault(ref.tensor_idx, []).append(layer)
        else:
            for ref in refs:
                width = _packed_width(packed_bytes, ref.page_size_bytes)
                parts[ref.tensor_idx] = [
                    msgspec.structs.replace(facts.layers[name], page_bytes=width) for name in names
                ]
        found[number] = [
            GroupLayer(_merge(layers), tensor, kv_caches.tensors[tensor].page_size_bytes)
            for tensor, layers in sorted(parts.items())
        ]
    return found


def _is_packed(facts: EngineFacts, names: Sequence[str], refs: Sequence[Any]) -> bool:
    """Whether vLLM copies whole blocks in which all layers stand, instead of each layer's page."""
    if len(refs) != len(names):
        return True
    pages = [facts.layers[name].page_bytes for name in names]
    return any(ref.page_size_bytes > page for ref, page in zip(refs, pages, strict=True))


def _packed_width(packed_bytes: int | None, block_bytes: int) -> int:
    """What a group's layers take of a block in which they stand side by side."""
    if packed_bytes is None:
        return block_bytes
    if packed_bytes > block_bytes:
        raise ConfigError(
            "VLLM_KV_CACHE_LAYOUT",
            f"a layout whose blocks of {block_bytes} bytes hold every layer of a KV-cache group",
            f"one in which a group reaches to byte {packed_bytes}",
        )
    return packed_bytes


def _merge(layers: list[LayerFacts]) -> LayerFacts:
    """Layers of one group that use the same pages."""
    shards = {layer.max_tp_shards for layer in layers}
    heads = {layer.heads for layer in layers}
    widths = {layer.page_bytes for layer in layers}
    return LayerFacts(
        name=" ".join(layer.name for layer in layers),
        page_bytes=max(widths),
        max_tp_shards=shards.pop() if len(shards) == 1 else None,
        context_sharded=any(layer.context_sharded for layer in layers),
        heads=heads.pop() if len(heads) == len(widths) == 1 else None,
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
