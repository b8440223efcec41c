from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from storage.engine import IoEngine, Queue, Task


class Gate:
    """A task that waits until it is opened, and says that it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(10)


def task(run: Callable[[], None], expire: Callable[[], None] = lambda: None) -> Task:
    return Task(run, expire, time.monotonic() + 60)


def test_reads_go_before_writes_that_wait() -> None:
    engine = IoEngine(1)
    gate, order, done = Gate(), [], threading.Event()
    engine.submit(Queue.WRITE, task(gate))
    assert gate.begun.wait(10)
    for i in range(3):
        engine.submit(Queue.WRITE, task(lambda i=i: order.append(f"w{i}")))  # type: ignore[misc]
    engine.submit(Queue.READ, task(lambda: order.append("r")))
    engine.submit(Queue.WRITE, task(done.set))
    assert engine.queued(Queue.WRITE) == 4
    gate.open.set()
    assert done.wait(10)
    assert order == ["r", "w0", "w1", "w2"]
    assert engine.close(5)


def test_writes_leave_one_thread_to_reads() -> None:
    engine = IoEngine(3)
    gates = [Gate() for _ in range(5)]
    for gate in gates:
        engine.submit(Queue.WRITE, task(gate))
    assert gates[0].begun.wait(10)
    assert gates[1].begun.wait(10)
    read = threading.Event()
    engine.submit(Queue.READ, task(read.set))
    assert read.wait(10), "50 slow stores must not delay a load"
    assert not gates[2].begun.is_set()
    for gate in gates:
        gate.open.set()
    assert engine.close(5)
    assert all(gate.begun.is_set() for gate in gates), "what is queued at close is still run"


def test_a_task_past_its_deadline_expires_instead() -> None:
    engine = IoEngine(1)
    ran, expired = [], threading.Event()
    engine.submit(Queue.READ, Task(lambda: ran.append(1), expired.set, time.monotonic() - 1))
    assert expired.wait(10)
    assert not ran
    assert engine.close(5)


def test_a_task_after_close_expires_at_once() -> None:
    engine = IoEngine(2)
    assert engine.close(5)
    ran, expired = [], threading.Event()
    engine.submit(Queue.READ, task(lambda: ran.append(1), expired.set))
    assert expired.is_set()
    assert not ran


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), MemoryError()])
@pytest.mark.parametrize("queue", list(Queue))
def test_a_task_that_raises_costs_no_thread(
    queue: Queue, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    engine = IoEngine(1)
    done = threading.Event()
    with caplog.at_level(logging.CRITICAL, "kvtier.storage"):
        for _ in range(3):
            engine.submit(queue, task(fail))
        engine.submit(queue, task(done.set))
        assert done.wait(10)
    assert engine.close(5)


def test_close_says_when_io_hangs() -> None:
    engine = IoEngine(2)
    gate = Gate()
    engine.submit(Queue.WRITE, task(gate))
    assert gate.begun.wait(10)
    started = time.monotonic()
    assert not engine.close(0.05)
    assert time.monotonic() - started < 2
    gate.open.set()
    assert engine.close(5)


def test_many_tasks_from_many_threads_all_run_once() -> None:
    engine = IoEngine(4)
    lock, counts = threading.Lock(), [0] * 2000

    def count(i: int) -> None:
        with lock:
            counts[i] += 1

    def submit(first: int) -> None:
        for i in range(first, 2000, 4):
            engine.submit(Queue(i % 2), task(lambda i=i: count(i)))  # type: ignore[misc]

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.close(20)
    assert counts == [1] * 2000
