"""The scrubber: reads rows that nobody asks for, so that damage is found before it is needed.

Paced in bytes per second; its reads are background work of the I/O threads, which wait for every
read and write that is queued.  A pass takes the rows of each namespace that were not used since it
began, least recently used first: what was used since then has been verified by that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from storage.engine import IoEngine, Queue, Task
from storage.types import RowKey

log = logging.getLogger("kvtier.storage")

_BATCH_BYTES = 1 << 20  # a read that comes meanwhile waits for no more than this
_TASK_TIMEOUT_S = 60.0  # background work may wait long
_PAUSE_S = 1.0  # between passes, or where there is nothing to do


class Scrubbed(Protocol):
    """Rows that can be verified in place."""

    @property
    def row_bytes(self) -> int: ...

    def cold_keys(self, before: int) -> list[RowKey]:
        """Keys not used since the use `before`, least recently used first."""
        ...

    def verify(self, keys: Sequence[RowKey]) -> None:
        """Verify rows against their checksums; drop and count what is wrong.  Does I/O."""
        ...

    def note_pass(self) -> None:
        """All of `cold_keys` have been verified."""
        ...


class Scrubber:
    """One thread over the namespaces of a root.  `stores` says which are open; `now_use` what a
    row that is used now would be noted with."""

    def __init__(
        self,
        engine: IoEngine,
        bytes_per_s: int,
        stores: Callable[[], Sequence[Scrubbed]],
        now_use: Callable[[], int],
    ) -> None:
        assert bytes_per_s > 0
        self._engine = engine
        self._bytes_per_s = bytes_per_s
        self._stores = stores
        self._now_use = now_use
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-scrub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop after the batch under way."""
        self._stopping.set()
        self._thread.join(_PAUSE_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for rows in self._stores():
                before = self._now_use()
                keys = rows.cold_keys(before)
                count = max(1, _BATCH_BYTES // rows.row_bytes)
                for start in range(0, len(keys), count):
                    self._do(rows, keys[start : start + count])
                    if self._stopping.is_set():
                        return
                if keys:
                    rows.note_pass()
            self._stopping.wait(_PAUSE_S)

    def _do(self, rows: Scrubbed, keys: Sequence[RowKey]) -> None:
        """Verify a batch, no sooner than the ones before it have been paid for."""
        started = time.monotonic()
        done = threading.Event()

        def run() -> None:
            try:
                rows.verify(keys)
            finally:
                done.set()

        deadline = started + _TASK_TIMEOUT_S
        self._engine.submit(Queue.BACKGROUND, Task(run, done.set, deadline, overdue=done.set))
        while not done.wait(_PAUSE_S):
            if self._stopping.is_set():
                return
        due = started + len(keys) * rows.row_bytes / self._bytes_per_s
        self._stopping.wait(max(0.0, due - time.monotonic()))
