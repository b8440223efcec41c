"""The runs of an evaluation as a table, as Markdown, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import msgspec
from rich.table import Table

from scripts.evals.plans import FS, KVTIER, NO_DEDUP
from scripts.evals.records import RunRecord
from scripts.evals.verdict import Bounds, differing

matplotlib.use("Agg")  # a file is all that is drawn, wherever there is no screen
from matplotlib import pyplot as plt

_COLOURS = {KVTIER: "#2a6f97", NO_DEDUP: "#7a6f9b", FS: "#c08a3e"}
_DAMAGED = "#c44e52"
_BAR = 0.6


@dataclass(frozen=True, slots=True)
class EvalReport:
    """`faults` is empty when all bounds were kept."""

    title: str
    runs: Sequence[RunRecord]
    """Of all sides, one side after the other."""
    bounds: Bounds
    faults: Sequence[str]

    def cold_of(self, run: RunRecord) -> RunRecord:
        return next(other for other in self.runs if other.side == run.side)


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    unit: str = ""


_COLUMNS = (
    _Column("KV on"),
    _Column("run"),
    _Column("score"),
    _Column("±", "stderr"),
    _Column("other", "answers"),
    _Column("wall", "s"),
    _Column("TTFT", "p50 ms"),
    _Column("TTFT", "p99 ms"),
    _Column("com-", "puted"),
    _Column("from", "device"),
    _Column("from", "region"),
    _Column("from", "disk"),
    _Column("MB", "written"),
    _Column("MB", "read"),
    _Column("MB on disk", "of budget"),
    _Column("disk", "states"),
    _Column("corrupt", "rows"),
)


def _cells(report: EvalReport, run: RunRecord) -> list[str]:
    def optional(value: int | None) -> str:
        return "-" if value is None else str(value)

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    budget = "" if run.disk_budget_bytes is None else f" / {run.disk_budget_bytes / 1e6:.0f}"
    cold = report.cold_of(run)
    return [
        run.side,
        f"{run.number} {run.kind}",
        f"{run.score:.4f}",
        f"{run.stderr:.4f}",
        "" if run is cold else str(differing(cold, run)),
        f"{run.wall_s:.1f}",
        ms(run.ttft_p50_s),
        ms(run.ttft_p99_s),
        *map(str, (run.tokens_computed, run.tokens_device, run.tokens_region, run.tokens_disk)),
        f"{run.bytes_written / 1e6:.1f}",
        f"{run.bytes_read / 1e6:.1f}",
        f"{run.disk_used_bytes / 1e6:.1f}{budget}",
        optional(run.state_changes),
        optional(run.rows_corrupt),
    ]


def table(report: EvalReport) -> Table:
    """The one table at the end: a line per run."""
    found = Table(title=report.title, title_justify="left", padding=(0, 0), pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        found.add_column(
            f"{column.title}\n{column.unit}".rstrip(),
            justify="left" if i < 2 else "right",
            no_wrap=i != 1,
        )
    for run, follower in zip(report.runs, [*report.runs[1:], None], strict=True):
        is_last = follower is None or follower.side != run.side
        found.add_row(*_cells(report, run), end_section=is_last)
    return found


def verdict_lines(report: EvalReport) -> list[str]:
    """What was asked of the runs, and how they kept it."""
    lines = [f"asked for: {report.bounds}"]
    return lines + ([f"FAILED: {fault}" for fault in report.faults] or ["kept by every run"])


def markdown(report: EvalReport) -> str:
    """The same table and verdict."""
    titles = [f"{c.title} {c.unit}".replace("- ", "").strip() for c in _COLUMNS]
    lines = [f"## {report.title}", "", f"| {' | '.join(titles)} |"]
    lines.append("|" + "|".join(["---"] * 2 + ["---:"] * (len(titles) - 2)) + "|")
    lines += [f"| {' | '.join(_cells(report, run))} |" for run in report.runs]
    return "\n".join([*lines, "", *verdict_lines(report)]) + "\n"


def figures(report: EvalReport) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "title": report.title,
        "bounds": asdict(report.bounds),
        "runs": [msgspec.to_builtins(run) for run in report.runs],
        "faults": list(report.faults),
    }


def draw(report: EvalReport, file: Path) -> None:
    """Scores with their error bars, and beside them the disk used after each run."""
    figure, (scores, disk) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    names = [f"{run.side}\n{run.number} {run.kind}".replace(" of ", "\nof ") for run in report.runs]
    colours = [_DAMAGED if run.rows_damaged else _COLOURS[run.side] for run in report.runs]
    at = range(len(names))
    values = [run.score for run in report.runs]
    errors = [run.stderr for run in report.runs]
    scores.bar(at, values, _BAR, yerr=errors, capsize=4, color=colours)
    scores.set_ylim(0, 1.12)
    scores.set_title(f"Score: {report.runs[0].metric.replace('_', ' ')}", loc="left")
    used = [run.disk_used_bytes / 1e6 for run in report.runs]
    disk.bar(at, used, _BAR, color=colours)
    disk.set_ylim(0, 1.12 * max(used))
    disk.set_title("Disk used, MB", loc="left")
    for axes, heights, form in ((scores, values, "{:.3f}"), (disk, used, "{:.1f}")):
        axes.set_xticks(list(at), names, size=8)
        axes.spines[["top", "right"]].set_visible(False)
        for i, height in enumerate(heights):
            above = errors[i] if axes is scores else 0.0
            axes.annotate(
                form.format(height),
                (i, height + above),
                (0, 3),
                textcoords="offset points",
                ha="center",
                size=9,
            )
    figure.suptitle(report.title)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def write(report: EvalReport, out: Path) -> None:
    """`report.md`, `report.json` and `report.png`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown(report))
    encoded = msgspec.json.format(msgspec.json.encode(figures(report)), indent=2)
    (out / "report.json").write_bytes(encoded)
    draw(report, out / "report.png")
