"""`kvtier watch`: a running store, live."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.live import Live
from rich.table import Table

from storage.device import ReadOnlyDevice, lock_holder
from storage.errors import ConfigError
from storage.status import read_status
from storage.survey import survey_root
from tiering.cli import words
from tiering.cli.console import console, print_json
from tiering.primary import REGION

_TIMEOUT_S = 5.0  # for an answer of /metrics


@dataclass(frozen=True)
class Reading:
    """A store at one time, `time_s` in Unix seconds.  What is counted only ever grows, but for a
    restart."""

    time_s: float
    source: str
    state: str
    used_bytes: float
    budget_bytes: float
    rows: float
    found: float
    missing: float
    bytes_read: float
    bytes_written: float
    waiting: str
    """What waits for the disk, in words."""
    lines: dict[str, str] = field(default_factory=dict)
    """Further facts that only this source knows."""


def watch(
    source: Annotated[
        str,
        typer.Argument(help="Root of a store, or the URL of vLLM's /metrics.", metavar="SOURCE"),
    ],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One look, and no more.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One look, for machines; implies --once.")
    ] = False,
) -> None:
    """A running store: state, use, hit rate, bandwidth, queue.

    A root's own figures are up to 10 s old; those of /metrics as fresh as the engine's last step.
    """
    is_url = source.startswith(("http://", "https://"))
    read: Callable[[], Reading] = (
        (lambda: read_metrics(source)) if is_url else (lambda: read_root(Path(source)))
    )
    now = read()
    if as_json:
        print_json(now)
        return
    if once:
        console().print(_table(now, None))
        return
    before: Reading | None = None
    try:
        with Live(_table(now, None), console=console(), auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                newest = read()
                if newest.time_s > now.time_s:
                    before, now = now, newest
                live.update(_table(now, before), refresh=True)
    except KeyboardInterrupt:
        return


def read_root(root: Path) -> Reading:
    """From what the root remembers of its use.  Raises `RootUnusable`, `ConfigError`."""
    status = read_status(root, ReadOnlyDevice())
    if status is None:
        survey_root(root)  # says what is wrong with it, if anything
        raise ConfigError("root", "one that a store process has had open for 10 s", str(root))
    age = words.span(time.time() - status.written_s)
    holder = lock_holder(root)
    owner = f"process {holder}" if holder else ("gone" if status.is_open else "nobody")
    return Reading(
        time_s=status.written_s,
        source=str(root),
        state=_with_reason(status.state, status.state_reason),
        used_bytes=status.used_bytes,
        budget_bytes=status.budget_bytes,
        rows=status.rows,
        found=status.counters.rows_read,
        missing=status.counters.rows_missing,
        bytes_read=status.counters.bytes_read,
        bytes_written=status.counters.bytes_written,
        waiting=f"{status.queued_reads} reads, {status.queued_writes} writes",
        lines={
            "owner": f"{owner}; figures {age} old",
            "health": status.health,
            "corrupt": f"{status.counters.rows_corrupt} rows",
            "evicted": f"{words.count(status.counters.rows_evicted)} rows",
        },
    )


def _with_reason(state: str, reason: str) -> str:
    return f"{state} ({reason})" if reason else state


def read_metrics(url: str) -> Reading:
    """From an engine's /metrics.  Raises `OSError`, or `ConfigError` if kvtier is not in it."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8", "replace")
    except ValueError as exc:
        raise ConfigError("source", "a root, or the URL of /metrics", url) from exc
    totals: dict[str, float] = defaultdict(float)
    by_label: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")
            if name.startswith("kvtier:"):
                name = name.removeprefix("kvtier:")
                totals[name] += sample.value
                for label, value in sample.labels.items():
                    by_label[f"{name} {label}"][value] += sample.value
    if not totals:
        raise ConfigError("source", "metrics of an engine with kvtier", url)
    states = by_label["disk_state state"]
    outcomes, hits = by_label["rows_read outcome"], by_label["chunk_hits tier"]
    chunks = sum(hits.values()) + totals["chunk_misses"]
    slots = by_label["region_slots use"]
    return Reading(
        time_s=time.time(),
        source=url,
        state=", ".join(state for state, is_on in states.items() if is_on) or "no disk",
        used_bytes=totals["disk_used_bytes"],
        budget_bytes=totals["disk_budget_bytes"],
        rows=totals["disk_rows"],
        found=sum(hits.values()),
        missing=totals["chunk_misses"],
        bytes_read=totals["read_bytes"],
        bytes_written=totals["write_bytes"],
        waiting=f"{slots['busy']:.0f} of {slots['total']:.0f} slots of the region in use",
        lines={
            "region hits": words.percent(hits[REGION], chunks),
            "disk hits": words.percent(sum(hits.values()) - hits[REGION], chunks),
            "corrupt": f"{outcomes['corrupt']:.0f} rows",
        },
    )


def _table(now: Reading, before: Reading | None) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    share = words.percent(now.used_bytes, now.budget_bytes)
    asked = now.found + now.missing
    shown = {
        "store": now.source,
        "state": now.state,
        "used": f"{words.size(now.used_bytes)} of {words.size(now.budget_bytes)} ({share})",
        "rows": words.count(now.rows),
        "found": f"{words.percent(now.found, asked)} of {words.count(asked)}",
        "read": words.size(now.bytes_read),
        "written": words.size(now.bytes_written),
        "waiting": now.waiting,
        **now.lines,
    }
    if before is not None:
        seconds = now.time_s - before.time_s
        found, missing = now.found - before.found, now.missing - before.missing
        if min(found, missing) >= 0 and found + missing:
            shown["found"] += f"; {words.percent(found, found + missing)} now"
        for name, amount in (
            ("read", now.bytes_read - before.bytes_read),
            ("written", now.bytes_written - before.bytes_written),
        ):
            if amount >= 0:
                shown[name] += f"; {words.size(amount / seconds)}/s now"
    for name, value in shown.items():
        table.add_row(name, value)
    return table
