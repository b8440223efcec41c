"""Replay traces of requests against the disk's policies, without a disk.

    python scripts/bench/replay.py --traces DIR --json out.json

A request's chunk is a hit only if all chunks before it hit; then all its chunks are offered for
storing.  The policies are the store's own classes, asked as the store asks them.  Beside the
default configuration stand the two fixed rules of admission, and the bounds: a disk that keeps
everything, and one that knows the future (Belady).  Then the same with a region in front, of 5 % of
the chunks, which changes what the disk gets to see.

"writes" are rows written as multiples of the trace's unique chunks, "per hit" are bytes written per
byte hit.  "to beat" is, on the traces where it is known, the better of the two fixed rules.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and in it a file is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.bench.belady import belady_hit_rate
from storage.admission import ADMISSION
from storage.eviction import EVICTION
from tiering.replay import (
    DEFAULT_ADMISSION,
    DEFAULT_EVICTION,
    PlayedDisk,
    PlayedRegion,
    play,
)
from tiering.traces import BadTrace, Trace, read_traces

CAPACITIES = "0.02,0.05,0.1,0.25,0.5"
REGION = 0.05
RIVALS = ("always", "second-touch")
_TO_BEAT = {
    "conversation": {0.02: 0.148, 0.05: 0.210, 0.1: 0.278, 0.25: 0.353, 0.5: 0.363},
    "synthetic": {0.02: 0.078, 0.05: 0.158, 0.1: 0.272, 0.25: 0.455, 0.5: 0.588},
    "agentic": {0.02: 0.632, 0.05: 0.900, 0.1: 0.947, 0.25: 0.958, 0.5: 0.959},
}

console = Console(width=118)


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay.  `capacity` and `region` are fractions of the trace's unique chunks."""

    trace: str
    capacity: float
    slots: int
    region: float
    policy: str
    eviction: str
    hit_rate: float
    disk_hit_rate: float
    """Hits that the region did not have; `hit_rate` counts both."""
    writes: float
    """Rows written, as multiples of the trace's unique chunks."""
    written_per_hit: float | None
    """Bytes written per byte hit on the disk."""
    infinite: float
    belady: float | None
    """Without a region only."""
    to_beat: float | None
    ratio: float | None
    """Hit rate by `to_beat`."""


def replay(
    trace: Trace, capacity: float, region: float, admission: str, eviction: str, belady: bool
) -> Cell:
    """Play one trace; `capacity` and `region` are fractions of its unique chunks."""
    slots = max(1, int(trace.unique_count * capacity))
    disk = PlayedDisk(slots, admission, eviction)
    front = PlayedRegion(int(trace.unique_count * region))
    hits, disk_hits = play(trace, disk, front)
    hit_rate = hits / trace.reference_count
    to_beat = _TO_BEAT.get(trace.name, {}).get(capacity) if not region else None
    return Cell(
        trace=trace.name,
        capacity=capacity,
        slots=slots,
        region=region,
        policy=admission,
        eviction=eviction,
        hit_rate=hit_rate,
        disk_hit_rate=disk_hits / trace.reference_count,
        writes=disk.rows_written / trace.unique_count,
        written_per_hit=disk.rows_written / disk_hits if disk_hits else None,
        infinite=trace.infinite_hit_rate,
        belady=belady_hit_rate(trace, slots) if belady else None,
        to_beat=to_beat,
        ratio=hit_rate / to_beat if to_beat else None,
    )


# -- the program --------------------------------------------------------------------------------

_traces: list[Trace] = []  # of this process: those that it was started with


@dataclass(frozen=True, slots=True)
class _Work:
    trace: int
    capacity: float
    region: float
    admission: str
    eviction: str
    belady: bool


def _start_worker(traces: list[Trace]) -> None:
    _traces[:] = traces


def _work(work: _Work) -> Cell:
    return replay(
        _traces[work.trace],
        work.capacity,
        work.region,
        work.admission,
        work.eviction,
        work.belady,
    )


