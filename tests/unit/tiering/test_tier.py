"""The disk as a tier, over a store whose every result the test decides."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from storage.service.client import FinishedJob
from storage.types import RowKey, RowOutcome
from tiering.tier import DiskTier, EndedJob

OK, STORED, MISSING, CORRUPT, DECLINED, FAILED, HUNG = RowOutcome
A, B, C = (RowKey(name) for name in (b"a", b"b", b"c"))


class PlayedStore:
    """Job ids are counted from 100, so that they are not the engine's."""

    def __init__(self, *present: RowKey) -> None:
        self.present = set(present)
        self.submitted: list[tuple[str, list[RowKey], list[int]]] = []
        self.touched: list[list[RowKey]] = []
        self.finished: list[FinishedJob] = []
        self.released: list[tuple[int, int]] = []
        self.ended: set[int] = set()
        self.aborts = 0
        self.can_die = True
        self.is_up = True
        self.is_closed = False
        self.renewals = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self.present

    def _submit(self, kind: str, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        self.submitted.append((kind, list(keys), list(slots)))
        return 99 + len(self.submitted)

    def read(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        return self._submit("read", keys, slots)

    def write(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int:
        return self._submit("write", keys, slots)

    def touch(self, keys: Sequence[RowKey]) -> None:
        self.touched.append(list(keys))

    def clear(self) -> int:
        raise AssertionError("a tier of an engine's own clears nothing")

    def poll(self) -> list[FinishedJob]:
        finished, self.finished = self.finished, []
        return finished

    def take_released(self) -> list[tuple[int, int]]:
        released, self.released = self.released, []
        return released

    def abort(self) -> None:
        self.aborts += 1
        if self.can_die:
            for number, (_, keys, _) in enumerate(self.submitted, 100):
                if number not in self.ended:
                    self.end(number, *[FAILED] * len(keys))
                else:
                    self.released += [(number, position) for position in range(len(keys))]

    def renew(self) -> None:
        self.present = set()
        self.renewals += 1

    def close(self) -> None:
        self.is_closed = True

    def end(self, job_id: int, *outcomes: RowOutcome, moved: int = 0) -> None:
        self.ended.add(job_id)
        self.finished.append(FinishedJob(job_id, list(outcomes), moved, 0.25))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> PlayedStore:
    return PlayedStore(A, B, C)


@pytest.fixture
def tier(store: PlayedStore, clock: Clock) -> DiskTier:
    return DiskTier(store, clock)


def test_jobs_are_reported_once_by_the_engines_id(tier: DiskTier, store: PlayedStore) -> None:
    tier.save(7, [A, B], [3, 4])
    tier.load(8, [C], [5])
    assert store.submitted == [("write", [A, B], [3, 4]), ("read", [C], [5])]
    assert tier.pending_jobs == 2
    assert tier.poll() == []
    store.end(101, OK, moved=4096)
    assert tier.poll() == [EndedJob(8, [C], True, 4096, 0.25)]
    store.end(100, OK, STORED, moved=4096)
    assert tier.poll() == [EndedJob(7, [A, B], True, 4096, 0.25)]
    assert tier.poll() == []
    assert tier.pending_jobs == 0


def test_a_load_that_fails_in_part_names_what_it_loaded(
    tier: DiskTier, store: PlayedStore, clock: Clock
) -> None:
    tier.load(1, [A, B, C], [0, 1, 2])
    store.end(100, OK, FAILED, OK)
    assert tier.poll() == [EndedJob(1, [A, C], False, 0, 0.25)]
    assert A in tier
    assert B not in tier, "the engine would try it again at once, for ever"
    clock.now += 31.0
    assert B in tier


def test_a_key_that_was_stored_again_is_found_again(tier: DiskTier, store: PlayedStore) -> None:
    tier.load(1, [A], [0])
    store.end(100, CORRUPT)
    tier.poll()
    assert A not in tier
    tier.save(2, [A], [0])
    store.end(101, OK)
    tier.poll()
    assert A in tier


@pytest.mark.parametrize("outcome", [DECLINED, FAILED])
def test_a_store_of_which_a_row_is_not_on_disk_is_no_success(
    tier: DiskTier, store: PlayedStore, outcome: RowOutcome
) -> None:
    tier.save(1, [A, B], [0, 1])
    store.end(100, OK, outcome)
    assert tier.poll() == [EndedJob(1, [A], False, 0, 0.25)]


@pytest.mark.parametrize("is_load", [True, False])
def test_a_job_with_rows_that_hang_ends_when_the_store_lets_go_of_all_slots(
    tier: DiskTier, store: PlayedStore, is_load: bool
) -> None:
    (tier.load if is_load else tier.save)(1, [A, B, C], [0, 1, 2])
    store.end(100, HUNG, OK, HUNG)
    assert tier.poll() == [], "its slots would be given to other chunks"
    assert (A in tier) is not is_load
    store.released = [(100, 0)]
    assert tier.poll() == []
    assert tier.pending_jobs == 1
    store.released = [(100, 2)]
    assert tier.poll() == [EndedJob(1, [B], False, 0, 0.25)]
    assert tier.pending_jobs == 0


def test_a_process_that_stands_still_on_slots_is_killed(
    tier: DiskTier, store: PlayedStore, clock: Clock
) -> None:
    store.is_up = False
    clock.now += 100.0
    tier.poll()
    assert store.aborts == 0, "nothing of ours is in its hands"
    tier.load(1, [A], [0])
    store.end(100, HUNG)
    assert tier.poll() == []
    clock.now += 4.9
    tier.poll()
    assert store.aborts == 0, "it may come round"
    clock.now += 0.2
    tier.poll()
    assert store.aborts == 1
    assert tier.poll() == [EndedJob(1, [], False, 0, 0.25)]
    clock.now += 100.0
    tier.poll()
    assert store.aborts == 1


def test_a_process_that_came_round_is_let_live(
    tier: DiskTier, store: PlayedStore, clock: Clock
) -> None:
    tier.load(1, [A], [0])
    store.is_up = False
    tier.poll()
    clock.now += 4.0
    store.is_up = True
    tier.poll()
    clock.now += 100.0
    tier.poll()
    store.is_up = False
    tier.poll()
    assert store.aborts == 0


def test_what_a_request_used_ages_as_one_chain(tier: DiskTier, store: PlayedStore) -> None:
    tier.begin("r")
    tier.use("r", [A])
    tier.use("r", [B, A])
    tier.use("stranger", [C])
    store.present.discard(B)
    tier.use("r", [C])
    assert store.touched == []
    tier.finish("r")
    assert store.touched == [[A, C]]
    tier.finish("r")
    tier.finish("stranger")
    assert store.touched == [[A, C]]


def test_drain_returns_every_job_to_the_next_poll(tier: DiskTier, store: PlayedStore) -> None:
    tier.load(1, [A], [0])
    tier.save(2, [B], [1])
    store.end(100, OK)
    store.end(101, OK)
    assert tier.drain(5.0)
    assert [job.job_id for job in tier.poll()] == [1, 2]


def test_drain_kills_a_store_that_does_not_end_its_jobs(tier: DiskTier, store: PlayedStore) -> None:
    tier.load(1, [A], [0])
    assert tier.drain(0.02)
    assert store.aborts == 1
    assert [job.job_id for job in tier.poll()] == [1]


def test_drain_says_when_a_disk_does_not_let_go(tier: DiskTier, store: PlayedStore) -> None:
    store.can_die = False
    tier.load(1, [A], [0])
    store.end(100, HUNG)
    assert not tier.drain(0.02)
    assert tier.poll() == []


def test_a_retired_tier_finds_and_takes_nothing_until_it_starts_again(
    tier: DiskTier, store: PlayedStore
) -> None:
    tier.load(9, [B], [2])
    store.end(100, FAILED)
    tier.poll()
    tier.retire()
    assert A not in tier
    tier.load(1, [A], [0])
    tier.save(2, [B], [1])
    assert len(store.submitted) == 1
    assert [(job.job_id, job.is_complete) for job in tier.poll()] == [(1, False), (2, False)]
    tier.start_again()
    assert store.renewals == 1
    assert A not in tier
    store.present = {B}
    assert B in tier, "the read that failed was of another row"
    tier.load(3, [B], [0])
    assert len(store.submitted) == 2
    tier.close()
    assert store.is_closed
