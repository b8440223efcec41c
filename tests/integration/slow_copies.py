"""For a server: kvtier's connector with copies that take a while, so that steps go by meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import tiering.vllm.worker
from tiering.copy_queue import CopyQueue
from tiering.vllm.connector import KvtierConnector as _KvtierConnector
from tiering.worker import Copied

DELAY_S = 0.1  # several steps of a tiny model


class SlowQueue(CopyQueue):
    def submit(self, job_id: int, copy: Callable[[], Copied], *, at_once: bool = False) -> None:
        def slow() -> Copied:
            time.sleep(DELAY_S)
            return copy()

        super().submit(job_id, slow, at_once=at_once)


tiering.vllm.worker.CopyQueue = SlowQueue  # type: ignore[misc]


class SlowCopiesConnector(_KvtierConnector):  # type: ignore[misc]
    """In the module that its name is looked up in."""
