"""What the storage benchmark compares: our store and the bare device, behind one small interface.

All sides move rows between one region and files below one directory.  `scripts.bench.vllm_fs` is
the third side.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from storage.device import aligned_buffer
from storage.header import SegmentGeometry
from storage.jobs import JobResult
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.reading import rows_per_call
from storage.store import DiskStore
from storage.types import PAGE_BYTES, RowKey, RowOutcome, round_up

IO_THREADS = StoreOptions(Path(), 0).io_threads  # as the product runs


class WrongBytes(Exception):
    """A side did not do what it was asked; its figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """Rows of one request: `keys[i]` is in, or goes to, row `slots[i]` of the region."""

    keys: Sequence[RowKey]
    slots: Sequence[int]


class Side(Protocol):
    """One way to keep rows on disk.  `write` and `read` return when all jobs have ended, and
    raise `WrongBytes` if a row was not written, or not found."""

    def write(self, jobs: Sequence[RowJob]) -> None: ...

    def read(self, jobs: Sequence[RowJob]) -> None: ...

    def forget(self, keys: Sequence[RowKey]) -> None:
        """Make room as this side's operator would, outside of any measurement; a side that
        evicts by itself does nothing."""
        ...

    def close(self) -> None:
        """End the threads and remove the files."""
        ...


class StoreSide:
    """`DiskStore` with the product's settings, but that it writes what it is offered."""

    def __init__(
        self, directory: Path, rows: Sequence[memoryview], budget_bytes: int, segment_bytes: int
    ) -> None:
        self._directory = directory
        self._rows = rows
        self._store = DiskStore.open(
            StoreOptions(
                directory,
                budget_bytes,
                segment_bytes=segment_bytes,
                admission="always",
                reserve_bytes=0,
            )
        )
        self.row_store = self._store.open_rows(Identity("bench", {}), rows[0].nbytes)

    @property
    def geometry(self) -> SegmentGeometry:
        return self.row_store.geometry

    def write(self, jobs: Sequence[RowJob]) -> None:
        self._run(jobs, is_write=True)

    def read(self, jobs: Sequence[RowJob]) -> None:
        self._run(jobs, is_write=False)

    def _run(self, jobs: Sequence[RowJob], *, is_write: bool) -> None:
        done = threading.Semaphore(0)
        results: list[JobResult] = []

        def on_done(result: JobResult) -> None:
            results.append(result)
            done.release()

        submit = self.row_store.submit_write if is_write else self.row_store.submit_read
        for job in jobs:
            submit(job.keys, [self._rows[slot] for slot in job.slots], on_done)
        for _ in jobs:
            done.acquire()
        bad = [o for result in results for o in result.outcomes if o is not RowOutcome.OK]
        if bad:
            raise WrongBytes(f"kvtier: {len(bad)} rows not OK, such as {bad[0].name}")

    def forget(self, keys: Sequence[RowKey]) -> None:
        pass

    def close(self) -> None:
        self._store.close()
        shutil.rmtree(self._directory)


class RawSide:
    """The calls of `StoreSide` without the store: the same files, offsets, lengths and iovecs, the
    trailers' pages included, from as many threads.  No checksum, header, index or key."""

    def __init__(
        self, directory: Path, rows: Sequence[memoryview], geometry: SegmentGeometry, slots: int
    ) -> None:
        self._directory = directory
        self._rows = rows
        self._geometry = geometry
        self._slots = round_up(slots, geometry.slots_per_segment)
        self._page = aligned_buffer(PAGE_BYTES)
        self._next = 0
        self._place: dict[RowKey, int] = {}
        self._fds: list[int] = []
        self._pool = ThreadPoolExecutor(IO_THREADS)
        directory.mkdir()

    def _fd(self, segment: int) -> int:
        while segment >= len(self._fds):
            path = self._directory / str(len(self._fds))
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
            os.posix_fallocate(fd, 0, self._geometry.segment_bytes)
            self._fds.append(fd)
        return self._fds[segment]

    def write(self, jobs: Sequence[RowJob]) -> None:
        for job in jobs:
            for key in job.keys:
                self._place[key] = self._next
                self._next = (self._next + 1) % self._slots
        self._run(jobs, is_write=True)

    def read(self, jobs: Sequence[RowJob]) -> None:
        self._run(jobs, is_write=False)

    def _run(self, jobs: Sequence[RowJob], *, is_write: bool) -> None:
        per_segment = self._geometry.slots_per_segment
        longest = rows_per_call(self._geometry.row_bytes)
        calls = []
        for job in jobs:
            for start in range(0, len(job.keys), longest):
                buffers: list[memoryview] = []
                first = last = -1
                for key, slot in zip(
                    job.keys[start : start + longest],
                    job.slots[start : start + longest],
                    strict=True,
                ):
                    place = self._place[key]
                    if first >= 0 and (place != last + 1 or place % per_segment == 0):
                        calls.append((first, buffers))
                        buffers, first = [], -1
                    first = place if first < 0 else first
                    last = place
                    buffers += [self._rows[slot], self._page]
                calls.append((first, buffers))
        call = os.pwritev if is_write else os.preadv

        def move(place: int, buffers: list[memoryview]) -> None:
            segment, slot = divmod(place, per_segment)
            moved = call(self._fd(segment), buffers, self._geometry.row_offset(slot))
            if moved != len(buffers) // 2 * self._geometry.stride:
                raise WrongBytes(f"raw: short transfer of {moved} bytes")

        for place, _ in calls:
            self._fd(place // per_segment)  # made here: threads would make it twice
        for _ in self._pool.map(move, *zip(*calls, strict=True)):
            pass

    def forget(self, keys: Sequence[RowKey]) -> None:
        for key in keys:
            self._place.pop(key, None)

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._fds:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._directory)
