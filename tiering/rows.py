"""The row layout: which rank's pages stand where in a chunk's row, and who writes them.  Pure.

A row is, layer after layer, `[blocks_per_chunk][shards][page_bytes]`, padded to 4 KiB: block by
block, in each block one page per distinct shard.  Consecutive ranks are replicas of each other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from storage.types import PAGE_BYTES, round_up
from tiering.topology import LayerFacts, Parallelism, shard_count


class ByteRange(NamedTuple):
    start: int
    stop: int


class LayerRow(msgspec.Struct, frozen=True):
    """One layer's part of a row.  Layers that share device memory share one part."""

    name: str
    page_bytes: int
    shards: int
    offset: int

    def page_range(self, block: int, shard: int) -> ByteRange:
        """Where the page of `shard` in the chunk's `block` stands."""
        start = self.offset + (block * self.shards + shard) * self.page_bytes
        return ByteRange(start, start + self.page_bytes)


class RowLayout(msgspec.Struct, frozen=True):
    """Built by `RowLayout.of` alone; the same on every rank and in the scheduler."""

    ranks: int
    blocks_per_chunk: int
    layers: tuple[LayerRow, ...]
    row_bytes: int

    @classmethod
    def of(
        cls, layers: Sequence[LayerFacts], parallel: Parallelism, blocks_per_chunk: int
    ) -> RowLayout:
        """The layout of chunks of `blocks_per_chunk` blocks.  `layers` in the order of the row."""
        assert layers, "a row of no layer"
        assert blocks_per_chunk >= 1, blocks_per_chunk
        placed = []
        offset = 0
        for layer in layers:
            assert layer.page_bytes > 0, layer
            shards = shard_count(layer, parallel)
            placed.append(LayerRow(layer.name, layer.page_bytes, shards, offset))
            offset += blocks_per_chunk * shards * layer.page_bytes
        row_bytes = round_up(offset, PAGE_BYTES)
        return cls(parallel.world_size, blocks_per_chunk, tuple(placed), row_bytes)

    @property
    def payload_bytes(self) -> int:
        """The row without its padding."""
        last = self.layers[-1]
        return last.offset + self.blocks_per_chunk * last.shards * last.page_bytes

    @property
    def row_bytes_without_dedup(self) -> int:
        """What the row would weigh with every rank's pages in it."""
        worker_bytes = sum(layer.page_bytes for layer in self.layers)
        return round_up(self.blocks_per_chunk * self.ranks * worker_bytes, PAGE_BYTES)

    @property
    def depends_on_ranks(self) -> bool:
        """Whether another number of ranks would make another row: any layer with several shards."""
        return self.ranks > 1 and any(layer.shards > 1 for layer in self.layers)

    @property
    def digest(self) -> str:
        """Equal for equal layouts only."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def replicas(self, layer: LayerRow) -> int:
        """Ranks that hold the same shard of `layer`."""
        return self.ranks // layer.shards

    def shard_of(self, layer: LayerRow, rank: int) -> int:
        return rank // self.replicas(layer)

    def is_writer(self, layer: LayerRow, rank: int, slot: int, block: int) -> bool:
        """Whether `rank`, of the ranks that hold its shard of `layer`, writes this page.

        A pure function of region slot and block, so that all ranks agree and take turns.
        """
        replicas = self.replicas(layer)
        return (slot * self.blocks_per_chunk + block) % replicas == rank % replicas

    def written_ranges(self, rank: int, slot: int) -> Iterator[ByteRange]:
        """The bytes of the row in `slot` that `rank` writes when a whole chunk is stored."""
        for layer in self.layers:
            for block in range(self.blocks_per_chunk):
                if self.is_writer(layer, rank, slot, block):
                    yield layer.page_range(block, self.shard_of(layer, rank))

    def read_ranges(self, rank: int) -> Iterator[ByteRange]:
        """The bytes of any row that `rank` loads when a whole chunk is loaded."""
        for layer in self.layers:
            for block in range(self.blocks_per_chunk):
                yield layer.page_range(block, self.shard_of(layer, rank))


def one_line(layout: RowLayout, refusals: Iterable[str]) -> str:
    """The layout for the start-up log: row with and without dedup, and what stood against it."""
    saved = layout.row_bytes_without_dedup / layout.row_bytes
    line = (
        f"row of {layout.row_bytes} bytes ({layout.row_bytes_without_dedup} without dedup, "
        f"{saved:.2f}x), {len(layout.layers)} layers, {layout.blocks_per_chunk} block(s) per "
        f"chunk, {layout.ranks} rank(s)"
    )
    reasons = "; ".join(refusals)
    return f"{line}; not deduplicated: {reasons}" if reasons and layout.ranks > 1 else line
