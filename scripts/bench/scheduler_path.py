"""What a manager's calls cost the scheduler's thread: kvtier beside vLLM's own tiering manager.

    python scripts/bench/scheduler_path.py --json out.json

Both sides are driven by one model of vLLM's offloading scheduler (`scheduler_calls.py`): prompts of
1, 32 and 512 chunks that are new, in the region, or on disk, beside 64 running requests and over a
region that is full, so that every store evicts.  vLLM's side is `TieringOffloadingManager` over its
`fs` tier with defaults; ours is `VllmManager` with a store process.  Every round takes each side in
turn, once by the wall clock and once by the thread's CPU time; figures are of the calls of all
rounds together.

What is not alike on both sides: vLLM's tier asks the disk for existence in a thread and answers
RETRY meanwhile, so a request is looked up in more steps ("all" adds them up); it takes in results
in the first lookup or store of a step, ours in `on_schedule_end`; its I/O threads share the
interpreter with the scheduler, which the wall clock sees and CPU time does not; its manager writes
file names when it submits, ours a message.

Then ours alone: the store process stopped (SIGSTOP), with a socket that takes messages and with one
that is full; and a prompt of 100,000 tokens that waits, of which vLLM asks for each of 6,250 chunks
in every step.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and in it a file is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import gc
import json
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.bench.scheduler_calls import (
    CPU,
    WALL,
    Call,
    Samples,
    Scheduler,
    Side,
    WrongResult,
    percentile,
    prompt,
)
from scripts.bench.storage import check_disk, why_no_fs
from storage.errors import ConfigError, StorageError
from storage.types import RowKey

if TYPE_CHECKING:
    from scripts.bench.vllm_managers import KvtierSide

OURS, THEIRS = "kvtier", "vLLM"
CLOCKS = (("wall", WALL), ("cpu", CPU))
RATIO_MAX = 0.5
STALLED_P99_US_MAX = 200.0
PROMPTS = {1: 60, 32: 30, 512: 6}  # chunks -> prompts of each sort per round
LONG_CHUNKS = 6250  # 100,000 tokens by 16
_BUDGET_BYTES = 4 << 30
_STALLED_SCANS = 4
_CONTENDED_SCANS = 20  # of a long prompt that waits for slots

console = Console(width=118)


@dataclass(frozen=True, slots=True)
class Line:
    """One kind of call, in microseconds; `theirs` None: of ours alone."""

    call: Call
    clock: str
    count: int
    p50: float
    p99: float
    worst: float
    theirs_count: int = 0
    theirs_p50: float | None = None
    theirs_p99: float | None = None

    @property
    def ratio_p50(self) -> float | None:
        return self.p50 / self.theirs_p50 if self.theirs_p50 else None

    @property
    def ratio_p99(self) -> float | None:
        return self.p99 / self.theirs_p99 if self.theirs_p99 else None


class Rounds:
    """Both sides over the same prompts.  Prompts that are new come again
    when as many others have passed through the region as it holds: then the disk alone has them."""

    def __init__(self, sides: Sequence[Side], prompts: dict[int, int]) -> None:
        self.sides = sides
        self._prompts = prompts
        self.samples = {(s.name, c): Samples(c) for s in sides for c in (WALL, CPU)}
        warm_up = Samples(WALL)
        self._drivers = {side.name: Scheduler(side, warm_up) for side in sides}
        self._on_disk: deque[list[list[RowKey]]] = deque()  # of the passes before, the oldest first
        for side in sides:
            self._drivers[side.name].start_running()

    def fill(self, slot_count: int) -> None:
        """Until the region is full, and the disk has what the first round looks for."""
        largest = max(self._prompts)
        for number in range(-(-slot_count // largest)):
            for driver in self._drivers.values():
                driver.new(prompt(f"fill {number}", largest))
        chunks = sum(size * count for size, count in self._prompts.items())
        for number in range(1 + -(-slot_count // chunks)):
            self._on_disk.append(list(self._names(f"before {number}")))
            for keys in self._on_disk[-1]:
                for driver in self._drivers.values():
                    driver.new(keys)

    def _names(self, name: str) -> Iterable[list[RowKey]]:
        for chunks, count in self._prompts.items():
            for number in range(count):
                yield prompt(f"{name} {chunks} {number}", chunks)

    def run(self, number: int) -> None:
        for label, clock in CLOCKS:
            new = list(self._names(f"{label} {number}"))
            on_disk = self._on_disk.popleft()
            self._on_disk.append(new)
            for side in self.sides[:: 1 if number % 2 else -1]:
                samples = self.samples[side.name, clock]
                driver = self._drivers[side.name]
                driver.use(samples)
                gc.collect()
                with samples.counting_collections():
                    for keys in on_disk:
                        driver.again(keys, "disk")
                    for keys in new:
                        driver.new(keys)
                        driver.again(keys, "region")

    def lines(self) -> list[Line]:
        found = []
        for label, clock in CLOCKS:
            ours = self.samples[OURS, clock].of
            theirs = self.samples[THEIRS, clock].of if (THEIRS, clock) in self.samples else {}
            for call in sorted(ours):
                found.append(line(call, label, ours[call], theirs.get(call, ())))
        return found

    def total(self, clock: str) -> dict[str, float]:
        """Microseconds of all calls of a prompt, by side; steps without a result left out."""
        which = WALL if clock == "wall" else CPU
        prompts = sum(self._prompts.values()) * 3
        found = {}
        for side in self.sides:
            of = self.samples[side.name, which].of
            spent = sum(
                sum(v) for call, v in of.items() if call.chunks and not call.name.endswith(": all")
            )
            rounds = len(of[Call("lookup, on disk: all", max(self._prompts))])
            found[side.name] = spent / 1e3 / prompts / (rounds / self._prompts[max(self._prompts)])
        return found

    def together(self, clock: str) -> list[Line]:
        """All kinds of calls for prompts of one size as one, a lookup as one call."""
        which = WALL if clock == "wall" else CPU
        ours, theirs = self.samples[OURS, which], self.samples[THEIRS, which]
        return [
            line(Call("any call", n), clock, ours.of_each_call(n), theirs.of_each_call(n))
            for n in self._prompts
        ]

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.stop_running()


def line(call: Call, clock: str, ours: Sequence[int], theirs: Sequence[int] = ()) -> Line:
    us = [percentile(ours, p) / 1e3 for p in (50, 99, 100)]
    if not theirs:
        return Line(call, clock, len(ours), us[0], us[1], us[2])
    other = [percentile(theirs, p) / 1e3 for p in (50, 99)]
    return Line(call, clock, len(ours), us[0], us[1], us[2], len(theirs), other[0], other[1])


# -- ours alone ------------------------------------------------------------------------------------


def stalled(side: KvtierSide, prompts: dict[int, int], rounds: int) -> dict[str, Samples]:
    """Calls while the store process stands still; by what its socket does."""
    parts = [(what, clock) for what in ("store stopped", "socket full") for clock in CLOCKS]
    found = {f"{what}, {label}": Samples(clock) for what, (label, clock) in parts}
    driver = Scheduler(side, Samples(WALL))
    on_disk = [prompt(f"stalled {n} {i}", n) for n, count in prompts.items() for i in range(count)]
    for keys in on_disk:
        driver.new(keys)
    for number in range(-(-side.tiering.primary.slot_count // max(prompts))):
        driver.new(prompt(f"stalled fill {number}", max(prompts)))
    side.signal(signal.SIGSTOP)
    try:
        for label, _ in CLOCKS:
            driver.use(found[f"store stopped, {label}"])
            _stalled_calls(driver, on_disk, f"stopped {label}", 1)
        while not side.client.unsent_bytes:  # until the socket takes no more
            side.client.touch(on_disk[-1])
            side.client.poll()
        for label, _ in CLOCKS:
            driver.use(found[f"socket full, {label}"])
            _stalled_calls(driver, on_disk, f"full {label}", rounds)
    finally:
        side.signal(signal.SIGCONT)
    driver.use(Samples(WALL))
    driver.settle(1)
    if side.tiering.primary.busy_count:
        raise WrongResult(f"{side.tiering.primary.busy_count} slots in use after the stall")
    return found


def _stalled_calls(
    driver: Scheduler, on_disk: Sequence[list[RowKey]], name: str, rounds: int
) -> None:
    for number in range(rounds):
        for index, keys in enumerate(on_disk):
            driver.unfinished(prompt(f"{name} {number} {index}", len(keys)))
            driver.cancelled(keys, _STALLED_SCANS)


def long_prompt(side: KvtierSide, chunks: int, scans: int) -> Samples:
    """A prompt that waits: for the disk, and for slots that an earlier one holds."""
    samples = Samples(CPU)
    driver = Scheduler(side, Samples(WALL))
    slots = side.tiering.primary.slot_count
    half = max(1, slots // 2)
    waiting, found, other = (prompt(f"long {i}", n) for i, n in enumerate((chunks, half, chunks)))
    for keys in (waiting, other, found, prompt("long fill", slots)):
        for start in range(0, len(keys), 512):
            driver.new(keys[start : start + 512], touch=False)
    side.signal(signal.SIGSTOP)
    try:
        driver.use(samples)
        driver.cancelled(waiting, scans)
        driver.use(Samples(WALL))
    finally:
        side.signal(signal.SIGCONT)
    driver.settle(1)
    for start in range(0, len(found), 512):
        driver.again(found[start : start + 512], "disk")
    side.signal(signal.SIGSTOP)
    try:
        context = driver.begin(chunks)
        driver.look_up([*found, *waiting], context)  # holds half of the region, wants the rest
        contended = Samples(CPU)
        driver.use(contended)
        driver.cancelled(other, min(scans, _CONTENDED_SCANS))
        driver.use(Samples(WALL))
        driver.end(context, chunks)
    finally:
        side.signal(signal.SIGCONT)
    driver.settle(1)
    for call, values in contended.of.items():
        if call.name.startswith("lookup"):
            name = call.name.replace("on disk", "no slot free")
            samples.of[Call(name, call.chunks)] += values
    return samples


# -- what is said ----------------------------------------------------------------------------------


def _text(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def calls_table(lines: Sequence[Line], clock: str) -> Table:
    table = Table(title=f"us per call, {'wall clock' if clock == 'wall' else 'CPU of the thread'}")
    for name in ("call", "chunks", "calls", "p50", "p99", "max", "vLLM p50", "p99"):
        table.add_column(name, justify="left" if name == "call" else "right")
    table.add_column("ratio p50", justify="right")
    table.add_column("p99", justify="right")
    for row in lines:
        if row.clock != clock:
            continue
        table.add_row(
            row.call.name,
            str(row.call.chunks or ""),
            str(row.count),
            *(_text(value) for value in (row.p50, row.p99, row.worst)),
            *(_text(value) for value in (row.theirs_p50, row.theirs_p99)),
            *(_text(value, 2) for value in (row.ratio_p50, row.ratio_p99)),
        )
    return table


def alone_table(title: str, samples: Samples) -> Table:
    table = Table(title=title)
    for name in ("call", "chunks", "calls", "p50 us", "p99 us", "max us"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for call in sorted(samples.of):
        row = line(call, "wall", samples.of[call])
        table.add_row(
            call.name,
            str(call.chunks or ""),
            str(row.count),
            *(_text(value) for value in (row.p50, row.p99, row.worst)),
        )
    return table


def misses(lines: Sequence[Line]) -> list[str]:
    """Kinds of calls of which ours take more than `RATIO_MAX` of vLLM's."""
    found = []
    for row in lines:
        for name, ratio in (("p50", row.ratio_p50), ("p99", row.ratio_p99)):
            if ratio is not None and ratio > RATIO_MAX:
                found.append(
                    f"{row.call.name} x{row.call.chunks} {name} ({row.clock}): {ratio:.2f}"
                )
    return found


