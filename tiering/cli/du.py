"""`kvtier du`: what is on the disk, whose, what dedup and codec saved, when it will be full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from storage.codec import NO_CODEC
from storage.errors import ConfigError
from storage.survey import RootSurvey, survey_root
from tiering.cli import words
from tiering.cli.console import console, parse_span, print_json, print_warnings, short_name
from tiering.cli.figures import NamespaceFigures, RootFigures, root_figures

_WIDE_COLUMNS = 100  # of a terminal; figures stand closer in a narrower one
_NAME_COLUMNS = 22  # of a namespace, where the terminal has 80


def du(
    roots: Annotated[list[Path], typer.Argument(help="Roots of stores.", metavar="ROOT...")],
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Two roots, side by side: without dedup, and with it."),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it: a picture, as PNG, SVG or PDF.")
    ] = None,
    stale_after: Annotated[
        str, typer.Option(help="Warn of namespaces that nobody opened for so long.")
    ] = "30d",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What fills the disk, per namespace and in total.

    Reads headers only and takes no lock: safe beside a running server.
    """
    stale_after_s = parse_span(stale_after, "--stale-after")
    if compare and len(roots) != 2:
        raise ConfigError("--compare", "two roots", len(roots))
    surveys = [survey_root(root) for root in roots]
    figures = [root_figures(survey, stale_after_s) for survey in surveys]
    if plot is not None:
        _plot(surveys, figures, plot)
    if as_json:
        print_json(figures)
        return
    out = console()
    if compare:
        _print_comparison(out, *figures)
        return
    for position, root in enumerate(figures):
        if position:
            out.print()
        _print_root(out, root)


def _plot(surveys: list[RootSurvey], figures: list[RootFigures], target: Path) -> None:
    try:
        from tiering.cli.plot import plot_usage
    except ImportError as exc:
        raise ConfigError("--plot", 'matplotlib: pip install "kvtier[plots]"', str(exc)) from exc
    try:
        plot_usage(surveys, figures, target)
    except ValueError as exc:
        raise ConfigError("--plot", "a file ending in .png, .svg or .pdf", str(target)) from exc


def _print_root(out: Console, root: RootFigures) -> None:
    out.print(Text(root.root, "bold"), soft_wrap=True)
    for name, value in _space_lines(root):
        out.print(Text.assemble((f"  {name:<12}", "dim"), value))
    if root.namespaces:
        shown = sorted(root.namespaces, key=lambda n: -n.disk_bytes)
        if len(shown) > 1:
            shown.append(root.total)
        out.print(_rows_table(out, shown))
        out.print(_bytes_table(out, shown))
    print_warnings(out, root.warnings)


def _space_lines(root: RootFigures) -> list[tuple[str, str]]:
    owner = f"open, by process {root.owner_pid}" if root.owner_pid else "nobody has it open"
    lines = [("store", f"{owner}{f'; was {root.state} last' if root.state else ''}")]
    if root.owner_pid and root.state:
        reason = f" ({root.state_reason})" if root.state_reason else ""
        lines = [("store", f"{owner}; {root.state}{reason}")]
    used = f"{words.size(root.charged_bytes)} charged"
    if root.budget_bytes:
        share = words.percent(root.charged_bytes, root.budget_bytes)
        lines.append(("budget", f"{words.size(root.budget_bytes)}, {used} ({share})"))
    else:
        lines.append(("budget", f"unknown, {used}"))
    reserve = f", {words.size(root.reserve_bytes)} of it in reserve" if root.reserve_bytes else ""
    free = f"{words.size(root.available_bytes)} free of {words.size(root.file_system_bytes)}"
    lines.append(("file system", free + reserve))
    if root.newest_model is not None:
        room = f"{words.size(root.growth_bytes)} to grow"
        if root.tokens_that_fit is not None:
            room += f", {words.count(root.tokens_that_fit)} more tokens of {root.newest_model}"
        lines.append(("room", room))
    if root.write_bytes_per_s is not None:
        rate = f"{words.size(root.write_bytes_per_s)}/s"
        if root.full_in_s is not None:
            rate += f", full in {words.span(root.full_in_s)}"
        elif root.turnover_s is not None:
            rate += f", overwrites all it holds in {words.span(root.turnover_s)}"
        lines.append(("writes", rate))
    if saved := root.total.saved_by_groups_bytes:
        lines.append(("groups", f"{words.size(saved)} saved by rows of each group's own size"))
    if root.quarantine_bytes:
        lines.append(("quarantine", words.size(root.quarantine_bytes)))
    if root.foreign_bytes:
        lines.append(("not kvtier's", words.size(root.foreign_bytes)))
    return lines


