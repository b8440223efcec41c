"""CopyWorker: moves blocks between CPU tensors and the region, for one rank.

Engine-neutral.  Blocks move in runs, as `even_runs` finds them, and with them all layers of a group
whose pages stand evenly apart, as those of one allocation do: one strided copy, in C, in the
caller's thread alone, that gives up the interpreter lock for as long as it takes.  Small blocks in
no order are gathered first, all at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tiering.region import Region
from tiering.rows import LayerRow
from tiering.runs import Pages, even_runs

_RUN_BYTES_MIN = (
    16 << 10
)  # on average; below, what a copy costs to begin is more than copying twice

Ids = npt.NDArray[np.integer]
Bytes = npt.NDArray[np.uint8]


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


class _Layer(NamedTuple):
    """Where the pages of one layer are, in bytes: page i at `device_offset + i * device_stride` of
    its `storage`, and its first piece at `row_offset` of every row."""

    row: LayerRow
    storage: torch.UntypedStorage
    page_count: int
    device_stride: int
    device_offset: int
    row_offset: int
    stretches: int  # pieces that stand apart in the row
    width: int  # content of a page

    @property
    def shape(self) -> tuple[int, ...]:
        """Layers of one shape that stand evenly apart form a stack."""
        row = self.row
        return (
            self.storage.data_ptr(),
            self.page_count,
            self.device_stride,
            self.stretches,
            self.width,
            row.page_bytes,
            row.shards,
            row.first_rank,
            row.ranks,
        )


class _Stack(NamedTuple):
    """Layers of a group that move together: `device`, uint8[page_count, layers, stretches, piece],
    and `rows`, uint8[slot_count, blocks_per_chunk, layers, stretches, piece], are views."""

    row: LayerRow  # of any of them: they have the same writers
    device: Bytes
    rows: Bytes

    @property
    def page_bytes(self) -> int:
        """The content of one block."""
        return int(self.device[0].size)


class CopyWorker:
    """`tensors[i]`, int8[num_blocks, page_bytes] and of any stride, is the i-th of the layers that
    the row layout has on this rank.

    `groups[g]` lists what a block of KV-cache group g consists of.  Keeps the region mapped until
    `close`.  Raises `ValueError` for tensors that are not the layout's.  One thread at a time.
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
        rows = region.layout.layers_of(rank)
        for tensor, row in zip(tensors, rows, strict=True):
            _check_pages(tensor, row)
        self._groups = [
            [
                self._stack_of(layers)
                for layers in _evenly_apart(
                    [_place(tensors[i], rows[i], rank, width) for i, width in group]
                )
            ]
            for group in groups
        ]

    def _stack_of(self, layers: Sequence[_Layer]) -> _Stack:
        """Views of the device tensors and of the region, without a copy."""
        first, layout = layers[0], self._region.layout
        device_step, row_step = _steps(layers[0], layers[-1], len(layers) - 1)
        page_piece = first.row.page_bytes // first.stretches
        inner = (len(layers), first.stretches, first.width // first.stretches)
        device = torch.tensor([], dtype=torch.uint8).set_(first.storage)
        return _Stack(
            first.row,
            np.lib.stride_tricks.as_strided(
                device.numpy()[first.device_offset :],
                (first.page_count, *inner),
                (first.device_stride, device_step, page_piece, 1),
            ),
            np.lib.stride_tricks.as_strided(
                np.frombuffer(self._region.mapping, np.uint8, offset=self._region.rows_offset)[
                    first.row_offset :
                ],
                (self._region.row_count, layout.blocks_per_chunk, *inner),
                (
                    layout.row_bytes,
                    first.row.block_bytes,
                    row_step,
                    first.row.shards * page_piece,
                    1,
                ),
            ),
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
        blocks_per_chunk = self._region.layout.blocks_per_chunk
        moved = 0
        for run, stacks in zip(runs, self._groups, strict=True):
            if len(run.block_ids) == 0:
                continue
            blocks = run.first_block % blocks_per_chunk + np.arange(len(run.block_ids))
            slots = np.asarray(run.slots, np.int64)[blocks // blocks_per_chunk]
            pages = Pages(np.asarray(run.block_ids, np.int64), slots, blocks % blocks_per_chunk)
            self._check(pages, stacks)
            for stack in stacks:
                own = self._own_pages(stack.row, pages) if is_store else pages
                self._copy_pages(stack, own, is_store=is_store)
                moved += len(own.block_ids) * stack.page_bytes
        return Copied(moved, time.perf_counter() - started)

    @staticmethod
    def _copy_pages(stack: _Stack, pages: Pages, *, is_store: bool) -> None:
        size = len(pages.block_ids) * stack.page_bytes
        runs = even_runs(pages, max(1, size // _RUN_BYTES_MIN))
        if runs is None and is_store:
            stack.rows[pages.slots, pages.blocks] = stack.device[pages.block_ids]
        elif runs is None:
            stack.device[pages.block_ids] = stack.rows[pages.slots, pages.blocks]
        for run in runs or ():
            device, rows = stack.device[run.block_ids], stack.rows[run.slots, run.blocks]
            if is_store:
                np.copyto(rows, device)
            else:
                np.copyto(device, rows)

    def _check(self, pages: Pages, stacks: Sequence[_Stack]) -> None:
        """Raises `IndexError`: a slice takes what is out of range without a word."""
        for name, ids, count in (
            ("block id", pages.block_ids, min(len(stack.device) for stack in stacks)),
            ("slot", pages.slots, self._region.row_count),
        ):
            if ids.min() < 0 or ids.max() >= count:
                raise IndexError(f"{name}: expected 0 to {count - 1}, got {ids.tolist()}")

    def _own_pages(self, row: LayerRow, pages: Pages) -> Pages:
        """The pages that this rank writes, as `RowLayout.is_writer` says."""
        if row.replicas == 1:
            return pages
        turns = pages.slots * self._region.layout.blocks_per_chunk + pages.blocks
        mine = turns % row.replicas == (self._rank - row.first_rank) % row.replicas
        return Pages(*(column[mine] for column in pages))

    def close(self) -> None:
        """Drop every view of the region and unmap it."""
        self._groups.clear()
        self._region.close()


def _check_pages(tensor: torch.Tensor, row: LayerRow) -> None:
    if tensor.dtype != torch.int8 or tensor.shape[1:] != (row.page_bytes,):
        raise ValueError(
            f"{row.name}: expected int8[num_blocks, {row.page_bytes}], "
            f"got {tensor.dtype}{list(tensor.shape)}"
        )
    assert tensor.stride(1) == 1, row.name


def _place(tensor: torch.Tensor, row: LayerRow, rank: int, width: int) -> _Layer:
    # Where one shard is all there is, its pieces follow each other.
    stretches = 1 if row.shards == 1 and width == row.page_bytes else row.stretches
    return _Layer(
        row,
        tensor.untyped_storage(),
        tensor.shape[0],
        tensor.stride(0),
        int(tensor.storage_offset()),
        row.offset + row.shard_of(rank) * row.page_bytes // stretches,
        stretches,
        width,
    )


def _steps(one: _Layer, other: _Layer, count: int) -> tuple[int, int]:
    """How far apart, on the device and in the row, `count` steps from one to the other are."""
    count = max(count, 1)
    return (
        (other.device_offset - one.device_offset) // count,
        (other.row_offset - one.row_offset) // count,
    )


def _evenly_apart(layers: Sequence[_Layer]) -> Iterator[list[_Layer]]:
    """`layers` in stacks: each of one shape, its layers evenly apart on the device and in rows."""
    by_shape: dict[tuple[int, ...], list[_Layer]] = {}
    for layer in layers:
        by_shape.setdefault(layer.shape, []).append(layer)
    for alike in by_shape.values():
        stack = alike[:1]
        for layer in alike[1:]:
            if len(stack) > 1 and _steps(stack[-1], layer, 1) != _steps(stack[0], stack[1], 1):
                yield stack
                stack = []
            stack.append(layer)
        yield stack
