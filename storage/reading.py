"""Reading rows: every one is verified; what is not what was stored is dropped.

The rows of jobs are read into their buffers; the scrubber's are read, looked at and forgotten.
Pins are taken and results are taken in under the owner's lock, the device is called outside it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from storage.catalog import Catalog
from storage.checksum import TRAILER_BYTES, crc32c
from storage.device import aligned_buffer
from storage.errors import CorruptRecord, DeviceError
from storage.header import Record
from storage.jobs import Part, RowCounters
from storage.namespace import Json
from storage.pool import Owner
from storage.record import ReadRow, fault_of
from storage.segment import ROWS_PER_CALL, Segment, runs
from storage.types import Location, RowKey, RowOutcome

log = logging.getLogger("kvtier.storage")

# Of a read: the fault is in this place on the disk, and stays there until it is overwritten; of a
# write it may be in the place.
BAD_PLACE_ERRNOS = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA})

_CALL_BYTES = 4 << 20  # to the device at once: more gains nothing, and holds up who waits behind

ReadError = CorruptRecord | DeviceError


class RowReader:
    """Reads the rows of one namespace; its methods run on I/O threads.

    A row that is dropped leaves its slot to the reader, which gives it back once it is kept.
    """

    def __init__(
        self,
        owner: Owner,
        catalog: Catalog,
        counters: RowCounters,
    ) -> None:
        self._owner = owner
        self._catalog = catalog
        self._pool = catalog.pool
        self._index = catalog.index
        self._counters = counters
        self._keeping = threading.Lock()  # of the quarantine, which is one for the root

    def read_part(self, part: Part) -> None:
        """Read the part's rows and report each."""
        started = time.monotonic()

        def report(position: int, outcome: RowOutcome) -> None:
            if part.report(position, outcome):
                self._count(outcome)

        self._read(part.keys, part.buffers, report, lambda: part.is_overdue)
        with self._owner.lock:
            self._counters.read_seconds += time.monotonic() - started

    def verify(self, keys: Sequence[RowKey]) -> None:
        """Verify rows as they stand on disk, for the scrubber.  Counts and drops what is wrong."""
        planned: list[tuple[Location, int]] = []
        records: dict[Location, Record] = {}
        with self._owner.lock:
            for position, key in enumerate(keys):
                place = self._index.get(key)
                if place is not None:
                    self._index.pin(place)
                    records[place] = self._pool[place.segment].record(place.slot)
                    planned.append((place, position))
        planned.sort()
        begun = 0
        try:
            for start, stop in stretches([p for p, _ in planned], self._pool.geometry.row_bytes):
                stretch = planned[start:stop]
                with self._pool.using(stretch[0][0].segment) as segment:
                    errors = _verify_slots(segment, [(p, records[p]) for p, _ in stretch])
                    begun = stop
                    self._take_in(keys, segment, stretch, errors, self._count_scrubbed)
        finally:
            with self._owner.lock:
                for place, _ in planned[begun:]:
                    self._index.unpin(place)

    def _count_scrubbed(self, _position: int, outcome: RowOutcome) -> None:
        self._counters.rows_scrubbed += 1
        if outcome is not RowOutcome.OK:
            self._counters.rows_scrubbed_corrupt += 1

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
        dropped: dict[RowKey, tuple[Location, Record]] = {}
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
                    space.place_failed(error.errno)
                    if error.errno not in BAD_PLACE_ERRNOS:
                        continue
                # Another reader of the same row may have dropped it already, or does so next.
                if self._index.get(key) == place and not self._index.place_is_pinned(place):
                    dropped[key] = place, segment.record(place.slot)
            self._catalog.drop(list(dropped))
        for key, error in bad:
            what = "dropped" if key in dropped else "could not read"
            log.warning("%s row %s: %s", what, key.hex(), error)
            if key in dropped and isinstance(error, CorruptRecord):
                self._keep(key, segment, *dropped[key], error.reason)
        if dropped:
            with self._owner.lock:
                for place, _ in dropped.values():
                    self._pool.withdraw(place, free=True)
            try:
                segment.flush_header(self._owner.lock)
            except DeviceError as exc:
                log.warning("could not record the loss of a row: %s", exc)

    def _keep(
        self, key: RowKey, segment: Segment, place: Location, record: Record, reason: str
    ) -> None:
        """Put what stands in a slot, which is ours, into the quarantine."""
        quarantine = self._owner.quarantine
        if not quarantine.is_on:
            return
        slot = aligned_buffer(segment.geometry.stride)
        try:
            segment.read_slots(place.slot, slot)
        except (CorruptRecord, DeviceError) as exc:
            log.warning("not kept: %s", exc)
            return
        content = slot[segment.geometry.lead_bytes :][: record.length]
        name = f"{self._pool.identity.directory}-{place.segment}-{place.slot}"
        attributes: dict[str, Json] = {
            "key": key.hex(),
            "segment": place.segment,
            "slot": place.slot,
            "path": str(segment.path),
            "checksum_expected": f"{record.checksum:08x}",
            "checksum_found": f"{crc32c(content[:-TRAILER_BYTES]):08x}",
            "checksum_of_trailer": f"{int.from_bytes(content[-TRAILER_BYTES:], 'little'):08x}",
            "reason": reason,
        }
        with self._keeping:
            quarantine.keep(name, content, attributes)


def _verify_slots(
    segment: Segment, slots: Sequence[tuple[Location, Record]]
) -> list[ReadError | None]:
    """What is wrong with consecutive slots, each.  A fault in one does not fail its neighbours."""
    stride = segment.geometry.stride
    content = aligned_buffer(len(slots) * stride)
    try:
        segment.read_slots(slots[0][0].slot, content)
    except (CorruptRecord, DeviceError) as exc:
        if len(slots) == 1:
            return [exc]
        return [error for slot in slots for error in _verify_slots(segment, [slot])]
    errors: list[ReadError | None] = []
    for position, (place, record) in enumerate(slots):
        slot = content[position * stride : (position + 1) * stride]
        reason = fault_of(slot, segment.geometry, record)
        errors.append((reason and CorruptRecord(segment.place(place.slot), reason)) or None)
    return errors


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
