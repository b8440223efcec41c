"""The results of the scaled work as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a file is all that is drawn, wherever there is no screen
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from rich.table import Table

from scripts.demo.scaled_work import DISK_BYTES, WorkResult

GB = 10**9
_COLOURS = ("#c44e52", "#2a6f97", "#6a994e")  # of the variants, in the order of the results
_BARS = 0.76  # width of all bars of a model


def table(results: Sequence[WorkResult], scale: float) -> Table:
    """`disk used` and `needed` are scaled back to the full disk."""
    found = Table(title=f"sizes scaled back by {scale:g}")
    found.add_column("model", no_wrap=True)
    found.add_column("TP", justify="right")
    found.add_column("stored", no_wrap=True)
    for title in ("row bytes", "needed", "disk used", "% of disk"):
        found.add_column(title, justify="right")
    found.add_column("state at the end")
    for title in (
        "ENOSPC state\nchanges",
        "hit rate on the\nsecond pass",
        "wrong\nbytes",
        "failed\nI/O",
    ):
        found.add_column(title, justify="right")
    for result, follower in zip(results, [*results[1:], None], strict=True):
        is_last = follower is None or follower.model != result.model
        found.add_row(
            result.model,
            str(result.tp),
            result.variant,
            f"{result.row_bytes:,}",
            f"{result.needed_bytes * scale / GB:.0f} GB",
            f"{result.used_bytes * scale / GB:.1f} GB",
            f"{100 * result.used_bytes / result.disk_bytes:.1f}",
            result.state,
            str(result.state_changes),
            f"{100 * result.hit_rate:.1f} %",
            str(result.wrong_bytes),
            str(result.errors),
            end_section=is_last,
        )
    return found


def plain(result: WorkResult, scale: float) -> dict[str, Any]:
    """One object of `--json`: as measured on the small disk, and scaled back."""
    fields = {name: getattr(result, name) for name in WorkResult.__slots__}
    return fields | {
        "needed_bytes": result.needed_bytes,
        "full_scale_used_bytes": round(result.used_bytes * scale),
        "full_scale_needed_bytes": round(result.needed_bytes * scale),
    }


def draw(results: Sequence[WorkResult], scale: float, file: Path) -> None:
    """Disk used against the disk's size, and beside it what the second pass found there."""
    figure, (disk, hits) = plt.subplots(
        1, 2, figsize=(12.5, 5.4), width_ratios=(1.5, 1), layout="constrained"
    )
    _draw_disk(disk, results, scale)
    _draw_hits(hits, results)
    variants = _variants(results)
    handles = [Patch(color=c, label=v) for c, v in zip(_COLOURS, variants, strict=False)]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"The same work on a disk of {DISK_BYTES // GB} GB (run at 1/{scale:g} of the size)",
        fontsize=13,
    )
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _draw_disk(axes: Axes, results: Sequence[WorkResult], scale: float) -> None:
    disk = DISK_BYTES / GB
    axes.axhline(disk, color="black", linewidth=1, linestyle="--")
    axes.annotate(
        f"size of the disk, {disk:.0f} GB",
        (1, disk),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        va="bottom",
    )
    for result in results:
        used = result.used_bytes * scale / GB
        if result.state_changes:
            inside = f"full:\nneeds\n{result.needed_bytes * scale / GB:,.0f}"
            _bar(axes, results, result, used, inside, is_inside=True)
        else:
            _bar(axes, results, result, used, f"{used:.0f}")
    axes.set_ylim(0, 1.12 * disk)
    axes.set_ylabel("GB on disk")
    axes.set_title("Disk used", loc="left")
    _name_models(axes, results)


def _draw_hits(axes: Axes, results: Sequence[WorkResult]) -> None:
    for result in results:
        percent = 100 * result.hit_rate
        _bar(axes, results, result, percent, f"{percent:.0f}")
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("% of the chunks asked for")
    axes.set_title("Found on disk after a restart", loc="left")
    _name_models(axes, results)


def _bar(
    axes: Axes,
    results: Sequence[WorkResult],
    result: WorkResult,
    height: float,
    label: str,
    *,
    is_inside: bool = False,
) -> None:
    variants = _variants(results)
    width, index = _BARS / len(variants), variants.index(result.variant)
    at = _models(results).index(result.model) + (index + 0.5) * width - _BARS / 2
    axes.bar(at, height, width - 0.02, color=_COLOURS[index])
    axes.annotate(
        label,
        (at, height),
        (0, -4 if is_inside else 3),
        textcoords="offset points",
        ha="center",
        va="top" if is_inside else "bottom",
        color="white" if is_inside else "black",
        size=9,
    )


def _name_models(axes: Axes, results: Sequence[WorkResult]) -> None:
    tp = {result.model: result.tp for result in results}
    names = [f"{model}\nTP {tp[model]}".replace("DeepSeek-", "DeepSeek\n") for model in tp]
    axes.set_xticks(range(len(tp)), names, size=9)
    axes.spines[["top", "right"]].set_visible(False)


def _variants(results: Sequence[WorkResult]) -> list[str]:
    return list(dict.fromkeys(result.variant for result in results))


def _models(results: Sequence[WorkResult]) -> list[str]:
    return list(dict.fromkeys(result.model for result in results))
