"""Store processes, seen from outside."""

from __future__ import annotations

import psutil


def store_processes() -> list[psutil.Process]:
    """Store processes of any engine on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_store = "storage.service" in (process.info["cmdline"] or [])
        if is_store and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found
