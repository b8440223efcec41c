"""Store processes, seen from outside."""

from __future__ import annotations

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
    """Whether a store process has files below `root` open."""
    try:
        return any(file.path.startswith(str(root)) for file in process.open_files())
    except psutil.Error:
        return False
