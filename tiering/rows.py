"""The row layout: which rank's pages stand where in a chunk's row, and who writes them.  Pure.

A row is, layer after layer and block after block, one page per distinct shard, padded to 4 KiB at
its end.  Consecutive ranks are replicas of each other.  Pages of a layer follow each other whole,
`[shards][page_bytes]`, or, where `KvHeads` says how they may, interleaved in the order of the
heads, `[stretches][shards][page_bytes / stretches]`: then the bytes are those of one rank that has
all the heads, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from storage.namespace import Json
from storage.types import PAGE_BYTES, round_up
from tiering.topology import (
    LayerFacts,
    Parallelism,
    head_stretches,
    kv_tp_replicas,
    reason_for_copies,
    replicated_layout,
    shard_count,
)


class ByteRange(NamedTuple):
    start: int
    stop: int


class LayerRow(msgspec.Struct, frozen=True):
    """One layer's part of a row.  Layers that share device memory share one part."""

    name: str
    page_bytes: int
    """Of one block on one rank."""
    shards: int
    offset: int
    ranks: int
    """How many ranks hold the layer: all, or under pipeline parallelism a single one."""
    first_rank: int = 0
    stretches: int = 1
    head_order: bool = False
    """Whether the part would be the same, byte for byte, at any number of ranks."""

    @property
    def block_bytes(self) -> int:
        """The layer's part of one block."""
        return self.shards * self.page_bytes

    @property
    def piece_bytes(self) -> int:
        """What of a page stands in one piece in the row."""
        return self.page_bytes // self.stretches

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.ranks // self.shards

    @property
    def depends_on_ranks(self) -> bool:
        return self.ranks > 1 and self.shards > 1 and not self.head_order

    def is_on(self, rank: int) -> bool:
        return self.first_rank <= rank < self.first_rank + self.ranks

    def shard_of(self, rank: int) -> int:
        """Which shard `rank`, one of those that hold the layer, has."""
        return (rank - self.first_rank) // self.replicas

    def pieces(self, block: int, shard: int) -> Iterator[ByteRange]:
        """Where the page of `shard` in the chunk's `block` stands, in the order of the page."""
        start = self.offset + block * self.block_bytes + shard * self.piece_bytes
        for stretch in range(self.stretches):
            first = start + stretch * self.shards * self.piece_bytes
            yield ByteRange(first, first + self.piece_bytes)


