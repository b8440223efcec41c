"""The disk store beside the bare device and beside vLLM's fs tier, in one run.

    python scripts/bench/storage.py --json out.json

Rows move between one region in /dev/shm and files below `--directory`.  Every round takes each side
in turn, so that a slow moment of a shared machine meets all of them; a figure is the median of the
rounds, a ratio the median of the rounds' ratios.  Every row that is read is checked for its mark,
outside of the time.  The bare device does the same calls as the store, without a store.

    fill    new files, new segments
    write   slots overwritten in place; vLLM's tier writes new files, of which the benchmark deletes
            as many beforehand, since it evicts nothing itself
    read    what `write` wrote
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and in it this file is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import hashlib
import importlib.util
import json
import mmap
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.bench import engine_loop
from scripts.bench.engine_loop import ClientTier, LoopRun, Tier
from scripts.bench.sides import IO_THREADS, RawSide, RowJob, Side, StoreSide, WrongBytes
from storage.checksum import crc32c
from storage.errors import ConfigError, StorageError
from storage.header import SegmentGeometry
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from storage.sizes import format_size, parse_size
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)
from storage.types import PAGE_BYTES, RowKey

if TYPE_CHECKING:
    from scripts.bench.vllm_fs import FsSide

ROW_SIZES = "499712,3452928,5013504,40103936"
OPS = ("fill", "write", "read")
KVTIER, RAW, FS = "kvtier", "raw", "fs"
SMALL_ROW_BYTES = 3_000_000  # the targets differ below and above
_SEGMENTS = 4  # of the store: it is full when they are, and rounds overwrite a third of it
_STORE_ROUNDS = 3  # rounds that fit in the store
_JOB_ROWS_MAX = 64
_JOB_BYTES_MAX = 64 << 20
_MARK_BYTES = 64  # at the start of a row: its key
_LOOKUP_KEYS = 1000
_SUBMIT_ROWS = 64
_SUBMITS = 40
_STORE_START_S = 60.0
_ALONE_S_MIN = 0.02

console = Console(width=118)


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


class BenchRegion:
    """uint8[row_count, row_bytes] in /dev/shm, every page touched, random bytes."""

    def __init__(self, row_bytes: int, row_count: int) -> None:
        self.fd = os.memfd_create("kvtier-bench")
        os.ftruncate(self.fd, row_bytes * row_count)
        mapping = mmap.mmap(self.fd, row_bytes * row_count)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(mapping, np.uint8).reshape(
            row_count, row_bytes
        )
        rng = np.random.default_rng(row_bytes)
        for row in self.array:
            row[:] = rng.integers(0, 256, row_bytes, np.uint8)
        self.rows = [row.data for row in self.array]

    def mark(self, jobs: Sequence[RowJob]) -> None:
        """Give every row the mark of its key, at its start and its end."""
        for job in jobs:
            for key, slot in zip(job.keys, job.slots, strict=True):
                mark = key.ljust(_MARK_BYTES, b"\0")
                self.rows[slot][:_MARK_BYTES] = mark
                self.rows[slot][-_MARK_BYTES:] = mark

    def wipe(self) -> None:
        self.array[:, :_MARK_BYTES] = 0
        self.array[:, -_MARK_BYTES:] = 0

    def check(self, jobs: Sequence[RowJob], side: str) -> None:
        """Raises `WrongBytes` unless every row has the mark of its key."""
        for job in jobs:
            for key, slot in zip(job.keys, job.slots, strict=True):
                mark = key.ljust(_MARK_BYTES, b"\0")
                row = self.rows[slot]
                if row[:_MARK_BYTES] != mark or row[-_MARK_BYTES:] != mark:
                    raise WrongBytes(f"{side}: a row that was read is not the one of its key")

    def close(self) -> None:
        os.close(self.fd)


def bench_jobs(name: str, row_bytes: int, row_count: int) -> list[RowJob]:
    """Jobs that cover `row_count` rows of the region once, under keys that follow from `name`."""
    longest = max(1, min(_JOB_ROWS_MAX, _JOB_BYTES_MAX // row_bytes))
    jobs = []
    for start in range(0, row_count, longest):
        slots = range(start, min(start + longest, row_count))
        jobs.append(RowJob([bench_key(f"{name}/{slot}") for slot in slots], slots))
    return jobs


def bench_key(name: str) -> RowKey:
    """As long as vLLM's: a sha256 and a group index."""
    return RowKey(hashlib.sha256(name.encode()).digest() + bytes(4))


