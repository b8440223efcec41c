"""CopyWorker: moves blocks between CPU tensors and the region, for one rank.

Engine-neutral.  Blocks move in runs, as `runs_of` finds them, and with them all layers of a group
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
from tiering.runs import Pages, Run, runs_of

_RUN_BYTES_MIN = (
    16 << 10
)  # on average; below, what a copy costs to begin is more than copying twice
_LINE_BYTES = 64
_ODD_BYTES_MIN = 4096  # memmove of pieces from here on is slow between places unlike modulo a line

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
    is_odd: bool
    """Pieces stand unlike modulo a line on the device and in rows, and are not small."""

    @property
    def page_bytes(self) -> int:
        """The content of one block."""
        return int(self.device[0].size)

    def copy(self, to: Bytes, of: Bytes) -> None:
        """Between pages and rows of this stack."""
        if self.is_odd:
            np.positive(of, out=to)  # a vector loop
        else:
            np.copyto(to, of)  # memmove of each piece


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
        device = np.lib.stride_tricks.as_strided(
            torch.tensor([], dtype=torch.uint8).set_(first.storage).numpy()[first.device_offset :],
            (first.page_count, *inner),
            (first.device_stride, device_step, page_piece, 1),
        )
        rows = np.lib.stride_tricks.as_strided(
            np.frombuffer(self._region.mapping, np.uint8, offset=self._region.rows_offset)[
                first.row_offset :
            ],
            (self._region.row_count, layout.blocks_per_chunk, *inner),
            (layout.row_bytes, first.row.block_bytes, row_step, first.row.shards * page_piece, 1),
        )
        apart = (device.ctypes.data - rows.ctypes.data, *device.strides[:-1], *rows.strides[:-1])
        is_odd = inner[-1] >= _ODD_BYTES_MIN and any(step % _LINE_BYTES for step in apart)
        return _Stack(first.row, device, rows, is_odd)

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
            if not is_store:
                moved += _copy_pages(stacks, pages, is_store=False)
                continue
            for alike in _by_writers(stacks):
                own = self._own_pages(alike[0].row, pages)
                moved += _copy_pages(alike, own, is_store=True)
        return Copied(moved, time.perf_counter() - started)

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


def _by_writers(stacks: Sequence[_Stack]) -> list[list[_Stack]]:
    """Those together whose pages have the same writers."""
    found: dict[tuple[int, int], list[_Stack]] = {}
    for stack in stacks:
        found.setdefault((stack.row.replicas, stack.row.first_rank), []).append(stack)
    return list(found.values())


def _copy_pages(stacks: Sequence[_Stack], pages: Pages, *, is_store: bool) -> int:
    """Returns the bytes moved."""
    size = len(pages.block_ids) * sum(stack.page_bytes for stack in stacks)
    runs = runs_of(pages, max(1, size // _RUN_BYTES_MIN), uneven=not is_store)
    for run in runs or ():
        for stack in stacks:
            _copy_run(stack, run, is_store=is_store)
    if runs is None:
        for stack in stacks:
            if is_store:
                stack.rows[pages.slots, pages.blocks] = stack.device[pages.block_ids]
            else:
                stack.device[pages.block_ids] = stack.rows[pages.slots, pages.blocks]
    return size


def _copy_run(stack: _Stack, run: Run, *, is_store: bool) -> None:
    rows, ids = stack.rows[run.slots, run.blocks], run.block_ids
    if not isinstance(ids, slice):
        # A layer's blocks, then the next layer's, as they stand in the row.  A store would gather.
        assert not is_store
        layers = np.arange(stack.device.shape[1])[:, np.newaxis]
        stack.device[ids, layers] = rows.swapaxes(0, 1)
    elif is_store:
        stack.copy(rows, stack.device[ids])
    else:
        stack.copy(stack.device[ids], rows)


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
