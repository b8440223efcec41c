"""The calls that vLLM's offloading scheduler makes of a manager, made by rote and timed.

Both sides of `scheduler_path.py` are driven by this one model of the scheduler: the same requests,
the same keys, the same rules for what follows a lookup.  Importing this does not import vllm.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from storage.types import RowKey

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_S = 0.001  # what the model's turn takes: the time in which jobs of a disk go on
SCANS_MAX = 20_000  # of one request that waits; more is a hang
RUNNING_REQUESTS = 64  # requests that decode meanwhile: a manager may look at each in every step
_RUNNING_CHUNKS = 8
CALIBRATIONS = 2000


class WrongResult(Exception):
    """A side did not find or take what it should; its figures would mean nothing."""


class Answer(NamedTuple):
    """vLLM's `LookupResult` members, passed in so that nothing here imports vllm."""

    hit: object
    pending: object
    retry: object


class Manager(Protocol):
    """vLLM's `OffloadingManager`, as far as its scheduler calls it in a step."""

    def on_new_request(self, req_context: Any) -> Any: ...
    def lookup(self, key: bytes, req_context: Any) -> Any: ...
    def prepare_load(self, keys: Any, req_context: Any) -> Any: ...
    def complete_load(self, keys: Any, req_context: Any) -> None: ...
    def prepare_store(self, keys: Any, req_context: Any) -> Any: ...
    def complete_store(self, keys: Any, req_context: Any) -> None: ...
    def touch(self, keys: Any, req_context: Any) -> None: ...
    def on_schedule_end(self, context: Any) -> None: ...
    def on_request_finished(self, req_context: Any) -> None: ...
    def has_pending_work(self) -> bool: ...
    def take_events(self) -> Any: ...
    def get_stats(self) -> Any: ...


class Side(Protocol):
    """One manager with its disk."""

    name: str
    manager: Manager
    answer: Answer

    def context(self, request_id: str) -> Any:
        """vLLM's `ReqContext` for a request."""
        ...

    def step_context(self, new_request_ids: Sequence[str]) -> Any:
        """vLLM's `ScheduleEndContext`."""
        ...

    def jobs(self) -> int:
        """Jobs of the disk that the manager waits for."""
        ...

    def close(self) -> None: ...


class Call(NamedTuple):
    """A kind of call; `chunks`: of how many chunks it is, or was made for."""

    name: str
    chunks: int


Clock = Callable[[], int]
WALL: Clock = time.perf_counter_ns
CPU: Clock = time.thread_time_ns  # of this thread alone: without waiting for the interpreter lock


@dataclass
class Samples:
    """Nanoseconds of each call, less those of reading the clock."""

    clock: Clock
    of: dict[Call, list[int]] = field(default_factory=lambda: defaultdict(list))
    collections: int = 0
    outcomes: list[tuple[str, int, int]] = field(default_factory=list)
    _overhead: int = 0

    def __post_init__(self) -> None:
        reads = sorted(-self.clock() + self.clock() for _ in range(CALIBRATIONS))
        self._overhead = reads[len(reads) // 2]

    def add(self, name: str, chunks: int, elapsed: int) -> int:
        spent = max(0, elapsed - self._overhead)
        self.of[Call(name, chunks)].append(spent)
        return spent

    @contextmanager
    def counting_collections(self) -> Iterator[None]:
        """Of the garbage collector, which runs as it likes: what it takes is part of the calls."""

        def count(phase: str, _: dict[str, int]) -> None:
            self.collections += phase == "stop"

        gc.callbacks.append(count)
        try:
            yield
        finally:
            gc.callbacks.remove(count)

    def of_each_call(self, chunks: int | None = None) -> list[int]:
        """All calls together, or those for prompts of so many chunks; of the lookups of a scan,
        their mean for each."""
        each: list[int] = []
        for call, values in self.of.items():
            if call.name.endswith(": all") or (chunks is not None and call.chunks != chunks):
                continue  # what adds up others
            if call.name.startswith("lookup"):
                made = 1 if "new" in call.name else call.chunks
                each += [value // made for value in values for _ in range(made)]
            else:
                each += values
        return each

    @property
    def digest(self) -> str:
        """Of what was looked up, found and stored: the same for both sides."""
        return hashlib.sha256(repr(self.outcomes).encode()).hexdigest()[:12]


def percentile(values: Sequence[int], percent: float) -> float:
    """The value below which `percent` of them lie; the largest of few."""
    ordered = sorted(values)
    return float(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))])


