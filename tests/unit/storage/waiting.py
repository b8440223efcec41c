"""How tests wait for threads, and deadlines of I/O that pass when a test says so: on a busy machine
none passes by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import storage.engine
import storage.rowstore

HANG_S = 60.0  # of what must happen at all
LONG_S = 3600.0  # beyond any deadline


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Deadlines:
    """`pass_all` lets those pass that are set by then; later ones begin from there."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._passed_s

    def pass_all(self) -> None:
        self._passed_s += LONG_S

    def pass_once(self, reached: threading.Event) -> threading.Thread:
        """In a thread, for who waits for a call that hangs: when it has been reached."""

        def wait() -> None:
            if reached.wait(LONG_S):
                self.pass_all()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread


@contextmanager
def played_deadlines() -> Iterator[Deadlines]:
    """Of the stores and engines that work meanwhile."""
    deadlines = Deadlines()
    played = SimpleNamespace(monotonic=deadlines.monotonic, sleep=time.sleep)
    with (
        mock.patch.object(storage.engine, "time", played),
        mock.patch.object(storage.rowstore, "time", played),
    ):
        yield deadlines
