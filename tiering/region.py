"""The region: one shared mapping per engine, rows in `/dev/shm`.  The only room that touches it.

The file begins with a header page and the row layout as JSON; slots of the largest row's size
follow, 4 KiB-aligned, so that O_DIRECT moves rows without a copy.  Rank 0's worker creates the
region; the other ranks and the scheduler only ever attach, and take the layout from it or compare
theirs with it.  The scheduler comes last: once every rank is there it drops the file's name, and
from then on the memory goes when the last process goes, however that ends.

Ranks that have layers of their own (a pipeline) each announce them first, in a file that rank 0
reads and removes (`announce_layers`, `collect_layers`).

Everyone who has one of these files open holds a shared flock on it.  A file whose exclusive lock
can be had belongs to nobody any more: the next start removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from storage.errors import LayoutMismatch, StorageError
from storage.sizes import format_size
from storage.types import PAGE_BYTES, round_up
from tiering.rows import GroupLayer, RowLayout, rows_differ

log = logging.getLogger("kvtier.region")

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "kvtier-"
_SUFFIX = ".region"
_MAGIC = b"kvtregn1"
_HEAD = struct.Struct("<8sIIQQQ")  # magic, state, layout length, rows offset, rows, file bytes
_MAKING, _MADE = 1, 2  # states; 0 is a file that was just created
_RANKS_OFFSET = 1024  # one byte per rank, 1 once it has attached
MAX_RANKS = PAGE_BYTES - _RANKS_OFFSET
ATTACH_TIMEOUT_S = 30.0  # a rank on this node attaches within seconds; one on another never does
_POLL_S = 0.01
_MADV_POPULATE_WRITE = getattr(mmap, "MADV_POPULATE_WRITE", 23)  # Linux 5.14


_ANNOUNCED = ".layers"  # suffix of what a rank announces


class RegionError(StorageError):
    """The region can't be made or attached; the message says what to change."""


def region_path(engine_id: str, directory: Path = SHARED_MEMORY) -> Path:
    """Where the region of an engine is until its last process has attached."""
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in engine_id)
    return directory / f"{_PREFIX}{safe}{_SUFFIX}"


