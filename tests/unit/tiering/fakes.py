"""A secondary tier whose every result the test decides, a clock, and a manager over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from storage.service.client import FinishedJob
from storage.types import RowKey, RowOutcome
from tiering.manager import LookupResult, TieringManager
from tiering.primary import PrimaryTier
from tiering.transfers import TierCounters

HIT, PENDING = LookupResult.HIT, LookupResult.HIT_PENDING
RETRY, MISS = LookupResult.RETRY, LookupResult.MISS


def keys(*numbers: int) -> list[RowKey]:
    return [RowKey(number.to_bytes(4, "big")) for number in numbers]


class FakeTier:
    """Holds keys, not bytes.  Jobs end when the test says so."""

    def __init__(self, *present: int) -> None:
        self.present = set(keys(*present))
        self.jobs: dict[int, tuple[str, list[RowKey]]] = {}
        self.touched: list[RowKey] = []
        self.closed = False
        self.can_clear = True
        self._finished: list[FinishedJob] = []
        self.released: list[tuple[int, int]] = []
        self.takes_writes = True
        self.write_rows_max = 1_000_000
        self._next = 0

    def missing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        return [key for key in keys if key not in self]

    def __contains__(self, key: bytes) -> bool:
        return key in self.present

    def _submit(self, kind: str, names: Sequence[RowKey]) -> int:
        self._next += 1
        self.jobs[self._next] = (kind, list(names))
        return self._next

    def read(self, names: Sequence[RowKey], slots: Sequence[int]) -> int:
        assert len(names) == len(slots)
        return self._submit("read", names)

    def write(self, names: Sequence[RowKey], slots: Sequence[int]) -> int:
        assert len(names) == len(slots)
        return self._submit("write", names)

    def clear(self) -> int:
        if self.can_clear:
            self.present.clear()
        job_id = self._submit("clear", [])
        self.finish(job_id, RowOutcome.OK if self.can_clear else RowOutcome.FAILED)
        return job_id

    def touch(self, names: Iterable[RowKey]) -> None:
        self.touched += [name for name in names if name in self.present]

    def poll(self) -> list[FinishedJob]:
        finished, self._finished = self._finished, []
        return finished

    def take_released(self) -> list[tuple[int, int]]:
        released, self.released = self.released, []
        return released

    def close(self) -> None:
        self.closed = True

    def finish(
        self, job_id: int, outcome: RowOutcome = RowOutcome.OK, seconds: float = 0.0
    ) -> None:
        kind, names = self.jobs.pop(job_id)
        if kind == "write" and outcome is RowOutcome.OK:
            self.present.update(names)
        if kind == "read" and outcome is RowOutcome.CORRUPT:
            self.present.difference_update(names)
        count = 1 if kind == "clear" else len(names)
        self._finished.append(FinishedJob(job_id, [outcome] * count, 0, seconds))

    def finish_all(self, outcome: RowOutcome = RowOutcome.OK) -> None:
        for job_id in list(self.jobs):
            self.finish(job_id, outcome)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(slots: int, *on_disk: int) -> tuple[TieringManager, FakeTier, Clock]:
    tier, clock = FakeTier(*on_disk), Clock()
    manager = TieringManager(
        PrimaryTier(slots), {"disk": tier}, promotion_timeout_s=10.0, now=clock
    )
    return manager, tier, clock


def lookups(manager: TieringManager, request: str, *numbers: int) -> list[LookupResult]:
    return [manager.lookup(key, request) for key in keys(*numbers)]


def store(manager: TieringManager, *numbers: int) -> None:
    plan = manager.prepare_store(keys(*numbers))
    assert plan is not None
    manager.complete_store(set(plan.keys))


def is_idle(manager: TieringManager) -> bool:
    return manager.primary.busy_count == 0 and not manager.has_pending_work()


def counters(manager: TieringManager) -> TierCounters:
    """Of the tier that `make` makes."""
    return manager.tiers["disk"].counters
