"""Which blocks move in one copy: those whose places go by even steps.  Pure: integers only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_EVEN_MIN = 3  # blocks; any two go by an even step, and of two chunks' a copy walks no row in order

BlockIds = npt.NDArray[np.int64]


class Pages(NamedTuple):
    """Device page `block_ids[i]` and block `blocks[i]` of the row in `slots[i]` hold one page.

    Those of a chunk stand together, and its blocks go by even steps.
    """

    block_ids: BlockIds
    slots: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


class Run(NamedTuple):
    """Indices of some pages, in order: `device[block_ids]` and `rows[slots, blocks]`.

    Either `slots` or `blocks` is a slice.
    """

    block_ids: slice | BlockIds
    """An array if they go by no even step; all of one chunk then."""
    slots: int | slice
    blocks: int | slice


def runs_of(pages: Pages, at_most: int, *, uneven: bool) -> list[Run] | None:
    """`pages` in few runs, going through them once, in order; None if they are more than `at_most`.

    The block ids of a run go up or down by even steps, and so do either its slots, for one block
    of each chunk, or its blocks, within one chunk.  If `uneven`, what else a chunk has is one run.
    """
    count = len(pages.block_ids)
    steps = np.diff(np.stack(pages))  # [3, count - 1]
    turns = (steps[:, 1:] != steps[:, :-1]).any(axis=0)
    is_even = (steps[0] != 0) & ((steps[1] != 0) != (steps[2] != 0))
    places = np.arange(count)
    even_until = places + 1
    even_until[:-1][is_even] = _next(turns, places[:-1][is_even], count - 1) + 1
    chunk_until = _next(steps[1] != 0, places, count)
    runs: list[Run] = []
    start = 0
    while start < count:
        if len(runs) == at_most:
            return None
        even_stop = even_until.item(start)
        stop = even_stop
        if stop - start < _EVEN_MIN:
            stop = chunk_until.item(start)
            if not uneven:
                stop = min(stop, even_stop)
        block_id, slot, block = (column.item(start) for column in pages)
        step = steps[:, start].tolist() if stop - start > 1 else (1, 0, 1)
        runs.append(
            Run(
                _progression(block_id, step[0], stop - start)
                if stop <= even_stop
                else pages.block_ids[start:stop],
                _progression(slot, step[1], stop - start) if step[1] else slot,
                _progression(block, step[2], stop - start) if step[2] else block,
            )
        )
        start = stop
    return runs


def _next(
    marks: npt.NDArray[np.bool_], places: npt.NDArray[np.int64], end: int
) -> npt.NDArray[np.int64]:
    """Of each of `places` the first place behind it that is marked, or `end`; `marks[i]` is that of
    place i + 1."""
    marked = np.append(np.flatnonzero(marks) + 1, end)
    return marked[np.searchsorted(marked[:-1], places, side="right")]


def _progression(first: int, step: int, count: int) -> slice:
    """`first, first + step, ...` as a slice; `step` may be negative."""
    stop = first + step * count
    return slice(first, stop if stop >= 0 else None, step)