class Region:
    """An attached region.  `close` is this process's alone and does not end it for others."""

    def __init__(self, fd: int, path: Path, *, populate: bool) -> None:
        head = os.pread(fd, _HEAD.size, 0)
        magic, state, layout_bytes, rows_offset, row_count, file_bytes = _HEAD.unpack(head)
        assert (magic, state) == (_MAGIC, _MADE), "attached before it was made"
        self.fd = fd
        self.path = path
        self.layout = msgspec.json.decode(os.pread(fd, layout_bytes, PAGE_BYTES), type=RowLayout)
        self.row_count = row_count
        self.rows_offset = rows_offset
        self.mapping = mmap.mmap(fd, file_bytes, mmap.MAP_SHARED)
        """The whole file; row i is the `layout.row_bytes` bytes from `rows_offset` on."""
        if populate:
            # The pages are there since the creator allocated them; this maps them, so that the
            # first copies do not pay for faults.  Older kernels fault them in one by one.
            with contextlib.suppress(OSError):
                self.mapping.madvise(_MADV_POPULATE_WRITE)

    # -- making and attaching -------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        engine_id: str,
        layout: RowLayout,
        size_bytes: int,
        *,
        size_field: str = "cpu_bytes_to_use",
        directory: Path = SHARED_MEMORY,
    ) -> Region:
        """Make the region of `engine_id` with as many rows as `size_bytes` hold, as rank 0.

        First removes regions of dead engines.  Raises `RegionError` that names `size_field` if
        not one row fits, or shared memory has no room; then nothing is left behind.
        """
        if layout.ranks > MAX_RANKS:
            raise RegionError(f"ranks: expected at most {MAX_RANKS}, got {layout.ranks}")
        remove_dead_regions(directory)
        row_count = size_bytes // layout.row_bytes
        if row_count < 1:
            raise RegionError(
                f"{size_field}: expected at least one row of {layout.row_bytes} bytes, "
                f"got {size_bytes}"
            )
        encoded = msgspec.json.encode(layout)
        rows_offset = round_up(PAGE_BYTES + len(encoded), PAGE_BYTES)
        file_bytes = rows_offset + row_count * layout.row_bytes
        path = region_path(engine_id, directory)
        fd = _create_locked(path)
        try:
            _check_fits(file_bytes, directory, size_field)
            os.posix_fallocate(fd, 0, file_bytes)  # sparse pages would be a SIGBUS later
            os.pwrite(fd, encoded, PAGE_BYTES)
            head = (_MAGIC, _MAKING, len(encoded), rows_offset, row_count, file_bytes)
            os.pwrite(fd, _HEAD.pack(*head), 0)
            os.pwrite(fd, b"\1", _RANKS_OFFSET)
            os.pwrite(fd, _HEAD.pack(_MAGIC, _MADE, *head[2:]), 0)
            region = cls(fd, path, populate=True)
        except BaseException as exc:
            path.unlink(missing_ok=True)
            os.close(fd)
            if not isinstance(exc, OSError):
                raise
            if exc.errno == errno.ENOSPC:
                raise _too_large(file_bytes, directory, size_field) from exc
            raise _refused(path, exc) from exc
        log.info("made %s: %d rows, %s", path, row_count, format_size(file_bytes))
        return region

    @classmethod
    def attach(
        cls,
        engine_id: str,
        *,
        rank: int | None,
        expected: RowLayout | None = None,
        directory: Path = SHARED_MEMORY,
        timeout_s: float = ATTACH_TIMEOUT_S,
    ) -> Region:
        """Attach to the region that rank 0 of `engine_id` makes, waiting for it.

        Raises `LayoutMismatch` if `expected`, this rank's own layout, is not the region's, and
        `RegionError` if the region does not appear in time or its maker failed.
        """
        path = region_path(engine_id, directory)
        fd = _open_made(path, timeout_s)
        try:
            region = cls(fd, path, populate=True)
            if expected is not None and expected != region.layout:
                differing, theirs, ours = rows_differ(region.layout, expected)
                raise LayoutMismatch(f"row of rank {rank}, {differing}", f"{theirs} (rank 0)", ours)
            if rank is not None:
                assert 0 <= rank < region.layout.ranks, rank
                os.pwrite(fd, b"\1", _RANKS_OFFSET + rank)
        except BaseException as exc:
            os.close(fd)
            if isinstance(exc, OSError):
                raise _refused(path, exc) from exc
            raise
        return region

    def wait_for_ranks(self, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        """Return once every rank has attached.  Raises `RegionError` naming those missing."""
        deadline = time.monotonic() + timeout_s
        while missing := self._missing_ranks():
            if time.monotonic() > deadline:
                raise RegionError(
                    f"rank(s) {missing} of {self.layout.ranks} did not attach to {self.path} in "
                    f"{timeout_s:g} s; all ranks of an engine must run on this node"
                )
            time.sleep(_POLL_S)

    def _missing_ranks(self) -> list[int]:
        present = os.pread(self.fd, self.layout.ranks, _RANKS_OFFSET)
        return [rank for rank, flag in enumerate(present) if not flag]

    def unlink(self) -> None:
        """Drop the name, if it is still this region's: from here on nothing can leak."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.fd)):
                self.path.unlink()

    # -- rows -----------------------------------------------------------------------------------

    def row(self, slot: int) -> memoryview:
        """Row `slot`, uint8[row_bytes], writable.  It belongs to whoever pins the slot."""
        assert 0 <= slot < self.row_count, slot
        start = self.rows_offset + slot * self.layout.row_bytes
        return memoryview(self.mapping)[start : start + self.layout.row_bytes]

    def close(self) -> None:
        """Unmap.  A mapping that tensors or views still use stays until they are gone."""
        with contextlib.suppress(BufferError):
            self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _layers_path(engine_id: str, rank: int, directory: Path) -> Path:
    path = region_path(f"{engine_id}-{rank}", directory)
    return path.with_name(path.name.removesuffix(_SUFFIX) + _ANNOUNCED + _SUFFIX)


@contextlib.contextmanager
def announce_layers(
    engine_id: str,
    rank: int,
    groups: Mapping[int, Sequence[GroupLayer]],
    *,
    directory: Path = SHARED_MEMORY,
) -> Iterator[None]:
    """Tell rank 0 which layers `rank` has in each KV-cache group, by the group's number, for as
    long as it takes to attach to its region.

    Raises `RegionError` if another engine of that name announces too.
    """
    remove_dead_regions(directory)
    path = _layers_path(engine_id, rank, directory)
    fd = _create_locked(path)
    try:
        encoded = msgspec.json.encode(groups)
        os.pwrite(fd, encoded, PAGE_BYTES)
        os.pwrite(fd, _HEAD.pack(_MAGIC, _MADE, len(encoded), 0, 0, 0), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def collect_layers(
    engine_id: str,
    ranks: Iterable[int],
    *,
    directory: Path = SHARED_MEMORY,
    timeout_s: float = ATTACH_TIMEOUT_S,
) -> dict[int, dict[int, list[GroupLayer]]]:
    """What each of `ranks` announced, waiting for them.

    Raises `RegionError` naming one that did not.
    """
    deadline = time.monotonic() + timeout_s
    found = {}
    for rank in ranks:
        path = _layers_path(engine_id, rank, directory)
        try:
            fd = _open_made(path, max(0.0, deadline - time.monotonic()))
        except RegionError:
            raise RegionError(
                f"rank {rank} did not say in {timeout_s:g} s which layers it has; all ranks of an "
                "engine must run on this node"
            ) from None
        try:
            size = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))[2]
            encoded = os.pread(fd, size, PAGE_BYTES)
            found[rank] = msgspec.json.decode(encoded, type=dict[int, list[GroupLayer]])
        finally:
            os.close(fd)
    return found


def _create_locked(path: Path) -> int:
    """A new file that is ours for certain: no one took it for a dead one before it was locked."""
    while True:
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise RegionError(
                f"{path} belongs to a running engine; give each engine an engine_id of its own"
            ) from None
        except OSError as exc:
            raise _refused(path, exc) from exc
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _open_made(path: Path, timeout_s: float) -> int:
    """Descriptor of the region at `path` once it is made, under a shared lock."""
    deadline = time.monotonic() + timeout_s
    fd = -1
    try:
        while True:
            if fd < 0:
                with contextlib.suppress(FileNotFoundError):
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    fcntl.flock(fd, fcntl.LOCK_SH)
            if fd >= 0:
                head = os.pread(fd, _HEAD.size, 0)
                if len(head) == _HEAD.size and _HEAD.unpack(head)[:2] == (_MAGIC, _MADE):
                    return fd
                if os.fstat(fd).st_nlink == 0:
                    raise RegionError(f"rank 0 failed to make {path}; its log says why")
            if time.monotonic() > deadline:
                raise RegionError(
                    f"{path} did not appear in {timeout_s:g} s: rank 0 of this engine failed, or "
                    "runs on another node"
                )
            time.sleep(_POLL_S)
    except BaseException as exc:
        if fd >= 0:
            os.close(fd)
        if isinstance(exc, OSError):
            raise _refused(path, exc) from exc
        raise


def _refused(path: Path, exc: OSError) -> RegionError:
    return RegionError(
        f"{path}: {exc.strerror}; expected shared memory at {path.parent} that this user may write "
        "and map"
    )


def _available(directory: Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def _check_fits(file_bytes: int, directory: Path, size_field: str) -> None:
    if file_bytes > _available(directory):
        raise _too_large(file_bytes, directory, size_field)


def _too_large(file_bytes: int, directory: Path, size_field: str) -> RegionError:
    return RegionError(
        f"{size_field}: a region of {file_bytes} bytes ({format_size(file_bytes)}) does not fit "
        f"{directory}, which has {format_size(_available(directory))} left; lower {size_field}, "
        "or give the container more shared memory (docker: --shm-size, Kubernetes: an emptyDir "
        "of medium Memory)"
    )


def dead_regions(directory: Path = SHARED_MEMORY) -> Iterator[Path]:
    """Regions that no process has open.  Yields each while its exclusive lock is held."""
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                yield path
        except OSError:
            continue  # a living engine has it
        finally:
            os.close(fd)


def remove_dead_regions(directory: Path = SHARED_MEMORY) -> int:
    """Remove what killed engines left; how many files that were."""
    count = 0
    for path in dead_regions(directory):
        path.unlink(missing_ok=True)
        log.info("removed %s, left by an engine that was killed", path)
        count += 1
    return count


def is_mapping_of(address: int, fd: int) -> bool:
    """Whether the start of the file `fd` is mapped at `address` in this process."""
    file = os.fstat(fd)
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            span, _, offset, of_device, inode, *_ = line.split(maxsplit=5)
            start, stop = (int(part, 16) for part in span.split("-"))
            if start <= address < stop:
                is_file = (of_device, int(inode)) == (device, file.st_ino)
                return is_file and address - start + int(offset, 16) == 0
    return False
