"""Reads by way of the store's own memory, over a source whose every result the test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from storage.jobs import JobResult
from storage.service import staging
from storage.service.staging import StagedReads
from storage.types import RowKey, RowOutcome

ROW = 4096
OK, MISSING, FAILED, HUNG = (
    RowOutcome.OK,
    RowOutcome.MISSING,
    RowOutcome.FAILED,
    RowOutcome.HUNG,
)


@dataclass
class Asked:
    keys: Sequence[RowKey]
    buffers: Sequence[memoryview]
    done: Callable[[JobResult], None]
    release: Callable[[list[int]], None]

    def end(self, *outcomes: RowOutcome) -> None:
        """The device fills every buffer, whatever becomes of it, with its key's byte."""
        self.fill()
        self.done(JobResult(list(outcomes), 0, 0.0))

    def fill(self) -> None:
        for key, buffer in zip(self.keys, self.buffers, strict=True):
            buffer[:] = bytes([key[0]]) * ROW


class Source:
    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.ends_at_once = False

    def submit_read(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None],
    ) -> None:
        self.asked.append(Asked(keys, buffers, on_done, on_release))
        if self.ends_at_once:
            self.asked[-1].end(*[FAILED] * len(keys))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Reads:
    """Two slabs of two rows each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(staging, "_SLAB_BYTES", 2 * ROW)
        self.source, self.clock = Source(), Clock()
        self.staged = StagedReads(self.source, ROW, 2, 10.0, self.clock)
        self.region = np.zeros((8, ROW), np.uint8)
        self.reported: list[list[RowOutcome]] = []

    def submit(self, *numbers: int) -> None:
        """Row n goes to slot n."""
        keys = [RowKey(bytes([number])) for number in numbers]
        rows = [self.region[number].data for number in numbers]
        self.staged.submit(keys, rows, lambda result: self.reported.append(result.outcomes))

    @property
    def filled(self) -> list[int]:
        """Slots that hold their row; every other one is as it was."""
        found = []
        for number, row in enumerate(self.region):
            if row.any():
                assert (row == number).all()
                found.append(number)
        return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_what_was_read_and_no_more_comes_to_the_region(reads: Reads) -> None:
    reads.submit(1, 2, 3)
    first, second = reads.source.asked
    second.end(OK)
    assert reads.reported == []
    first.end(MISSING, OK)
    assert reads.reported == [[MISSING, OK, OK]]
    assert reads.filled == [2, 3]


def test_pieces_wait_for_memory(reads: Reads) -> None:
    reads.submit(1, 2, 3, 4, 5)
    assert [asked.keys for asked in reads.source.asked] == [[b"\1", b"\2"], [b"\3", b"\4"]]
    reads.source.asked[1].end(OK, OK)
    assert reads.source.asked[2].keys == [b"\5"]
    reads.source.asked[2].end(OK)
    reads.source.asked[0].end(OK, OK)
    assert reads.reported == [[OK] * 5]
    assert reads.filled == [1, 2, 3, 4, 5]


def test_a_row_that_hangs_has_failed_and_its_slot_is_free(reads: Reads) -> None:
    reads.submit(1, 2)
    caught = reads.source.asked[0]
    caught.done(JobResult([HUNG, HUNG], 0, 0.0))
    assert reads.reported == [[FAILED, FAILED]]
    reads.submit(3, 4)
    reads.source.asked[1].end(OK, OK)
    caught.fill()  # in the end the device delivers
    assert reads.filled == [3, 4]
    caught.release([0])
    caught.release([1])
    reads.submit(5, 6)
    reads.submit(7)
    assert len(reads.source.asked) == 4, "the memory is there again"


def test_memory_is_not_used_again_before_the_device_lets_go(reads: Reads) -> None:
    reads.submit(1, 2)
    caught = reads.source.asked[0]
    caught.done(JobResult([OK, HUNG], 0, 0.0))
    reads.submit(3, 4, 5, 6)
    taken = reads.source.asked[1]
    assert len(reads.source.asked) == 2
    taken.end(OK, OK)
    assert len(reads.source.asked) == 3, "through the slab that is left"
    caught.fill()
    reads.source.asked[2].end(OK, OK)
    assert reads.filled == [3, 4, 5, 6]


def test_a_release_may_come_before_the_result(reads: Reads) -> None:
    """As from one drive of several."""
    reads.submit(1, 2)
    caught = reads.source.asked[0]
    caught.release([1])
    caught.done(JobResult([OK, HUNG], 0, 0.0))
    reads.submit(3)
    reads.submit(4)
    assert len(reads.source.asked) == 3


def test_a_disk_that_has_caught_all_memory_fails_what_waits(reads: Reads) -> None:
    reads.submit(1, 2, 3, 4, 5)
    for asked in list(reads.source.asked):
        asked.done(JobResult([HUNG, HUNG], 0, 0.0))
    assert reads.reported == [[FAILED] * 5]
    reads.submit(6)
    assert reads.reported[1:] == [[FAILED]]
    reads.source.asked[0].release([0, 1])
    reads.submit(7)
    reads.source.asked[2].end(OK)
    assert reads.filled == [7]


def test_what_waited_too_long_fails(reads: Reads) -> None:
    reads.submit(1, 2, 3, 4)
    reads.submit(5)
    reads.clock.now += 11.0
    reads.source.asked[0].end(OK, OK)
    assert reads.reported == [[FAILED]]
    assert len(reads.source.asked) == 2


def test_a_source_that_answers_at_once_is_no_recursion(reads: Reads) -> None:
    reads.source.ends_at_once = True
    reads.submit(*[1] * 5000)
    assert reads.reported == [[FAILED] * 5000]


def test_a_job_without_keys_ends(reads: Reads) -> None:
    reads.submit()
    assert reads.reported == [[]]
