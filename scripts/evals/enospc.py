"""The preset `enospc`: four models on a disk that is too small, their rows stored in three ways.

Every row of its table is simulated: eight ranks of vLLM do not fit two cores, nor these models this
machine. Ranks, region, store process and file system are real; what a rank would have computed is a
pattern. See `scripts/demo/scaled_work.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress

from scripts.demo.report import GB, draw, plain, table
from scripts.demo.scaled_work import DISK_BYTES, SCALE, WORKS, Work, WorkResult, run_work
from scripts.demo.small_disk import FileSystem, small_disk
from scripts.evals.records import write_whole
from scripts.models import ROOT
from storage.codec import NO_CODEC

VARIANTS = ((False, NO_CODEC), (True, NO_CODEC), (True, "zstd"))
_RATIO_TOLERANCE = 0.01  # of rows without dedup to rows with it, which is the number of ranks
_NOTE = (
    "All rows are simulated: TP ranks as processes without a model, over the real region, store"
    " process and file system. Under zstd pages are bf16 numbers of which 11 bits in 16 are noise;"
    " what a codec makes of a trained model's KV, scripts/bench/codecs.py tells."
)


def run_enospc(out: Path | None, console: Console, works: Sequence[Work] = WORKS) -> int:
    """Run every model in every variant, print the table, write the report; the exit code."""
    directory = out.absolute() if out is not None else ROOT / ".cache" / "evals" / "enospc"
    if out is None:
        shutil.rmtree(directory, ignore_errors=True)
    (directory / "runs").mkdir(parents=True, exist_ok=True)
    results = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("models", total=len(works) * len(VARIANTS))
        for work in works:
            for dedup, codec in VARIANTS:
                result = _result(work, directory / "runs", dedup=dedup, codec=codec)
                results.append(result)
                bar.console.print(f"{result.model}, {result.variant}: done", highlight=False)
                bar.advance(task)
    console.print(table(results, SCALE))
    console.print(_NOTE, highlight=False)
    faults = faults_of(results)
    for fault in faults:
        console.print(f"FAILED: {fault}", markup=False, highlight=False)
    write(results, faults, directory)
    console.print(f"report.md, report.json and report.png are in {directory}", markup=False)
    return 1 if faults else 0


def _result(work: Work, runs: Path, *, dedup: bool, codec: str) -> WorkResult:
    """Of one model in one variant; kept as a file, so that it is never run twice."""
    file = runs / f"{work.preset}-{'with' if dedup else 'without'}-{codec}.json"
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=WorkResult)
    with small_disk(FileSystem.TMPFS, int(DISK_BYTES / SCALE)) as disk:
        result = run_work(work, disk, SCALE, dedup=dedup, codec=codec)
    write_whole(file, msgspec.json.encode(result))
    return result


def faults_of(results: Sequence[WorkResult]) -> list[str]:
    """What the runs promised and did not keep."""
    faults = []
    for result in results:
        name = f"{result.model}, {result.variant}"
        if result.wrong_bytes or result.errors:
            faults.append(f"{name}: {result.wrong_bytes} wrong bytes, {result.errors} failed I/O")
        if result.dedup and result.hit_rate < 1:
            faults.append(f"{name}: found {result.hit_rate:.1%} of its chunks again")
    row_bytes = {(r.model, r.dedup): r.row_bytes for r in results}
    for model, tp in {r.model: r.tp for r in results}.items():
        ratio = row_bytes[model, False] / row_bytes[model, True]
        if abs(ratio / tp - 1) > _RATIO_TOLERANCE:
            faults.append(f"{model}: rows without dedup are {ratio:.2f} times as large, not {tp}")
    return faults


def markdown(results: Sequence[WorkResult], faults: Sequence[str]) -> str:
    """The table and the verdict."""
    disk = f"{DISK_BYTES / GB:.0f} GB"
    lines = [f"## Four models on a disk of {disk}, run at 1/{SCALE:g} of the size", ""]
    titles = ("model", "TP", "ranks", "stored", "row bytes", "needed GB", "disk used GB", "outcome")
    lines.append(f"| {' | '.join((*titles, 'ENOSPC state changes', 'warm hit rate'))} |")
    lines.append("|---|---:|---|---|---:|---:|---:|---|---:|---:|")
    for r in results:
        outcome = "fits" if not r.state_changes else "disk full, goes on"
        sizes = f"{r.needed_bytes * SCALE / GB:.0f} | {r.used_bytes * SCALE / GB:.1f}"
        lines.append(
            f"| {r.model} | {r.tp} | simulated | {r.variant} | {r.row_bytes:,} | {sizes} |"
            f" {outcome} | {r.state_changes} | {r.hit_rate:.1%} |"
        )
    verdict = [f"FAILED: {fault}" for fault in faults] or ["No wrong byte, no failed I/O."]
    return "\n".join([*lines, "", _NOTE, "", *verdict]) + "\n"


def write(results: Sequence[WorkResult], faults: Sequence[str], out: Path) -> None:
    """`report.md`, `report.json` and `report.png`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown(results, faults))
    found = {
        "scale": SCALE,
        "disk_bytes": DISK_BYTES,
        "ranks": "simulated",
        "rows": [plain(result, SCALE) | {"variant": result.variant} for result in results],
        "faults": list(faults),
    }
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=2))
    draw(results, SCALE, out / "report.png")
