"""What tests ask of the machine: processes and bytes, seen from outside."""

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


def allocated_bytes(root: Path) -> int:
    """Physical bytes of all regular files under `root`, also while they come and go."""
    total = 0
    for path in root.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        total += stat.st_blocks * 512 if path.is_file() else 0
    return total
