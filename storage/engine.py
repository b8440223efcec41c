"""I/O threads behind two queues.  Knows tasks, not rows: runs reads before writes, reports once.

A write never delays a read by more than the tasks already running.  A task that waited past its
deadline is not started: its `expire` runs instead, in the same thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

log = logging.getLogger("kvtier.storage")


class Queue(IntEnum):
    """Served in this order."""

    READ = 0
    WRITE = 1


@dataclass(frozen=True, slots=True)
class Task:
    """`run` does the I/O and reports its own errors; either it or `expire` is called, once."""

    run: Callable[[], None]
    expire: Callable[[], None]
    deadline: float  # `time.monotonic()`


class IoEngine:
    """A fixed number of threads.  `submit` never waits and may be called from any thread."""

    def __init__(self, thread_count: int, name: str = "kvtier-io") -> None:
        assert thread_count >= 1
        self._queues: tuple[deque[Task], deque[Task]] = (deque(), deque())
        self._condition = threading.Condition()
        self._running_writes = 0
        self._closing = False
        # Writes may occupy all threads but one, so that a read finds a thread at once.
        self._max_writes = max(1, thread_count - 1)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(thread_count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, queue: Queue, task: Task) -> None:
        """Queue `task`; once closing, `expire` it here and now."""
        with self._condition:
            if not self._closing:
                self._queues[queue].append(task)
                self._condition.notify()
                return
        task.expire()

    def queued(self, queue: Queue) -> int:
        return len(self._queues[queue])

    def close(self, timeout_s: float) -> bool:
        """Run what is queued, then end the threads.  False if some were still busy at the end.

        After False a thread may still be in a system call on its task's buffers.
        """
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _take(self) -> tuple[Queue, Task] | None:
        """The next task, waiting for one; None when closing and nothing is left."""
        with self._condition:
            while True:
                if self._queues[Queue.READ]:
                    return Queue.READ, self._queues[Queue.READ].popleft()
                if self._queues[Queue.WRITE] and self._running_writes < self._max_writes:
                    self._running_writes += 1
                    return Queue.WRITE, self._queues[Queue.WRITE].popleft()
                if self._closing and not self._queues[Queue.WRITE]:
                    return None
                self._condition.wait()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            queue, task = taken
            try:
                (task.run if time.monotonic() < task.deadline else task.expire)()
            except BaseException:  # a bug of ours; and a lost thread would be jobs without an end
                log.exception("an I/O task raised")
            finally:
                if queue is Queue.WRITE:
                    with self._condition:
                        self._running_writes -= 1
                        self._condition.notify_all()
