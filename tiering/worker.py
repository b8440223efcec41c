"""CopyWorker: moves blocks between CPU tensors and the region, for one rank.

Engine-neutral.  A transfer runs when it is submitted, in the caller's thread: on CPU tensors a copy
has nothing to overlap with that the same cores are not needed for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiering.region import Region
from tiering.rows import LayerRow

Ids = npt.NDArray[np.integer]


class BlockRun(NamedTuple):
    """Consecutive blocks of one request in one KV-cache group.

    `block_ids[i]` on the device belongs to block `first_block + i` of the request, and so to chunk
    `slots[(first_block % blocks_per_chunk + i) // blocks_per_chunk]`: the first chunk may be
    entered in its middle.
    """

    block_ids: Ids
    slots: Ids
    first_block: int


class LayerPages(NamedTuple):
    """One layer's device pages in a group: `width` bytes of each page are its content."""

    layer: int  # index in the row layout
    width: int


class Copied(NamedTuple):
    """`bytes_moved` between device and region; of a store only what this rank had to write."""

    bytes_moved: int
    seconds: float


class _Pages(NamedTuple):
    """Device page `block_ids[i]` and block `blocks[i]` of the row in `slots[i]` hold one page."""

    block_ids: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


class CopyWorker:
    """`tensors[i]`, int8[num_blocks, page_bytes] and of any stride, is layer i of the row layout.

    `groups[g]` lists what a block of KV-cache group g consists of.  Keeps the region mapped until
    `close`.
    """

    def __init__(
        self,
        region: Region,
        rank: int,
        tensors: Sequence[torch.Tensor],
        groups: Sequence[Sequence[LayerPages]],
    ) -> None:
        layout = region.layout
        assert len(tensors) == len(layout.layers), (len(tensors), len(layout.layers))
        self._region = region
        self._rank = rank
        self._groups = [list(group) for group in groups]
        self._tensors = list(tensors)
        flat = torch.frombuffer(region.mapping, dtype=torch.int8)
        self._pages = [self._layer_view(flat, layer) for layer in layout.layers]
        for layer, tensor in zip(layout.layers, tensors, strict=True):
            if tensor.dtype != torch.int8 or tensor.shape[1:] != (layer.page_bytes,):
                raise ValueError(
                    f"{layer.name}: expected int8[num_blocks, {layer.page_bytes}], "
                    f"got {tensor.dtype}{list(tensor.shape)}"
                )

    def _layer_view(self, flat: torch.Tensor, layer: LayerRow) -> torch.Tensor:
        """int8[slot_count, blocks_per_chunk, page_bytes]: this rank's shard of `layer`, no copy."""
        layout = self._region.layout
        shard = layout.shard_of(layer, self._rank)
        return flat.as_strided(
            (self._region.row_count, layout.blocks_per_chunk, layer.page_bytes),
            (layout.row_bytes, layer.shards * layer.page_bytes, 1),
            self._region.rows_offset + layer.offset + shard * layer.page_bytes,
        )

    def store(self, runs: Sequence[BlockRun]) -> Copied:
        """Copy blocks to the region: of each page, only if this rank is its writer."""
        return self._copy(runs, is_store=True)

    def load(self, runs: Sequence[BlockRun]) -> Copied:
        """Copy blocks from the region into the device tensors."""
        return self._copy(runs, is_store=False)

    def _copy(self, runs: Sequence[BlockRun], *, is_store: bool) -> Copied:
        """`runs[g]` is of group g."""
        started = time.perf_counter()
        layout = self._region.layout
        moved = 0
        for run, group in zip(runs, self._groups, strict=True):
            if len(run.block_ids) == 0:
                continue
            blocks = run.first_block % layout.blocks_per_chunk + np.arange(len(run.block_ids))
            slots = np.asarray(run.slots, np.int64)[blocks // layout.blocks_per_chunk]
            pages = _Pages(
                np.asarray(run.block_ids, np.int64), slots, blocks % layout.blocks_per_chunk
            )
            for index, width in group:
                part = self._own_pages(layout.layers[index], pages) if is_store else pages
                device, region = self._tensors[index], self._pages[index]
                ids, rows, subs = (torch.from_numpy(column) for column in part)
                if is_store:
                    region[rows, subs, :width] = device[ids, :width]
                else:
                    device[ids, :width] = region[rows, subs, :width]
                moved += len(ids) * width
        return Copied(moved, time.perf_counter() - started)

    def _own_pages(self, layer: LayerRow, pages: _Pages) -> _Pages:
        """The pages that this rank writes, as `RowLayout.is_writer` says."""
        layout = self._region.layout
        replicas = layout.replicas(layer)
        if replicas == 1:
            return pages
        turns = (pages.slots * layout.blocks_per_chunk + pages.blocks) % replicas
        mine = turns == self._rank % replicas
        return _Pages(*(column[mine] for column in pages))

    def close(self) -> None:
        """Drop every view of the region and unmap it."""
        self._pages.clear()
        self._tensors.clear()
        self._region.close()
