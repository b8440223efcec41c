"""The disk as a tier of an engine that has a region and a manager of its own, such as vLLM's.

Engine-neutral.  The engine names jobs and slots; here is what it must be told and when: every job
once, and only when its slots are free.  A row whose I/O hangs leaves its slot to the store, and the
engine would give the slot of a job that has ended to another chunk; so such a job ends when the
store lets go.  A store process that stands still lets go of nothing: it is killed, its slots are
free then, and a new one is started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from storage.service.client import FinishedJob
from storage.types import STORED, RowKey, RowOutcome
from tiering.secondary import SecondaryTier

log = logging.getLogger("kvtier.tier")

_FAILED_READ_RETRY_S = 30.0  # a key whose read failed is a miss for that long
_MAX_FAILED_KEYS = 100_000
_STILL_S = 5.0  # how long a process that stands still, with our slots, may come round
_POLL_S = 0.001  # while `drain` waits


class StoreProcess(SecondaryTier, Protocol):
    """A store in a process of its own, such as `StoreClient`.

    While `is_up` is False it finds nothing, and jobs end at once.  `abort` kills it; as after any
    death, its jobs have failed and its slots are free once it is gone.  `renew` leaves the rows
    where they are and goes on without any; what is written from then on no later engine finds.
    """

    @property
    def is_up(self) -> bool: ...

    def abort(self) -> None: ...

    def renew(self) -> None: ...


class EndedJob(NamedTuple):
    """One job of the engine's; its slots are the engine's again."""

    job_id: int
    done: list[RowKey]
    """The keys whose rows were loaded, or are on disk now."""
    is_complete: bool
    """Whether these are all of the job's keys."""
    bytes_moved: int
    seconds: float


@dataclass(slots=True, eq=False)
class _Job:
    job_id: int  # the engine's
    keys: list[RowKey]
    is_load: bool
    held: set[int] = field(default_factory=set)  # positions whose slots are still the store's
    result: FinishedJob | None = None


