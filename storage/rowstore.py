"""The rows of one namespace: read, write, evict.

Decides under the store's lock, does I/O outside it.

The way of a write (`_write_part`, on an I/O thread):

    encode    under a codec; the size of its frame decides which class of slots a row is for
    take      free slots, else grow, else the slots of the least recently used rows of the class,
              whose names leave the index and the table at once, or a new segment in the place of
              colder ones of other classes
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
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage.admission import ADMISSION
from storage.catalog import Catalog
from storage.codec import RowCodec
from storage.engine import Queue, Task
from storage.errors import DeviceError
from storage.eviction import is_colder_by_far
from storage.header import Record, SegmentGeometry
from storage.index import Hashes, Numbers, hashes_of
from storage.jobs import Job, JobResult, Part, RowCounters, wait
from storage.mover import Mover
from storage.namespace import Identity
from storage.pool import Growth, Owner, SegmentPool, charge_of
from storage.reading import BAD_PLACE_ERRNOS, RowReader, stretches
from storage.segment import Segment
from storage.sharing import Holding
from storage.space import DiskState, is_full
from storage.types import MAX_KEY_BYTES, STORED, Location, RowKey, RowOutcome, SegmentId, SlotId

__all__ = ["JobResult", "RowCounters", "RowStore"]

Rows = dict[int, memoryview]  # position in a part -> what is written: the row, or its frame

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
        self._owner = owner
        self.pool = SegmentPool(owner, directory, identity, geometry, codec, is_new=is_new)
        self._codec = codec
        self._catalog = Catalog(self.pool, owner.options.eviction)
        self._admission = ADMISSION[owner.options.admission]()
        # How many rows each class gives before others are asked for a segment again.
        self._ask_after = dict.fromkeys(self.pool.classes, 0)
        self._writing: set[RowKey] = set()
        self._reader = RowReader(owner, self._catalog, self.counters)
        self.mover = Mover(owner, self._catalog, self.counters)

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
        return Holding(charged, len(numbers), self._catalog.coldest_use())

    @property
    def segment_numbers(self) -> list[SegmentId]:
        with self._owner.lock:
            return self.pool.numbers

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
        self._submit(Queue.WRITE, keys, buffers, on_done, on_release, self._write_part, timeout_s)

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
                self._owner.space.place_failed(errno.ETIMEDOUT)
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
            if queue is Queue.WRITE and not part.job.is_in_order:
                with self._owner.lock:
                    self._mark_used(part.job.keys)  # whole jobs: parts end in any order
            part.job.report()
            if queue is Queue.READ:
                with self._owner.lock:
                    self._admission.read(part.job.keys_read, slots=self.pool.slot_count)

    # -- writing --------------------------------------------------------------------------------

    def _write_part(self, part: Part) -> None:
        started = time.monotonic()
        try:
            for size_class, rows in self._encode(part, self._select_new(part)).items():
                refused = self._write_rows(part, size_class, rows, self._take_slots)
                # Where segments are not preallocated a fresh slot may find the disk full; the slot
                # of a row does not.
                self._write_rows(part, size_class, refused, self._evict)
        finally:
            for position in list(part.unfinished):
                self._finish_write(part, position, RowOutcome.FAILED)
            with self._owner.lock:
                self.counters.write_seconds += time.monotonic() - started

    def _select_new(self, part: Part) -> list[int]:
        """Positions of the rows that must be written; the others are reported here."""
        new = []
        job = part.job
        with self._owner.lock:
            if job.admitted is None:
                job.admitted = self._admit(job.keys)
            writable: bool | None = None  # not asked: asking may be the one probe
            for position, key in enumerate(part.keys):
                if key in self._catalog.index:
                    part.report(position, RowOutcome.ALREADY_STORED)
                    self.counters.rows_already_stored += 1
                    continue
                if key in self._writing:
                    self.counters.declined_twice += 1
                elif part.start + position >= job.admitted:
                    self.counters.declined_admission += 1
                else:
                    writable = self._owner.space.may_write() if writable is None else writable
                    if not writable:
                        self.counters.declined_disk += 1
                    elif not self._can_afford(job, part.start + position):
                        self.counters.declined_write_budget += 1
                    else:
                        self._writing.add(key)
                        part.unfinished.add(position)
                        new.append(position)
                        continue
                part.report(position, RowOutcome.DECLINED)
        return new

    def _admit(self, keys: Sequence[RowKey]) -> int:
        """How many rows of a job, from the first, are worth a write: all while there is room."""
        space = self._owner.space
        free = len(keys)
        if space.state is DiskState.FULL:
            free = self.pool.free_count
            if not free and space.may_grow():
                free = 1  # which finds out whether there is room again
        return self._admission.offer(keys, slots=self.pool.slot_count, free=free)

    def _can_afford(self, job: Job, position: int) -> bool:
        """Charge a row to the drive's budget of writes.  Behind the first of a job that it has no
        room for, no row is worth it."""
        budget = self._owner.write_budget
        if budget is None:
            return True
        if position < job.affordable and not budget.take(self.row_bytes, self._owner.space.now()):
            job.affordable = position
        return position < job.affordable

    def _encode(self, part: Part, positions: list[int]) -> dict[SegmentGeometry, Rows]:
        """What to write at each position, by the class of slots that it is for."""
        if self._codec is None:
            return {self.geometry: {position: part.buffers[position] for position in positions}}
        by_class: dict[SegmentGeometry, Rows] = {}
        for position in positions:
            size_class, content = self._codec.encode(part.buffers[position])
            by_class.setdefault(size_class, {})[position] = content
        return by_class

    def _write_rows(
        self,
        part: Part,
        size_class: SegmentGeometry,
        rows: Rows,
        take: Callable[[Part, SegmentGeometry, int], list[Location]],
    ) -> Rows:
        """Write rows to the slots that `take` finds, and publish them.

        Returns those that a full disk refused, which are still unfinished.
        """
        refused: Rows = {}
        positions = list(rows)
        while positions:
            places = take(part, size_class, len(positions))
            if not places:
                for position in positions:
                    self._finish_write(part, position, RowOutcome.DECLINED)
                break
            places = self._without_lost(places)
            taken = list(zip(places, positions, strict=False))
            refused |= {p: rows[p] for p in self._write_taken(part, taken, rows)}
            positions = positions[len(places) :]
        return refused

    def _without_lost(self, places: list[Location]) -> list[Location]:
        """Those of `places` whose file is still there; the other segments are given up."""
        lost = self.find_lost({place.segment for place in places})
        if not lost:
            return places
        self._give_back([place for place in places if place.segment in lost])
        self._lose(lost)
        return [place for place in places if place.segment not in lost]

    def find_lost(self, numbers: Iterable[SegmentId]) -> set[SegmentId]:
        """Which segments have a file that somebody removed."""
        lost = set()
        for number in numbers:
            with contextlib.suppress(DeviceError), self.pool.using(number) as segment:
                if segment.is_lost():
                    lost.add(number)
        return lost

    def _lose(self, numbers: Collection[SegmentId]) -> None:
        log.warning("%s: somebody removed the files of segments %s", self.directory, numbers)
        self._owner.note_external_removals(len(numbers))
        self.mover.lose(numbers)

    def check_files(self) -> None:
        """Give up segments whose file somebody removed and those that could not be given back
        yet; try places that could not be written again."""
        lost = self.find_lost(n for n in self.segment_numbers if not self.pool.is_going(n))
        if lost:
            self._lose(lost)
        self.mover.finish()
        with self._owner.lock:
            self.pool.trust_again()

    def _take_slots(self, part: Part, size_class: SegmentGeometry, count: int) -> list[Location]:
        """1 to `count` slots that nobody else has: free ones, else new ones, else `_evict`'s."""
        while True:
            with self._owner.lock:
                places = self.pool.take_free(size_class, count)
            if places:
                return places
            growth = self.pool.grow(size_class)
            if growth is Growth.FAILED:
                return []
            if growth is Growth.REFUSED:
                return self._evict(part, size_class, count)

    def _evict(self, part: Part, size_class: SegmentGeometry, count: int) -> list[Location]:
        """Slots of a class that rows leave: none of this job, none being read.

        The rows are those of the class that were used longest ago, unless segments of other
        classes hold rows that are colder by far: then those give way to a segment of this class.
        Asking looks at every segment; so a class that was refused first gives as many rows as a
        segment holds, if it has them.
        """
        with self._owner.lock:
            if len(self._catalog.policies) == 1 or self._ask_after[size_class] > 0:
                places = self._evict_rows(part, size_class, count)
                if places or len(self._catalog.policies) == 1:
                    return places
        has_more = self.pool.replace(
            size_class, lambda needed: self._give_up(part, size_class, needed)
        )
        with self._owner.lock:
            self._ask_after[size_class] = 0 if has_more else size_class.slots_per_segment
            places = self.pool.take_free(size_class, count)
            return places or self._evict_rows(part, size_class, count)

    def _evict_rows(self, part: Part, size_class: SegmentGeometry, count: int) -> list[Location]:
        """The slots of up to `count` rows of one class that leave."""
        policy = self._catalog.policies[size_class]
        numbers = policy.victims(count, lambda number: self._must_stay(part, number))
        victims = [self._catalog.key(number) for number in numbers]
        places = self._catalog.evict(victims, numbers, policy)
        self.counters.rows_evicted += len(victims)
        self._ask_after[size_class] -= len(victims)
        self._catalog.announce((), victims)
        return places

    def _must_stay(self, part: Part, number: int) -> bool:
        return self._catalog.is_held(number) or self._catalog.key(number) in part.job.key_set

    # -- size classes, under the lock -----------------------------------------------------------

    def _give_up(
        self, part: Part, size_class: SegmentGeometry, needed_bytes: int
    ) -> list[SegmentId]:
        """Take all rows out of segments of other classes whose files have `needed_bytes`, coldest
        first, if all of them are colder by far than the next row that this class would lose.

        Files, not charges: those promise bytes that a full file system does not give back.
        """
        own = self._catalog.policies[size_class].victims(1, lambda n: self._must_stay(part, n))
        now = self._owner.next_use()
        own_use = self._catalog.last_use(own[0]) if own else now
        chosen: list[Segment] = []
        for segment in sorted(self.pool.others(size_class), key=lambda other: other.mean_use):
            if needed_bytes <= 0:
                break
            is_colder = is_colder_by_far(now, segment.mean_use, own_use)
            if own and not is_colder:
                break
            places = (Location(segment.id, slot) for slot, _, _ in segment.rows())
            numbers = map(self._catalog.index.number, places)
            if segment.is_idle and not any(self._must_stay(part, n) for n in numbers):
                chosen.append(segment)
                needed_bytes -= segment.geometry.segment_bytes
        if needed_bytes > 0:
            return []
        for segment in chosen:
            self.counters.rows_evicted += len(self._catalog.drop_rows(segment))
        return [segment.id for segment in chosen]

    # -- rows that have their slots -------------------------------------------------------------

    def _write_taken(self, part: Part, taken: list[Placed], rows: Rows) -> list[int]:
        """Write rows to slots that are this part's, and publish them.

        Returns the positions that a full disk refused, their slots given back.
        """
        by_segment = {
            number: list(group)
            for number, group in groupby(taken, lambda placed: placed[0].segment)
        }
        refused: list[int] = []
        try:
            for number, placed in by_segment.items():
                with self.pool.using(number) as segment:
                    try:
                        self._write_in_segment(part, segment, placed, rows)
                    except DeviceError as exc:
                        refused += self._write_failed(part, placed, exc)
        except BaseException:  # a bug; the slots must be free all the same
            self._give_back([p for p, position in taken if position in part.unfinished])
            raise
        return refused

    def _write_in_segment(
        self, part: Part, segment: Segment, placed: list[Placed], rows: Rows
    ) -> None:
        """Forget, write, publish.  On `DeviceError` none of `placed` is published."""
        owner = self._owner
        with owner.lock:
            must_forget = segment.may_be_named_on_disk([place.slot for place, _ in placed])
        if must_forget:
            segment.forget(owner.lock)
        records: list[Record] = []
        for start, stop in stretches([place for place, _ in placed], self.row_bytes):
            content = [rows[position] for _, position in placed[start:stop]]
            records += segment.write_rows(placed[start][0].slot, content)
        # Last first: a chain's head is its most recent row.
        newest_last = list(zip(placed, records, strict=True))[::-1]
        with owner.lock:
            for (place, position), record in newest_last:
                use = owner.next_use()
                segment.name(place.slot, part.keys[position], record, use)
            version = segment.version
        segment.flush_header(owner.lock, version)
        with owner.lock:
            owner.space.write_succeeded()
            part.job.is_in_order = len(placed) == len(part.job.keys)
            policy = self._catalog.policies[segment.geometry]
            for (place, position), _ in newest_last:
                self._catalog.publish(part.keys[position], place, policy)
                self._finish_write(part, position, RowOutcome.OK)
            self._catalog.announce([part.keys[position] for _, position in placed], ())

    def _write_failed(self, part: Part, rows: list[Placed], error: DeviceError) -> list[int]:
        """Give the slots back.  The positions of rows that may be tried elsewhere, since the disk
        is full; the others are finished as failed."""
        owner = self._owner
        places, positions = [place for place, _ in rows], [position for _, position in rows]
        takes_headers = self._give_back(places)
        with owner.lock:
            if takes_headers and error.errno in BAD_PLACE_ERRNOS:
                # It is the place: or one that can't be written would suspend the disk for ever.
                owner.space.place_failed(error.errno)
                self.pool.distrust(places)
            else:
                owner.space.write_failed(error.errno, str(error))
        if is_full(error.errno):
            return positions
        log.warning("rows not written: %s", error)
        for position in positions:
            self._finish_write(part, position, RowOutcome.FAILED)
        return []

    def _give_back(self, places: list[Location]) -> bool:
        """Free the slots of rows that did not come to be, and tell Zarr's readers.  Whether the
        disk still takes that."""
        with self._owner.lock:
            for place in places:
                self.pool.withdraw(place, free=True)
            held = [self.pool.hold(number) for number in {place.segment for place in places}]
        try:
            for segment in held:
                segment.flush_header(self._owner.lock)
        except DeviceError:
            return False
        finally:
            self.pool.let_go(held)
        return True

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
