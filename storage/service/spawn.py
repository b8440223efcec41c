"""Starts the store process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Spawn = Callable[[socket.socket], "subprocess.Popen[bytes]"]


def spawn_store_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    """Start `python -m storage.service` at the other end of `connection`.

    It stays in the engine's session: Linux shares the cores among sessions first (autogroup), and
    an engine whose ranks spin on `sched_yield` was seen to starve the threads of a store in a
    session of its own for ten seconds (kernel 6.18, two cores).
    """
    package_root = str(Path(__file__).resolve().parents[2])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (package_root, os.environ.get("PYTHONPATH")))
    )
    return subprocess.Popen(
        [sys.executable, "-m", "storage.service", "--fd", str(connection.fileno())],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        env=environment,
    )