def as_json(lines: Sequence[Line], alone: dict[str, Samples]) -> dict[str, Any]:
    return {
        "calls": [
            {
                "call": row.call.name,
                "chunks": row.call.chunks,
                "clock": row.clock,
                "count": row.count,
                "p50_us": row.p50,
                "p99_us": row.p99,
                "max_us": row.worst,
                "vllm_p50_us": row.theirs_p50,
                "vllm_p99_us": row.theirs_p99,
                "ratio_p50": row.ratio_p50,
                "ratio_p99": row.ratio_p99,
            }
            for row in lines
        ],
        "alone": {
            name: [
                {
                    "call": call.name,
                    "chunks": call.chunks,
                    "count": len(values),
                    "p50_us": percentile(values, 50) / 1e3,
                    "p99_us": percentile(values, 99) / 1e3,
                    "max_us": percentile(values, 100) / 1e3,
                }
                for call, values in sorted(samples.of.items())
            ]
            for name, samples in alone.items()
        },
        "targets": {"ratio_max": RATIO_MAX, "stalled_p99_us_max": STALLED_P99_US_MAX},
        "missed": misses(lines),
    }


# -- command line ----------------------------------------------------------------------------------


def main(
    directory: Annotated[Path, typer.Option(help="Where the files go.")] = Path("/var/tmp"),
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 7,
    slots: Annotated[int, typer.Option(min=64, help="Slots of the region.")] = 8192,
    chunks: Annotated[str, typer.Option(help="Chunks of a prompt.")] = "1,32,512",
    long: Annotated[int, typer.Option(min=1, help="Chunks of the long prompt.")] = LONG_CHUNKS,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
) -> None:
    """Cost per manager call beside vLLM's own tiering manager."""
    try:
        prompts = parse_chunks(chunks, slots)
        check_disk(directory, _BUDGET_BYTES // 2)
        if json_path is not None and not json_path.absolute().parent.is_dir():
            raise ConfigError("--json", "a path in a directory that is there", str(json_path))
        if (reason := why_no_fs()) is not None:
            raise ConfigError("vllm", "to be installed", reason)
        run(directory, rounds, slots, prompts, long, json_path)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    except WrongResult as exc:
        typer.echo(f"failed: {exc}", err=True)
        raise typer.Exit(1) from None


def parse_chunks(text: str, slots: int) -> dict[int, int]:
    """Prompts of each size, from "1,32,512".  Raises `ConfigError`."""
    found = {}
    for part in text.split(","):
        if not part.strip().isdigit() or not 0 < int(part) <= slots // 4:
            raise ConfigError("--chunks", f"numbers from 1 to {slots // 4}, by commas", text)
        count = int(part)
        found[count] = PROMPTS.get(count, max(2, 64 // count))
    return found


def run(
    directory: Path,
    rounds: int,
    slots: int,
    prompts: dict[int, int],
    long: int,
    json_path: Path | None,
) -> None:
    from scripts.bench.vllm_managers import FsManagerSide, KvtierSide  # takes seconds

    started, load = time.monotonic(), os.getloadavg()[0]
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console, transient=True))
        task = progress.add_task("starting", total=rounds + 3)
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory))
        )
        threads = threading.active_count()
        ours = KvtierSide(scratch / "kvtier", slots, _BUDGET_BYTES)
        stack.callback(ours.close)
        our_threads = threading.active_count() - threads
        theirs = FsManagerSide(scratch / "fs", slots)
        stack.callback(theirs.close)
        their_threads = threading.active_count() - threads - our_threads
        bench = Rounds([ours, theirs], prompts)
        progress.update(task, advance=1, description="filling both")
        bench.fill(slots)
        gc.collect()
        gc.freeze()  # as vLLM's engine does after its start
        for number in range(rounds):
            progress.update(task, advance=1, description="rounds")
            bench.run(number)
        progress.update(task, advance=1, description="the store stands still")
        alone = stalled(ours, prompts, rounds)
        progress.update(task, advance=1, description="a long prompt waits")
        alone[f"prompt of {long} chunks, cpu"] = long_prompt(ours, long, 10 * rounds)
        bench.close()
    lines = bench.lines()
    together = [row for clock in ("wall", "cpu") for row in bench.together(clock)]
    for clock in ("wall", "cpu"):
        console.print(calls_table([*lines, *together], clock))
    for name, samples in alone.items():
        console.print(alone_table(name, samples))
    for clock in ("wall", "cpu"):
        total = bench.total(clock)
        console.print(
            f"all calls of a prompt, us, {clock}: kvtier {total[OURS]:.1f}, vLLM "
            f"{total[THEIRS]:.1f}, ratio {total[OURS] / total[THEIRS]:.2f}"
        )
    for text in misses(lines):
        console.print(f"above {RATIO_MAX}: {text}")
    for name, samples in alone.items():
        if not name.startswith("prompt"):
            values = samples.of_each_call()
            console.print(
                f"{name}: p99 of all {len(values)} calls {percentile(values, 99) / 1e3:.1f} us, "
                f"most {percentile(values, 100) / 1e3:.1f} us"
            )
    digests = {bench.samples[side.name, WALL].digest for side in bench.sides}
    console.print(
        f"threads beside the scheduler's: kvtier {our_threads}, vLLM {their_threads}; collections: "
        + ", ".join(f"{n} {bench.samples[n, WALL].collections}" for n in (OURS, THEIRS))
    )
    console.print(
        f"{rounds} rounds on {os.cpu_count()} cores, load average {load:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after, {time.monotonic() - started:.0f} s, "
        f"result {' != '.join(sorted(digests))}"
    )
    if json_path is not None:
        json_path.write_text(json.dumps(as_json([*lines, *together], alone), indent=2) + "\n")
    if len(digests) != 1:
        raise WrongResult("the sides did not find and store the same")


if __name__ == "__main__":
    typer.run(main)
