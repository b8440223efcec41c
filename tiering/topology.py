"""TP ranks, shards and replicas: which ranks hold identical KV, layer by layer.

Pure.  What a layer does not say, or what splits it in a way that is not proven here, makes it
"not replicated": that costs space and never a byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class KvHeads(msgspec.Struct, frozen=True):
    """How the pages of a head-sharded layer lie in the page of one rank that has all the heads.

    That page is `[stretches][total heads][bytes of a head]`; a rank's page is the same with its own
    heads: `min(tp, total)` shards, each on consecutive ranks.  Rows in this order do not depend
    on the number of ranks.
    """

    total: int
    """KV heads of the layer on all ranks together, each counted once."""
    stretches: int = 1
    """Times that the heads follow each other in a page: for [K, V][token][head] 2 x tokens."""


class LayerFacts(msgspec.Struct, frozen=True):
    """What an engine says of one layer's KV cache."""

    name: str
    page_bytes: int
    """Bytes of one block on one rank, padding included."""
    max_tp_shards: int | None = None
    """Into how many distinct shards the layer's KV splits at most; None or 0: unknown."""
    context_sharded: bool = True
    """Whether decode context parallelism, if on, splits this layer's tokens."""
    heads: KvHeads | None = None
    """Set where the page is proven to hold whole KV heads and nothing else."""


class Parallelism(msgspec.Struct, frozen=True):
    """How the ranks of one engine divide the model."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    world_size: int = 1
    shares_region: bool = True
    """Whether all ranks map one region: one node, and an executor whose workers are processes."""
    dedup: bool = True
    """False: keep every rank's copy, as asked for."""

    def refusals(self) -> list[str]:
        """Why no layer may be taken as replicated; empty if nothing speaks against it."""
        reasons = []
        if not self.dedup:
            reasons.append("dedup is off in the settings")
        if self.pp > 1:
            reasons.append(f"pipeline parallel size {self.pp}")
        if self.dcp > 1:
            reasons.append(f"decode context parallel size {self.dcp}")
        if self.pcp > 1:
            reasons.append(f"prefill context parallel size {self.pcp}")
        if self.world_size != self.tp:
            reasons.append(f"world size {self.world_size} is not the TP size {self.tp}")
        if not self.shares_region:
            reasons.append("the ranks do not share one region")
        return reasons


def replicas_floor(layer: LayerFacts, parallel: Parallelism) -> int:
    """Ranks per distinct shard as vLLM reports them: `max(1, tp // max_tp_shards)`.

    From `_layer_tp_replicas` of vLLM's `v1/core/kv_cache_utils.py`; not what the layout trusts.
    """
    if not layer.max_tp_shards or (layer.context_sharded and parallel.dcp > 1):
        return 1
    return max(1, parallel.tp // layer.max_tp_shards)


def kv_tp_replicas(layers: Sequence[LayerFacts], parallel: Parallelism) -> int:
    """Consecutive TP ranks that hold identical KV for every layer; equals vLLM's own value."""
    if not layers:
        return 1
    return math.gcd(parallel.tp, *(replicas_floor(layer, parallel) for layer in layers))


def replicated_layout(layers: Sequence[LayerFacts], parallel: Parallelism) -> bool:
    """Whether every rank holds the same bytes of every layer."""
    tp = parallel.tp
    return tp > 1 and kv_tp_replicas(layers, parallel) == tp and not parallel.refusals()


def shard_count(layer: LayerFacts, parallel: Parallelism) -> int:
    """Distinct parts of the layer's KV across ranks, as the row keeps them.

    One per rank unless the layer is known to split into fewer and the ranks divide evenly among
    them; then `tp // shard_count` consecutive ranks hold the same part.
    """
    known = layer.max_tp_shards or (layer.heads.total if layer.heads else None)
    if not known or parallel.refusals():
        return parallel.world_size
    shards = min(parallel.tp, known)
    return shards if parallel.tp % shards == 0 else parallel.tp


def head_stretches(layer: LayerFacts, parallel: Parallelism) -> int | None:
    """`KvHeads.stretches` where the row may keep the layer's heads in their order, else None.

    Needs ranks that divide the heads evenly, or heads that divide the ranks evenly.
    """
    heads = layer.heads
    if heads is None or layer.max_tp_shards not in (None, heads.total) or parallel.refusals():
        return None
    even = heads.total % parallel.tp == 0 or parallel.tp % heads.total == 0
    return heads.stretches if even else None


def reason_for_copies(layer: LayerFacts, parallel: Parallelism) -> str | None:
    """Why every rank keeps a copy of its own of the layer; None if some rank shares another's."""
    if shard_count(layer, parallel) < parallel.world_size or parallel.world_size == 1:
        return None
    if refusals := parallel.refusals():
        return "; ".join(refusals)
    known = layer.max_tp_shards or (layer.heads.total if layer.heads else None)
    if not known:
        return "how it splits over ranks is not known"
    if known >= parallel.tp:
        return "each rank has other KV heads"
    return f"{parallel.tp} ranks do not divide evenly by {known} shards"
