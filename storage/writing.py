"""Writing rows: whether, where, and in which order, so that no crash leaves new bytes under an old
name.  Decides under the store's lock, does I/O outside it.

The way of a part (`RowWriter.write_part`, on an I/O thread):

    select    what is not stored or on its way already, and worth a write
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
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby

from storage.admission import AdmissionPolicy
from storage.catalog import Catalog
from storage.codec import RowCodec
from storage.errors import DeviceError
from storage.eviction import is_colder_by_far
from storage.header import Record, SegmentGeometry
from storage.jobs import Job, Part, RowCounters
from storage.mover import Mover
from storage.pool import Growth, Owner
from storage.reading import BAD_PLACE_ERRNOS, stretches
from storage.segment import Segment
from storage.space import DiskState, is_full
from storage.types import STORED, Location, RowKey, RowOutcome, SegmentId

log = logging.getLogger("kvtier.storage")

Rows = dict[int, memoryview]  # position in a part -> what is written: the row, or its frame
Placed = tuple[Location, int]  # a slot, and the position in a part of the row that goes there


class RowWriter:
    """Writes the rows of one namespace; `write_part` runs on I/O threads."""

    def __init__(
        self,
        owner: Owner,
        catalog: Catalog,
        codec: RowCodec | None,
        admission: AdmissionPolicy,
        counters: RowCounters,
        mover: Mover,
    ) -> None:
        self._owner = owner
        self._catalog = catalog
        self._pool = catalog.pool
        self._row_bytes = catalog.pool.geometry.row_bytes
        self._codec = codec
        self._admission = admission
        self._counters = counters
        self._mover = mover
        # How many rows each class gives before others are asked for a segment again.
        self._ask_after = dict.fromkeys(self._pool.classes, 0)
        self.writing: set[RowKey] = set()
        """Keys on their way to a slot; guarded by the owner's lock."""

    def write_part(self, part: Part) -> None:
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
                self._counters.write_seconds += time.monotonic() - started

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
                    self._counters.rows_already_stored += 1
                    continue
                if key in self.writing:
                    self._counters.declined_twice += 1
                elif part.start + position >= job.admitted:
                    self._counters.declined_admission += 1
                else:
                    writable = self._owner.space.may_write() if writable is None else writable
                    if not writable:
                        self._counters.declined_disk += 1
                    elif not self._can_afford(job, part.start + position):
                        self._counters.declined_write_budget += 1
                    else:
                        self.writing.add(key)
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
            free = self._pool.free_count
            if not free and space.may_grow():
                free = 1  # which finds out whether there is room again
        return self._admission.offer(keys, slots=self._pool.slot_count, free=free)

    def _can_afford(self, job: Job, position: int) -> bool:
        """Charge a row to the drive's budget of writes.  Behind the first of a job that it has no
        room for, no row is worth it."""
        budget = self._owner.write_budget
        if budget is None:
            return True
        if position < job.affordable and not budget.take(self._row_bytes, self._owner.space.now()):
            job.affordable = position
        return position < job.affordable

    def _encode(self, part: Part, positions: list[int]) -> dict[SegmentGeometry, Rows]:
        """What to write at each position, by the class of slots that it is for."""
        if self._codec is None:
            return {
                self._pool.geometry: {position: part.buffers[position] for position in positions}
            }
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
        self.lose(lost)
        return [place for place in places if place.segment not in lost]

    def find_lost(self, numbers: Iterable[SegmentId]) -> set[SegmentId]:
        """Which segments have a file that somebody removed."""
        lost = set()
        for number in numbers:
            with contextlib.suppress(DeviceError), self._pool.using(number) as segment:
                if segment.is_lost():
                    lost.add(number)
        return lost

    def lose(self, numbers: Collection[SegmentId]) -> None:
        log.warning("%s: somebody removed the files of segments %s", self._pool.directory, numbers)
        self._owner.note_external_removals(len(numbers))
        self._mover.lose(numbers)

    def _take_slots(self, part: Part, size_class: SegmentGeometry, count: int) -> list[Location]:
        """1 to `count` slots that nobody else has: free ones, else new ones, else `_evict`'s."""
        while True:
            with self._owner.lock:
                places = self._pool.take_free(size_class, count)
            if places:
                return places
            growth = self._pool.grow(size_class)
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
        has_more = self._pool.replace(
            size_class, lambda needed: self._give_up(part, size_class, needed)
        )
        with self._owner.lock:
            self._ask_after[size_class] = 0 if has_more else size_class.slots_per_segment
            places = self._pool.take_free(size_class, count)
            return places or self._evict_rows(part, size_class, count)

    def _evict_rows(self, part: Part, size_class: SegmentGeometry, count: int) -> list[Location]:
        """The slots of up to `count` rows of one class that leave."""
        policy = self._catalog.policies[size_class]
        numbers = policy.victims(count, lambda number: self._must_stay(part, number))
        victims = [self._catalog.key(number) for number in numbers]
        places = self._catalog.evict(victims, numbers, policy)
        self._counters.rows_evicted += len(victims)
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
        for segment in sorted(self._pool.others(size_class), key=lambda other: other.mean_use):
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
            self._counters.rows_evicted += len(self._catalog.drop_rows(segment))
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
                with self._pool.using(number) as segment:
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
        for start, stop in stretches([place for place, _ in placed], self._row_bytes):
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
                self._pool.distrust(places)
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
                self._pool.withdraw(place, free=True)
            held = [self._pool.hold(number) for number in {place.segment for place in places}]
        try:
            for segment in held:
                segment.flush_header(self._owner.lock)
        except DeviceError:
            return False
        finally:
            self._pool.let_go(held)
        return True

    def _finish_write(self, part: Part, position: int, outcome: RowOutcome) -> None:
        with self._owner.lock:
            part.unfinished.remove(position)
            self.writing.remove(part.keys[position])
            if not part.report(position, outcome):
                return  # it was counted when it was given up
            if outcome in STORED:
                self._counters.rows_written += 1
                self._counters.bytes_written += self._row_bytes
            elif outcome is RowOutcome.DECLINED:
                if self._owner.space.takes_writes:
                    self._counters.declined_full += 1
                else:  # it said so when it was to grow
                    self._counters.declined_disk += 1
            else:
                self._counters.writes_failed += 1
