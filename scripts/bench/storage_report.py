"""What the storage benchmark found: ratios of rounds, tables, targets, JSON."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from scripts.bench import engine_loop
from scripts.bench.engine_loop import LoopRun
from scripts.bench.sides import IO_THREADS

OPS = ("fill", "write", "read")
KVTIER, RAW, FS = "kvtier", "raw", "fs"
LOOKUP_KEYS = 1000
SUBMIT_ROWS = 64
_SMALL_ROW_BYTES = 3_000_000  # other targets hold below and above
_BODY_TEXT = f"{engine_loop.BODY_S * 1e3:g} ms"


@dataclass(frozen=True, slots=True)
class Figure:
    """One side, one op, one round."""

    seconds: float
    cpu_seconds: float


@dataclass(slots=True)
class SizeResult:
    """`figures[op][side]` are the rounds' figures, each of `bytes_moved`."""

    row_bytes: int
    bytes_moved: int
    figures: dict[str, dict[str, list[Figure]]]
    checksum_cpu_s: list[float] = field(default_factory=list)  # of the region's rows, per round

    def gb_s(self, op: str, side: str) -> float | None:
        rounds = self.figures[op].get(side)
        return median(self.bytes_moved / f.seconds / 1e9 for f in rounds) if rounds else None

    def cpu_s_per_gb(self, op: str, side: str) -> float | None:
        rounds = self.figures[op].get(side)
        return median(f.cpu_seconds / self.bytes_moved * 1e9 for f in rounds) if rounds else None

    @property
    def checksum_cpu_s_per_gb(self) -> float:
        return median(self.checksum_cpu_s) / self.bytes_moved * 1e9

    def speed_ratio(self, op: str, other: str, of: str = KVTIER) -> float | None:
        """The speed of `of` by that of `other`."""
        return self._ratio(op, other, lambda ours, theirs: theirs.seconds / ours.seconds, of)

    def cpu_ratio(self, op: str, other: str, of: str = KVTIER) -> float | None:
        """The CPU seconds of `of` by those of `other`."""
        return self._ratio(
            op, other, lambda ours, theirs: ours.cpu_seconds / max(theirs.cpu_seconds, 1e-9), of
        )

    def _ratio(
        self, op: str, other: str, ratio: Callable[[Figure, Figure], float], of: str = KVTIER
    ) -> float | None:
        pairs = zip(self.figures[op].get(of, ()), self.figures[op].get(other, ()), strict=False)
        ratios = [ratio(ours, theirs) for ours, theirs in pairs]
        return median(ratios) if ratios else None


@dataclass(slots=True)
class EngineResult:
    """The engine's view: seconds per call, and the loop test's runs by (side, op, mode)."""

    lookup_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    submit_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    alone: list[float] = field(default_factory=list)
    runs: dict[tuple[str, str, str], list[LoopRun]] = field(
        default_factory=lambda: defaultdict(list)
    )
    bytes_moved: int = 0

    def gb_s(self, side: str, op: str, mode: str) -> float:
        return median(self.bytes_moved / run.seconds / 1e9 for run in self.runs[side, op, mode])

    def p99_s(self, side: str, op: str) -> float:
        turns = [turn for run in self.runs[side, op, "busy"] for turn in run.turns]
        return float(np.percentile(turns, 99))

    @property
    def p99_alone_s(self) -> float:
        return float(np.percentile(self.alone, 99))


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked for, and what was found.  `bare`: what the bare device comes to, where it is
    in the same relation: more can't be had here."""

    what: str
    at_least: bool
    wanted: float
    found: float
    bare: float | None = None

    @property
    def is_reached(self) -> bool:
        return self.found >= self.wanted if self.at_least else self.found <= self.wanted