def replay_all(traces: list[Trace], works: list[_Work], processes: int) -> Iterator[Cell]:
    """Cells in the order of `works`, played by so many processes."""
    context = multiprocessing.get_context("fork")  # the traces are there already
    with ProcessPoolExecutor(processes, context, _start_worker, (traces,)) as pool:
        yield from pool.map(_work, works)


def _parse_capacities(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < capacity <= 1 for capacity in found):
        raise typer.BadParameter(f"expected fractions above 0 up to 1, such as 0.1,0.5: {text!r}")
    return found


def _parse_policy(name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise typer.BadParameter(f"expected one of {', '.join(known)}: {name!r}")
    return name


def run(
    traces: Annotated[Path, typer.Option(help="Folder of *.jsonl.gz.")],
    capacity: Annotated[
        str, typer.Option(help="The disk's budget, as fractions of a trace's unique chunks.")
    ] = CAPACITIES,
    admission: Annotated[str, typer.Option(help=", ".join(ADMISSION))] = DEFAULT_ADMISSION,
    eviction: Annotated[str, typer.Option(help=", ".join(EVICTION))] = DEFAULT_EVICTION,
    region: Annotated[
        float, typer.Option(min=0, max=1, help="Size of the region of the second table; 0: none.")
    ] = REGION,
    processes: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the cells to this file.")
    ] = None,
) -> None:
    """Replay traces against a policy and a budget; print hit rates, writes and the bounds."""
    capacities = _parse_capacities(capacity)
    _parse_policy(admission, list(ADMISSION))
    _parse_policy(eviction, list(EVICTION))
    try:
        found = read_traces(traces)
    except BadTrace as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    policies = list(dict.fromkeys((admission, *RIVALS)))
    works = [
        _Work(number, fraction, front, policy, eviction, belady=policy == admission and not front)
        for front in dict.fromkeys((0.0, region))
        for number in range(len(found))
        for fraction in capacities
        for policy in policies
    ]
    cells: list[Cell] = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=len(works))
        for cell in replay_all(found, works, processes):
            cells.append(cell)
            progress.advance(task)
    _print_tables(cells, policies)
    if json_out is not None:
        alone = [cell for cell in cells if cell.policy == admission and not cell.region]
        compared = [cell for cell in cells if cell not in alone]
        document = {
            "cells": [asdict(cell) for cell in alone],
            "compared": [asdict(cell) for cell in compared],
        }
        try:
            json_out.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as exc:
            typer.echo(f"--json: {exc}", err=True)
            raise typer.Exit(2) from None


def _print_tables(cells: list[Cell], policies: list[str]) -> None:
    """One table per region and trace, one line per capacity."""
    ours, *rivals = policies
    by_table: dict[tuple[float, str], dict[float, dict[str, Cell]]] = {}
    for cell in cells:
        lines = by_table.setdefault((cell.region, cell.trace), {})
        lines.setdefault(cell.capacity, {})[cell.policy] = cell
    for (region, trace), lines in by_table.items():
        infinite = next(iter(lines.values()))[ours].infinite
        where = f"behind a region of {region:.0%}" if region else "the disk alone"
        table = Table(
            title=f"{trace}, {where}: hit rate / writes (infinite cache: {infinite:.4f})",
            title_justify="left",
        )
        table.add_column("disk")
        for column in (*rivals, ours, "per hit", "Belady", "to beat", "ratio"):
            table.add_column(column, justify="right")
        for capacity, by_policy in lines.items():
            cell = by_policy[ours]
            table.add_row(
                f"{capacity:.4g}",
                *(
                    f"{by_policy[policy].hit_rate:.4f} / {by_policy[policy].writes:.2f}"
                    for policy in (*rivals, ours)
                ),
                _number(cell.written_per_hit, 2),
                _number(cell.belady, 4),
                _number(cell.to_beat, 3),
                _number(cell.ratio, 3),
            )
        console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    typer.run(run)
