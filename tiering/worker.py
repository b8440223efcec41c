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
    """One layer's device pages in a group: `width` bytes of each page are its content, all of them
    where the row keeps heads in their order."""

    layer: int  # index among the layers of the rank
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


class _LayerCopy(NamedTuple):
    """One layer of a group: `device[i]` and `rows[slot, block]` are pages, in pieces, of the same
    words; `page_bytes` of them are content."""

    layer: LayerRow
    device: torch.Tensor
    rows: torch.Tensor
    page_bytes: int


class CopyWorker:
    """`tensors[i]`, int8[num_blocks, page_bytes] and of any stride, is the i-th of the layers that
    the row layout has on this rank.

    `groups[g]` lists what a block of KV-cache group g consists of.  Keeps the region mapped until
    `close`.  Raises `ValueError` for tensors that are not the layout's.
    """

    def __init__(
        self,
        region: Region,
        rank: int,
        tensors: Sequence[torch.Tensor],
        groups: Sequence[Sequence[LayerPages]],
    ) -> None:
        self._region = region
        self._rank = rank
        layers = region.layout.layers_of(rank)
        device = [_device_pages(t, layer) for t, layer in zip(tensors, layers, strict=True)]
        flat = torch.frombuffer(region.mapping, dtype=torch.int8)
        rows = [self._row_view(flat, layer) for layer in layers]
        self._groups = [
            [_layer_copy(layers[i], device[i], rows[i], width) for i, width in group]
            for group in groups
        ]

    def _row_view(self, flat: torch.Tensor, layer: LayerRow) -> torch.Tensor:
        """int8[slot_count, blocks_per_chunk, stretches, piece_bytes]: this rank's shard of `layer`
        in every row, without a copy."""
        layout = self._region.layout
        piece = layer.piece_bytes
        return flat.as_strided(
            (self._region.row_count, layout.blocks_per_chunk, layer.stretches, piece),
            (layout.row_bytes, layer.block_bytes, layer.shards * piece, 1),
            self._region.rows_offset + layer.offset + layer.shard_of(self._rank) * piece,
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
            for copy in group:
                part = self._own_pages(copy.layer, pages) if is_store else pages
                ids, rows, subs = (torch.from_numpy(column) for column in part)
                if is_store:
                    copy.rows[rows, subs] = copy.device[ids]
                else:
                    copy.device[ids] = copy.rows[rows, subs]
                moved += len(ids) * copy.page_bytes
        return Copied(moved, time.perf_counter() - started)

    def _own_pages(self, layer: LayerRow, pages: _Pages) -> _Pages:
        """The pages that this rank writes, as `RowLayout.is_writer` says."""
        if layer.replicas == 1:
            return pages
        turns = pages.slots * self._region.layout.blocks_per_chunk + pages.blocks
        mine = turns % layer.replicas == (self._rank - layer.first_rank) % layer.replicas
        return _Pages(*(column[mine] for column in pages))

    def close(self) -> None:
        """Drop every view of the region and unmap it."""
        self._groups.clear()
        self._region.close()


def _device_pages(tensor: torch.Tensor, layer: LayerRow) -> torch.Tensor:
    """`tensor` as int8[num_blocks, stretches, piece_bytes].  Raises `ValueError`."""
    if tensor.dtype != torch.int8 or tensor.shape[1:] != (layer.page_bytes,):
        raise ValueError(
            f"{layer.name}: expected int8[num_blocks, {layer.page_bytes}], "
            f"got {tensor.dtype}{list(tensor.shape)}"
        )
    assert tensor.stride(1) == 1, layer.name
    stride = tensor.stride(0)
    shape = (tensor.shape[0], layer.stretches, layer.piece_bytes)
    return tensor.as_strided(shape, (stride, layer.piece_bytes, 1))


def _layer_copy(
    layer: LayerRow, device: torch.Tensor, rows: torch.Tensor, page_bytes: int
) -> _LayerCopy:
    """Both sides cut to the content of a page, in the widest words that fit all of it: torch
    gathers words one by one, and bytes cost it several times as much."""
    piece = page_bytes // layer.stretches
    device, rows = device[..., :piece], rows[..., :piece]
    numbers = [
        piece,
        device.data_ptr(),
        rows.data_ptr(),
        *device.stride()[:-1],
        *rows.stride()[:-1],
    ]
    for word in (torch.int64, torch.int32, torch.int16):
        if all(number % word.itemsize == 0 for number in numbers):
            return _LayerCopy(layer, device.view(word), rows.view(word), page_bytes)
    return _LayerCopy(layer, device, rows, page_bytes)
