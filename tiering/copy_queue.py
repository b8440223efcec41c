"""CopyQueue: copies that run in a thread of their own, while the engine's step goes on.

First in, first out, one at a time: two copies of one worker never touch the same memory at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import psutil

from tiering.worker import Copied

log = logging.getLogger("kvtier.worker")


def cores_of_process() -> set[int]:
    """Those that any thread of this process may use.  vLLM binds each of a rank's threads to one
    core, the main thread to the first: a thread that it starts would copy where the model needs
    every turn, also while another core of the rank is idle."""
    cores = set[int]()
    for thread in psutil.Process().threads():
        with contextlib.suppress(ProcessLookupError):  # it ended
            cores |= os.sched_getaffinity(thread.id)
    return cores


class CopyFailed(Exception):
    """A copy ended half-way: what its blocks hold now is unknown, and nobody may use them."""


class FinishedCopy(NamedTuple):
    job_id: int
    copied: Copied


class CopyQueue:
    """One thread and the copies that it has yet to make.

    `submit`, `poll`, `wait` and `close` are for one caller, the worker's thread.  Once a copy has
    failed no other is begun, and all but `close` raise `CopyFailed`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Callable[[], Copied]]] = deque()
        self._pending: set[int] = set()  # waiting, or being copied
        self._finished: list[FinishedCopy] = []
        self._failure: CopyFailed | None = None
        self._is_closing = False
        # A daemon: an engine that dies without `close` must not wait for it.
        self._thread = threading.Thread(target=self._run, name="kvtier-copies", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, copy: Callable[[], Copied], *, at_once: bool = False) -> None:
        """Have `copy` made after those before it, or, `at_once`, before all that wait."""
        with self._changed:
            self._raise_failure()
            assert not self._is_closing, "closed"
            assert job_id not in self._pending, job_id
            self._pending.add(job_id)
            (self._waiting.appendleft if at_once else self._waiting.append)((job_id, copy))
            self._changed.notify_all()

    def poll(self) -> list[FinishedCopy]:
        """Copies that ended since the last call; each is told once."""
        with self._changed:
            self._raise_failure()
            finished, self._finished = self._finished, []
            return finished

    def wait(self, job_ids: Collection[int], timeout_s: float | None = None) -> None:
        """Return once none of `job_ids` is under way, or after `timeout_s`.  Ids that are not, or
        no longer, known are done."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or self._pending.isdisjoint(job_ids), timeout_s
            )
            self._raise_failure()

    def close(self) -> None:
        """Make the copies that wait, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        with contextlib.suppress(OSError, psutil.Error):  # a sandbox may forbid it
            os.sched_setaffinity(0, cores_of_process())
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                job_id, copy = self._waiting.popleft()
            try:
                copied = copy()
            except BaseException as exc:
                log.exception("copying for job %d failed", job_id)
                failure = CopyFailed(f"copying for job {job_id} failed: {exc!r}")
                failure.__cause__ = exc
                with self._changed:
                    self._failure = failure
                    self._changed.notify_all()
                return
            del copy  # with what it holds of the region, before anybody is told
            with self._changed:
                self._pending.discard(job_id)
                self._finished.append(FinishedCopy(job_id, copied))
                self._changed.notify_all()
