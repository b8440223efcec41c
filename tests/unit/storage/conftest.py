"""Fixtures of the tests of storage."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def open_fds() -> Iterator[Callable[[], int]]:
    """How many descriptors this process has.  Files that earlier tests left to the collector are
    not closed between two counts."""
    gc.collect()
    gc.disable()
    yield lambda: len(os.listdir("/proc/self/fd"))
    gc.enable()