class RowLayout(msgspec.Struct, frozen=True):
    """Built by `of` and `of_unlike_ranks` alone; the same on every rank and in the scheduler."""

    ranks: int
    blocks_per_chunk: int
    layers: tuple[LayerRow, ...]
    row_bytes: int
    kv_tp_replicas: int = 1
    """As vLLM reports it; the layout goes by each layer's own replicas."""
    replicated_layout: bool = False
    """As vLLM reports it: every rank holds the same bytes of every layer."""
    copies: dict[str, int] = {}
    """Why -> how many layers of which every rank keeps its own copy."""

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerFacts],
        parallel: Parallelism,
        blocks_per_chunk: int,
        engine_layers: Sequence[LayerFacts] | None = None,
    ) -> RowLayout:
        """Of ranks that all have the same `layers`, given in the order of the row.

        `engine_layers` are those that `kv_tp_replicas` is about, where they are not the row's:
        some share memory, or are not offloaded.
        """
        placed = []
        for layer in layers:
            stretches = head_stretches(layer, parallel)
            assert layer.page_bytes % (stretches or 1) == 0, layer
            placed.append(
                LayerRow(
                    layer.name,
                    layer.page_bytes,
                    shard_count(layer, parallel),
                    0,
                    parallel.world_size,
                    stretches=stretches or 1,
                    head_order=stretches is not None,
                )
            )
        reported = layers if engine_layers is None else engine_layers
        reasons = Counter(reason_for_copies(layer, parallel) for layer in layers)
        return msgspec.structs.replace(
            cls._placed(placed, parallel.world_size, blocks_per_chunk),
            kv_tp_replicas=kv_tp_replicas(reported, parallel),
            replicated_layout=replicated_layout(reported, parallel),
            copies={reason: count for reason, count in reasons.items() if reason is not None},
        )

    @classmethod
    def of_unlike_ranks(
        cls, layers_by_rank: Sequence[Sequence[LayerFacts]], blocks_per_chunk: int
    ) -> RowLayout:
        """Of ranks that have layers of their own: the stages of a pipeline.  Nothing is shared."""
        placed = [
            LayerRow(f"{layer.name} of rank {rank}", layer.page_bytes, 1, 0, 1, first_rank=rank)
            for rank, layers in enumerate(layers_by_rank)
            for layer in layers
        ]
        return msgspec.structs.replace(
            cls._placed(placed, len(layers_by_rank), blocks_per_chunk),
            copies={"the ranks are stages of a pipeline": len(placed)},
        )

    @classmethod
    def of_private_rows(cls, own: Sequence[RowLayout], parallel: Parallelism) -> RowLayout:
        """What rows weigh on all ranks together, where each keeps `own` rows of its pages alone.

        For figures; no byte is placed by it.
        """
        layers = [
            msgspec.structs.replace(layer, first_rank=rank)
            for rank, layout in enumerate(own)
            for layer in layout.layers
        ]
        return msgspec.structs.replace(
            cls._placed(layers, len(own), own[0].blocks_per_chunk),
            row_bytes=sum(layout.row_bytes for layout in own),
            copies={"; ".join(parallel.refusals()): len(layers)},
        )

    @classmethod
    def _placed(cls, layers: Sequence[LayerRow], ranks: int, blocks_per_chunk: int) -> RowLayout:
        assert layers, "a row of no layer"
        assert blocks_per_chunk >= 1, blocks_per_chunk
        placed = []
        offset = 0
        for layer in layers:
            assert layer.page_bytes > 0, layer
            assert layer.ranks % layer.shards == 0, layer
            placed.append(msgspec.structs.replace(layer, offset=offset))
            offset += blocks_per_chunk * layer.block_bytes
        return cls(ranks, blocks_per_chunk, tuple(placed), round_up(offset, PAGE_BYTES))

    def layers_of(self, rank: int) -> list[LayerRow]:
        """The layers that `rank` holds, in its own order."""
        return [layer for layer in self.layers if layer.is_on(rank)]

    @property
    def payload_bytes(self) -> int:
        """The row without its padding."""
        last = self.layers[-1]
        return last.offset + self.blocks_per_chunk * last.block_bytes

    @property
    def row_bytes_without_dedup(self) -> int:
        """What the row would weigh with every rank's pages in it."""
        block_bytes = sum(layer.ranks * layer.page_bytes for layer in self.layers)
        return round_up(self.blocks_per_chunk * block_bytes, PAGE_BYTES)

    @property
    def depends_on_ranks(self) -> bool:
        """Whether another number of ranks would make another row."""
        return any(layer.depends_on_ranks for layer in self.layers) or any(
            layer.ranks < self.ranks for layer in self.layers
        )

    @property
    def digest(self) -> str:
        """Equal for equal layouts only."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def is_writer(self, layer: LayerRow, rank: int, slot: int, block: int) -> bool:
        """Whether `rank`, of the ranks that hold its shard of `layer`, writes this page.

        A pure function of region slot and block, so that all ranks agree and take turns.
        """
        turn = (slot * self.blocks_per_chunk + block) % layer.replicas
        return turn == (rank - layer.first_rank) % layer.replicas

    def written_ranges(self, rank: int, slot: int) -> Iterator[ByteRange]:
        """The bytes of the row in `slot` that `rank` writes when a whole chunk is stored."""
        for layer in self.layers_of(rank):
            for block in range(self.blocks_per_chunk):
                if self.is_writer(layer, rank, slot, block):
                    yield from layer.pieces(block, layer.shard_of(rank))

    def read_ranges(self, rank: int) -> Iterator[ByteRange]:
        """The bytes of any row that `rank` loads when a whole chunk is loaded."""
        for layer in self.layers_of(rank):
            for block in range(self.blocks_per_chunk):
                yield from layer.pieces(block, layer.shard_of(rank))


def row_identity(layout: RowLayout) -> dict[str, Json]:
    """What of a layout shapes the bytes of a row, for the identity of a namespace.

    A layer whose part is the same at any number of ranks is named with the bytes of its part; of
    the others the shards count, and with them the ranks.
    """
    layers: list[Json] = []
    for layer in layout.layers:
        if layer.depends_on_ranks or layer.ranks < layout.ranks:
            layers.append([layer.name, layer.page_bytes, layer.shards, layer.first_rank])
        else:
            layers.append([layer.name, layer.block_bytes])
    return {"layers": layers, "ranks": layout.ranks if layout.depends_on_ranks else None}


def rows_differ(one: RowLayout, other: RowLayout) -> tuple[str, str, str]:
    """Where two layouts that are not equal first differ, and what each has there, with the row."""
    assert one != other
    kind, first, second = "other facts", str(one.copies), str(other.copies)
    if one.blocks_per_chunk != other.blocks_per_chunk:
        kind = "blocks per chunk"
        first, second = str(one.blocks_per_chunk), str(other.blocks_per_chunk)
    elif len(one.layers) != len(other.layers):
        kind, first, second = "layers", str(len(one.layers)), str(len(other.layers))
    else:
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            if mine != theirs:
                kind = f"layer {mine.name}"
                first, second = (
                    f"{layer.name}: {layer.shards} x {layer.page_bytes} bytes at {layer.offset}"
                    for layer in (mine, theirs)
                )
                break
    return (
        kind,
        f"{first}, row of {one.row_bytes} bytes for {one.ranks} rank(s)",
        f"{second}, row of {other.row_bytes} bytes for {other.ranks} rank(s)",
    )
