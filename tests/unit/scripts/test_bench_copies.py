"""The benchmark of copies in small, so that it can't rot."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import copies as bench
from storage.errors import StorageError

SHAPES = [
    bench.Shape("in order", (512,) * 6),
    bench.Shape("in turns", (512,) * 6, tp=2, in_order=False),
    bench.Shape("two kinds, packed", (512, 64) * 3, blocks_per_chunk=4, by_block=True),
]


def test_a_tiny_run_says_everything_and_the_same_twice(memory_path: Path) -> None:
    figures, digest = bench.run(SHAPES, 64_000, 2, memory_path)
    assert [(f.shape, f.op) for f in figures] == [
        (shape.name, op) for shape in SHAPES for op in ("store", "load")
    ]
    assert all(min(f.kvtier, f.plain, f.indexing, f.ratio) > 0 for f in figures)
    assert not any(f.counts for f in figures), "rows this small are not what the target is about"
    assert bench.run(SHAPES, 64_000, 1, memory_path)[1] == digest


def test_bytes_that_did_not_arrive_are_noticed(memory_path: Path) -> None:
    made = bench.Bench(SHAPES[1], 64_000, memory_path)
    made.kvtier("store")
    made.check("store")
    with pytest.raises(StorageError, match="load: not the bytes that were copied"):
        made.check("load")
    made.close()
