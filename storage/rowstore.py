"""The rows of one namespace: what is asked of them, as jobs of parts on I/O threads.

`reading.py` reads the rows of a part, `writing.py` writes them, `catalog.py` knows which there are.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage.admission import ADMISSION
from storage.catalog import Catalog
from storage.codec import RowCodec
from storage.engine import Queue, Task
from storage.errors import DeviceError
from storage.header import SegmentGeometry
from storage.index import Hashes, Numbers, hashes_of
from storage.jobs import Job, JobResult, Part, RowCounters, wait
from storage.mover import Mover
from storage.namespace import Identity
from storage.pool import Owner, SegmentPool, charge_of
from storage.reading import RowReader
from storage.segment import Segment
from storage.sharing import Holding
from storage.types import MAX_KEY_BYTES, Location, RowKey, RowOutcome, SegmentId, SlotId
from storage.writing import RowWriter

__all__ = ["JobResult", "RowCounters", "RowStore"]

log = logging.getLogger("kvtier.storage")

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
        codec: RowCodec | None,
        *,
        is_new: bool,
    ) -> None:
        """`directory` is the array's, in the namespace's; made by the first write if `is_new`.
        `geometry` is the one without a codec.
        """
        self.identity = identity
        self.geometry = geometry
        self.directory = directory
        self.counters = RowCounters()
        self.engine = ""
        """As in `Holding`; set by `DiskStore` before anybody has the rows."""
        self._owner = owner
        self.pool = SegmentPool(owner, directory, identity, geometry, codec, is_new=is_new)
        self._codec = codec
        self._catalog = Catalog(self.pool, owner.options.eviction)
        self._admission = ADMISSION[owner.options.admission]()
        self._reader = RowReader(owner, self._catalog, self.counters)
        self.mover = Mover(owner, self._catalog, self.counters)
        self._writer = RowWriter(
            owner, self._catalog, codec, self._admission, self.counters, self.mover
        )

    @property
    def row_bytes(self) -> int:
        return self.geometry.row_bytes

    @property
    def on_change(self) -> Callable[[Sequence[RowKey], Sequence[RowKey]], None] | None:
        """Called with (published, withdrawn) keys, in order, under the store's lock."""
        return self._catalog.on_change

    @on_change.setter
    def on_change(self, call: Callable[[Sequence[RowKey], Sequence[RowKey]], None] | None) -> None:
        self._catalog.on_change = call

    # -- opening, by DiskStore; no I/O is under way --------------------------------------------

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Take over the segments found on disk and index their rows, recency kept."""
        segments = list(segments)
        named = [np.flatnonzero(segment.entries["key_bytes"]) for segment in segments]
        count = sum(map(len, named))
        numbers, uses = np.empty(count, np.int64), np.empty(count, np.int64)
        hashes = np.empty(count, np.uint64)
        stop = 0
        for segment, slots in zip(segments, named, strict=True):
            self.pool.adopt(segment)
            start, stop = stop, stop + len(slots)
            first = self._catalog.index.number(Location(segment.id, SlotId(0)))
            numbers[start:stop] = first + slots
            uses[start:stop] = segment.entries["last_use"][slots]
            hashes[start:stop] = hashes_of(segment.entries["key"][slots].tolist())
        self._owner.note_use(int(uses.max(initial=0)))
        recent_first = np.argsort(uses)[::-1]
        numbers, hashes = numbers[recent_first], hashes[recent_first]
        is_kept = self._withdraw_twins(numbers, hashes)
        numbers, hashes = numbers[is_kept], hashes[is_kept]
        self._catalog.index.load(hashes, numbers)
        oldest_first = numbers[::-1]
        stands_in = oldest_first // self.geometry.slots_per_segment
        for size_class, policy in self._catalog.policies.items():
            of_class = [s for s in self.pool.numbers if self.pool[s].geometry == size_class]
            policy.load(oldest_first[np.isin(stands_in, of_class)])

    def _withdraw_twins(self, numbers: Numbers, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Of a key named twice the more recent place counts: an eviction may not have reached the
        header before a crash, and both places then hold the same row.  Which rows are kept."""
        is_kept = np.ones(len(numbers), np.bool_)
        in_order = np.sort(hashes)
        of_several = in_order[1:][in_order[1:] == in_order[:-1]]
        if not len(of_several):
            return is_kept
        seen: set[bytes] = set()
        for position in np.flatnonzero(np.isin(hashes, of_several)).tolist():
            number = int(numbers[position])
            key = self.pool.key(number)
            if key in seen:
                self.pool.withdraw(self._catalog.index.place(number), free=True)
                is_kept[position] = False
            seen.add(key)
        return is_kept

    # -- asking ---------------------------------------------------------------------------------

    def __contains__(self, key: RowKey) -> bool:
        with self._owner.lock:
            return key in self._catalog.index

    def __len__(self) -> int:
        with self._owner.lock:
            return len(self._catalog.index)

    def keys(self) -> list[RowKey]:
        """All keys, least recently used first."""
        with self._owner.lock:
            return self._catalog.keys()

    def locate(self, key: RowKey) -> Location | None:
        """Where a row stands; in zarr's array it is row `segment * slots_per_segment + slot`."""
        with self._owner.lock:
            return self._catalog.index.get(key)

    def cold_keys(self, before: int) -> list[RowKey]:
        """Keys not used since the use `before`, least recently used first."""
        with self._owner.lock:
            return self._catalog.cold_keys(before)

    def room(self) -> int:
        """About how many rows fit before one must go: free slots, and what the budget allows."""
        with self._owner.lock:
            free = sum(self.pool.count_free(size_class) for size_class in self.pool.classes)
            left = self._owner.space.effective_bytes - self._owner.space.charged_bytes
            segments = max(0, left // self.pool.charge_bytes)
            return free + segments * self.geometry.slots_per_segment

    def coldest_uses(self, count: int, without: Collection[RowKey]) -> list[int]:
        """The last uses of the first rows to go, `count` at most, coldest first; but of `without`
        and of rows that are being read."""
        catalog = self._catalog

        def stays(number: int) -> bool:
            return catalog.is_held(number) or catalog.key(number) in without

        with self._owner.lock:
            numbers = [n for p in catalog.policies.values() for n in p.victims(count, stays)]
            return sorted(map(catalog.last_use, numbers))[:count]

    def holding(self) -> Holding:
        """What the namespace has of the budget, under the lock."""
        numbers = self.pool.numbers
        charged = sum(charge_of(self.pool[number].geometry) for number in numbers)
        return Holding(charged, len(numbers), self._catalog.coldest_use(), self.engine)

    @property
    def segment_numbers(self) -> list[SegmentId]:
        with self._owner.lock:
            return self.pool.numbers

    @property
    def writing_count(self) -> int:
        """Rows being written now: 0 when idle."""
        with self._owner.lock:
            return len(self._writer.writing)

    @property
    def pin_count(self) -> int:
        """Rows being read now: 0 when idle."""
        with self._owner.lock:
            return self._catalog.index.pin_count

    def count(self) -> RowCounters:
        """A copy of the counters."""
        with self._owner.lock:
            counters = replace(self.counters)
        if self._codec is not None:
            codec = self._codec.count()
            counters = replace(counters, **vars(codec))
        return counters

    def subscribe(self, on_change: Callable[[Sequence[RowKey], Sequence[RowKey]], None]) -> None:
        """Tell all keys that are there, and from then on every change, in order."""
        with self._owner.lock:
            on_change(self._catalog.keys(), ())
            self.on_change = on_change

    # -- doing ----------------------------------------------------------------------------------

    def touch(self, keys: Sequence[RowKey]) -> None:
        """The chunks of one request, first to last, were used now, not from here."""
        with self._owner.lock:
            self._admission.touch(keys)
            self._mark_used(keys)

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
        with self._owner.lock:
            self._mark_used(keys)
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
        self._submit(
            Queue.WRITE, keys, buffers, on_done, on_release, self._writer.write_part, timeout_s
        )

    def read(self, keys: Sequence[RowKey], buffers: Sequence[memoryview]) -> JobResult:
        """`submit_read`, waiting for the result."""
        return wait(lambda done: self.submit_read(keys, buffers, done))

    def write(self, keys: Sequence[RowKey], buffers: Sequence[memoryview]) -> JobResult:
        """`submit_write`, waiting for the result."""
        return wait(lambda done: self.submit_write(keys, buffers, done))

    def verify(self, keys: Sequence[RowKey]) -> None:
        """Verify rows against their checksums, dropping what is wrong.  On an I/O thread."""
        self._reader.verify(keys)

    def note_pass(self) -> None:
        """The scrubber has seen every row that was not used meanwhile."""
        with self._owner.lock:
            self.counters.scrub_passes += 1

    def remove(self, keys: Iterable[RowKey]) -> int:
        """Drop rows that no one is reading; how many.  Raises `DeviceError`: then a crash may
        bring them back."""
        with self._owner.lock:
            index = self._catalog.index
            gone = [k for k in keys if k in index and not index.is_pinned(k)]
            touched = {self._catalog.withdraw(key, free=True).segment for key in gone}
            self._catalog.announce((), gone)
            held = [self.pool.hold(number) for number in touched]
        try:
            for segment in held:
                segment.flush_header(self._owner.lock)
        finally:
            self.pool.let_go(held)
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
        if self.pool.has_going:
            self.mover.finish()

    def _expire_part(self, queue: Queue, part: Part) -> None:
        with self._owner.lock:
            if queue is Queue.READ:
                self.counters.reads_expired += len(part.keys)
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
                self.counters.reads_hung += count
                self._owner.space.place_failed(errno.ETIMEDOUT)
            else:
                self.counters.writes_hung += count
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
            if queue is Queue.WRITE and not part.job.is_in_order:
                with self._owner.lock:
                    self._mark_used(part.job.keys)  # whole jobs: parts end in any order
            part.job.report()
            if queue is Queue.READ:
                with self._owner.lock:
                    self._admission.read(part.job.keys_read, slots=self.pool.slot_count)

    # -- files that are gone --------------------------------------------------------------------

    def find_lost(self, numbers: Iterable[SegmentId]) -> set[SegmentId]:
        """`RowWriter.find_lost`."""
        return self._writer.find_lost(numbers)

    def check_files(self) -> None:
        """Give up segments whose file somebody removed and those that could not be given back
        yet; try places that could not be written again."""
        lost = self.find_lost(n for n in self.segment_numbers if not self.pool.is_going(n))
        if lost:
            self._writer.lose(lost)
        self.mover.finish()
        with self._owner.lock:
            self.pool.trust_again()

    # -- bookkeeping, under the lock ------------------------------------------------------------

    def _mark_used(self, keys: Sequence[RowKey]) -> None:
        """Leaf first: of a request's chunks, first to last, the first is the most recent."""
        for key in reversed(keys):
            place = self._catalog.touch(key)
            if place is not None:
                self.pool[place.segment].mark_used(place.slot, self._owner.next_use())

    # -- end ------------------------------------------------------------------------------------

    def flush(self, *, recency: bool) -> None:
        """Bring headers up to date; with `recency` also those where only uses changed.

        Best effort, up to the first header that can't be written: that stays an older one, which
        loses recency or brings back evicted rows, and never bytes.
        """
        for number in self.segment_numbers:
            with self._owner.lock:
                if number not in self.pool:  # given up meanwhile
                    continue
                segment = self.pool.hold(number)
                if recency and segment.recency_changed:
                    segment.version += 1
            try:
                segment.flush_header(self._owner.lock)
            except DeviceError as exc:
                log.warning("headers not written: %s", exc)
                return
            finally:
                self.pool.let_go([segment])

    def close(self) -> None:
        """Flush and close the files.  All jobs have ended."""
        self.flush(recency=True)
        for number in self.segment_numbers:
            try:
                self.pool[number].close()
            except DeviceError as exc:
                log.warning("%s", exc)
