"""Copies between device tensors on the CPU and the region, beside a plain contiguous copy.

    python scripts/bench/copies.py --json out.json

Three sides move the same bytes between the same two allocations, in one thread: kvtier's
`CopyWorker`; the statement that a simple worker makes per layer, `host[slots] = device[blocks]` in
torch; and one contiguous `torch.Tensor.copy_`.  The device's pages are in one allocation, layer by
layer or block by block, as vLLM makes it; four times as many blocks and slots as move, so that "in
no order" has somewhere to jump.

Every round takes each side once, in an order drawn anew, so that a slow moment of a shared machine
meets all of them; a figure is the median of the rounds, a ratio the median of the rounds' ratios.
Time is the thread's own: what other processes take of its core is not in it, what they take of
caches and memory is.
What was stored and what was loaded, into other blocks, is compared with where it came from.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and in it a file is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from storage.errors import ConfigError, StorageError
from storage.sizes import parse_size
from tiering.region import SHARED_MEMORY, Region
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism
from tiering.worker import BlockRun, CopyWorker, LayerPages

TARGET_RATIO = 0.8  # of the plain copy
TARGET_ROW_BYTES = 499_712  # from here on
_SPACE = 4  # blocks and slots, per block that moves

console = Console(width=110)


@dataclass(frozen=True)
class Shape:
    """What a block consists of: `pages` bytes of each layer, in the order of the row."""

    name: str
    pages: tuple[int, ...]
    tp: int = 1
    """Ranks, of which this is the first; latent pages, so that each writes its share."""
    blocks_per_chunk: int = 1
    in_order: bool = True
    """Block ids and slots; else both in no order."""
    by_block: bool = False
    """The device's pages: all layers of a block, then the next block.  Else the other way round."""

    @property
    def block_bytes(self) -> int:
        return sum(self.pages)


V2_LITE, V4_FLASH, GQA, V32 = (18_432,) * 27, (116_581,) * 43, (65_536,) * 32, (36_864, 18_680) * 62
SHAPES = (
    Shape("V2-Lite, 27 x 18 KB", V2_LITE),
    Shape("V2-Lite, no order", V2_LITE, in_order=False),
    Shape("V2-Lite, 4 blocks a chunk", V2_LITE, blocks_per_chunk=4),
    Shape("V2-Lite, 4 a chunk, no order", V2_LITE, blocks_per_chunk=4, in_order=False),
    Shape("V2-Lite, 2 ranks in turns", V2_LITE, tp=2),
    Shape("V2-Lite, packed by block", V2_LITE, by_block=True),
    Shape("GQA, 32 x 64 KB", GQA),
    Shape("GQA, no order", GQA, in_order=False),
    Shape("two kinds of page, 3.4 MB", V32),
    Shape("two kinds of page, no order", V32, in_order=False),
    Shape("43 odd pages, 5.0 MB", V4_FLASH),
    Shape("43 odd pages, no order", V4_FLASH, in_order=False),
    Shape("244 x 2 KB", (2048,) * 244),
    Shape("244 x 2 KB, no order", (2048,) * 244, in_order=False),
    Shape("122 x 4 KB, no order", (4096,) * 122, in_order=False),
    Shape("tiny, 4 x 1 KB", (1024,) * 4),
    Shape("tiny, no order", (1024,) * 4, in_order=False),
)


@dataclass(frozen=True)
class Figure:
    """GB/s of one direction, and how many times the plain copy's and the indexing's speed."""

    shape: str
    row_bytes: int
    op: str
    kvtier: float
    indexing: float
    plain: float
    ratio: float
    indexing_ratio: float

    @property
    def counts(self) -> bool:
        """Whether the target is about it."""
        return self.row_bytes >= TARGET_ROW_BYTES


