"""Giving segments back: their warm rows move into the slots of colder ones, so that the coldest
rows of all are lost, and not those that happened to stand in a segment.

The way of a row, whole slot by whole slot, verified against the key table:

    plan      the rows that are one too many leave: the coldest, wherever they stand
    move      copy to a slot that one of them left: forget, write, publish there, as a write does
    finish    when nobody reads in the segment any more, its file goes

A crash in between leaves a row in its old place, or in both with the same bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import NamedTuple

from storage.catalog import Catalog
from storage.device import aligned_buffer
from storage.errors import CorruptRecord, DeviceError
from storage.header import SegmentGeometry
from storage.jobs import RowCounters
from storage.pool import Owner, charge_of
from storage.record import fault_of
from storage.segment import Segment, runs
from storage.types import Location, RowKey, SegmentId

log = logging.getLogger("kvtier.storage")

_BATCH_BYTES = 8 << 20


class Move(NamedTuple):
    """`source` is pinned, `target` is nobody's else."""

    key: RowKey
    source: Location
    target: Location


class Mover:
    """Gives back segments of one namespace.  Safe from any thread; one at a time works."""

    def __init__(self, owner: Owner, catalog: Catalog, counters: RowCounters) -> None:
        self._owner = owner
        self._catalog = catalog
        self._pool = catalog.pool
        self._counters = counters
        self._working = threading.Lock()

    def choose(self, size_bytes: int) -> list[SegmentId]:
        """The segments of least use that are charged `size_bytes` together, or all there are."""
        with self._owner.lock:
            segments = [self._pool[n] for n in self._pool.numbers if not self._pool.is_going(n)]
            chosen = []
            for segment in sorted(segments, key=lambda s: (s.mean_use, s.id)):
                if size_bytes <= 0:
                    break
                size_bytes -= charge_of(segment.geometry)
                chosen.append(segment.id)
            return chosen

    def give_back(self, numbers: Sequence[SegmentId]) -> int:
        """Give segments back to the file system; how many bytes of charge that released so far.

        Those in which a row is being read follow when it has been read.
        """
        with self._working:
            with self._owner.lock:
                for number in numbers:
                    self._pool.retire(number)
                moves = [
                    move
                    for size_class in self._pool.classes
                    for move in self._plan(size_class, set(numbers))
                ]
            moves.sort(key=lambda move: move.target)
            for number, group in groupby(moves, key=lambda move: move.target.segment):
                with self._pool.using(number) as target:
                    for batch in _batches(list(group), target.geometry):
                        self._move(batch, target)
            return self._remove_idle()

    def lose(self, numbers: Collection[SegmentId]) -> None:
        """The files of segments are gone: so are their rows."""
        with self._working:
            with self._owner.lock:
                for number in numbers:
                    self._pool.retire(number)
            self._remove_idle()

    def finish(self) -> None:
        """Remove segments that were being read when they were given back."""
        with self._owner.lock:
            is_due = self._pool.has_going
        if is_due and self._working.acquire(blocking=False):
            try:
                self._remove_idle()
            finally:
                self._working.release()

    # -- the steps ------------------------------------------------------------------------------

    def _plan(self, size_class: SegmentGeometry, going: set[SegmentId]) -> list[Move]:
        """Decide which rows of a class stay, and where; the others leave.  Under the lock."""
        catalog, index, pool = self._catalog, self._catalog.index, self._pool
        policy = catalog.policies[size_class]
        leaving = [n for n in policy if index.place(n).segment in going]
        too_many = max(0, len(leaving) - pool.count_free(size_class))

        def stays(number: int) -> bool:
            place = index.place(number)
            is_elsewhere = pool.is_going(place.segment) and place.segment not in going
            return is_elsewhere or index.place_is_pinned(place)

        victims = [(catalog.key(n), index.place(n)) for n in policy.victims(too_many, stays)]
        targets = []
        for key, place in victims:
            is_going = place.segment in going
            catalog.withdraw(key, free=is_going)
            if not is_going:
                targets.append(place)
        catalog.announce((), [key for key, _ in victims])
        self._counters.rows_given_up += len(victims)
        gone = {place for _, place in victims}
        staying = [place for n in leaving if (place := index.place(n)) not in gone]
        targets += pool.take_free(size_class, len(staying) - len(targets))
        moves = []
        # Warmest first: of what can't be moved the coldest are lost.
        for source, target in zip(reversed(staying), sorted(targets), strict=False):
            index.pin(source)
            moves.append(Move(catalog.key(index.number(source)), source, target))
        for place in sorted(targets)[len(moves) :]:
            pool.withdraw(place, free=True)
        return moves

    def _move(self, batch: Sequence[Move], target: Segment) -> None:
        """Copy rows to slots of one segment and publish them there."""
        owner = self._owner
        stride, places = target.geometry.stride, [move.target.slot for move in batch]
        content = aligned_buffer(len(batch) * stride)
        slots = [content[i * stride : (i + 1) * stride] for i in range(len(batch))]
        whole = [move for move, slot in zip(batch, slots, strict=True) if self._read(move, slot)]
        try:
            with owner.lock:
                must_forget = target.may_be_named_on_disk(places)
            if must_forget:
                target.forget(owner.lock)
            for start, stop in runs(places):  # those that were not read are written and not named
                target.write_slots(places[start], content[start * stride : stop * stride])
            with owner.lock:
                for move in whole:
                    source = self._pool[move.source.segment]
                    use = int(source.entries["last_use"][move.source.slot])
                    record = source.record(move.source.slot)
                    target.name(move.target.slot, move.key, record, use)
                version = target.version
            target.flush_header(owner.lock, version)
        except DeviceError as exc:
            log.warning("rows not moved, and lost: %s", exc)
            with owner.lock:
                owner.space.write_failed(exc.errno, str(exc))
            whole = []
        with owner.lock:
            moved = set(whole)
            lost = [move for move in batch if move not in moved]
            for move in whole:
                self._catalog.index.unpin(move.source)
                self._catalog.move(move.key, move.target)
            for move in lost:
                self._catalog.index.unpin(move.source)
                self._pool.withdraw(move.target, free=True)
            self._counters.rows_moved += len(whole)

    def _read(self, move: Move, slot: memoryview) -> bool:
        """Whether a slot could be read and holds what the table says."""
        with self._owner.lock:
            record = self._pool[move.source.segment].record(move.source.slot)
        with self._pool.using(move.source.segment) as source:
            try:
                source.read_slots(move.source.slot, slot)
                reason = fault_of(slot, source.geometry, record)
            except (CorruptRecord, DeviceError) as exc:
                reason = str(exc)
            if reason is not None:
                log.warning("dropped row %s: %s", move.key.hex(), reason)
        return reason is None

    def _remove_idle(self) -> int:
        """Drop what is left in retired segments and remove those that nobody uses."""
        released = 0
        with self._owner.lock:
            ready = [
                number
                for number in self._pool.going
                if self._pool[number].is_idle and not self._catalog.index.has_pins_in(number)
            ]
            for number in ready:
                lost = self._catalog.drop_rows(self._pool[number])
                self._counters.rows_given_up += len(lost)
                self._pool.claim(number)
        for number in ready:
            charge = charge_of(self._pool[number].geometry)
            try:
                self._pool.remove(number)
            except DeviceError as exc:
                log.warning("segment %d stays: %s", number, exc)
            else:
                released += charge
        return released


def _batches(moves: list[Move], geometry: SegmentGeometry) -> list[list[Move]]:
    count = max(1, _BATCH_BYTES // geometry.stride)
    return [moves[start : start + count] for start in range(0, len(moves), count)]
