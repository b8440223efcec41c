"""The picture of `kvtier plan --plot`: hit rate, and writes, against the size of the disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import ConfigError
from tiering.planning import HitPoint

if TYPE_CHECKING:
    from tiering.cli.plan import Plan

_WITH, _WITHOUT, _MARK = "#0072b2", "#d55e00", "#444444"  # told apart by everybody
_GB = 10**9


def save_plot(path: Path, plan: Plan) -> None:
    """Draw `plan` into `path`.  Raises `ConfigError` where it can't be drawn or written."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot", "matplotlib (pip install 'kvtier[plots]')", None) from None
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError("--plot", "a file .png, .svg or .pdf", str(path))
    curve = plan.curve
    panels = 2 if curve is not None and curve.is_of_trace else 1
    figure = Figure(figsize=(8, 4.2 if panels == 1 else 6.6), layout="constrained")
    axes: list[Any] = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    if curve is None:
        _draw_tokens(axes[0], plan)
    else:
        what = "hit rate" if curve.is_of_trace else "share of the expected prompts that fits"
        _draw(axes[0], curve.points, curve.points_without_dedup, lambda p: 100 * p.hit_rate)
        axes[0].set(ylabel=f"{what}, %", ylim=(0, 108))
    if curve is not None and curve.is_of_trace:
        axes[0].axhline(100 * curve.best, color=_MARK, linewidth=0.8, linestyle=":")
        axes[0].annotate(
            "a disk that keeps everything ",
            (1, 100 * curve.best),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color=_MARK,
            fontsize=8,
        )
    if curve is not None and panels == 2:
        _draw_writes(axes[1], plan, curve.points)
    figure.suptitle(
        f"{plan.size.model}, TP {plan.size.tp}: row of {plan.size.row_bytes:,} bytes, "
        f"{plan.size.row_bytes_without_dedup:,} without dedup",
        fontsize=11,
    )
    if plan.budget_bytes is not None:
        for number, axis in enumerate(axes):
            axis.axvline(plan.budget_bytes / _GB, color=_MARK, linewidth=1, linestyle="--")
            if not number:
                axis.annotate(
                    f" budget {plan.budget_bytes / _GB:g} GB",
                    (plan.budget_bytes / _GB, 0.03),
                    xycoords=("data", "axes fraction"),
                    color=_MARK,
                )
    axes[-1].set(xlabel="disk, GB")
    axes[-1].xaxis.set_major_formatter("{x:,.0f}")
    for axis in axes:
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.yaxis.set_major_formatter("{x:,.0f}")
    axes[0].legend(frameon=False, loc="best")
    try:
        figure.savefig(path, dpi=150)
    except OSError as exc:
        raise ConfigError("--plot", "a file that can be written", f"{path}: {exc}") from exc


def _draw(
    axis: Any,
    points: Sequence[HitPoint],
    points_without_dedup: Sequence[HitPoint],
    value: Callable[[HitPoint], float],
) -> None:
    lines = [(points, _WITH, "with dedup"), (points_without_dedup, _WITHOUT, "without dedup")]
    for line, color, label in lines[: 1 if points == points_without_dedup else 2]:
        sizes = [point.budget_bytes / _GB for point in line]
        axis.plot(sizes, [value(point) for point in line], "o-", color=color, label=label)


def _draw_tokens(axis: Any, plan: Plan) -> None:
    """Without expected prompts: what a disk holds."""
    sizes = [plan.gauge_bytes * step // 10 for step in range(1, 16)]
    for dedup, color, label in ((True, _WITH, "with dedup"), (False, _WITHOUT, "without dedup")):
        held = [plan.size.disk_holds(size, dedup=dedup) for size in sizes]
        axis.plot([size / _GB for size in sizes], held, color=color, label=label)
    axis.set(ylabel=f"{plan.size.unit} held")
    axis.set_ylim(bottom=0)


def _draw_writes(axis: Any, plan: Plan, points: Sequence[HitPoint]) -> None:
    sizes = [point.budget_bytes / _GB for point in points]
    daily = [(point.written_bytes_per_day or 0) / _GB for point in points]
    axis.plot(sizes, daily, "o-", color=_WITH)
    axis.set(ylabel="written per day, GB")
    axis.set_ylim(bottom=0)
    if plan.endurance is not None:
        allowed = plan.endurance.bytes_per_day / _GB
        axis.axhline(allowed, color="#cc3311", linewidth=1)
        axis.annotate(
            f"the drive's endurance over {plan.endurance.years:g} years ",
            (1, allowed),
            xycoords=("axes fraction", "data"),
            ha="right",
            va="bottom",
            color="#cc3311",
        )
