"""Rows read from their files by somebody who does not own the root: every one is verified.

Beside a running store a row may be overwritten between the look at its table and the look at its
slot.  So a fault counts only if the table still names the same record afterwards; otherwise the row
is gone, which is nobody's fault.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from storage.checksum import TRAILER_BYTES, crc32c
from storage.codec import BadFrame
from storage.device import Device, ReadOnlyDevice, aligned_buffer, read_fully
from storage.errors import CorruptRecord, DeviceError
from storage.header import Record
from storage.reading import rows_per_call
from storage.record import fault_of
from storage.segment import runs
from storage.survey import NamespaceSurvey, SegmentSurvey, newest_table
from storage.types import RowKey, SlotId


class RowOnDisk(NamedTuple):
    """One row that a table named.  `row` is uint8[row_bytes], the caller's until the next one is
    asked for; None if there is a `fault`, or if neither: the row is gone since."""

    segment: SegmentSurvey
    slot: SlotId
    key: RowKey
    row: memoryview | None
    fault: str | None


class Checksums(NamedTuple):
    """crc32c of one record: as the key table, its own trailer and its bytes say."""

    table: int
    trailer: int
    content: int


class RowInspector:
    """Reads the rows of one surveyed namespace.  Used by one thread."""

    def __init__(self, namespace: NamespaceSurvey, device: Device | None = None) -> None:
        assert namespace.geometry is not None, "rows of no size"
        self._namespace = namespace
        self._row_bytes = namespace.geometry.row_bytes
        self._device = device or ReadOnlyDevice()

    def rows(
        self, segment: SegmentSurvey, slots: Sequence[SlotId] | None = None
    ) -> Iterator[RowOnDisk]:
        """The rows of a segment, or of some of its slots (ascending), in order.

        A device that fails makes a fault of the rows that it fails; one that has lost the file,
        none.
        """
        named = [SlotId(int(slot)) for slot in segment.named] if slots is None else list(slots)
        try:
            fd = self._open(segment.path)
        except DeviceError as exc:
            fault = None if exc.errno == errno.ENOENT else str(exc)
            for slot in named:
                yield RowOnDisk(segment, slot, RowKey(segment.key(slot)), None, fault)
            return
        try:
            stride = segment.geometry.stride
            longest = rows_per_call(stride)
            area = aligned_buffer(min(longest, max(1, len(named))) * stride)
            decoded = memoryview(bytearray(self._row_bytes))
            for start, stop in runs(named, longest):
                yield from self._stretch(fd, segment, named[start:stop], area, decoded)
        finally:
            self._device.close(fd)

    def checksums(self, segment: SegmentSurvey, slot: SlotId) -> Checksums:
        """Raises `DeviceError` or `CorruptRecord` if the slot can't be read."""
        record = _record(segment, slot)
        content = aligned_buffer(segment.geometry.stride)
        fd = self._open(segment.path)
        try:
            offset = segment.geometry.row_offset(slot)
            read_fully(self._device, fd, [content], offset, str(segment.path))
        finally:
            self._device.close(fd)
        stored = content[segment.geometry.lead_bytes :][: record.length]
        trailer = int.from_bytes(stored[-TRAILER_BYTES:], "little")
        return Checksums(record.checksum, trailer, crc32c(stored[:-TRAILER_BYTES]))

    def _open(self, path: Path) -> int:
        """Past the page cache where that is possible: what counts is what the drive has."""
        try:
            return self._device.open(path, direct=True)
        except DeviceError as exc:
            if exc.errno != errno.EINVAL:
                raise
            return self._device.open(path)

    def _stretch(
        self,
        fd: int,
        segment: SegmentSurvey,
        slots: Sequence[SlotId],
        area: memoryview,
        decoded: memoryview,
    ) -> Iterator[RowOnDisk]:
        """Consecutive slots; where they can't be read together, each alone."""
        stride = segment.geometry.stride
        content = area[: len(slots) * stride]
        offset = segment.geometry.row_offset(slots[0])
        error: str | None = None
        try:
            read_fully(self._device, fd, [content], offset, str(segment.path))
        except (CorruptRecord, DeviceError) as exc:
            if len(slots) > 1:
                for slot in slots:
                    yield from self._stretch(fd, segment, [slot], area, decoded)
                return
            error = str(exc)
        for position, slot in enumerate(slots):
            key = RowKey(segment.key(slot))
            row, fault = None, error
            if error is None:
                part = content[position * stride : (position + 1) * stride]
                row, fault = self._row_in(part, segment, slot, decoded)
            if fault is not None and not self._is_named_still(fd, segment, slot):
                fault = None
            yield RowOnDisk(segment, slot, key, row, fault)

    def _row_in(
        self, content: memoryview, segment: SegmentSurvey, slot: SlotId, decoded: memoryview
    ) -> tuple[memoryview | None, str | None]:
        """(row, fault) of a slot's content."""
        record = _record(segment, slot)
        fault = fault_of(content, segment.geometry, record)
        if fault is not None:
            return None, fault
        stored = content[segment.geometry.lead_bytes :][: record.length - TRAILER_BYTES]
        if self._namespace.codec is None:
            return stored, None
        try:
            self._namespace.codec.decode(stored, decoded)
        except BadFrame as exc:
            return None, str(exc)
        return decoded, None

    def _is_named_still(self, fd: int, segment: SegmentSurvey, slot: SlotId) -> bool:
        """Whether the newest table on disk has the same record in a slot as the survey."""
        entries = newest_table(self._device, fd, segment.geometry, self._namespace.fingerprint)
        if entries is None:
            return True
        return bool(
            entries["key_bytes"][slot] == segment.entries["key_bytes"][slot]
            and entries["key"][slot].tobytes() == segment.entries["key"][slot].tobytes()
            and entries["checksum"][slot] == segment.entries["checksum"][slot]
        )


def _record(segment: SegmentSurvey, slot: SlotId) -> Record:
    entry = segment.entries[slot]
    return Record(int(entry["length"]), int(entry["checksum"]))
