"""Which blocks move in one copy: those whose places go by even steps.  Pure: integers only."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Pages(NamedTuple):
    """Device page `block_ids[i]` and block `blocks[i]` of the row in `slots[i]` hold one page."""

    block_ids: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


class EvenRun(NamedTuple):
    """Indices of some pages, in order: `device[block_ids]` and `rows[slots, blocks]`, of which one
    is a slice."""

    block_ids: slice
    slots: int | slice
    blocks: int | slice


def even_runs(pages: Pages, at_most: int) -> list[EvenRun] | None:
    """`pages` in as few runs as going through them once, in order, can make; None if they are more
    than `at_most`.

    The block ids of a run go up or down by even steps, and so do either its slots, for one block
    of each chunk, or its blocks, within one chunk.
    """
    count = len(pages.block_ids)
    steps = np.diff(np.stack(pages))  # [3, count - 1]
    turns = (np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1).tolist()
    is_even = ((steps[0] != 0) & ((steps[1] != 0) != (steps[2] != 0))).tolist()
    runs: list[EvenRun] = []
    start = 0
    while start < count:
        if len(runs) == at_most:
            return None
        stop, step = start + 1, (1, 1, 0)
        if stop < count and is_even[start]:
            turn = bisect_right(turns, start)
            stop = turns[turn] + 1 if turn < len(turns) else count
            step = tuple(steps[:, start].tolist())
        block_id, slot, block = (int(column[start]) for column in pages)
        runs.append(
            EvenRun(
                _progression(block_id, step[0], stop - start),
                _progression(slot, step[1], stop - start) if step[1] else slot,
                _progression(block, step[2], stop - start) if step[2] else block,
            )
        )
        start = stop
    return runs


def _progression(first: int, step: int, count: int) -> slice:
    """`first, first + step, ...` as a slice; `step` may be negative."""
    stop = first + step * count
    return slice(first, stop if stop >= 0 else None, step)
