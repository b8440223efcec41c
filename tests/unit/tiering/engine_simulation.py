"""An engine, its workers and a disk in small, with real content, over one `TieringManager`.

The region's slots and the disk hold numbers instead of bytes, and what is right for a chunk follows
from its key, so that a transfer from or into the wrong slot, or too early, is seen.  A step takes
`STEP_S`.  Everything random comes from one seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from storage.service.client import FinishedJob
from storage.types import RowKey, RowOutcome
from tests.unit.tiering.fakes import Clock
from tiering.manager import LookupResult, TieringManager
from tiering.primary import PrimaryTier

STEP_S = 0.1
GARBAGE = -1


def content(key: RowKey) -> int:
    return hash(key)


@dataclass(slots=True)
class _Job:
    job_id: int
    is_read: bool
    keys: list[RowKey]
    slots: list[int]
    ends_at: int  # step


class SimulatedDisk:
    """A `SecondaryTier`.  Never evicts.  `failures` is the chance of a row to fail in one of the
    ways that a disk has."""

    def __init__(
        self,
        slots: list[int],
        randomness: random.Random,
        *,
        latency_max: int = 4,
        failures: float = 0.0,
    ) -> None:
        self.rows: dict[RowKey, int] = {}
        self.takes_writes = True
        self.write_rows_max = 1_000_000
        self.step = 0
        self.stands_still = False
        self._slots = slots
        self._random = randomness
        self._latency_max = latency_max
        self._failures = failures
        self._jobs: list[_Job] = []
        self._hung: list[tuple[int, int, int]] = []  # (job id, position, slot)
        self._released: list[tuple[int, int]] = []
        self._next = 0

    def missing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        return [key for key in keys if key not in self]

    def __contains__(self, key: bytes) -> bool:
        return key in self.rows

    def read(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        return self._submit(True, keys, slots)

    def write(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        return self._submit(False, keys, slots)

    def _submit(self, is_read: bool, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        assert keys
        assert len(keys) == len(slots)
        self._next += 1
        ends_at = self.step + self._random.randint(1, self._latency_max)
        self._jobs.append(_Job(self._next, is_read, list(keys), list(slots), ends_at))
        return self._next

    def touch(self, keys: Iterable[RowKey]) -> None:
        """Nothing is ever evicted here."""

    def clear(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @property
    def is_busy(self) -> bool:
        """Whether a result is owed, of a job or of a slot."""
        return bool(self._jobs or self._hung)

    def poll(self) -> list[FinishedJob]:
        if self.stands_still:
            return []
        for hung in [h for h in self._hung if self._random.random() < 0.1]:
            self._hung.remove(hung)
            job_id, position, slot = hung
            self._slots[slot] = GARBAGE  # a late read
            self._released.append((job_id, position))
        ended = [job for job in self._jobs if job.ends_at <= self.step]
        self._jobs = [job for job in self._jobs if job.ends_at > self.step]
        return [self._end(job) for job in ended]

    def _end(self, job: _Job) -> FinishedJob:
        outcomes = []
        for position, (key, slot) in enumerate(zip(job.keys, job.slots, strict=True)):
            outcome = self._read(key, slot) if job.is_read else self._write(key, slot)
            if outcome is RowOutcome.HUNG:
                self._hung.append((job.job_id, position, slot))
            outcomes.append(outcome)
        return FinishedJob(job.job_id, outcomes, 1, 0.01 * len(outcomes))

    def _read(self, key: RowKey, slot: int) -> RowOutcome:
        if self._random.random() < self._failures:
            self._slots[slot] = GARBAGE
            outcome = self._random.choice(
                [RowOutcome.FAILED, RowOutcome.CORRUPT, RowOutcome.MISSING, RowOutcome.HUNG]
            )
            if outcome in (RowOutcome.CORRUPT, RowOutcome.MISSING):
                self.rows.pop(key, None)
            return outcome
        if key not in self.rows:
            return RowOutcome.MISSING
        self._slots[slot] = self.rows[key]
        return RowOutcome.OK

    def _write(self, key: RowKey, slot: int) -> RowOutcome:
        if self._random.random() < self._failures:
            # A late write would write what stands in its slot: it is pinned until it is released.
            assert self._slots[slot] == content(key), "a slot changed while it was written"
            return self._random.choice([RowOutcome.FAILED, RowOutcome.DECLINED])
        assert self._slots[slot] == content(key), "a slot changed while it was written"
        if key in self.rows:
            return RowOutcome.ALREADY_STORED
        self.rows[key] = self._slots[slot]
        return RowOutcome.OK

    def take_released(self) -> list[tuple[int, int]]:
        released, self._released = self._released, []
        return released


class Stage(Enum):
    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(eq=False)
class SimulatedRequest:
    """Its chunks, and what became of it."""

    name: str
    chain: list[RowKey]
    stage: Stage = Stage.WAITING
    until: int = 0  # step at which its load or its run ends
    hits: int | None = None
    """Of its first lookup that was answered."""
    pending_steps: int = 0
    oldest_pending_steps: int = 0
    """In which it waited as the one that arrived first."""
    loaded: list[RowKey] = field(default_factory=list)
    is_cancelled: bool = False
    stored: bool = False


class SimulatedEngine:
    """Arrivals, lookups in some order, loads, stores, preemption, cancellation; step by step."""

    def __init__(
        self,
        randomness: random.Random,
        *,
        slot_count: int,
        failures: float = 0.0,
        latency_max: int = 4,
        running_max: int = 8,
        preempts: float = 0.0,
        cancels: float = 0.0,
        timeout_s: float = 10.0,
    ) -> None:
        self.random = randomness
        self.clock = Clock()
        self.slots = [GARBAGE] * slot_count
        self.disk = SimulatedDisk(
            self.slots, randomness, latency_max=latency_max, failures=failures
        )
        self.manager = TieringManager(
            PrimaryTier(slot_count),
            {"disk": self.disk},
            promotion_timeout_s=timeout_s,
            now=self.clock,
        )
        self.requests: list[SimulatedRequest] = []
        self._running_max = running_max
        self._preempts = preempts
        self._cancels = cancels
        self._step = 0
        self._stores: list[tuple[int, list[RowKey], list[int]]] = []  # until, keys, slots
        self._orphans: list[tuple[int, list[RowKey]]] = []  # loads of requests that were cancelled

    def arrive(self, name: str, chain: list[RowKey]) -> SimulatedRequest:
        request = SimulatedRequest(name, chain)
        self.requests.append(request)
        self.manager.begin(name)
        return request

    @property
    def is_done(self) -> bool:
        return not self._stores and not self._orphans and self._all_ended

    @property
    def _all_ended(self) -> bool:
        return all(request.stage is Stage.ENDED for request in self.requests)

    def step(self, *, shuffled: bool = False) -> None:
        """One step of the scheduler, then the workers'."""
        waiting = [r for r in self.requests if r.stage is Stage.WAITING]
        oldest = waiting[0] if waiting else None
        if shuffled:
            self.random.shuffle(waiting)
        running = sum(r.stage in (Stage.LOADING, Stage.RUNNING) for r in self.requests)
        for request in waiting:
            if running >= self._running_max:
                break
            if self._look_up(request):
                running += 1
            else:
                request.pending_steps += 1
                request.oldest_pending_steps += request is oldest
        self.manager.end_step()
        self._store()
        self._end_step()

    def _look_up(self, request: SimulatedRequest) -> bool:
        """Whether the scheduler was told how much there is to load; then it is loaded."""
        hits: list[RowKey] = []
        is_deferred = False
        for key in request.chain:
            result = self.manager.lookup(key, request.name)
            if result is LookupResult.MISS:
                break
            is_deferred |= result is not LookupResult.HIT
            hits.append(key)
        if is_deferred:
            return False
        if request.hits is None:
            request.hits = len(hits)
        request.loaded = hits
        if hits:
            slots = self.manager.prepare_load(hits, request.name)
            assert len(set(slots)) == len(hits)
            self._check(hits)
            request.stage = Stage.LOADING
            request.until = self._step + self.random.randint(1, 3)
        else:
            self._run(request)
        return True

    def _check(self, keys: list[RowKey]) -> None:
        for key in keys:
            assert self.slots[self.manager.primary.slot(key)] == content(key), "a wrong byte"

    def _run(self, request: SimulatedRequest) -> None:
        request.stage = Stage.RUNNING
        request.stored = False
        request.until = self._step + self.random.randint(1, 4)

    def _store(self) -> None:
        for request in self.requests:
            if request.stage is not Stage.RUNNING or request.stored:
                continue
            plan = self.manager.prepare_store(request.chain, request.name)
            if plan is None:
                continue
            request.stored = True
            for slot in plan.slots:
                self.slots[slot] = GARBAGE  # half written
            if plan.keys:
                until = self._step + self.random.randint(1, 3)
                self._stores.append((until, plan.keys, plan.slots))

    def _end_step(self) -> None:
        self._step += 1
        self.disk.step = self._step
        self.clock.now += STEP_S
        for store in [s for s in self._stores if s[0] <= self._step]:
            self._stores.remove(store)
            _, keys, slots = store
            for key, slot in zip(keys, slots, strict=True):
                self.slots[slot] = content(key)
            self.manager.complete_store(set(keys), success=self.random.random() < 0.95)
        for orphan in [o for o in self._orphans if o[0] <= self._step]:
            self._orphans.remove(orphan)
            self._check(orphan[1])
            self.manager.complete_load(set(orphan[1]))
        for request in self.requests:
            self._advance(request)

    def _advance(self, request: SimulatedRequest) -> None:
        if request.stage is Stage.ENDED:
            return
        if self.random.random() < self._cancels:
            request.is_cancelled = True
            if request.stage is Stage.LOADING:
                self._orphans.append((request.until, request.loaded))
            self._finish(request)
        elif request.stage is Stage.LOADING and request.until <= self._step:
            self._check(request.loaded)
            self.manager.complete_load(set(request.loaded))
            self._run(request)
        elif request.stage is Stage.RUNNING:
            if self.random.random() < self._preempts:
                request.stage = Stage.WAITING
            elif request.until <= self._step:
                self._finish(request)

    def _finish(self, request: SimulatedRequest) -> None:
        request.stage = Stage.ENDED
        self.manager.finish(request.name)