def _text(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def rows_table(results: Sequence[SizeResult]) -> Table:
    table = Table(title="GB/s of row bytes; checksums on for kvtier alone")
    table.add_column("row bytes", justify="right")
    table.add_column("op")
    for name in ("kvtier", "raw", "vLLM fs", "/ raw", "/ fs"):
        table.add_column(name, justify="right")
    for name in ("kvtier", "raw", "vLLM fs", "/ fs"):
        table.add_column(f"CPU s/GB\n{name}", justify="right")
    for result in results:
        for op in OPS:
            table.add_row(
                f"{result.row_bytes:,}" if op == OPS[0] else "",
                op,
                *(_text(result.gb_s(op, side)) for side in (KVTIER, RAW, FS)),
                _text(result.speed_ratio(op, RAW)),
                _text(result.speed_ratio(op, FS)),
                *(_text(result.cpu_s_per_gb(op, side), 3) for side in (KVTIER, RAW, FS)),
                _text(result.cpu_ratio(op, FS)),
                end_section=op == OPS[-1],
            )
    return table


def cpu_table(results: Sequence[SizeResult]) -> Table:
    """Where the CPU seconds of kvtier's writes go."""
    table = Table(title="CPU s per GB written by kvtier")
    for name in ("row bytes", "calls (as raw)", "checksum", "all else", "vLLM fs, no checksum"):
        table.add_column(name, justify="right")
    for result in results:
        ours, raw = (result.cpu_s_per_gb("write", side) or 0.0 for side in (KVTIER, RAW))
        checksum = result.checksum_cpu_s_per_gb
        cells = (raw, checksum, ours - raw - checksum, result.cpu_s_per_gb("write", FS))
        table.add_row(f"{result.row_bytes:,}", *(_text(cell, 3) for cell in cells))
    return table


def engine_tables(result: EngineResult, sides: Sequence[str]) -> list[Table]:
    calls = Table(title="On the engine's thread, ms (median)")
    calls.add_column("call")
    calls.add_column("kvtier", justify="right")
    calls.add_column("vLLM fs", justify="right")
    for name, figures in (
        (f"lookup of {LOOKUP_KEYS} keys", result.lookup_s),
        (f"submit of a {SUBMIT_ROWS}-row job", result.submit_s),
    ):
        cells = [median(figures[s]) * 1e3 if figures.get(s) else None for s in (KVTIER, FS)]
        calls.add_row(name, *(_text(cell, 3) for cell in cells))
    loop = Table(
        title=f"Beside a {_BODY_TEXT} Python loop in the engine's process; "
        f"p99 of a turn without I/O: {result.p99_alone_s * 1e3:.2f} ms"
    )
    for name in ("side", "op", "idle GB/s", "busy GB/s", "busy / idle", "p99 ms", "p99 / alone"):
        loop.add_column(name, justify="left" if name in ("side", "op") else "right")
    for side in sides:
        for op in ("write", "read"):
            idle, busy = result.gb_s(side, op, "idle"), result.gb_s(side, op, "busy")
            p99 = result.p99_s(side, op)
            loop.add_row(
                side,
                op,
                _text(idle),
                _text(busy),
                _text(busy / idle),
                _text(p99 * 1e3),
                _text(p99 / result.p99_alone_s),
            )
    return [calls, loop]


def targets(results: Sequence[SizeResult], engine: EngineResult) -> list[Target]:
    """The speed targets, for the sizes that were run."""
    found: list[Target] = []

    def add(
        what: str, at_least: bool, wanted: float, value: float | None, bare: float | None = None
    ) -> None:
        if value is not None:
            found.append(Target(what, at_least, wanted, value, bare))

    for result in results:
        is_small = result.row_bytes < _SMALL_ROW_BYTES
        size = f"{result.row_bytes:,} B"
        for op in ("write", "read"):
            add(f"{op} {size} / raw", True, 0.85 if is_small else 0.90, result.speed_ratio(op, RAW))
        for op, wanted in (("write", 2.5 if is_small else 1.4), ("fill", 1.1), ("read", 1.0)):
            ours, bare = result.speed_ratio(op, FS), result.speed_ratio(op, FS, RAW)
            add(f"{op} {size} / fs", True, wanted, ours, bare)
        add(
            f"CPU of write {size} / fs",
            False,
            0.25 if is_small else 0.5,
            result.cpu_ratio("write", FS),
            result.cpu_ratio("write", FS, RAW),
        )
    add(f"lookup of {LOOKUP_KEYS} keys, ms", False, 1.0, median(engine.lookup_s[KVTIER]) * 1e3)
    add(
        f"submit of a {SUBMIT_ROWS}-row job, ms",
        False,
        0.2,
        median(engine.submit_s[KVTIER]) * 1e3,
    )
    for op in ("write", "read"):
        idle, busy = engine.gb_s(KVTIER, op, "idle"), engine.gb_s(KVTIER, op, "busy")
        add(f"{op} beside a busy loop / idle", True, 0.9, busy / idle)
        p99 = engine.p99_s(KVTIER, op) / engine.p99_alone_s
        add(f"loop p99 during {op} / no I/O", False, 1.2, p99)
    return found


def targets_table(found: Sequence[Target]) -> Table:
    table = Table(title="Targets")
    table.add_column("what")
    table.add_column("wanted", justify="right")
    table.add_column("found", justify="right")
    table.add_column("bare device", justify="right")
    table.add_column("")
    for target in found:
        sign = ">=" if target.at_least else "<="
        table.add_row(
            target.what,
            f"{sign} {target.wanted:g}",
            f"{target.found:.2f}" if target.found >= 0.1 else f"{target.found:.3f}",
            "" if target.bare is None else f"{target.bare:.2f}",
            "reached" if target.is_reached else "[bold]missed[/bold]",
        )
    return table


def as_json(
    results: Sequence[SizeResult], engine: EngineResult, sides: Sequence[str], rounds: int
) -> dict[str, Any]:
    rows = []
    for result in results:
        for op in ("write", "read"):
            row: dict[str, Any] = {"row_bytes": result.row_bytes, "op": op}
            row |= _op_json(result, op)
            if op == "write":
                row |= {f"fill_{name}": value for name, value in _op_json(result, "fill").items()}
            rows.append(row)
    loop = [
        {
            "side": side,
            "op": op,
            "idle_gb_s": engine.gb_s(side, op, "idle"),
            "busy_gb_s": engine.gb_s(side, op, "busy"),
            "p99_ms": engine.p99_s(side, op) * 1e3,
        }
        for side in sides
        for op in ("write", "read")
    ]
    return {
        "rows": rows,
        "rounds": rounds,
        "io_threads": IO_THREADS,
        "load_average": os.getloadavg()[0],
        "checksum_cpu_s_per_gb": {r.row_bytes: r.checksum_cpu_s_per_gb for r in results},
        "lookup_1000_ms": {s: median(v) * 1e3 for s, v in engine.lookup_s.items()},
        "submit_64_ms": {s: median(v) * 1e3 for s, v in engine.submit_s.items()},
        "loop": loop,
        "loop_p99_alone_ms": engine.p99_alone_s * 1e3,
        "targets": [
            {
                "what": t.what,
                "wanted": t.wanted,
                "found": t.found,
                "bare_device": t.bare,
                "reached": t.is_reached,
            }
            for t in targets(results, engine)
        ],
    }


def _op_json(result: SizeResult, op: str) -> dict[str, float | None]:
    return {
        "gb_s": result.gb_s(op, KVTIER),
        "gb_s_raw": result.gb_s(op, RAW),
        "gb_s_fs": result.gb_s(op, FS),
        "ratio_raw": result.speed_ratio(op, RAW),
        "ratio_fs": result.speed_ratio(op, FS),
        "cpu_s_per_gb": result.cpu_s_per_gb(op, KVTIER),
        "cpu_s_per_gb_raw": result.cpu_s_per_gb(op, RAW),
        "cpu_s_per_gb_fs": result.cpu_s_per_gb(op, FS),
        "cpu_ratio_fs": result.cpu_ratio(op, FS),
    }