def _table(out: Console, titles: Sequence[str]) -> Table:
    gap = 1 if out.width < _WIDE_COLUMNS else 2
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap - 1, 0, 0))
    table.add_column("namespace", no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _name(out: Console, one: NamespaceFigures) -> str:
    width = max(_NAME_COLUMNS, out.width - 80 + _NAME_COLUMNS)
    return short_name(one.namespace, width, one.model)


def _rows_table(out: Console, shown: Sequence[NamespaceFigures]) -> Table:
    """`shown` may end in the total."""
    table = _table(out, ["TP", "rows", "row", "tokens", "hits", "found", "used", "segments"])
    for one in shown:
        asked = (one.hits or 0) + (one.misses or 0)
        table.add_row(
            _name(out, one),
            _ranks(one),
            words.count(one.rows),
            words.size(one.row_bytes) if one.row_bytes else "",
            words.count(one.tokens),
            words.count(one.hits),
            words.percent(one.hits or 0, asked),
            words.span(one.last_use_age_s),
            f"{one.segments_full}/{one.segments_open}/{one.segments_free}",
        )
    return table


def _ranks(one: NamespaceFigures) -> str:
    if one.ranks is None:
        return "" if one.row_bytes == 0 else "-"
    return f"{one.ranks}" if one.replicas in (None, 1) else f"{one.ranks} ={one.replicas}x"


def _bytes_table(out: Console, shown: Sequence[NamespaceFigures]) -> Table:
    titles = ["no dedup", "rows", "on disk", "apparent", "by dedup", "by codec"]
    table = _table(out, titles)
    for one in shown:
        table.add_row(
            _name(out, one),
            words.size(one.bytes_without_dedup),
            words.size(one.logical_bytes),
            words.size(one.disk_bytes),
            words.size(one.apparent_bytes),
            words.size(one.saved_by_dedup_bytes),
            "-" if one.codec == NO_CODEC else words.size(one.saved_by_codec_bytes),
        )
    return table


def _per(amount: float | None, count: float) -> float | None:
    return amount / count if amount is not None and count else None


_COMPARED: tuple[
    tuple[str, Callable[[float | None], str], Callable[[RootFigures], float | None]], ...
] = (
    ("on disk", words.size, lambda root: root.disk_bytes),
    ("rows' bytes", words.size, lambda root: root.total.logical_bytes),
    ("without dedup", words.size, lambda root: root.total.bytes_without_dedup),
    ("rows", words.count, lambda root: root.total.rows),
    ("bytes per row", words.size, lambda root: _per(root.total.logical_bytes, root.total.rows)),
    ("tokens held", words.count, lambda root: root.total.tokens),
    ("tokens per GB", words.count, lambda root: _per(root.total.tokens, root.disk_bytes / 1e9)),
    ("hits", words.count, lambda root: root.total.hits),
)


def _print_comparison(out: Console, first: RootFigures, second: RootFigures) -> None:
    """The same work on two roots: what each holds, and by how much the second is smaller."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("")
    table.add_column(Path(first.root).name, justify="right", overflow="fold")
    table.add_column(Path(second.root).name, justify="right", overflow="fold")
    table.add_column("first / second", justify="right")

    for title, shown, figure in _COMPARED:
        one, other = figure(first), figure(second)
        factor = f"{one / other:.2f}x" if one and other else ""
        table.add_row(title, shown(one), shown(other), factor)
    table.add_row("budget", words.size(first.budget_bytes), words.size(second.budget_bytes), "")
    table.add_row("state", first.state or "-", second.state or "-", "")
    out.print(table)
