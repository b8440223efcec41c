"""Reading rows: every one is verified; what is not what was stored is dropped.

Pins are taken and results are taken in under the owner's lock, the device is called outside it.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from storage.errors import CorruptRecord, DeviceError
from storage.header import Record
from storage.index import RowIndex
from storage.jobs import Part, RowCounters
from storage.pool import Owner, SegmentPool
from storage.record import ReadRow
from storage.segment import ROWS_PER_CALL, Segment, runs
from storage.types import Location, RowKey, RowOutcome

log = logging.getLogger("kvtier.storage")

# Of a read: the fault is in this place on the disk, and stays there until it is overwritten.
_BAD_PLACE_ERRNOS = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA})

_CALL_BYTES = 8 << 20  # to the device at once: more gains nothing, and holds up who waits behind

ReadError = CorruptRecord | DeviceError


class RowReader:
    """Reads the rows of one namespace; its methods run on I/O threads.

    `drop` takes rows out of index, policy and table, under the lock.
    """

    def __init__(
        self,
        owner: Owner,
        pool: SegmentPool,
        index: RowIndex,
        counters: RowCounters,
        drop: Callable[[Sequence[RowKey]], None],
    ) -> None:
        self._owner = owner
        self._pool = pool
        self._index = index
        self._counters = counters
        self._drop = drop

    def read_part(self, part: Part) -> None:
        """Read the part's rows and report each."""
        started = time.monotonic()

        def report(position: int, outcome: RowOutcome) -> None:
            if part.report(position, outcome):
                self._count(outcome)

        self._read(part.keys, part.buffers, report, lambda: part.is_overdue)
        with self._owner.lock:
            self._counters.read_seconds += time.monotonic() - started

    def _count(self, outcome: RowOutcome) -> None:
        counters = self._counters
        match outcome:
            case RowOutcome.OK:
                counters.rows_read += 1
                counters.bytes_read += self._pool.geometry.row_bytes
            case RowOutcome.MISSING:
                counters.rows_missing += 1
            case RowOutcome.CORRUPT:
                counters.rows_corrupt += 1
            case _:
                counters.reads_failed += 1

    def _read(
        self,
        keys: Sequence[RowKey],
        buffers: Sequence[memoryview],
        report: Callable[[int, RowOutcome], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        """Read the rows of `keys` that are there; `report` is called under the lock, with a
        position in `keys`.  Stops between two calls to the device once `is_cancelled`."""
        planned: list[tuple[Location, int]] = []
        records: dict[Location, Record] = {}
        with self._owner.lock:
            for position, key in enumerate(keys):
                place = self._index.get(key)
                if place is None:
                    report(position, RowOutcome.MISSING)
                else:
                    self._index.pin(place)
                    records[place] = self._pool[place.segment].record(place.slot)
                    planned.append((place, position))
        planned.sort()
        begun = 0
        try:
            for start, stop in stretches([p for p, _ in planned], self._pool.geometry.row_bytes):
                if is_cancelled():
                    return
                stretch = planned[start:stop]
                rows = [ReadRow(p.slot, records[p], buffers[i]) for p, i in stretch]
                with self._pool.using(stretch[0][0].segment) as segment:
                    errors = segment.read_rows(rows)
                    begun = stop
                    self._take_in(keys, segment, stretch, errors, report)
        finally:  # cancelled, or a bug; the pins must go all the same
            with self._owner.lock:
                for place, _ in planned[begun:]:
                    self._index.unpin(place)

    def _take_in(
        self,
        keys: Sequence[RowKey],
        segment: Segment,
        stretch: list[tuple[Location, int]],
        errors: list[ReadError | None],
        report: Callable[[int, RowOutcome], None],
    ) -> None:
        """Unpin and report a stretch; drop what is wrong."""
        bad: list[tuple[RowKey, ReadError]] = []
        dropped: list[RowKey] = []
        space = self._owner.space
        with self._owner.lock:
            for (place, position), error in zip(stretch, errors, strict=True):
                self._index.unpin(place)
                key = keys[position]
                if error is None:
                    report(position, RowOutcome.OK)
                    space.read_succeeded()
                    continue
                bad.append((key, error))
                if isinstance(error, CorruptRecord):
                    report(position, RowOutcome.CORRUPT)
                else:
                    report(position, RowOutcome.FAILED)
                    space.read_failed(error.errno)
                    if error.errno not in _BAD_PLACE_ERRNOS:
                        continue
                # Another reader of the same row may have dropped it already, or does so next.
                if self._index.get(key) == place and not self._index.place_is_pinned(place):
                    dropped.append(key)
            self._drop(dropped)
        for key, error in bad:
            what = "dropped" if key in dropped else "could not read"
            log.warning("%s row %s: %s", what, key.hex(), error)
        if dropped:
            try:
                segment.flush_header(self._owner.lock)
            except DeviceError as exc:
                log.warning("could not record the loss of a row: %s", exc)


def rows_per_call(row_bytes: int) -> int:
    """How many rows one call to the device moves at most."""
    return max(1, min(ROWS_PER_CALL, _CALL_BYTES // row_bytes))


def stretches(places: Sequence[Location], row_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) positions of the stretches of `places` that one call reads or writes."""
    longest = rows_per_call(row_bytes)
    found: list[tuple[int, int]] = []
    start = 0
    for _, group in groupby(places, key=lambda place: place.segment):
        slots = [place.slot for place in group]
        found += [(start + first, start + stop) for first, stop in runs(slots, longest)]
        start += len(slots)
    return found
