"""`kvtier plan`: how large a drive and a region a model needs, before anything is started."""

from __future__ import annotations

import dataclasses
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from storage.errors import ConfigError
from storage.sizes import format_size, parse_size
from tiering.cli.plan_plot import save_plot
from tiering.model_config import ELEMENT_BYTES, read_model_config
from tiering.planning import (
    HEADROOM,
    IN_FLIGHT_CHUNKS,
    IN_FLIGHT_TOKENS,
    Endurance,
    HitPoint,
    RowSize,
    budget_of,
    knee,
    kv_transfer_config,
    region_for,
    row_size,
)
from tiering.presets import Preset, load_preset, own_model, preset_names
from tiering.replay import play_disk
from tiering.traces import Trace, read_trace

_GB = 10**9
_BLOCK_TOKENS = 16
_CURVE = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)  # of what the prompts of a trace would fill
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.25)  # of what the expected prompts would fill
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Curve:
    """Hit rates by budget, with dedup and without; `points` ascend."""

    points: tuple[HitPoint, ...]
    points_without_dedup: tuple[HitPoint, ...]
    best: float
    """Of a disk that keeps everything."""
    is_of_trace: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What `kvtier plan` says.  Sizes in bytes."""

    size: RowSize
    note: str
    disk_bytes: int | None
    curve: Curve | None
    budget_bytes: int | None
    region_bytes: int
    in_flight: int
    """Tokens, or chunks where the tokens of a chunk are not known."""
    written_per_day: int | None
    endurance: Endurance | None
    config: dict[str, Any] | None

    @property
    def limits_writes(self) -> bool:
        """Whether the configuration holds the writes to what the drive bears."""
        if self.config is None:
            return False
        return "write_bytes_per_day" in self.config["kv_connector_extra_config"]["disk"]

    @property
    def gauge_bytes(self) -> int:
        """The disk that tokens per GB are told for."""
        return self.budget_bytes or 1000 * _GB


def plan(
    model: Annotated[
        Path | None, typer.Argument(help="A model's config.json, or the directory it is in.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help=f"Instead: {', '.join(preset_names())}, or a file like those."),
    ] = None,
    worker_bytes: Annotated[
        int | None, typer.Option(help="Bytes of a block on one rank instead, all layers together.")
    ] = None,
    max_tp_shards: Annotated[
        int, typer.Option(min=1, help="With --worker-bytes: 1 for MLA, else the KV heads.")
    ] = 1,
    tp: Annotated[
        int | None,
        typer.Option(min=1, help="TP ranks; else the preset's, or 1."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block; else as the engine does.")
    ] = None,
    blocks_per_chunk: Annotated[
        int, typer.Option(min=1, help="Blocks stored, found and evicted together.")
    ] = 1,
    dtype: Annotated[
        str | None, typer.Option(help=f"Of the KV: {', '.join(ELEMENT_BYTES)}.")
    ] = None,
    disk: Annotated[str | None, typer.Option(help='The drive, or the room on it: "177GB".')] = None,
    tokens: Annotated[
        str | None, typer.Option(help='Tokens of shared prompts that are expected: "2M".')
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Requests to replay instead, a .jsonl or .jsonl.gz.")
    ] = None,
    trace_chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of one chunk id of the trace.")
    ] = 512,
    tokens_per_day: Annotated[
        str | None, typer.Option(help="Prompt tokens a day never seen before; without --trace.")
    ] = None,
    endurance: Annotated[
        str | None, typer.Option(help='Of the drive: "1.2PB" written in all, or "0.3DWPD".')
    ] = None,
    years: Annotated[float, typer.Option(help="That the drive must last.")] = 5.0,
    in_flight_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Prompt tokens on their way at a time, for the region; else {IN_FLIGHT_TOKENS}.",
        ),
    ] = None,
    root: Annotated[str, typer.Option(help="The store's directory.")] = "/var/lib/kvtier",
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate against disk size into this .png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object instead of text.")] = False,
) -> None:
    """How large a drive and a region a model needs, and what to paste."""
    if trace is not None and tokens is not None:
        raise ConfigError("--trace", "either a trace or --tokens", str(trace))
    chosen, ranks = _model(model, preset, worker_bytes, max_tp_shards, tp, block_size, dtype)
    size = row_size(chosen, ranks, blocks_per_chunk)
    if size.tokens_per_chunk is None:
        for option, value in (
            ("--tokens", tokens),
            ("--trace", trace),
            ("--tokens-per-day", tokens_per_day),
            ("--in-flight-tokens", in_flight_tokens),
        ):
            if value is not None:
                expected = "--block-size with it, which this preset does not know"
                raise ConfigError(option, expected, str(value))
    disk_bytes = parse_size(disk, "--disk") if disk is not None else None
    if disk_bytes is not None and not size.disk_rows(budget_of(disk_bytes)):
        raise ConfigError("--disk", f"room for one row at least, of {size.row_bytes} bytes", disk)
    token_count = _count(tokens, "--tokens")
    replayed = read_trace(trace) if trace is not None else None
    curve = None
    if replayed is not None:
        curve = _replayed_curve(size, replayed, trace_chunk_tokens, disk_bytes)
    elif token_count is not None:
        curve = _expected_curve(size, token_count, disk_bytes)
    budget = _budget(size, disk_bytes, token_count, curve)
    written = _written_per_day(size, curve, budget, _count(tokens_per_day, "--tokens-per-day"))
    usual = IN_FLIGHT_CHUNKS if size.tokens_per_chunk is None else IN_FLIGHT_TOKENS
    in_flight = in_flight_tokens or usual
    region = region_for(size, in_flight)
    limits = Endurance.parse(endurance, disk_bytes, years) if endurance is not None else None
    config = None
    if budget is not None:
        is_too_much = limits is not None and written is not None and written > limits.bytes_per_day
        config = kv_transfer_config(
            root,
            _in_config(budget),
            f"{region >> 30}GiB",
            blocks_per_chunk,
            _in_config(_round_down(limits.bytes_per_day)) if limits and is_too_much else None,
        )
    made = Plan(
        size=size,
        note=chosen.note,
        disk_bytes=disk_bytes,
        curve=curve,
        budget_bytes=budget,
        region_bytes=region,
        in_flight=in_flight,
        written_per_day=written,
        endurance=limits,
        config=config,
    )
    if plot is not None:
        save_plot(plot, made)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(_plain(made)), indent=2).decode())
    else:
        _print(made, Console(highlight=False))


# -- what was asked -----------------------------------------------------------------------------


def _model(
    path: Path | None,
    preset: str | None,
    worker_bytes: int | None,
    max_tp_shards: int,
    tp: int | None,
    block_size: int | None,
    dtype: str | None,
) -> tuple[Preset, int]:
    """The model and its ranks."""
    given = [name for name in (path, preset, worker_bytes) if name is not None]
    if len(given) != 1:
        raise ConfigError("MODEL", "one of a config.json, --preset or --worker-bytes", given)
    if path is not None:
        return read_model_config(path, dtype, block_size), tp or 1
    if dtype is not None:
        raise ConfigError("--dtype", "a config.json to apply it to", dtype)
    if worker_bytes is not None:
        if worker_bytes < 1:
            raise ConfigError("--worker-bytes", "a number above 0", worker_bytes)
        if tp is None:
            raise ConfigError("--tp", "the ranks that --worker-bytes is about", None)
        tokens_per_block = block_size or _BLOCK_TOKENS
        return own_model(worker_bytes, tp, max_tp_shards, tokens_per_block), tp
    assert preset is not None
    loaded = load_preset(preset)
    if block_size is not None:
        if loaded.tokens_per_block not in (None, block_size):
            raise ConfigError(
                "--block-size", f"{loaded.tokens_per_block}, the preset's", block_size
            )
        loaded = msgspec.structs.replace(loaded, tokens_per_block=block_size)
    return loaded, tp or loaded.tp[0]


def _count(text: str | None, option: str) -> int | None:
    if text is None:
        return None
    try:
        return parse_size(text, option)
    except ConfigError:
        raise ConfigError(option, 'a number above 0, such as 500000 or "2M"', text) from None


# -- what a disk is worth -----------------------------------------------------------------------


def _replayed_curve(
    size: RowSize, trace: Trace, chunk_tokens: int, disk_bytes: int | None
) -> Curve:
    """Play the trace at several sizes of the disk; each size once, whatever fills it."""
    budgets = [
        size.budget_for(max(1, round(share * trace.unique_count)) * chunk_tokens)
        for share in _CURVE
    ]
    if disk_bytes is not None:
        budgets.append(budget_of(disk_bytes))
    budgets = sorted(set(budgets))
    wanted = {
        (dedup, budget): min(
            size.disk_holds(budget, dedup=dedup) // chunk_tokens, trace.unique_count
        )
        for dedup in (True, False)
        for budget in budgets
    }
    played: dict[int, tuple[float, int]] = {}  # hit rate and rows written, by slots
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for slots in progress.track(sorted(set(wanted.values())), description="replaying"):
            played[slots] = play_disk(trace, slots)
    per_day = _SECONDS_PER_DAY / trace.seconds if trace.seconds else 0.0

    def point(budget: int, dedup: bool) -> HitPoint:
        hit_rate, rows_written = played[wanted[dedup, budget]]
        written_bytes = rows_written * chunk_tokens * size.unit_bytes(dedup=dedup)
        return HitPoint(budget, hit_rate, round(written_bytes * per_day))

    curves = [tuple(point(budget, dedup) for budget in budgets) for dedup in (True, False)]
    return Curve(curves[0], curves[1], trace.infinite_hit_rate, is_of_trace=True)


def _expected_curve(size: RowSize, tokens: int, disk_bytes: int | None) -> Curve:
    """The share of the expected prompts that fits, at several sizes of the disk."""
    full = size.budget_for(tokens)
    budgets = {round(full * share) for share in _SHARES}
    if disk_bytes is not None:
        budgets.add(budget_of(disk_bytes))
    curves = [
        tuple(
            HitPoint(budget, min(1.0, size.disk_holds(budget, dedup=dedup) / tokens), None)
            for budget in sorted(budgets)
        )
        for dedup in (True, False)
    ]
    return Curve(curves[0], curves[1], 1.0, is_of_trace=False)


def _budget(
    size: RowSize, disk_bytes: int | None, tokens: int | None, curve: Curve | None
) -> int | None:
    """What the prompts need, and no more than the disk has."""
    wanted = []
    if disk_bytes is not None:
        wanted.append(budget_of(disk_bytes))
    if tokens is not None:
        wanted.append(size.budget_for(round(HEADROOM * tokens)))
    elif curve is not None:
        wanted.append(knee(curve.points).budget_bytes)
    return _round_down(min(wanted)) if wanted else None


def _round_down(size_bytes: int) -> int:
    """To three figures, as it stands in a configuration."""
    step: int = 10 ** max(0, len(str(size_bytes)) - 3)
    return size_bytes // step * step


def _in_config(size_bytes: int) -> str:
    for unit, factor in (("GB", _GB), ("MB", 10**6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:g}{unit}"
    return str(size_bytes)


def _written_per_day(
    size: RowSize, curve: Curve | None, budget: int | None, tokens_per_day: int | None
) -> int | None:
    if curve is not None and curve.is_of_trace:
        assert budget is not None
        point = min(curve.points, key=lambda point: abs(point.budget_bytes - budget))
        return point.written_bytes_per_day
    if tokens_per_day is not None:
        return round(tokens_per_day * size.unit_bytes())
    return None


# -- as text ------------------------------------------------------------------------------------


def _print(plan: Plan, console: Console) -> None:
    size = plan.size
    tokens = "?" if size.tokens_per_chunk is None else str(size.tokens_per_chunk)
    groups = f", {size.groups} KV-cache groups" if size.groups > 1 else ""
    console.print(f"[bold]{size.model}[/bold], TP {size.tp}, {tokens} tokens per chunk{groups}")
    if plan.note:
        console.print(plan.note, style="dim")
    tables = [_row_table(plan)]
    if plan.curve is not None:
        tables.append(_curve_table(plan, plan.curve))
    elif plan.budget_bytes is not None:
        tables.append(_share_table(plan, plan.budget_bytes))
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    for line in _advice(plan):
        console.print(line)
    if plan.config is not None:
        text = msgspec.json.format(msgspec.json.encode(plan.config), indent=2).decode()
        console.print("\n[bold]To paste[/bold]")
        # Not wrapped, whatever the width: a shell must read it.
        typer.echo(f"vllm serve MODEL --kv-transfer-config {shlex.quote(text)}")


def _row_table(plan: Plan) -> Table:
    size = plan.size
    table = Table("", title="What a row weighs", title_justify="left")
    table.add_column("with dedup", justify="right")
    table.add_column("without", justify="right")
    table.add_row("bytes of a row", f"{size.row_bytes:,}", f"{size.row_bytes_without_dedup:,}")
    if len(set(size.rows)) > 1:
        means = (sum(rows) // len(rows) for rows in (size.rows, size.rows_without_dedup))
        table.add_row("on disk, mean of the groups", *(f"{mean:,}" for mean in means))
    both = (True, False)
    table.add_row(
        f"{size.unit} per GB of region", *(f"{size.region_holds(_GB, dedup=d):,}" for d in both)
    )
    gauge = plan.gauge_bytes
    table.add_row(
        f"{size.unit} per GB of disk",
        *(f"{size.disk_holds(gauge, dedup=d) * _GB // gauge:,}" for d in both),
    )
    if plan.disk_bytes is not None:
        budget = budget_of(plan.disk_bytes)
        table.add_row(
            f"{size.unit} on {format_size(plan.disk_bytes)} of disk",
            *(f"{size.disk_holds(budget, dedup=d):,}" for d in both),
        )
    return table


def _curve_table(plan: Plan, curve: Curve) -> Table:
    what = "Hit rate" if curve.is_of_trace else "Share of the expected prompts that fits"
    table = Table("disk", title=f"{what} by size of the disk", title_justify="left")
    table.columns[0].justify = "right"
    for title in (f"{plan.size.unit} held", "with dedup", "without"):
        table.add_column(title, justify="right")
    if curve.is_of_trace:
        table.add_column("written\nper day", justify="right")
    for point, without in zip(curve.points, curve.points_without_dedup, strict=True):
        cells = [
            format_size(point.budget_bytes),
            f"{plan.size.disk_holds(point.budget_bytes):,}",
            f"{point.hit_rate:.1%}",
            f"{without.hit_rate:.1%}",
        ]
        if point.written_bytes_per_day is not None:
            cells.append(format_size(point.written_bytes_per_day))
        table.add_row(*cells)
    return table


def _share_table(plan: Plan, budget: int) -> Table:
    """What of shared prompts would fit, for those who did not say how many they expect."""
    title = f"What of your shared prompts {format_size(budget)} hold"
    table = Table("if they come to", title=title, title_justify="left")
    table.columns[0].justify = "right"
    table.add_column("with dedup", justify="right")
    table.add_column("without", justify="right")
    unit = plan.size.unit
    held = [plan.size.disk_holds(budget, dedup=dedup) for dedup in (True, False)]
    for needed in _round_numbers(min(held) / 2, 2.5 * max(held)):
        table.add_row(f"{needed:,} {unit}", *(f"{min(1.0, count / needed):.0%}" for count in held))
    return table


def _round_numbers(low: float, high: float) -> list[int]:
    """1, 2, 5, 10, ... from `low` to `high`."""
    start = max(3, math.floor(math.log10(low))) if low > 0 else 3
    stop = max(start, math.floor(math.log10(high))) if high > 0 else start
    numbers = [digit * 10**power for power in range(start, stop + 1) for digit in (1, 2, 5)]
    return [number for number in numbers if low <= number <= high]


def _advice(plan: Plan) -> list[str]:
    lines = []
    if plan.budget_bytes is None:
        lines.append("Give --disk, --tokens or --trace for a budget and a configuration to paste.")
    else:
        why = "the disk, less what the store leaves free"
        if plan.disk_bytes is None or plan.budget_bytes < _round_down(budget_of(plan.disk_bytes)):
            why = "more would bring little"
        lines.append(f"[bold]Budget[/bold]  {format_size(plan.budget_bytes)}: {why}.")
    lines.append(
        f"[bold]Region[/bold]  {plan.region_bytes >> 30} GiB of shared memory: "
        f"{plan.in_flight:,} {plan.size.unit} of prompts on their way at a time."
    )
    if plan.size.tokens_per_chunk is None:
        lines.append("[bold]Tokens[/bold]  Give --block-size, of your engine, for tokens.")
    elif plan.curve is None and plan.disk_bytes is not None:
        lines.append("[bold]Hits[/bold]    Give --tokens or --trace for hit rates by disk size.")
    if plan.curve is not None and plan.curve.is_of_trace:
        lines.append(
            f"[bold]Hits[/bold]    At most {plan.curve.best:.1%}, of a disk that keeps everything."
        )
    if plan.written_per_day is not None:
        lines.append(f"[bold]Writes[/bold]  {format_size(plan.written_per_day)} a day.")
    if plan.endurance is not None:
        lines.append(f"[bold]Drive[/bold]   {_wear(plan.endurance, plan.written_per_day)}")
        if plan.limits_writes:
            lines.append(
                "        Below, write_bytes_per_day holds them to it, at the cost of hits."
            )
    return lines


def _wear(endurance: Endurance, written_per_day: int | None) -> str:
    allowed = (
        f"{format_size(endurance.total_bytes)} written in {endurance.years:g} years are "
        f"{format_size(endurance.bytes_per_day)} a day"
    )
    if written_per_day is None:
        return f"{allowed}. Give --trace or --tokens-per-day to hold writes against it."
    share = written_per_day / endurance.bytes_per_day
    lasts = endurance.years_at(written_per_day)
    if share > 1:
        days = lasts * 365
        span = f"{lasts:.2g} years" if lasts >= 1 else f"{days:.0f} days"
        return f"{allowed}; these writes are {share:.2g} times that: it lasts {span}."
    return f"{allowed}, of which these writes are {share:.0%}."


# -- as JSON ------------------------------------------------------------------------------------


def _plain(plan: Plan) -> dict[str, Any]:
    size, gauge = plan.size, plan.gauge_bytes
    found: dict[str, Any] = dataclasses.asdict(size)
    found["factor"] = round(size.factor, 4)
    found["unit"] = size.unit
    for name, dedup in (("", True), ("_without_dedup", False)):
        found[f"per_gb_of_region{name}"] = size.region_holds(_GB, dedup=dedup)
        found[f"per_gb_of_disk{name}"] = size.disk_holds(gauge, dedup=dedup) * _GB // gauge
        if plan.disk_bytes is not None:
            budget = budget_of(plan.disk_bytes)
            found[f"disk_holds{name}"] = size.disk_holds(budget, dedup=dedup)
    found |= {
        "note": plan.note,
        "disk_bytes": plan.disk_bytes,
        "budget_bytes": plan.budget_bytes,
        "region_bytes": plan.region_bytes,
        "in_flight": plan.in_flight,
        "written_bytes_per_day": plan.written_per_day,
        "curve": dataclasses.asdict(plan.curve) if plan.curve is not None else None,
        "endurance": None,
        "kv_transfer_config": plan.config,
    }
    if plan.endurance is not None:
        found["endurance"] = {
            "total_bytes": plan.endurance.total_bytes,
            "years": plan.endurance.years,
            "bytes_per_day": plan.endurance.bytes_per_day,
        }
    return found
