from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from storage.engine import IoEngine, Queue, Task
from tests.unit.storage.waiting import played_deadlines


class Gate:
    """A task that waits until it is opened, and says that it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.open.wait(60)


def task(run: Callable[[], None], expire: Callable[[], None] = lambda: None) -> Task:
    return Task(run, expire, time.monotonic() + 60)


def test_reads_go_before_writes_that_wait() -> None:
    engine = IoEngine(1)
    gate, order, done = Gate(), [], threading.Event()
    engine.submit(Queue.WRITE, task(gate))
    assert gate.begun.wait(60)
    for i in range(3):
        engine.submit(Queue.WRITE, task(lambda i=i: order.append(f"w{i}")))  # type: ignore[misc]
    engine.submit(Queue.READ, task(lambda: order.append("r")))
    engine.submit(Queue.WRITE, task(done.set))
    assert engine.queued(Queue.WRITE) == 4
    gate.open.set()
    assert done.wait(60)
    assert order == ["r", "w0", "w1", "w2"]
    assert engine.close(60).is_ended


def test_writes_leave_one_thread_to_reads() -> None:
    engine = IoEngine(3)
    gates = [Gate() for _ in range(5)]
    for gate in gates:
        engine.submit(Queue.WRITE, task(gate))
    assert gates[0].begun.wait(60)
    assert gates[1].begun.wait(60)
    read = threading.Event()
    engine.submit(Queue.READ, task(read.set))
    assert read.wait(60), "50 slow stores must not delay a load"
    assert not gates[2].begun.is_set()
    for gate in gates:
        gate.open.set()
    assert engine.close(60).is_ended
    assert all(gate.begun.is_set() for gate in gates), "what is queued at close is still run"


def test_a_task_past_its_deadline_expires_instead() -> None:
    engine = IoEngine(1)
    ran, expired = [], threading.Event()
    engine.submit(Queue.READ, Task(lambda: ran.append(1), expired.set, time.monotonic() - 1))
    assert expired.wait(60)
    assert not ran
    assert engine.close(60).is_ended


def test_no_more_than_so_many_write_at_once() -> None:
    engine = IoEngine(4, write_threads=2)
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        engine.submit(Queue.WRITE, task(gate))
    reads = [Gate() for _ in range(2)]
    for read in reads:
        engine.submit(Queue.READ, task(read))
    assert all(gate.begun.wait(60) for gate in (*gates[:2], *reads))
    assert not gates[2].begun.is_set()
    for gate in (*reads, *gates):
        gate.open.set()
    assert engine.close(60).is_ended


def test_background_work_waits_for_reads_and_writes() -> None:
    engine = IoEngine(2)
    gates, order = [Gate(), Gate()], []
    engine.submit(Queue.READ, task(gates[0]))
    engine.submit(Queue.WRITE, task(gates[1]))
    assert all(gate.begun.wait(60) for gate in gates)
    engine.submit(Queue.BACKGROUND, task(lambda: order.append("b")))
    engine.submit(Queue.WRITE, task(lambda: order.append("w")))
    gates[0].open.set()  # this thread may take neither: the one write thread is busy
    is_read = threading.Event()
    engine.submit(Queue.READ, task(is_read.set))
    assert is_read.wait(60)
    assert order == []
    gates[1].open.set()
    assert engine.close(60).is_ended
    assert order == ["w", "b"]


def test_writes_beyond_the_bound_expire_at_once_and_reads_do_not() -> None:
    engine = IoEngine(2, queued_bytes_max=100)
    gate, read = Gate(), threading.Event()
    engine.submit(Queue.WRITE, task(gate))
    assert gate.begun.wait(60)
    ran, expired = [], []
    for i in range(50):
        run = lambda i=i: ran.append(i)  # noqa: E731
        expire = lambda i=i: expired.append(i)  # noqa: E731
        engine.submit(Queue.WRITE, Task(run, expire, time.monotonic() + 60, size_bytes=10))
    assert expired == list(range(10, 50))
    engine.submit(Queue.READ, task(read.set))
    assert read.wait(60)
    gate.open.set()
    assert engine.close(60).is_ended
    assert ran == list(range(10))


def test_a_task_that_hangs_is_overdue_and_the_others_go_on() -> None:
    with played_deadlines() as deadlines:
        engine = IoEngine(2)
        gate, overdue, other = Gate(), threading.Event(), threading.Event()
        engine.submit(Queue.READ, replace(task(gate), overdue=overdue.set))
        assert gate.begun.wait(60)
        assert not overdue.is_set()
        deadlines.pass_all()
        assert overdue.wait(60)
        engine.submit(Queue.READ, replace(task(other.set), deadline=math.inf))
        assert other.wait(60), "one thread is caught, the other works"
        gate.open.set()
        assert engine.close(60).is_ended


def test_a_disk_that_has_caught_every_thread_keeps_nobody_waiting() -> None:
    with played_deadlines() as deadlines:
        engine = IoEngine(2)
        gates = [Gate(), Gate()]
        overdue = [threading.Event(), threading.Event()]
        for gate, event in zip(gates, overdue, strict=True):
            engine.submit(Queue.READ, replace(task(gate), overdue=event.set))
            assert gate.begun.wait(60)
        expired = threading.Event()
        engine.submit(Queue.WRITE, replace(task(lambda: None, expired.set), deadline=math.inf))
        deadlines.pass_all()
        assert all(event.wait(60) for event in overdue)
        assert expired.wait(60), "what waited when the last one was caught"
        at_once = threading.Event()
        engine.submit(Queue.READ, replace(task(lambda: None, at_once.set), deadline=math.inf))
        assert at_once.is_set()
        gates[0].open.set()
        deadline = time.monotonic() + 10
        again = threading.Event()
        while not again.is_set() and time.monotonic() < deadline:
            engine.submit(Queue.READ, replace(task(again.set), deadline=math.inf))
            time.sleep(0.01)
        assert again.is_set(), "it is back"
        gates[1].open.set()
        assert engine.close(60).is_ended


def test_a_queued_task_expires_at_its_deadline_though_all_threads_are_busy() -> None:
    engine = IoEngine(1)
    gate, expired = Gate(), threading.Event()
    engine.submit(Queue.READ, task(gate))
    assert gate.begun.wait(60)
    engine.submit(Queue.READ, Task(lambda: None, expired.set, time.monotonic() + 0.1))
    assert expired.wait(60)
    gate.open.set()
    assert engine.close(60).is_ended


def test_close_expires_what_it_has_no_time_for() -> None:
    engine = IoEngine(1)
    gate, expired = Gate(), list[int]()
    engine.submit(Queue.READ, task(gate))
    assert gate.begun.wait(60)

    def expire(number: int) -> None:
        expired.append(number)
        if number == 2:
            gate.open.set()

    for i in range(3):
        engine.submit(Queue.WRITE, task(lambda: None, lambda i=i: expire(i)))  # type: ignore[misc]
    closed = engine.close(0.05)
    assert closed == (True, 3)
    assert expired == [0, 1, 2]


def test_a_task_after_close_expires_at_once() -> None:
    engine = IoEngine(2)
    assert engine.close(60).is_ended
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
        assert done.wait(60)
    assert engine.close(60).is_ended


def test_close_says_when_io_hangs() -> None:
    engine = IoEngine(2)
    gate = Gate()
    engine.submit(Queue.WRITE, task(gate))
    assert gate.begun.wait(60)
    assert not engine.close(0.05).is_ended
    gate.open.set()
    assert engine.close(60).is_ended


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
    assert engine.close(20).is_ended
    assert counts == [1] * 2000
