"""Store processes, seen from outside."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def store_processes() -> list[psutil.Process]:
    """Store processes of any engine on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_store = "storage.service" in (process.info["cmdline"] or [])
        if is_store and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def serves(process: psutil.Process, root: Path) -> bool:
    """Whether a store process has `root`, which it locks, or anything below open."""
    try:
        descriptors = list(Path(f"/proc/{process.pid}/fd").iterdir())
    except OSError:  # it ends
        return False
    return any(_target(descriptor).startswith(str(root)) for descriptor in descriptors)


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # closed meanwhile
        return ""
