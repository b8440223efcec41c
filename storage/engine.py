"""I/O threads behind three queues.  Knows tasks, not rows: reads first, then writes, then the rest.

A write never delays a read by more than the tasks already running.  Every task has a deadline that
holds whatever the disk does: one that still waits then is not started (`expire`), of one that runs
the owner is told (`overdue`), since its system call can't be taken back.  A disk that hangs keeps
the threads that it caught and nothing else; when it has them all, what is asked for expires at
once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

log = logging.getLogger("kvtier.storage")

_WATCH_S = 0.05  # how late a deadline may be noticed
_GRACE_S = 0.5  # of `close`, for the tasks that run when its time is up


class Queue(IntEnum):
    """Served in this order."""

    READ = 0
    WRITE = 1
    BACKGROUND = 2
    """One at a time, and only while no read or write waits."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """`run` does the I/O and reports its own errors; either it or `expire` is called, once.

    `overdue` is called, from another thread, if `run` has not returned at the deadline.
    """

    run: Callable[[], None]
    expire: Callable[[], None]
    deadline: float  # `time.monotonic()`
    size_bytes: int = 0  # that it moves; what the bound on queued writes counts
    overdue: Callable[[], None] = _nothing


class Closed(NamedTuple):
    """How a close went.  Unless `is_ended` a thread may still be in a system call on its task's
    buffers.  `expired` tasks had not begun when the time was up."""

    is_ended: bool
    expired: int


class IoEngine:
    """A fixed number of threads.  `submit` never waits and may be called from any thread."""

    def __init__(
        self,
        thread_count: int,
        *,
        write_threads: int | None = None,
        queued_bytes_max: int | None = None,
        name: str = "kvtier-io",
    ) -> None:
        """At most `write_threads` write at once; None: all but one, so that a read finds a thread
        at once.  Of writes no more than `queued_bytes_max` wait, unless that is None."""
        assert thread_count >= 1
        self._queues: tuple[deque[Task], ...] = tuple(deque() for _ in Queue)
        self._condition = threading.Condition()
        self._running: dict[Task, Queue] = {}
        self._overdue: set[Task] = set()  # of the running ones
        self._queued_bytes = 0  # of writes
        self._queued_bytes_max = queued_bytes_max
        self._closing = False
        self._limits = {
            Queue.READ: thread_count,
            Queue.WRITE: write_threads or max(1, thread_count - 1),
            Queue.BACKGROUND: 1,
        }
        self._has_work = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(thread_count)
        ]
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)
        for thread in (*self._threads, self._watcher):
            thread.start()

    def submit(self, queue: Queue, task: Task) -> None:
        """Queue `task`; `expire` it here and now when closing, when too many bytes wait to be
        written, or when the disk hangs and has caught every thread that could run it."""
        with self._condition:
            if self._takes(queue, task):
                self._queues[queue].append(task)
                if queue is Queue.WRITE:
                    self._queued_bytes += task.size_bytes
                self._condition.notify()
                self._has_work.set()
                return
        task.expire()

    def _takes(self, queue: Queue, task: Task) -> bool:
        if self._closing or self._is_stuck(queue):
            return False
        is_bounded = queue is Queue.WRITE and self._queued_bytes_max is not None
        if not is_bounded or not self._queues[queue]:
            return True
        assert self._queued_bytes_max is not None
        return self._queued_bytes + task.size_bytes <= self._queued_bytes_max

    def _is_stuck(self, queue: Queue) -> bool:
        """Whether overdue tasks hold every thread that `queue` may use."""
        if len(self._overdue) == len(self._threads):
            return True
        caught = sum(self._running[task] is queue for task in self._overdue)
        return caught >= self._limits[queue]

    def queued(self, queue: Queue) -> int:
        return len(self._queues[queue])

    def close(self, timeout_s: float) -> Closed:
        """Run what is queued, for `timeout_s` at most; expire the rest and end the threads."""
        end = time.monotonic() + timeout_s
        with self._condition:
            self._closing = True
            self._condition.notify_all()
            while (self._running or any(self._queues)) and time.monotonic() < end:
                self._condition.wait(max(0.0, end - time.monotonic()))
            left = [task for queue in Queue for task in self._drain(queue)]
            self._condition.notify_all()
            self._has_work.set()
        for task in left:
            task.expire()
        for thread in self._threads:
            thread.join(max(0.0, end + _GRACE_S - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return Closed(False, len(left))
        self._watcher.join()
        return Closed(True, len(left))

    def _drain(self, queue: Queue) -> list[Task]:
        tasks = list(self._queues[queue])
        self._queues[queue].clear()
        if queue is Queue.WRITE:
            self._queued_bytes = 0
        return tasks

    # -- threads --------------------------------------------------------------------------------

    def _take(self) -> tuple[Queue, Task] | None:
        """The next task, waiting for one; None when closing and nothing is left."""
        with self._condition:
            while True:
                for queue in Queue:
                    running = sum(other is queue for other in self._running.values())
                    if self._queues[queue] and running < self._limits[queue]:
                        task = self._queues[queue].popleft()
                        if queue is Queue.WRITE:
                            self._queued_bytes -= task.size_bytes
                        self._running[task] = queue
                        return queue, task
                    if self._queues[queue] and queue is Queue.WRITE:
                        break  # background work waits for them too
                if self._closing and not any(self._queues):
                    return None
                self._condition.wait()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            _, task = taken
            try:
                (task.run if time.monotonic() < task.deadline else task.expire)()
            except BaseException:  # a bug of ours; and a lost thread would be jobs without an end
                log.exception("an I/O task raised")
            finally:
                with self._condition:
                    del self._running[task]
                    self._overdue.discard(task)
                    if self._closing:
                        self._condition.notify_all()  # `close` waits for the last one

    def _watch(self) -> None:
        """Keep the deadlines of tasks that no thread of the above can keep."""
        while self._has_work.wait():
            with self._condition:
                now = time.monotonic()
                overdue = [
                    task
                    for task in self._running
                    if task.deadline <= now and task not in self._overdue
                ]
                self._overdue.update(overdue)
                expired = []
                for queue in Queue:
                    if self._is_stuck(queue):
                        expired += self._drain(queue)
                    while self._queues[queue] and self._queues[queue][0].deadline <= now:
                        task = self._queues[queue].popleft()
                        if queue is Queue.WRITE:
                            self._queued_bytes -= task.size_bytes
                        expired.append(task)
                is_idle = not self._running and not any(self._queues)
                if is_idle:
                    if self._closing:
                        return
                    self._has_work.clear()
            for task in overdue:
                self._call(task.overdue)
            for task in expired:
                self._call(task.expire)
            if not is_idle:
                time.sleep(_WATCH_S)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException:  # a bug of ours; the others must be called all the same
            log.exception("the end of an I/O task raised")