def all_keys(jobs: Sequence[RowJob]) -> list[RowKey]:
    return [key for job in jobs for key in job.keys]


class SizeBench:
    """All sides with rows of one size."""

    def __init__(self, directory: Path, row_bytes: int, row_count: int, *, with_fs: bool) -> None:
        self.region = BenchRegion(row_bytes, row_count)
        self._directory = directory
        self._row_bytes = row_bytes
        self._row_count = row_count
        self._with_fs = with_fs
        slots = max(1, -(-row_count * _STORE_ROUNDS // _SEGMENTS))
        self._segment_bytes = slots * (row_bytes + PAGE_BYTES + 4096)
        slots = SegmentGeometry.choose(row_bytes, 1 << 62, self._segment_bytes).slots_per_segment
        geometry = SegmentGeometry(row_bytes, slots)
        segments = max(_SEGMENTS, -(-row_count // slots) + 1)
        self._budget_bytes = ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES
        self._budget_bytes += segments * (geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES)
        self._capacity = segments * slots
        self._made = 0

    def run(self, rounds: int, on_round: Callable[[], None]) -> SizeResult:
        result = SizeResult(
            self._row_bytes,
            self._row_bytes * self._row_count,
            {op: defaultdict(list) for op in OPS},
        )
        with ExitStack() as stack:
            stack.callback(self.region.close)
            sides = self._make_sides()
            for side in sides.values():
                stack.callback(side.close)
            written = self._prefill(sides)
            for number in range(rounds):
                names = list(sides)
                names = names[number % len(names) :] + names[: number % len(names)]
                self._fill_round(names, result)
                cpu = time.process_time()
                for row in self.region.rows:
                    crc32c(row)
                result.checksum_cpu_s.append(time.process_time() - cpu)
                jobs = bench_jobs(f"round {number}", self._row_bytes, self._row_count)
                self.region.mark(jobs)
                for name in names:
                    sides[name].forget(written[name])
                    written[name] = all_keys(jobs)
                    self._measure(result, "write", name, sides[name].write, jobs)
                for name in names:
                    self.region.wipe()
                    self._measure(result, "read", name, sides[name].read, jobs)
                    self.region.check(jobs, name)
                on_round()
        return result

    def _make_sides(self) -> dict[str, Side]:
        """Fresh ones."""
        self._made += 1
        base = self._directory / f"{self._row_bytes}-{self._made}"
        base.mkdir()
        ours = StoreSide(base / "kvtier", self.region.rows, self._budget_bytes, self._segment_bytes)
        sides: dict[str, Side] = {
            KVTIER: ours,
            RAW: RawSide(base / "raw", self.region.rows, ours.geometry, self._row_count),
        }
        if self._with_fs:
            sides[FS] = _fs_side(base / "fs", self.region)
        return sides

    def _prefill(self, sides: dict[str, Side]) -> dict[str, list[RowKey]]:
        """Bring each side to its steady state; the keys that its operator deletes first."""
        written: dict[str, list[RowKey]] = {}
        for name, side in sides.items():
            wanted = self._capacity if name == KVTIER else self._row_count
            for number in range(-(-wanted // self._row_count)):
                jobs = bench_jobs(f"before {number}", self._row_bytes, self._row_count)
                side.write(jobs)
                written[name] = all_keys(jobs)
        return written

    def _fill_round(self, names: Sequence[str], result: SizeResult) -> None:
        jobs = bench_jobs("fill", self._row_bytes, self._row_count)
        sides = self._make_sides()
        try:
            for name in names:
                self._measure(result, "fill", name, sides[name].write, jobs)
                sides.pop(name).close()  # one at a time is on the disk
        finally:
            for side in sides.values():
                side.close()

    @staticmethod
    def _measure(
        result: SizeResult,
        op: str,
        side: str,
        move: Callable[[Sequence[RowJob]], None],
        jobs: Sequence[RowJob],
    ) -> None:
        cpu, started = time.process_time(), time.perf_counter()
        move(jobs)
        figure = Figure(time.perf_counter() - started, time.process_time() - cpu)
        result.figures[op][side].append(figure)


def _fs_side(directory: Path, region: BenchRegion) -> FsSide:
    from scripts.bench.vllm_fs import FsSide  # takes seconds, and needs vllm

    return FsSide(directory, region.array)


# -- the engine's view -----------------------------------------------------------------------------


@contextmanager
def store_client(directory: Path, region: BenchRegion, budget_bytes: int) -> Iterator[StoreClient]:
    """A client with the real store process behind it."""
    row_count, row_bytes = region.array.shape
    client = StoreClient(
        StoreOptions(directory, budget_bytes, admission="always", reserve_bytes=0),
        Identity("bench", {}),
        RegionRows(region.fd, 0, row_bytes, row_count),
    )
    client.connect(_STORE_START_S)
    try:
        yield client
    finally:
        client.close()
        shutil.rmtree(directory)


def bench_engine(
    directory: Path, row_bytes: int, row_count: int, rounds: int, *, with_fs: bool
) -> EngineResult:
    """Lookups, submissions, and the loop test, through the real store process."""
    region = BenchRegion(row_bytes, row_count)
    result = EngineResult(bytes_moved=row_bytes * row_count)
    steps = engine_loop.calibrate()
    # Room for one round and a little: from the second on, slots are overwritten.
    budget_bytes = int(row_bytes * row_count * 1.25) + (64 << 20)
    with ExitStack() as stack:
        stack.callback(region.close)
        client = stack.enter_context(store_client(directory / "client", region, budget_bytes))
        tiers: dict[str, Tier] = {KVTIER: ClientTier(client)}
        fs: FsSide | None = None
        if with_fs:
            fs = _fs_side(directory / "engine-fs", region)
            stack.callback(fs.close)
            tiers[FS] = fs
        written: list[RowKey] = []
        for number in range(rounds):
            alone = engine_loop.run_alone(
                lambda: engine_loop.spin(steps), max(_ALONE_S_MIN, result.bytes_moved / 2e9)
            )
            result.alone += alone.turns
            for name in list(tiers)[:: 1 if number % 2 else -1]:
                for mode in ("idle", "busy"):
                    is_busy = mode == "busy"
                    body: Callable[[], object] = (
                        (lambda: engine_loop.spin(steps)) if is_busy else _rest
                    )
                    jobs = bench_jobs(f"{name} {mode} {number}", row_bytes, row_count)
                    if name == FS and fs is not None:
                        fs.forget(written)
                        written = all_keys(jobs)
                    region.mark(jobs)
                    for op in ("write", "read"):
                        run = engine_loop.run_jobs(tiers[name], jobs, body, is_write=op == "write")
                        result.runs[name, op, mode].append(run)
            ours = bench_jobs(f"{KVTIER} busy {number}", row_bytes, row_count)
            _measure_calls(result, client, fs, ours, written)
    return result


def _rest() -> None:
    time.sleep(engine_loop.BODY_S / 4)


def _measure_calls(
    result: EngineResult,
    client: StoreClient,
    fs: FsSide | None,
    jobs: Sequence[RowJob],
    fs_keys: Sequence[RowKey],
) -> None:
    """Lookups of keys that are there, and submissions of jobs that cause no I/O."""
    keys = (all_keys(jobs) * _LOOKUP_KEYS)[:_LOOKUP_KEYS]
    keys = [RowKey(bytes(bytearray(key))) for key in keys]  # as new objects, whose hash is unknown
    started = time.perf_counter()
    found = [key in client for key in keys]
    result.lookup_s[KVTIER].append(time.perf_counter() - started)
    if not all(found):
        raise WrongBytes("kvtier: a key was not found")
    rows = _SUBMIT_ROWS
    job = RowJob(([*all_keys(jobs)] * rows)[:rows], [0] * rows)  # stored already
    for _ in range(_SUBMITS):
        started = time.perf_counter()
        client.write(job.keys, job.slots)
        result.submit_s[KVTIER].append(time.perf_counter() - started)
        while client.pending_jobs:
            client.poll()
            time.sleep(0.0001)
    if fs is None:
        return
    on_caller, until_found = fs.lookup(list(fs_keys[:_LOOKUP_KEYS]))
    scale = _LOOKUP_KEYS / min(len(fs_keys), _LOOKUP_KEYS)
    result.lookup_s[FS].append(on_caller * scale)
    result.lookup_s[f"{FS} until found"].append(until_found * scale)
    job = RowJob((list(fs_keys) * rows)[:rows], [0] * rows)
    for _ in range(_SUBMITS):
        started = time.perf_counter()
        fs.submit_write(job)
        result.submit_s[FS].append(time.perf_counter() - started)
        while not fs.poll():
            time.sleep(0.0001)


# -- what is said ----------------------------------------------------------------------------------


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
        (f"lookup of {_LOOKUP_KEYS} keys", result.lookup_s),
        (f"submit of a {_SUBMIT_ROWS}-row job", result.submit_s),
    ):
        cells = [median(figures[s]) * 1e3 if figures.get(s) else None for s in (KVTIER, FS)]
        calls.add_row(name, *(_text(cell, 3) for cell in cells))
    loop = Table(
        title=f"Beside a {BODY_TEXT} Python loop in the engine's process; "
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


BODY_TEXT = f"{engine_loop.BODY_S * 1e3:g} ms"


def targets(results: Sequence[SizeResult], engine: EngineResult) -> list[Target]:
    """The speed targets, for the sizes that were run."""
    found: list[Target] = []

    def add(
        what: str, at_least: bool, wanted: float, value: float | None, bare: float | None = None
    ) -> None:
        if value is not None:
            found.append(Target(what, at_least, wanted, value, bare))

    for result in results:
        is_small = result.row_bytes < SMALL_ROW_BYTES
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
    add(f"lookup of {_LOOKUP_KEYS} keys, ms", False, 1.0, median(engine.lookup_s[KVTIER]) * 1e3)
    add(
        f"submit of a {_SUBMIT_ROWS}-row job, ms",
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


# -- command line ----------------------------------------------------------------------------------


def parse_sizes(text: str) -> list[int]:
    """Row sizes from "499712,5MB".  Raises `ConfigError`."""
    sizes = [parse_size(part, "--sizes") for part in text.split(",")]
    for size in sizes:
        if size % PAGE_BYTES:
            raise ConfigError("--sizes", f"multiples of {PAGE_BYTES}", size)
    return sizes


def check_disk(directory: Path, needed: int) -> None:
    """Raises `ConfigError` if the directory is not there or has no room."""
    if not directory.is_dir():
        raise ConfigError("--directory", "a directory", str(directory))
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConfigError("--directory", f"{format_size(needed)} free", format_size(free))


def why_no_fs() -> str | None:
    """Why vLLM's fs tier can't take part, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not installed (make setup-vllm): without the columns of its fs tier"
    return None


def main(
    directory: Annotated[Path, typer.Option(help="Where the files go.")] = Path("/var/tmp"),
    sizes: Annotated[str, typer.Option(help="Row sizes, multiples of 4096.")] = ROW_SIZES,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 7,
    per_round: Annotated[str, typer.Option(help="Bytes that a side moves per round.")] = "500MB",
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
    without_fs: Annotated[bool, typer.Option("--without-fs", help="Leave vLLM out.")] = False,
) -> None:
    """The disk store beside the bare device and vLLM's fs tier."""
    try:
        row_sizes = parse_sizes(sizes)
        round_bytes = parse_size(per_round, "--per-round")
        check_disk(directory, round_bytes * (_STORE_ROUNDS + 4) + 2 * max(row_sizes) * _SEGMENTS)
        if json_path is not None and not json_path.absolute().parent.is_dir():
            raise ConfigError("--json", "a path in a directory that is there", str(json_path))
        reason = "vLLM left out" if without_fs else why_no_fs()
        if reason is not None:
            console.print(reason)
        run(directory, row_sizes, round_bytes, rounds, json_path, with_fs=reason is None)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    except WrongBytes as exc:
        typer.echo(f"failed: {exc}", err=True)
        raise typer.Exit(1) from None


def run(
    directory: Path,
    row_sizes: Sequence[int],
    round_bytes: int,
    rounds: int,
    json_path: Path | None,
    *,
    with_fs: bool,
) -> None:
    started = time.monotonic()
    sides = [KVTIER, FS] if with_fs else [KVTIER]
    load = os.getloadavg()[0]
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as scratch,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("rounds", total=rounds * (len(row_sizes) + 1))
        results = []
        for row_bytes in row_sizes:
            progress.update(task, description=f"rows of {row_bytes:,} bytes")
            row_count = max(2, round_bytes // row_bytes)
            bench = SizeBench(Path(scratch), row_bytes, row_count, with_fs=with_fs)
            results.append(bench.run(rounds, lambda: progress.advance(task)))
        progress.update(task, description="beside a busy loop")
        row_bytes = row_sizes[0]
        row_count = max(2, round_bytes // row_bytes)
        engine = bench_engine(Path(scratch), row_bytes, row_count, rounds, with_fs=with_fs)
    for table in (
        rows_table(results),
        cpu_table(results),
        *engine_tables(engine, sides),
        targets_table(targets(results, engine)),
    ):
        console.print(table)
    console.print(
        f"{rounds} rounds of {format_size(round_bytes)} on {os.cpu_count()} cores, "
        f"load average {load:.1f} before and {os.getloadavg()[0]:.1f} after, "
        f"{time.monotonic() - started:.0f} s"
    )
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(results, engine, sides, rounds), indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
