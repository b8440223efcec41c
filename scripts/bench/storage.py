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
from typing import TYPE_CHECKING, Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import Progress

from scripts.bench import engine_loop
from scripts.bench.engine_loop import ClientTier, Tier
from scripts.bench.sides import RawSide, RowJob, Side, StoreSide, WrongBytes
from scripts.bench.storage_report import (
    FS,
    KVTIER,
    LOOKUP_KEYS,
    OPS,
    RAW,
    SUBMIT_ROWS,
    EngineResult,
    Figure,
    SizeResult,
    as_json,
    cpu_table,
    engine_tables,
    rows_table,
    targets,
    targets_table,
)
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
_SEGMENTS = 4  # of the store: it is full when they are, and rounds overwrite a third of it
_STORE_ROUNDS = 3  # rounds that fit in the store
_JOB_ROWS_MAX = 64
_JOB_BYTES_MAX = 64 << 20
_MARK_BYTES = 64  # at the start of a row: its key
_SUBMITS = 40
_STORE_START_S = 60.0
_ALONE_S_MIN = 0.02

console = Console(width=118)


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
    keys = (all_keys(jobs) * LOOKUP_KEYS)[:LOOKUP_KEYS]
    keys = [RowKey(bytes(bytearray(key))) for key in keys]  # as new objects, whose hash is unknown
    started = time.perf_counter()
    found = [key in client for key in keys]
    result.lookup_s[KVTIER].append(time.perf_counter() - started)
    if not all(found):
        raise WrongBytes("kvtier: a key was not found")
    rows = SUBMIT_ROWS
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
    on_caller, until_found = fs.lookup(list(fs_keys[:LOOKUP_KEYS]))
    scale = LOOKUP_KEYS / min(len(fs_keys), LOOKUP_KEYS)
    result.lookup_s[FS].append(on_caller * scale)
    result.lookup_s[f"{FS} until found"].append(until_found * scale)
    job = RowJob((list(fs_keys) * rows)[:rows], [0] * rows)
    for _ in range(_SUBMITS):
        started = time.perf_counter()
        fs.submit_write(job)
        result.submit_s[FS].append(time.perf_counter() - started)
        while not fs.poll():
            time.sleep(0.0001)


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
