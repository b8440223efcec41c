"""The rows of one namespace: read, write, evict.

Decides under the store's lock, does I/O outside it.

The way of a write (`_write_part`, on an I/O thread):

    take      free slots, else grow, else the slots of the least recently used rows, whose names
              leave the index and the table at once
    forget    if the header on disk still names a slot's old row: write the header without it
    write     rows and trailers, O_DIRECT from the caller's buffers
    publish   name the rows in the table, write the header, then add them to the index

A header write is small, but waits its turn behind the rows in the device's queue; so a part is many
rows, and each step is done for all of them, once per segment.

So a crash at any point leaves old rows, new rows or free slots, never a new row under an old name.
Rows of the job itself are not evicted for it: a chain without its head can't be hit.
Nothing is synced: a power cut may lose or mix any of these writes, and the checksum in the key
table makes what it mixed a miss.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage.engine import Queue, Task
from storage.errors import DeviceError
from storage.eviction import LeastRecentlyUsedRows
from storage.header import SegmentGeometry
from storage.index import Hashes, Numbers, RowIndex, hashes_of
from storage.jobs import Job, JobResult, Part, RowCounters, wait
from storage.namespace import Identity
from storage.pool import Growth, Owner, SegmentPool
from storage.reading import RowReader, stretches
from storage.segment import Segment
from storage.space import is_full
from storage.types import MAX_KEY_BYTES, STORED, Location, RowKey, RowOutcome, SegmentId, SlotId

__all__ = ["JobResult", "RowCounters", "RowStore"]

log = logging.getLogger("kvtier.storage")

Placed = tuple[Location, int]  # a slot, and the position in a part of the row that goes there

_READ_PART_BYTES = 8 << 20  # of a job per task: small enough to share a job among the threads
_WRITE_PART_BYTES = 32 << 20  # two header writes per part: they must not outweigh its rows


def _nothing(_positions: list[int]) -> None:
    pass


class RowStore:
    """Rows of `row_bytes` bytes under keys, in segments of one namespace.

    All methods are safe from any thread.  Buffers are C-contiguous `uint8[row_bytes]` views;
    4 KiB-aligned ones move without a copy.  They belong to the store from submission until the
    job is reported.  Made by `DiskStore.open_rows`; `close` is the store's.
    """

    def __init__(
        self,
        owner: Owner,
        directory: Path,
        identity: Identity,
        geometry: SegmentGeometry,
        *,
        is_new: bool,
    ) -> None:
        """`directory` is the array's, in the namespace's; made by the first write if `is_new`."""
        self.identity = identity
        self.geometry = geometry
        self.directory = directory
        self.counters = RowCounters()
        self.on_change: Callable[[Sequence[RowKey], Sequence[RowKey]], None] | None = None
        """Called with (published, withdrawn) keys, in order, under the store's lock."""
        self._owner = owner
        self.pool = SegmentPool(owner, directory, identity, geometry, is_new=is_new)
        self._index = RowIndex(geometry.slots_per_segment, self.pool.key)
        self._policy = LeastRecentlyUsedRows()
        self._writing: set[RowKey] = set()
        self._reader = RowReader(owner, self.pool, self._index, self.counters, self._drop)

    @property
    def row_bytes(self) -> int:
        return self.geometry.row_bytes

    # -- opening, by DiskStore; no I/O is under way --------------------------------------------

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Take over the segments found on disk and index their rows, recency kept."""
        found: list[tuple[Numbers, Hashes, Numbers]] = []  # numbers, hashes, last uses
        for segment in segments:
            self.pool.adopt(segment)
            slots = np.flatnonzero(segment.entries["key_bytes"])
            rows = segment.entries[slots]
            first = self._index.number(Location(segment.id, SlotId(0)))
            uses = rows["last_use"].astype(np.int64)
            found.append((first + slots, hashes_of(rows["key"].tolist()), uses))
        if not found:
            return
        numbers, hashes, uses = (np.concatenate(column) for column in zip(*found, strict=True))
        self._owner.note_use(int(uses.max(initial=0)))
        recent_first = np.argsort(uses, kind="stable")[::-1]
        numbers, hashes = numbers[recent_first], hashes[recent_first]
        is_kept = self._withdraw_twins(numbers, hashes)
        numbers, hashes = numbers[is_kept], hashes[is_kept]
        self._index.load(hashes, numbers)
        self._policy.load(numbers[::-1])

    def _withdraw_twins(self, numbers: Numbers, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Of a key named twice the more recent place counts: an eviction may not have reached the
        header before a crash, and both places then hold the same row.  Which rows are kept."""
        is_kept = np.ones(len(numbers), np.bool_)
        is_alone = np.zeros(len(numbers), np.bool_)
        is_alone[np.unique(hashes, return_index=True)[1]] = True
        seen: set[bytes] = set()
        for position in np.flatnonzero(np.isin(hashes, hashes[~is_alone])).tolist():
            place = self._index.place(int(numbers[position]))
            key = self.pool.key(*place)
            if key in seen:
                self.pool.withdraw(place, free=True)
                is_kept[position] = False
            seen.add(key)
        return is_kept

    def drop_segment(self, number: SegmentId) -> int:
        """Give a segment back to the file system; how many rows went with it.

        Raises `DeviceError`; then the rows are gone and its bytes stay charged.
        """
        with self._owner.lock:
            segment = self.pool[number]
            self.pool.retire(number)
            keys = [RowKey(key) for _, key, _ in segment.rows()]
            assert not any(self._index.is_pinned(key) for key in keys), "rows are being read"
            idle = segment.free_count + len(keys) == self.geometry.slots_per_segment
            assert idle, "rows are being written"
            for key in keys:
                self._policy.remove(self._index.number(self._index.withdraw(key)))
            self.counters.rows_evicted += len(keys)
            self._announce((), keys)
        self.pool.remove(number)
        return len(keys)

    # -- asking ---------------------------------------------------------------------------------

    def __contains__(self, key: RowKey) -> bool:
        with self._owner.lock:
            return key in self._index

    def __len__(self) -> int:
        with self._owner.lock:
            return len(self._index)

    def keys(self) -> list[RowKey]:
        """All keys, least recently used first."""
        with self._owner.lock:
            return [self._key(number) for number in self._policy]

    def locate(self, key: RowKey) -> Location | None:
        """Where a row stands; in zarr's array it is row `segment * slots_per_segment + slot`."""
        with self._owner.lock:
            return self._index.get(key)

    @property
    def segment_numbers(self) -> list[SegmentId]:
        with self._owner.lock:
            return self.pool.numbers

    @property
    def pin_count(self) -> int:
        """Rows being read now: 0 when idle."""
        with self._owner.lock:
            return self._index.pin_count

    def count(self) -> RowCounters:
        """A copy of the counters."""
        with self._owner.lock:
            return RowCounters(
                **{f.name: getattr(self.counters, f.name) for f in fields(RowCounters)}
            )

    # -- doing ----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[RowKey]) -> None:
        """Mark the chunks of one request, first to last, as used now."""
        with self._owner.lock:
            for key in reversed(keys):
                place = self._index.get(key)
                if place is not None:
                    self._policy.touch(self._index.number(place))
                    self.pool[place.segment].mark_used(place.slot, self._owner.next_use())

    def submit_read(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = _nothing,
    ) -> None:
        """Read rows into `buffers`.

        `on_done` runs once, on an I/O thread, within `read_timeout_s` whatever the disk does.
        The buffers of rows that are HUNG then stay the store's; `on_release` is called with their
        positions in `keys`, each of them once, when the device lets go of them.
        """
        self.touch(keys)
        timeout_s = self._owner.options.read_timeout_s
        self._submit(
            Queue.READ, keys, buffers, on_done, on_release, self._reader.read_part, timeout_s
        )

    def submit_write(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None] = _nothing,
    ) -> None:
        """Write rows, the chunks of one request from first to last.

        `on_done` runs once, within `write_timeout_s`: on an I/O thread, or here and now if too
        much waits already.  A row reported as stored is readable and survives the death of the
        process, not a power cut.  HUNG and `on_release` are as for `submit_read`.
        """
        timeout_s = self._owner.options.write_timeout_s
        self._submit(Queue.WRITE, keys, buffers, on_done, on_release, self._write_part, timeout_s)

    def read(self, keys: Sequence[RowKey], buffers: Sequence[memoryview]) -> JobResult:
        """`submit_read`, waiting for the result."""
        return wait(lambda done: self.submit_read(keys, buffers, done))

    def write(self, keys: Sequence[RowKey], buffers: Sequence[memoryview]) -> JobResult:
        """`submit_write`, waiting for the result."""
        return wait(lambda done: self.submit_write(keys, buffers, done))

    def remove(self, keys: Iterable[RowKey]) -> int:
        """Drop rows that no one is reading; how many.  Raises `DeviceError`: then a crash may
        bring them back."""
        with self._owner.lock:
            gone = [k for k in keys if k in self._index and not self._index.is_pinned(k)]
            touched = {self._withdraw(key, free=True).segment for key in gone}
            self._announce((), gone)
            segments = [self.pool[number] for number in touched]
        for segment in segments:
            segment.flush_header(self._owner.lock)
        return len(gone)

    def _submit(
        self,
        queue: Queue,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        on_done: Callable[[JobResult], None],
        on_release: Callable[[list[int]], None],
        run: Callable[[Part], None],
        timeout_s: float,
    ) -> None:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
        for key, buffer in zip(keys, buffers, strict=True):
            if not 1 <= len(key) <= MAX_KEY_BYTES:
                raise ValueError(f"key {key.hex()}: expected 1 to {MAX_KEY_BYTES} bytes")
            if buffer.nbytes != self.row_bytes or not buffer.c_contiguous:
                raise ValueError(
                    f"buffer: expected {self.row_bytes} contiguous bytes, got {buffer.nbytes}"
                )
            if queue is Queue.READ and buffer.readonly:
                raise ValueError("buffer: expected a writable one, to read into")
        if not keys:
            on_done(JobResult([], 0, 0.0))
            return
        part_bytes = _READ_PART_BYTES if queue is Queue.READ else _WRITE_PART_BYTES
        rows = max(1, part_bytes // self.row_bytes)
        starts = range(0, len(keys), rows)
        if queue is Queue.WRITE:
            with self._owner.lock:
                self.counters.rows_offered += len(keys)
        job = Job(keys, self.row_bytes, len(starts), on_done, on_release)
        deadline = time.monotonic() + timeout_s
        for start in starts:
            part = Part(job, start, keys[start : start + rows], buffers[start : start + rows])
            task = Task(
                run=lambda part=part: self._run_part(queue, run, part),  # type: ignore[misc]
                expire=lambda part=part: self._expire_part(queue, part),  # type: ignore[misc]
                deadline=deadline,
                size_bytes=len(part.keys) * self.row_bytes,
                overdue=lambda part=part: self._give_up_part(queue, part),  # type: ignore[misc]
            )
            self._owner.engine.submit(queue, task)

    def _run_part(self, queue: Queue, run: Callable[[Part], None], part: Part) -> None:
        try:
            run(part)
        finally:
            self._end_part(queue, part)

    def _expire_part(self, queue: Queue, part: Part) -> None:
        with self._owner.lock:
            if queue is Queue.READ:
                self.counters.reads_failed += len(part.keys)
            else:
                self.counters.declined_busy += len(part.keys)
                for position in range(len(part.keys)):
                    part.report(position, RowOutcome.DECLINED)
        self._end_part(queue, part)

    def _give_up_part(self, queue: Queue, part: Part) -> None:
        """Its thread is in a call that does not return: the job ends without it."""
        with self._owner.lock:
            if not part.give_up():
                return
            count = len(part.hung)
            if queue is Queue.READ:
                self.counters.reads_failed += count
                self._owner.space.read_failed(errno.ETIMEDOUT)
            else:
                self.counters.writes_failed += count
                self._owner.space.write_failed(errno.ETIMEDOUT, "a write does not return")
        log.warning("the disk hangs: a %s of %d rows has not returned", queue.name.lower(), count)
        if part.job.part_done():
            part.job.report()

    def _end_part(self, queue: Queue, part: Part) -> None:
        with self._owner.lock:
            was_waited_for = part.end()
        if not was_waited_for:
            if part.hung:
                part.job.on_release([part.start + position for position in part.hung])
        elif part.job.part_done():
            if queue is Queue.WRITE:
                self.touch(part.job.keys)  # whole jobs: parts end in any order
            part.job.report()

    # -- writing --------------------------------------------------------------------------------

    def _write_part(self, part: Part) -> None:
        started = time.monotonic()
        try:
            refused = self._write_rows(part, self._select_new(part), self._take_slots)
            # Where segments are not preallocated a fresh slot may find the disk full; the slot of
            # a row does not.
            self._write_rows(part, refused, self._evict)
        finally:
            for position in list(part.unfinished):
                self._finish_write(part, position, RowOutcome.FAILED)
            with self._owner.lock:
                self.counters.write_seconds += time.monotonic() - started

    def _select_new(self, part: Part) -> list[int]:
        """Positions of the rows that must be written; the others are reported here."""
        new = []
        with self._owner.lock:
            writable: bool | None = None  # not asked: asking may be the one probe
            for position, key in enumerate(part.keys):
                if key in self._index:
                    part.report(position, RowOutcome.ALREADY_STORED)
                    self.counters.rows_already_stored += 1
                    continue
                if key in self._writing:
                    self.counters.declined_twice += 1
                else:
                    writable = self._owner.space.may_write() if writable is None else writable
                    if writable:
                        self._writing.add(key)
                        part.unfinished.add(position)
                        new.append(position)
                        continue
                    self.counters.declined_disk += 1
                part.report(position, RowOutcome.DECLINED)
        return new

    def _write_rows(
        self, part: Part, positions: list[int], take: Callable[[Part, int], list[Location]]
    ) -> list[int]:
        """Write rows to the slots that `take` finds, and publish them.

        Returns the positions that a full disk refused, which are still unfinished.
        """
        refused = []
        while positions:
            places = take(part, len(positions))
            if not places:
                for position in positions:
                    self._finish_write(part, position, RowOutcome.DECLINED)
                break
            taken = list(zip(places, positions, strict=False))
            refused += self._write_taken(part, taken)
            positions = positions[len(places) :]
        return refused

    def _take_slots(self, part: Part, count: int) -> list[Location]:
        """1 to `count` slots that nobody else has: free ones, else new ones, else `_evict`'s."""
        while True:
            with self._owner.lock:
                places = self.pool.take_free(count)
            if places:
                return places
            growth = self.pool.grow()
            if growth is Growth.FAILED:
                return []
            if growth is Growth.REFUSED:
                return self._evict(part, count)

    def _evict(self, part: Part, count: int) -> list[Location]:
        """The slots of up to `count` rows that leave: none of this job, none being read."""
        with self._owner.lock:
            wanted = part.job.key_set
            victims = [
                self._key(number)
                for number in self._policy.victims(
                    count,
                    lambda n: (
                        self._index.place_is_pinned(self._index.place(n)) or self._key(n) in wanted
                    ),
                )
            ]
            places = sorted(self._withdraw(key, free=False) for key in victims)
            self.counters.rows_evicted += len(victims)
            self._announce((), victims)
            return places

    def _write_taken(self, part: Part, taken: list[Placed]) -> list[int]:
        """Write rows to slots that are this part's, and publish them.

        Returns the positions that a full disk refused, their slots given back.
        """
        by_segment = {
            number: list(group)
            for number, group in groupby(taken, lambda placed: placed[0].segment)
        }
        refused: list[int] = []
        try:
            for number, rows in by_segment.items():
                try:
                    self._write_in_segment(part, self.pool[number], rows)
                except DeviceError as exc:
                    refused += self._write_failed(part, rows, exc)
        except BaseException:  # a bug; the slots must be free all the same
            self._give_back([p for p, position in taken if position in part.unfinished])
            raise
        return refused

    def _write_in_segment(self, part: Part, segment: Segment, rows: list[Placed]) -> None:
        """Forget, write, publish.  On `DeviceError` none of `rows` is published."""
        owner = self._owner
        with owner.lock:
            must_forget = segment.may_be_named_on_disk([place.slot for place, _ in rows])
        if must_forget:
            segment.forget(owner.lock)
        checksums: list[int] = []
        for start, stop in stretches([place for place, _ in rows], self.row_bytes):
            buffers = [part.buffers[position] for _, position in rows[start:stop]]
            checksums += segment.write_rows(rows[start][0].slot, buffers)
        # Last first: a chain's head is its most recent row.
        newest_last = list(zip(rows, checksums, strict=True))[::-1]
        with owner.lock:
            for (place, position), checksum in newest_last:
                use = owner.next_use()
                segment.name(place.slot, part.keys[position], checksum, use)
            version = segment.version
        segment.flush_header(owner.lock, version)
        with owner.lock:
            owner.space.write_succeeded()
            for (place, position), _ in newest_last:
                self._index.publish(part.keys[position], place)
                self._policy.add(self._index.number(place))
                self._finish_write(part, position, RowOutcome.OK)
            self._announce([part.keys[position] for _, position in rows], ())

    def _write_failed(self, part: Part, rows: list[Placed], error: DeviceError) -> list[int]:
        """Give the slots back.  The positions of rows that may be tried elsewhere, since the disk
        is full; the others are finished as failed."""
        owner = self._owner
        self._give_back([place for place, _ in rows])
        positions = [position for _, position in rows]
        with owner.lock:
            owner.space.write_failed(error.errno, str(error))
        if is_full(error.errno):
            return positions
        for position in positions:
            self._finish_write(part, position, RowOutcome.FAILED)
        return []

    def _give_back(self, places: list[Location]) -> None:
        """Free the slots of rows that did not come to be, and tell Zarr's readers, if the disk
        still takes it."""
        with self._owner.lock:
            for place in places:
                self.pool.withdraw(place, free=True)
            segments = [self.pool[number] for number in {place.segment for place in places}]
        with contextlib.suppress(DeviceError):
            for segment in segments:
                segment.flush_header(self._owner.lock)

    def _finish_write(self, part: Part, position: int, outcome: RowOutcome) -> None:
        with self._owner.lock:
            part.unfinished.remove(position)
            self._writing.remove(part.keys[position])
            if not part.report(position, outcome):
                return  # it was counted when it was given up
            if outcome in STORED:
                self.counters.rows_written += 1
                self.counters.bytes_written += self.row_bytes
            elif outcome is RowOutcome.DECLINED:
                self.counters.declined_full += 1
            else:
                self.counters.writes_failed += 1

    # -- bookkeeping, under the lock ------------------------------------------------------------

    def _drop(self, keys: Sequence[RowKey]) -> None:
        """Rows that are not what was stored are gone; their slots are free."""
        for key in keys:
            self._withdraw(key, free=True)
        self._announce((), keys)

    def _key(self, number: int) -> RowKey:
        """Of a published row, by its number."""
        return RowKey(self.pool.key(*self._index.place(number)))

    def _withdraw(self, key: RowKey, *, free: bool) -> Location:
        """Take a row out of index, policy and table; its slot is free, or the caller's."""
        place = self._index.withdraw(key)
        self._policy.remove(self._index.number(place))
        self.pool.withdraw(place, free=free)
        return place

    def _announce(self, published: Sequence[RowKey], withdrawn: Sequence[RowKey]) -> None:
        if self.on_change is not None and (published or withdrawn):
            self.on_change(published, withdrawn)

    # -- end ------------------------------------------------------------------------------------

    def flush(self, *, recency: bool) -> None:
        """Bring headers up to date; with `recency` also those where only uses changed.

        Best effort, up to the first header that can't be written: that stays an older one, which
        loses recency or brings back evicted rows, and never bytes.
        """
        for segment in self._all_segments():
            with self._owner.lock:
                if recency and segment.recency_changed:
                    segment.version += 1
            try:
                segment.flush_header(self._owner.lock)
            except DeviceError as exc:
                log.warning("headers not written: %s", exc)
                return

    def close(self) -> None:
        """Flush and close the files.  All jobs have ended."""
        self.flush(recency=True)
        for segment in self._all_segments():
            try:
                segment.close()
            except DeviceError as exc:
                log.warning("%s", exc)

    def _all_segments(self) -> list[Segment]:
        with self._owner.lock:
            return [self.pool[number] for number in self.pool.numbers]
