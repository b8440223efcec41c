"""What a busy scheduler and a store do to each other: bandwidth, and the time of a turn.

The engine's process runs a loop with 1 ms of pure Python per turn, as a scheduler does, takes in
finished jobs and submits new ones.  Our store runs in its own process, as in the product; vLLM's fs
tier in the engine's, as in vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scripts.bench.sides import RowJob, WrongBytes
from storage.service.client import StoreClient
from storage.types import RowOutcome

BODY_S = 0.001
_JOBS_IN_FLIGHT = 4


class Tier(Protocol):
    """What the engine's thread calls; none of it may wait."""

    def submit_write(self, job: RowJob) -> int: ...

    def submit_read(self, job: RowJob) -> int: ...

    def poll(self) -> list[int]:
        """Ids of the jobs that ended.  Raises `WrongBytes` for one that failed."""
        ...


class ClientTier:
    """A `StoreClient`, whose store process does the work."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def submit_write(self, job: RowJob) -> int:
        return self._client.write(job.keys, job.slots)

    def submit_read(self, job: RowJob) -> int:
        return self._client.read(job.keys, job.slots)

    def poll(self) -> list[int]:
        finished = self._client.poll()
        for job in finished:
            bad = [outcome for outcome in job.outcomes if outcome is not RowOutcome.OK]
            if bad:
                raise WrongBytes(f"kvtier: {len(bad)} rows not OK, such as {bad[0].name}")
        return [job.job_id for job in finished]


@dataclass(slots=True)
class LoopRun:
    """`turns` are the seconds of each turn, `seconds` is from the first job to the last."""

    seconds: float = 0.0
    turns: list[float] = field(default_factory=list)


def spin(steps: int) -> int:
    """Pure Python that holds the interpreter lock."""
    total = 0
    for step in range(steps):
        total += step & 3
    return total


def calibrate() -> int:
    """How many steps of `spin` take `BODY_S` here: the fastest of many tries."""
    steps = 1000
    fastest = min(_timed(steps) for _ in range(200))
    return max(1, int(steps * BODY_S / fastest))


def _timed(steps: int) -> float:
    started = time.perf_counter()
    spin(steps)
    return time.perf_counter() - started


def run_alone(body: Callable[[], object], seconds: float) -> LoopRun:
    """The loop without any I/O."""
    run = LoopRun()
    end = time.perf_counter() + seconds
    now = time.perf_counter()
    while now < end:
        body()
        run.turns.append(-now + (now := time.perf_counter()))
    return run


def run_jobs(
    tier: Tier, jobs: Sequence[RowJob], body: Callable[[], object], *, is_write: bool
) -> LoopRun:
    """The loop with `jobs`, a few in flight at a time, until all have ended."""
    submit = tier.submit_write if is_write else tier.submit_read
    waiting = list(reversed(jobs))
    in_flight = 0
    run = LoopRun()
    started = now = time.perf_counter()
    while waiting or in_flight:
        while waiting and in_flight < _JOBS_IN_FLIGHT:
            submit(waiting.pop())
            in_flight += 1
        body()
        in_flight -= len(tier.poll())
        run.turns.append(-now + (now := time.perf_counter()))
    run.seconds = now - started
    return run
