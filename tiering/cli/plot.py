"""Pictures of what fills a disk, and of how it came to that.  Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from storage.survey import RootSurvey
from tiering.cli import words
from tiering.cli.console import short_name
from tiering.cli.figures import RootFigures

_PARTS = (
    ("rows", "tab:blue"),
    ("free slots", "lightsteelblue"),
    ("headers and other files", "tab:gray"),
    ("saved by dedup", "tab:green"),
)


def plot_usage(surveys: Sequence[RootSurvey], figures: Sequence[RootFigures], target: Path) -> None:
    """Bars of what each namespace takes, and each root's own history of use.

    Raises `OSError` if `target` can't be written, `ValueError` for an ending that names no format.
    """
    bars = sum(max(1, len(root.namespaces)) for root in figures)
    figure = Figure(figsize=(10, 1.6 + 0.45 * bars + 2.6 * len(surveys)), layout="constrained")
    heights = [0.8 + 0.45 * bars, *[2.6] * len(surveys)]
    rows = figure.subplots(1 + len(surveys), 1, height_ratios=heights, squeeze=False)[:, 0]
    _plot_parts(rows[0], figures)
    for axes, survey in zip(rows[1:], surveys, strict=True):
        _plot_history(axes, survey)
    figure.savefig(target, dpi=120)


def _plot_parts(axes: Axes, figures: Sequence[RootFigures]) -> None:
    names: list[str] = []
    for root in figures:
        for one in sorted(root.namespaces, key=lambda n: n.disk_bytes):
            prefix = f"{Path(root.root).name}/" if len(figures) > 1 else ""
            rows = one.logical_bytes - max(0, one.saved_by_codec_bytes)
            rest = max(0, one.disk_bytes - rows - one.free_slot_bytes)
            sizes = (rows, one.free_slot_bytes, rest, one.saved_by_dedup_bytes or 0)
            left = 0
            for (part, colour), part_bytes in zip(_PARTS, sizes, strict=True):
                is_saved = part == _PARTS[-1][0]
                axes.barh(
                    len(names),
                    part_bytes,
                    left=left,
                    color="none" if is_saved else colour,
                    edgecolor=colour,
                    linestyle="--" if is_saved else "-",
                    label=part if not names else None,
                )
                left += part_bytes
            names.append(prefix + short_name(one.namespace, 34, one.model))
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.size(value)))
    axes.set_xlim(left=0)
    axes.set_title("what fills the disk", loc="left")
    if names:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.15), ncols=4, fontsize="small")


def _plot_history(axes: Axes, survey: RootSurvey) -> None:
    axes.set_title(f"use of {survey.root} over time", loc="left")
    status = survey.status
    if status is None or len(status.history) < 2:
        axes.text(0.5, 0.5, "no history yet", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    times = np.array([point.time_s for point in status.history], "datetime64[s]")
    axes.fill_between(times, [p.used_bytes for p in status.history], alpha=0.3, color="tab:blue")
    axes.plot(times, [p.used_bytes for p in status.history], color="tab:blue", label="used")
    axes.axhline(status.budget_bytes, color="tab:red", linestyle=":", label="budget")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words.size(value)))
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    rates = axes.twinx()
    rates.plot(
        times[1:],
        [
            _hit_rate(before.rows_read, before.rows_missing, now.rows_read, now.rows_missing)
            for before, now in zip(status.history, status.history[1:], strict=False)
        ],
        color="tab:orange",
        label="rows found, of those asked for",
    )
    rates.set_ylim(0, 1.02)
    rates.yaxis.set_major_formatter(PercentFormatter(1.0))
    lines = [*axes.get_lines(), *rates.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], fontsize="small", loc="best")


def _hit_rate(read_before: int, missing_before: int, read: int, missing: int) -> float:
    """Between two points; not a number, which leaves a gap, where nobody asked."""
    asked = read + missing - read_before - missing_before
    return (read - read_before) / asked if asked else nan
