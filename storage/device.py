"""The seam at the bottom: the only place that opens, reads, writes, allocates and syncs.

`LocalDevice` is the real one.  Its faulty twin is `storage.testing.FaultyDevice`, which makes the
Nth operation fail; so every method here is one system call or one small file, and no method
retries.  `read_fully` and `write_fully`, which loop over short transfers, stand above the seam.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple, Protocol

from storage.errors import CorruptRecord, DeviceError
from storage.types import PAGE_BYTES

_IOV_MAX = 1024  # of Linux; `os.sysconf("SC_IOV_MAX")` says the same


class FileStat(NamedTuple):
    """`size_bytes` is apparent, `allocated_bytes` is `st_blocks * 512`: what a budget counts.

    `modified_s` is in Unix seconds.  A symlink is neither followed nor a directory.
    """

    size_bytes: int
    allocated_bytes: int
    modified_s: float
    is_directory: bool


class SpaceStat(NamedTuple):
    """Of a file system: `available_bytes` is what this user may take (`f_bavail * f_frsize`)."""

    total_bytes: int
    available_bytes: int
    total_inodes: int  # 0 where the file system counts none
    available_inodes: int


class Device(Protocol):
    """File operations.  Every method raises `DeviceError`; all are safe from any thread."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        """A read-write descriptor; `create` makes a new file (0600) and fails if one is there."""
        ...

    def close(self, fd: int) -> None: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read into `buffers` from `offset`; may be short; 0 at the end of the file."""
        ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written from `buffers` at `offset`; may be short."""
        ...

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Reserve `size_bytes` from offset 0, so that later writes there can't run out of space."""
        ...

    def truncate(self, fd: int, size_bytes: int) -> None: ...

    def sync(self, fd: int) -> None:
        """fdatasync."""
        ...

    def stat(self, path: Path) -> FileStat: ...

    def is_linked(self, fd: int) -> bool:
        """Whether the open file still has a name: False once somebody removed it."""
        ...

    def leads_to(self, path: Path, fd: int) -> bool:
        """Whether `path` still names the open directory: False once it was removed or moved, or a
        file system was mounted over it, or unmounted with it."""
        ...

    def space(self, path: Path) -> SpaceStat: ...

    def list(self, path: Path) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def make_directory(self, path: Path) -> None:
        """Make `path` and those parents that are missing, each 0700; fine if it is there."""
        ...

    def remove_directory(self, path: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def read_file(self, path: Path) -> bytes: ...

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a small file whole (0600), replacing what is there; not atomic."""
        ...

    def lock(self, path: Path) -> int | None:
        """Take the exclusive lock of a directory; its descriptor, or None if another has it."""
        ...


@contextlib.contextmanager
def _translated(op: str, path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise DeviceError(op, path, exc.errno or 0) from exc


# A pipe where a file should be must not hold up whoever opens it; files do not know the flag.
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LocalDevice:
    """Files of a local file system.  Never follows a symlink in the last component of a path."""

    def __init__(self) -> None:
        self._paths: dict[int, Path] = {}  # for messages only

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        flags = os.O_RDWR | _SAFELY
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        with _translated("open", path):
            fd = os.open(path, flags, 0o600)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        path = self._paths.pop(fd, Path("?"))
        with _translated("close", path):
            os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with _translated("read", self._path(fd)):
            return os.preadv(fd, buffers[:_IOV_MAX], offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with _translated("write", self._path(fd)):
            return os.pwritev(fd, buffers[:_IOV_MAX], offset)

    def allocate(self, fd: int, size_bytes: int) -> None:
        with _translated("allocate", self._path(fd)):
            os.posix_fallocate(fd, 0, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        with _translated("truncate", self._path(fd)):
            os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        with _translated("sync", self._path(fd)):
            os.fdatasync(fd)

    def stat(self, path: Path) -> FileStat:
        with _translated("stat", path):
            stat = os.stat(path, follow_symlinks=False)
        return FileStat(stat.st_size, stat.st_blocks * 512, stat.st_mtime, S_ISDIR(stat.st_mode))

    def is_linked(self, fd: int) -> bool:
        with _translated("fstat", self._path(fd)):
            return os.fstat(fd).st_nlink > 0

    def leads_to(self, path: Path, fd: int) -> bool:
        with _translated("stat", path):
            try:
                return os.path.samestat(os.stat(path), os.fstat(fd))
            except FileNotFoundError:
                return False

    def space(self, path: Path) -> SpaceStat:
        with _translated("statvfs", path):
            stat = os.statvfs(path)
        return SpaceStat(
            stat.f_blocks * stat.f_frsize,
            stat.f_bavail * stat.f_frsize,
            stat.f_files,
            stat.f_favail,
        )

    def list(self, path: Path) -> list[str]:
        with _translated("list", path):
            return sorted(os.listdir(path))

    def make_directory(self, path: Path) -> None:
        with _translated("make_directory", path):
            for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
                missing.mkdir(0o700, exist_ok=True)  # os.makedirs has a mode for the last one only

    def remove_directory(self, path: Path) -> None:
        with _translated("rmdir", path):
            os.rmdir(path)

    def remove(self, path: Path) -> None:
        with _translated("remove", path):
            os.unlink(path)

    def rename(self, source: Path, target: Path) -> None:
        with _translated("rename", source):
            os.rename(source, target)
        for fd, path in list(self._paths.items()):
            if path == source:
                self._paths[fd] = target

    def read_file(self, path: Path) -> bytes:
        with _translated("read", path):
            fd = os.open(path, os.O_RDONLY | _SAFELY)
            with os.fdopen(fd, "rb") as file:
                return file.read()

    def write_file(self, path: Path, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _SAFELY
        with _translated("write_file", path):
            fd = os.open(path, flags, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def lock(self, path: Path) -> int | None:
        with _translated("lock", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except BaseException:
                os.close(fd)
                raise
        self._paths[fd] = path
        return fd

    def _path(self, fd: int) -> Path:
        return self._paths.get(fd, Path("?"))


class ReadOnlyDevice(LocalDevice):
    """Files to be looked at by somebody who may not own them: opens none for writing, and what
    would change one fails with EROFS."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if create:
            raise DeviceError("open", path, errno.EROFS)
        flags = os.O_RDONLY | _SAFELY | (os.O_DIRECT if direct else 0)
        with _translated("open", path):
            fd = os.open(path, flags)
        self._paths[fd] = path
        return fd

    def make_directory(self, path: Path) -> None:
        raise DeviceError("make_directory", path, errno.EROFS)

    def remove_directory(self, path: Path) -> None:
        raise DeviceError("rmdir", path, errno.EROFS)

    def remove(self, path: Path) -> None:
        raise DeviceError("remove", path, errno.EROFS)

    def rename(self, source: Path, target: Path) -> None:  # noqa: ARG002
        raise DeviceError("rename", source, errno.EROFS)

    def write_file(self, path: Path, data: bytes) -> None:  # noqa: ARG002
        raise DeviceError("write_file", path, errno.EROFS)

    def lock(self, path: Path) -> int | None:
        raise DeviceError("lock", path, errno.EROFS)


def lock_holder(root: Path) -> int | None:
    """The process that holds the lock of a root, without trying to take it; None if none does, or
    the system does not say (another container, a network file system)."""
    try:
        stat = root.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    wanted = f"{stat.st_dev >> 8 & 0xFFF:02x}:{stat.st_dev & 0xFF:02x}:{stat.st_ino}"
    for line in lines:
        fields = line.split()
        if fields[1] == "FLOCK" and wanted in fields:
            return int(fields[4])
    return None


def _advance(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `buffers` after their first `count` bytes."""
    for position, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[position + 1 :]]
        count -= buffer.nbytes
    return []


def read_fully(
    device: Device, fd: int, buffers: Sequence[memoryview], offset: int, place: str
) -> None:
    """Fill all of `buffers` from `offset`.

    Raises `DeviceError`, or `CorruptRecord(place)` when the file ends before the buffers do.  On
    either, the buffers hold no defined content.
    """
    left = list(buffers)
    while left:
        count = device.preadv(fd, left, offset)
        if count == 0:
            raise CorruptRecord(place, f"file ends at {offset}, inside a row")
        offset += count
        left = _advance(left, count)


def write_fully(device: Device, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of `buffers` at `offset`; on `DeviceError` any part of it may be written."""
    left = list(buffers)
    while left:
        count = device.pwritev(fd, left, offset)
        if count == 0:
            # Taken as an error: to go on writing nothing would be to loop for ever.
            raise DeviceError("write", f"descriptor {fd}", errno.EIO)
        offset += count
        left = _advance(left, count)


def reserve(device: Device, fd: int, size_bytes: int) -> None:
    """Make a file `size_bytes` long, its blocks allocated where the file system can do that.

    Raises `DeviceError`, and then the file may have any size up to that.
    """
    try:
        device.allocate(fd, size_bytes)
    except DeviceError as exc:
        if exc.errno not in _CANNOT_ALLOCATE:
            raise
        device.truncate(fd, size_bytes)  # sparse: a write may find the disk full


_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def exists(device: Device, path: Path) -> bool:
    """Whether something is at `path`; True also when the device does not say."""
    try:
        device.stat(path)
    except DeviceError as exc:
        return exc.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def replace_file(device: Device, path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step: a reader sees the old file or the new one.

    The temporary name ends in `PARTIAL_SUFFIX`; opening a store removes what a crash left of it.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        device.write_file(partial, data)
        device.rename(partial, path)
    except BaseException:
        with contextlib.suppress(DeviceError):
            device.remove(partial)
        raise


PARTIAL_SUFFIX = ".partial"  # of files that are being made


def aligned_buffer(size_bytes: int) -> memoryview:
    """`size_bytes` of zeroed memory at a page boundary, fit for O_DIRECT."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1)))[:size_bytes]


class Scratch(threading.local):
    """Page-aligned memory of each thread; grows to the most that was taken at once."""

    def __init__(self) -> None:
        self._memory = aligned_buffer(PAGE_BYTES)

    def take(self, size_bytes: int) -> memoryview:
        """`size_bytes` with whatever they hold; the caller's until the thread takes again."""
        if self._memory.nbytes < size_bytes:
            self._memory = aligned_buffer(size_bytes)
        return self._memory[:size_bytes]


def supports_direct(device: Device, directory: Path) -> bool:
    """Whether files in `directory` take O_DIRECT: asked by a page written to a file of its own."""
    probe = directory / f"probe-{os.getpid()}{PARTIAL_SUFFIX}"
    try:
        fd = device.open(probe, create=True, direct=True)
    except DeviceError:
        with contextlib.suppress(DeviceError):  # EINVAL may leave the empty file behind
            device.remove(probe)
        return False
    page = aligned_buffer(PAGE_BYTES)
    try:
        try:
            return device.pwritev(fd, [page], 0) == PAGE_BYTES
        except DeviceError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                return False
            device.preadv(fd, [page], 0)  # a full disk: what can be read so can be overwritten
            return True
    except DeviceError:
        return False
    finally:
        with contextlib.suppress(DeviceError):
            device.close(fd)
        with contextlib.suppress(DeviceError):
            device.remove(probe)