def prompt(name: str, chunks: int) -> list[RowKey]:
    """Keys of a prompt of its own, as long as vLLM's: a sha256 and a group index."""
    seed = hashlib.sha256(name.encode()).digest()
    return [
        RowKey(hashlib.sha256(seed + index.to_bytes(4, "big")).digest() + bytes(4))
        for index in range(chunks)
    ]


class Scheduler:
    """Drives one side, one request at a time beside others that run.

    A step is what vLLM's is: lookups and loads of a waiting request, `on_schedule_end`, stores of
    what was computed; then the model's turn, in which nothing here is timed; then completions,
    statistics, events.
    """

    def __init__(self, side: Side, samples: Samples) -> None:
        self.side = side
        self.samples = samples
        self._manager = side.manager
        self._running: list[Any] = []
        self._made = 0

    def use(self, samples: Samples) -> None:
        """From here on the calls' times go there."""
        self.samples = samples

    # -- requests -------------------------------------------------------------------------------

    def start_running(self) -> None:
        """Requests that have stored a few chunks and stay."""
        for number in range(RUNNING_REQUESTS):
            context = self._arrive(1)
            self._store(prompt(f"running {number}", _RUNNING_CHUNKS), context, _RUNNING_CHUNKS)
            self._running.append(context)
        self.settle(1)

    def stop_running(self) -> None:
        for context in self._running:
            self._manager.on_request_finished(context)
        self._running.clear()

    def new(self, keys: Sequence[RowKey], *, touch: bool = True) -> None:
        """A prompt that nobody has: looked up, computed, stored in one call, cascaded."""
        chunks = len(keys)
        context = self._arrive(chunks)
        spent, hits = 0, None
        for _ in range(SCANS_MAX):
            elapsed, hits = self._scan(keys, context)
            spent += elapsed
            self._end_step(chunks, [context.req_id])
            if hits is not None:
                break
            time.sleep(STEP_S)
        self.samples.add("lookup, new prompt", chunks, spent)
        if hits:
            raise WrongResult(f"{self.side.name}: found {hits} chunks of a new prompt")
        stored = self._store(keys, context, chunks)
        if touch:
            self._timed("touch", chunks, self._manager.touch, keys, context)
        self._finish(context, chunks)
        self.settle(chunks)
        self.samples.outcomes.append(("new", chunks, stored))

    def again(self, keys: Sequence[RowKey], where: str) -> None:
        """A prompt that is there: `where` is "region" or "disk"."""
        chunks = len(keys)
        context = self._arrive(chunks)
        spent: list[int] = []
        hits = None
        for _ in range(SCANS_MAX):
            elapsed, hits = self._scan(keys, context)
            spent.append(elapsed)
            if hits is not None:
                break
            self._end_step(chunks, [])
            time.sleep(STEP_S)
        if hits != chunks:
            raise WrongResult(f"{self.side.name}: found {hits} of {chunks} chunks in the {where}")
        add = self.samples.add
        if where == "region":
            add("lookup, in the region", chunks, spent[-1])
        else:
            add("lookup, on disk: first", chunks, spent[0])
            for elapsed in spent[1:-1]:
                add("lookup, on disk: waiting", chunks, elapsed)
            add("lookup, on disk: found", chunks, spent[-1])
            add("lookup, on disk: all", chunks, sum(spent))
        self._load(keys, context, chunks)
        self._finish(context, chunks)
        self.settle(chunks)
        self.samples.outcomes.append((where, chunks, hits))

    def cancelled(self, keys: Sequence[RowKey], scans: int) -> None:
        """A prompt on disk that is looked up in so many steps and then given up."""
        chunks = len(keys)
        context = self._arrive(chunks)
        for scan in range(scans):
            elapsed, hits = self._scan(keys, context)
            name = "first" if scan == 0 else "waiting"
            self.samples.add(f"lookup, on disk: {name}", chunks, elapsed)
            if hits == chunks:
                raise WrongResult(f"{self.side.name}: found chunks of a disk that stands still")
            self._end_step(chunks, [])
        self._finish(context, chunks)

    def unfinished(self, keys: Sequence[RowKey]) -> None:
        """A new prompt whose chunks the disk does not come to."""
        chunks = len(keys)
        context = self._arrive(chunks)
        elapsed, hits = self._scan(keys, context)
        self.samples.add("lookup, new prompt", chunks, elapsed)
        if hits != 0:
            raise WrongResult(f"{self.side.name}: found {hits} chunks of a new prompt")
        self._end_step(chunks, [context.req_id])
        self._store(keys, context, chunks)
        self._finish(context, chunks)

    def begin(self, chunks: int) -> Any:
        """A request arrives; its context, for `look_up` and `end`."""
        return self._arrive(chunks)

    def look_up(self, keys: Sequence[RowKey], context: Any) -> None:
        self._scan(keys, context)
        self._end_step(len(keys), [])

    def end(self, context: Any, chunks: int) -> None:
        self._finish(context, chunks)

    def settle(self, chunks: int) -> None:
        """Steps until the disk has done what it was asked."""
        for _ in range(SCANS_MAX):
            self._end_step(chunks, [])
            if not self.side.jobs():
                return
            time.sleep(STEP_S)
        raise WrongResult(f"{self.side.name}: jobs that do not end")

    # -- calls ----------------------------------------------------------------------------------

    def _timed(self, name: str, chunks: int, call: Callable[..., Any], *arguments: Any) -> Any:
        clock = self.samples.clock
        started = clock()
        result = call(*arguments)
        self.samples.add(name, chunks, clock() - started)
        return result

    def _arrive(self, chunks: int) -> Any:
        self._made += 1
        context = self.side.context(f"request-{self._made}")
        self._timed("on_new_request", chunks, self._manager.on_new_request, context)
        return context

    def _scan(self, keys: Sequence[RowKey], context: Any) -> tuple[int, int | None]:
        """One prefix lookup as vLLM makes it, (ns, hits); None: a lookup was deferred."""
        lookup, answer, clock = self._manager.lookup, self.side.answer, self.samples.clock
        hit, pending, retry = answer
        hits, deferred = 0, False
        started = clock()
        for key in keys:
            result = lookup(key, context)
            if result is hit:
                hits += 1
            elif result is pending or result is retry:
                deferred = True
            else:
                break
        elapsed = clock() - started
        return elapsed, None if deferred else hits

    def _store(self, keys: Sequence[RowKey], context: Any, chunks: int) -> int:
        """Store as one job; how many chunks were taken."""
        plan = self._timed("prepare_store", chunks, self._manager.prepare_store, keys, context)
        if plan is None or not plan.keys_to_store:
            return 0
        stored = set(plan.keys_to_store)  # as vLLM keeps them
        self._timed("complete_store", chunks, self._manager.complete_store, stored, context)
        return len(stored)

    def _load(self, keys: Sequence[RowKey], context: Any, chunks: int) -> None:
        self._timed("prepare_load", chunks, self._manager.prepare_load, keys, context)
        self._end_step(chunks, [context.req_id])
        self._timed("complete_load", chunks, self._manager.complete_load, set(keys), context)

    def _finish(self, context: Any, chunks: int) -> None:
        self._timed("on_request_finished", chunks, self._manager.on_request_finished, context)

    def _end_step(self, chunks: int, new_request_ids: Sequence[str]) -> None:
        """`on_schedule_end` and what every step asks; named by what became of jobs in it."""
        manager, clock = self._manager, self.samples.clock
        context = self.side.step_context(new_request_ids)
        before = self.side.jobs()
        started = clock()
        manager.on_schedule_end(context)
        ended = clock() - started
        after = self.side.jobs()
        what = "quiet" if after == before else "takes results" if after < before else "sends reads"
        chunks = chunks if after != before else 0
        self.samples.add(f"on_schedule_end, {what}", chunks, ended)
        self._timed(f"get_stats, {'quiet' if after == before else 'changes'}", 0, manager.get_stats)
        self._timed("take_events", 0, lambda: list(manager.take_events()))
        self._timed("has_pending_work", 0, manager.has_pending_work)
