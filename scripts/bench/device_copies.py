"""vLLM's worker over kvtier's region, beside one copy of the same bytes to or from pinned memory.

    python scripts/bench/device_copies.py --device cuda

Needs vLLM and, but for a look at the program, a device.  Every round takes each side in turn; a
figure is the median of the rounds, a ratio the median of the rounds' ratios.  What was stored is
loaded into other blocks and compared.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and in it a file is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

from storage.errors import StorageError
from storage.sizes import parse_size
from tiering.region import SHARED_MEMORY, Region
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism

SHAPES = {
    "DeepSeek-V2-Lite, 27 x 18 KB": [18_432] * 27,
    "GQA, 32 x 64 KB": [65_536] * 32,
    "DeepSeek-V3.2, 3.4 MB": [36_864, 18_680] * 62,
    "244 x 2 KB": [2048] * 244,
}


class Figure(NamedTuple):
    shape: str
    op: str
    worker_gb_per_s: float
    plain_gb_per_s: float
    ratio: float


def run(device: str, moved_bytes: int, rounds: int, directory: Path) -> list[Figure]:
    """Raises `StorageError` if bytes did not come back as they went."""
    figures = []
    with tempfile.TemporaryDirectory(prefix="kvtier-copies-", dir=directory) as scratch:
        for name, pages in SHAPES.items():
            figures += _measure(name, pages, device, moved_bytes, rounds, Path(scratch))
    return figures


def _measure(
    name: str, pages: list[int], device: str, moved_bytes: int, rounds: int, directory: Path
) -> list[Figure]:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from tiering.vllm.worker import make_worker

    count = max(1, moved_bytes // sum(pages))
    layout = RowLayout.of([LayerFacts(f"{i}", p, 1) for i, p in enumerate(pages)], Parallelism(), 1)
    room = (count + 1) * layout.row_bytes + 65_536
    region = Region.create("bench-device-copies", layout, room, directory=directory)
    region.unlink()
    memory = torch.empty(2 * count * sum(pages), dtype=torch.int8, device=device)
    memory.random_(-128, 128)
    tensors, before = [], 0
    for page in pages:
        tensors.append(memory[before * 2 * count :][: page * 2 * count].view(2 * count, page))
        before += page
    worker = make_worker(
        region,
        0,
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, t.shape[1]) for t in tensors],
            [[CanonicalKVCacheRef(i, page) for i, page in enumerate(pages)]],
        ),
    )
    size = count * sum(pages)
    in_one = torch.zeros(size, dtype=torch.int8, device=device)
    pinned = torch.empty(size, dtype=torch.int8, pin_memory=device == "cuda")
    rows = CPULoadStoreSpec(list(range(count)))
    here = GPULoadStoreSpec(list(range(count)), [count], [0])
    there = GPULoadStoreSpec(list(range(count, 2 * count)), [count], [0])
    job = 0

    def by_worker(submit: Callable[..., bool], source: Any, target: Any) -> None:
        nonlocal job
        job += 1
        submit(job, source, target)
        worker.wait({job})
        worker.get_finished()

    def plainly(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        if device != "cpu":
            torch.accelerator.synchronize()

    figures = []
    for op, ours, theirs in (
        (
            "store",
            lambda: by_worker(worker.submit_store, here, rows),
            lambda: plainly(pinned, in_one),
        ),
        (
            "load",
            lambda: by_worker(worker.submit_load, rows, there),
            lambda: plainly(in_one, pinned),
        ),
    ):
        taken = [(_seconds(theirs), _seconds(ours)) for _ in range(rounds + 1)][1:]
        plain, own = (median(side) for side in zip(*taken, strict=True))
        ratio = median(theirs / ours for theirs, ours in taken)
        figures.append(Figure(name, op, size / own / 1e9, size / plain / 1e9, ratio))
    if not all(torch.equal(t[:count], t[count:]) for t in tensors):
        raise StorageError(f"{name}: what was loaded is not what was stored")
    worker.shutdown()
    return figures


def _seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def main(
    device: Annotated[str, typer.Option(help="As torch names it: cuda, xpu or cpu.")] = "cuda",
    moved: Annotated[str, typer.Option(help="Bytes per copy.")] = "256MB",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each side.")] = 9,
    directory: Annotated[Path, typer.Option(help="Where the region is made.")] = SHARED_MEMORY,
) -> None:
    """How fast blocks move between a device and the region."""
    try:
        figures = run(device, parse_size(moved, "--moved"), rounds, directory)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    table = Table("pages of a block", "", "worker, GB/s", "plain, GB/s", "/ plain")
    for figure in figures:
        table.add_row(*figure[:2], *(f"{number:.2f}" for number in figure[2:]))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