class DiskTier:
    """One engine's jobs at `store`.  One thread, the scheduler's, makes all calls; none but `drain`
    and `close` waits or does I/O."""

    def __init__(
        self,
        store: StoreProcess,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._now = now
        self._jobs: dict[int, _Job] = {}  # by the store's job id: those not reported yet
        self._ended: list[EndedJob] = []
        self._failed_reads: dict[RowKey, float] = {}  # key -> when to try again
        self._chains: dict[str, dict[RowKey, None]] = {}  # by request: what it used, in order
        self._still_since: float | None = None
        self._is_retired = False

    # -- requests -------------------------------------------------------------------------------

    def begin(self, request_id: str) -> None:
        """A request arrives."""
        self._chains.setdefault(request_id, {})

    def use(self, request_id: str, keys: Iterable[RowKey]) -> None:
        """A request uses chunks, first to last; parts may come one after the other."""
        chain = self._chains.get(request_id)
        if chain is not None:
            chain.update(dict.fromkeys(keys))

    def finish(self, request_id: str) -> None:
        """The request makes no more calls.  What it used ages as one chain, the leaf first."""
        chain = self._chains.pop(request_id, None)
        if chain:
            self._store.touch([key for key in chain if key in self._store])

    # -- asking and doing -----------------------------------------------------------------------

    def __contains__(self, key: RowKey) -> bool:
        """Whether a load of `key` is worth a try."""
        return key in self._store and not self._is_retired and not self._failed_lately(key)

    def load(self, job_id: int, keys: Sequence[RowKey], slots: Sequence[int]) -> None:
        """Copy rows from disk into `slots`, which are the tier's until the job has ended."""
        if self._is_retired:
            self._refuse(job_id)
            return
        job = _Job(job_id, list(keys), is_load=True)
        self._jobs[self._store.read(job.keys, slots)] = job

    def save(self, job_id: int, keys: Sequence[RowKey], slots: Sequence[int]) -> None:
        """Copy the rows in `slots` to disk, the chunks of a request first to last."""
        if self._is_retired:
            self._refuse(job_id)
            return
        job = _Job(job_id, list(keys), is_load=False)
        self._jobs[self._store.write(job.keys, slots)] = job

    def _refuse(self, job_id: int) -> None:
        self._ended.append(EndedJob(job_id, [], False, 0, 0.0))

    def _failed_lately(self, key: RowKey) -> bool:
        retry_at = self._failed_reads.get(key)
        if retry_at is None:
            return False
        if self._now() < retry_at:
            return True
        del self._failed_reads[key]
        return False

    # -- results --------------------------------------------------------------------------------

    @property
    def pending_jobs(self) -> int:
        """Jobs that `poll` has not returned yet."""
        return len(self._jobs) + len(self._ended)

    def poll(self) -> list[EndedJob]:
        """The jobs that ended since the last call."""
        for result in self._store.poll():
            self._take_in(result)
        for store_id, position in self._store.take_released():
            job = self._jobs[store_id]
            job.held.discard(position)
            if not job.held:
                self._end(store_id)
        self._end_standstill()
        ended, self._ended = self._ended, []
        return ended

    def _take_in(self, result: FinishedJob) -> None:
        job = self._jobs[result.job_id]
        job.result = result
        outcomes = list(zip(job.keys, result.outcomes, strict=True))
        if job.is_load:
            if len(self._failed_reads) > _MAX_FAILED_KEYS:
                self._failed_reads.clear()
            retry_at = self._now() + _FAILED_READ_RETRY_S
            failed = [key for key, outcome in outcomes if outcome is not RowOutcome.OK]
            self._failed_reads.update(dict.fromkeys(failed, retry_at))
        else:
            for key, outcome in outcomes:
                if outcome in STORED:
                    self._failed_reads.pop(key, None)
        job.held = {i for i, (_, outcome) in enumerate(outcomes) if outcome is RowOutcome.HUNG}
        if not job.held:
            self._end(result.job_id)

    def _end(self, store_id: int) -> None:
        job = self._jobs.pop(store_id)
        assert job.result is not None
        pairs = zip(job.keys, job.result.outcomes, strict=True)
        done = [key for key, outcome in pairs if outcome in STORED]
        is_complete = len(done) == len(job.keys)
        moved, seconds = job.result.bytes_moved, job.result.seconds
        self._ended.append(EndedJob(job.job_id, done, is_complete, moved, seconds))

    def _end_standstill(self) -> None:
        """Kill a process that stands still on our slots."""
        now = self._now()
        if self._store.is_up or not self._jobs:
            self._still_since = None
        elif self._still_since is None:
            self._still_since = now
        elif now - self._still_since > _STILL_S:
            log.error("the store process stands still on %d jobs: it is killed", len(self._jobs))
            self._still_since = None
            self._store.abort()

    # -- end ------------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended; `poll` returns them afterwards.  False if some did not
        although the store process was killed in the middle of `timeout_s`."""
        end = time.monotonic() + timeout_s / 2
        ended: list[EndedJob] = []
        is_killed = False
        while self._jobs:
            if time.monotonic() > end:
                if is_killed:
                    break
                is_killed = True
                end = time.monotonic() + timeout_s / 2
                log.error("transfers did not end: the store process is killed")
                self._store.abort()
            ended += self.poll()
            time.sleep(_POLL_S)
        self._ended = ended + self._ended
        return not self._jobs

    def retire(self) -> None:
        """Find and take nothing until `start_again`."""
        self._is_retired = True

    def start_again(self) -> None:
        """Go on without the rows that are there: they stay, for a later engine.  No job is under
        way."""
        self._store.renew()
        self._failed_reads.clear()
        self._is_retired = False

    def close(self) -> None:
        """End the store process, which first writes what it was given."""
        self._store.close()