class Bench:
    """One shape: a region, device pages, and what each side does with them."""

    def __init__(self, shape: Shape, moved_bytes: int, directory: Path) -> None:
        self.shape = shape
        chunks = max(1, moved_bytes // (shape.block_bytes * shape.blocks_per_chunk))
        self.count = chunks * shape.blocks_per_chunk
        layers = [LayerFacts(f"{i}", page, 1) for i, page in enumerate(shape.pages)]
        parallel = Parallelism(tp=shape.tp, world_size=shape.tp)
        self.layout = RowLayout.of(layers, parallel, shape.blocks_per_chunk)
        room = 2 * 4096 * (1 + len(layers) // 20)  # for the header and the layout
        size = _SPACE * chunks * self.layout.row_bytes + room
        self.region = Region.create("bench-copies", self.layout, size, directory=directory)
        self.region.unlink()
        self.blocks = _SPACE * self.count
        self.memory = torch.empty(self.blocks * shape.block_bytes, dtype=torch.int8)
        self.memory.random_(-128, 128, generator=torch.Generator().manual_seed(1))
        self.tensors = self._tensors()
        pages = [LayerPages(i, page) for i, page in enumerate(shape.pages)]
        self.worker = CopyWorker(self.region, 0, self.tensors, [pages])
        ids, slots = np.arange(self.blocks), np.arange(_SPACE * chunks)
        if not shape.in_order:
            drawn = np.random.default_rng(1)
            drawn.shuffle(ids)
            drawn.shuffle(slots)
        self.run = BlockRun(ids[: self.count], slots[:chunks], 0)
        self.elsewhere = BlockRun(ids[-self.count :], slots[:chunks], 0)
        self._index()

    def _tensors(self) -> list[torch.Tensor]:
        """int8[blocks, page] per layer, views of one allocation."""
        tensors, before = [], 0
        for page in self.shape.pages:
            step, start = (self.shape.block_bytes, before)
            if not self.shape.by_block:
                step, start = page, before * self.blocks
            tensors.append(self.memory.as_strided((self.blocks, page), (step, 1), start))
            before += page
        return tensors

    def _index(self) -> None:
        """What the plain statement needs: a host tensor per layer, and the ids as tensors."""
        flat = torch.frombuffer(self.region.mapping, dtype=torch.int8)[self.region.rows_offset :]
        per_chunk, row_bytes = self.shape.blocks_per_chunk, self.layout.row_bytes
        self.host = [
            flat.as_strided(
                (self.region.row_count, per_chunk, row.page_bytes),
                (row_bytes, row.page_bytes, 1),
                flat.storage_offset() + row.offset,
            )
            for row in self.layout.layers
        ]
        turns = np.repeat(self.run.slots, per_chunk) * per_chunk
        turns += np.tile(np.arange(per_chunk), len(self.run.slots))
        own = turns % self.shape.tp == 0
        self.places = {
            "store": (self.run.block_ids[own], turns[own]),
            "load": (self.elsewhere.block_ids, turns),
        }
        self.flat = flat

    def bytes_of(self, op: str) -> int:
        return len(self.places[op][0]) * self.shape.block_bytes

    def kvtier(self, op: str) -> None:
        if op == "store":
            self.worker.store([self.run])
        else:
            self.worker.load([self.elsewhere])

    def indexing(self, op: str) -> None:
        ids, turns = (torch.from_numpy(column) for column in self.places[op])
        slots, blocks = turns // self.shape.blocks_per_chunk, turns % self.shape.blocks_per_chunk
        for device, host in zip(self.tensors, self.host, strict=True):
            if op == "store":
                host[slots, blocks] = device[ids]
            else:
                device[ids] = host[slots, blocks]

    def plain(self, op: str) -> None:
        size = self.bytes_of(op)
        device, host = self.memory[:size], self.flat[:size]
        if op == "store":
            host.copy_(device)
        else:
            device.copy_(host)

    def check(self, op: str) -> str:
        """Digest of what stands where `op` put it.  Raises `StorageError` if it is not what was
        copied; of ranks in turns only this one's share has come."""
        digest = hashlib.sha256()
        ids, turns = self.places[op]
        for device, host in zip(self.tensors, self.host, strict=True):
            there = host[turns // self.shape.blocks_per_chunk, turns % self.shape.blocks_per_chunk]
            if not torch.equal(device[ids], there):
                raise StorageError(f"{self.shape.name}: {op}: not the bytes that were copied")
            digest.update(there.numpy().tobytes())
        return digest.hexdigest()

    def close(self) -> None:
        self.host.clear()
        del self.flat
        self.worker.close()


def measure(bench: Bench, rounds: int) -> tuple[list[Figure], str]:
    """Both directions, and the digest of the bytes that they left."""
    figures, digests = [], []
    order = random.Random(1)
    for op in ("store", "load"):
        seconds: dict[str, list[float]] = {"kvtier": [], "indexing": [], "plain": []}
        sides: dict[str, Callable[[str], None]] = {
            "plain": bench.plain,
            "indexing": bench.indexing,
            "kvtier": bench.kvtier,
        }
        names = list(sides)
        for turn in range(rounds + 1):
            order.shuffle(names)
            for name in names:
                started = time.thread_time()
                sides[name](op)
                if turn:  # the first is to warm up
                    seconds[name].append(time.thread_time() - started)
        bench.kvtier(op)  # the others left their bytes
        digests.append(bench.check(op))
        speed = {name: bench.bytes_of(op) / median(taken) / 1e9 for name, taken in seconds.items()}
        figures.append(
            Figure(
                bench.shape.name,
                bench.layout.row_bytes,
                op,
                **speed,
                ratio=_ratio(seconds["plain"], seconds["kvtier"]),
                indexing_ratio=_ratio(seconds["indexing"], seconds["kvtier"]),
            )
        )
    return figures, hashlib.sha256("".join(digests).encode()).hexdigest()


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return median(t / o for t, o in zip(theirs, ours, strict=True))


def run(
    shapes: Sequence[Shape], moved_bytes: int, rounds: int, directory: Path
) -> tuple[list[Figure], str]:
    """The figures and one hash of all bytes.  One thread, as the worker has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures, digest = [], hashlib.sha256()
    try:
        with (
            Progress(console=console, transient=True) as progress,
            tempfile.TemporaryDirectory(prefix="kvtier-copies-", dir=directory) as scratch,
        ):
            for shape in progress.track(shapes, description="shapes"):
                bench = Bench(shape, moved_bytes, Path(scratch))
                try:
                    found, of_bytes = measure(bench, rounds)
                finally:
                    bench.close()
                figures += found
                digest.update(of_bytes.encode())
    finally:
        torch.set_num_threads(threads)
    return figures, digest.hexdigest()[:16]


def table_of(figures: Sequence[Figure]) -> Table:
    table = Table(title="GB/s in one thread; a ratio above 1 is faster")
    for name in ("pages of a block", "row, bytes", "", "kvtier", "plain", "indexing", "/ plain"):
        table.add_column(name, justify="left" if name in ("pages of a block", "") else "right")
    table.add_column("/ indexing", justify="right")
    for figure in figures:
        missed = figure.counts and figure.ratio < TARGET_RATIO
        ratio = f"{figure.ratio:.2f}"
        table.add_row(
            figure.shape,
            f"{figure.row_bytes:,}",
            figure.op,
            *(f"{speed:.2f}" for speed in (figure.kvtier, figure.plain, figure.indexing)),
            f"[bold]{ratio}[/bold]" if missed else ratio,
            f"{figure.indexing_ratio:.2f}",
        )
    return table


def main(
    moved: Annotated[str, typer.Option(help="Bytes per copy.")] = "64MB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each side.")] = 9,
    directory: Annotated[Path, typer.Option(help="Where the region is made.")] = SHARED_MEMORY,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
) -> None:
    """How fast blocks move between device tensors and the region."""
    try:
        size = parse_size(moved, "--moved")
        if not directory.is_dir():
            raise ConfigError("--directory", "a directory", str(directory))
        figures, digest = run(SHAPES, size, rounds, directory)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    console.print(table_of(figures))
    counted = [figure for figure in figures if figure.counts]
    reached = sum(figure.ratio >= TARGET_RATIO for figure in counted)
    console.print(
        f"rows of 0.5 MB and more: {reached} of {len(counted)} at {TARGET_RATIO} of a plain copy "
        f"or above; result {digest}"
    )
    if json_path is not None:
        found = {"figures": [asdict(figure) for figure in figures], "result": digest}
        json_path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
