"""TP ranks, shards and replicas: which ranks hold identical KV, layer by layer.

Pure.  What a layer does not say, or what splits it in a way that is not proven here, makes it
"not replicated": that costs space and never a byte.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class LayerFacts(msgspec.Struct, frozen=True):
    """What an engine says of one layer's KV cache."""

    name: str
    page_bytes: int
    """Bytes of one block on one rank, padding included."""
    max_tp_shards: int | None = None
    """Into how many distinct shards the layer's KV splits at most; None or 0: unknown."""
    context_sharded: bool = True
    """Whether decode context parallelism, if on, splits this layer's tokens."""


class Parallelism(msgspec.Struct, frozen=True):
    """How the ranks of one engine divide the model."""

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    pcp: int = 1
    world_size: int = 1
    shares_region: bool = True
    """Whether all ranks map one region: one node, and an executor whose workers are processes."""

    def refusals(self) -> list[str]:
        """Why no layer may be taken as replicated; empty if nothing speaks against it."""
        reasons = []
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
    if not layer.max_tp_shards or parallel.refusals():
        return parallel.world_size
    shards = min(parallel.tp, layer.max_tp_shards)
    return shards if parallel.tp % shards == 0 else parallel.tp
