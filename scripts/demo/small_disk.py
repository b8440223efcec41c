"""A real file system of a given size, made for one run and removed whatever ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from storage.errors import StorageError

_COMMAND_TIMEOUT_S = 60.0
_BUSY_TIMEOUT_S = 60.0  # for processes that still end their I/O


class DiskUnavailable(StorageError):
    """The file system can't be made here; the message is one line."""


class FileSystem(Enum):
    EXT4 = "ext4"
    """In a file, through a loop device: takes O_DIRECT."""
    TMPFS = "tmpfs"
    """In memory: buffered I/O."""


class DiskSpace(NamedTuple):
    """As `df` shows it, in bytes."""

    size_bytes: int
    used_bytes: int


@contextlib.contextmanager
def small_disk(file_system: FileSystem, size_bytes: int) -> Iterator[Path]:
    """Mount an empty file system of `size_bytes` and yield where.  Raises `DiskUnavailable`.

    On the way out, by an exception or ^C too, it is unmounted and nothing is left.  The image of
    an ext4 loses its name as soon as it is mounted, so that not even kill -9 leaves its bytes.
    """
    if os.geteuid():
        raise DiskUnavailable("this makes and mounts a small file system: run it as root")
    with tempfile.TemporaryDirectory(
        prefix=f"kvtier-disk-{os.getpid()}-", dir="/var/tmp"
    ) as scratch:
        at = Path(scratch) / "disk"
        at.mkdir()
        if file_system is FileSystem.TMPFS:
            _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "kvtier", str(at))
        else:
            _mount_ext4(Path(scratch) / "image", at, size_bytes)
        try:
            yield at
        finally:
            _unmount(at)


def disk_space(at: Path) -> DiskSpace:
    stat = os.statvfs(at)
    return DiskSpace(stat.f_blocks * stat.f_frsize, (stat.f_blocks - stat.f_bfree) * stat.f_frsize)


def _mount_ext4(image: Path, at: Path, size_bytes: int) -> None:
    with image.open("wb") as file:
        file.truncate(size_bytes)
    # Nothing but data: no journal, no blocks for root, few inodes.
    _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", "-N", "4096", str(image))
    _run("mount", "-o", "loop", str(image), str(at))
    image.unlink()


def _unmount(at: Path) -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second ^C must not leave it mounted
    try:
        deadline = time.monotonic() + _BUSY_TIMEOUT_S
        while True:
            try:
                _run("umount", str(at))
                return
            except DiskUnavailable:
                if time.monotonic() > deadline:
                    _run("umount", "--lazy", str(at))  # gone once its last user is
                    return
                time.sleep(0.1)
    finally:
        signal.signal(signal.SIGINT, previous)


def _run(*command: str) -> None:
    """Raises `DiskUnavailable` with what the command says."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
            start_new_session=True,  # ^C is for us to handle
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DiskUnavailable(f"{command[0]}: {exc}") from exc
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise DiskUnavailable(said if said.startswith(command[0]) else f"{command[0]}: {said}")
