"""Copies in a thread of their own: their order, who waits for what, failures and the end."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tiering.copy_queue import CopyFailed, CopyQueue
from tiering.worker import Copied

HANG_S = 60.0


@pytest.fixture
def queue() -> Iterator[CopyQueue]:
    made = CopyQueue()
    yield made
    made.close()


class Gate:
    """A copy that ends when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> Copied:
        self.begun.set()
        assert self.open.wait(HANG_S)
        return Copied(7, 0.5)


def done(order: list[int], number: int) -> Callable[[], Copied]:
    def copy() -> Copied:
        order.append(number)
        return Copied(number, 0.0)

    return copy


def test_submitting_waits_for_nothing_and_polling_tells_each_once(queue: CopyQueue) -> None:
    gate = Gate()
    queue.submit(1, gate)
    assert gate.begun.wait(HANG_S)
    queue.submit(2, done([], 2))
    assert queue.poll() == []
    gate.open.set()
    queue.wait({1, 2})
    assert queue.poll() == [(1, Copied(7, 0.5)), (2, Copied(2, 0.0))]
    assert queue.poll() == []


def test_copies_are_made_in_order_but_those_at_once_first(queue: CopyQueue) -> None:
    gate, order = Gate(), list[int]()
    queue.submit(0, gate)
    assert gate.begun.wait(HANG_S)
    for number in (1, 2):
        queue.submit(number, done(order, number))
    queue.submit(3, done(order, 3), at_once=True)
    gate.open.set()
    queue.wait({1, 2, 3})
    assert order == [3, 1, 2]


def test_waiting_is_for_the_named_copies_alone(queue: CopyQueue) -> None:
    gate = Gate()
    queue.submit(1, done([], 1))
    queue.submit(2, gate)
    queue.wait({1})
    queue.wait({99})  # of no job: nothing to wait for
    queue.wait({2}, 0.01)
    assert queue.poll() == [(1, Copied(1, 0.0))]
    gate.open.set()
    queue.wait({2})
    assert queue.poll() == [(2, Copied(7, 0.5))]


def test_a_copy_that_fails_is_never_silent_and_the_last() -> None:
    queue, order = CopyQueue(), list[int]()
    gate = Gate()

    def fail() -> Copied:
        gate()
        raise MemoryError("no room")

    queue.submit(1, fail)
    queue.submit(2, done(order, 2))
    gate.open.set()
    for call in (lambda: queue.wait({2}), queue.poll, lambda: queue.submit(3, gate)):
        with pytest.raises(CopyFailed, match=r"copying for job 1 failed: MemoryError"):
            call()
    queue.close()
    assert order == []


def test_the_end_is_after_all_that_was_submitted() -> None:
    queue, order = CopyQueue(), list[int]()
    gate = Gate()
    queue.submit(0, gate)
    for number in range(1, 20):
        queue.submit(number, done(order, number))
    gate.open.set()
    queue.close()
    assert order == list(range(1, 20))


def test_an_engine_goes_on_while_bytes_move(queue: CopyQueue) -> None:
    """A strided copy gives up the interpreter lock: where no thread is ever made to take turns,
    this one gets its turn only so."""
    target = np.zeros((64, 4096), np.uint8)
    source = np.ones((64, 4160), np.uint8)[:, :4096]
    has_begun, had_a_turn = list[bool](), list[bool]()

    def copy() -> Copied:
        has_begun.append(True)
        end = time.monotonic() + HANG_S
        while not had_a_turn and time.monotonic() < end:
            np.copyto(target, source)
        return Copied(len(had_a_turn), 0.0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(10 * HANG_S)
    try:
        queue.submit(1, copy)
        while not has_begun:
            time.sleep(0.0005)
        had_a_turn.append(True)
        queue.wait({1})
    finally:
        sys.setswitchinterval(interval)
    assert queue.poll() == [(1, Copied(1, 0.0))]


def test_copies_may_use_every_core_that_the_process_has() -> None:
    """Also those that the thread which makes the queue may not: vLLM binds it to one."""
    cores = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def copy() -> Copied:
        found.append(os.sched_getaffinity(0))
        return Copied(0, 0.0)

    def bound() -> None:
        os.sched_setaffinity(0, {min(cores)})
        made = CopyQueue()
        made.submit(1, copy)
        made.close()

    thread = threading.Thread(target=bound)
    thread.start()
    thread.join()
    assert found == [cores]


def test_copies_are_made_where_cores_may_not_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    queue = CopyQueue()
    queue.submit(1, done([], 1))
    queue.wait({1})
    assert queue.poll() == [(1, Copied(1, 0.0))]
    queue.close()
