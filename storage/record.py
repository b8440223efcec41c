"""How rows stand in slots: what is written for a run of rows, where a run is read into, and whether
what came is what was written.  Works on memory; does no I/O.

`WholeRows` move without a copy between the caller's page-aligned buffers and the disk; what belongs
to them, trailer and frame head, stands in pages of their own.  `PackedRows` pass through memory of
the I/O thread, encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from storage.checksum import TRAILER_BYTES, crc32c
from storage.codec import BadFrame, RowCodec
from storage.device import Scratch, aligned_buffer
from storage.header import FRAME_HEAD_BYTES, Record, SegmentGeometry
from storage.types import PAGE_BYTES, SlotId


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row to read: `buffer`, uint8[row_bytes] and writable, is the caller's until reported."""

    slot: SlotId
    record: Record
    buffer: memoryview


def fault_of(slot: memoryview, geometry: SegmentGeometry, record: Record) -> str | None:
    """What is wrong with a whole slot, as it stands on disk, in which `record` should be."""
    content = slot[geometry.lead_bytes : geometry.lead_bytes + record.length - TRAILER_BYTES]
    trailer = slot[geometry.lead_bytes + content.nbytes :]
    return _mismatch(crc32c(content), trailer, record)


class SlotFormat(Protocol):
    """Of the slots of one segment.  Methods work in the calling thread's own memory: what one
    returns is good until the thread's next call of any."""

    def lay_out(self, rows: Sequence[memoryview]) -> tuple[list[memoryview], list[Record]]:
        """What to write for rows in consecutive slots, and what then stands in each."""
        ...

    def targets(self, rows: Sequence[ReadRow]) -> list[memoryview]:
        """Where to read consecutive slots into."""
        ...

    def accept(self, rows: Sequence[ReadRow], targets: Sequence[memoryview]) -> list[str | None]:
        """Once `targets` are filled: fill each row's buffer, or say what is wrong with it."""
        ...


def slot_format(geometry: SegmentGeometry, codec: RowCodec | None, *, direct: bool) -> SlotFormat:
    """The format of a segment's slots; `direct` if every buffer must stand on a page boundary."""
    if geometry.is_packed:
        assert codec is not None
        return PackedRows(geometry, codec)
    return WholeRows(geometry, codec.head if codec is not None else b"", direct=direct)


_scratch = Scratch()


class WholeRows:
    """`[row][page that begins with the trailer]`; under a codec a page before them ends in the head
    of a frame."""

    def __init__(self, geometry: SegmentGeometry, head: bytes, *, direct: bool) -> None:
        assert geometry.lead_bytes + len(head) in (0, PAGE_BYTES)
        self._head = head
        self._head_checksum = crc32c(head)
        self._record_bytes = geometry.record_bytes
        self._direct = direct

    def lay_out(self, rows: Sequence[memoryview]) -> tuple[list[memoryview], list[Record]]:
        trailers, leads = self._pages(len(rows))
        buffers = []
        records = []
        for position, row in enumerate(rows):
            if self._direct and not _aligned(row):
                bounce = aligned_buffer(row.nbytes)
                bounce[:] = row
                row = bounce
            if self._head:
                lead = _page(leads, position)
                lead[-FRAME_HEAD_BYTES:] = self._head
                buffers.append(lead)
            checksum = crc32c(row, self._head_checksum)
            trailer = _page(trailers, position)
            trailer[:TRAILER_BYTES] = checksum.to_bytes(TRAILER_BYTES, "little")
            buffers += [row, trailer]
            records.append(Record(self._record_bytes, checksum))
        return buffers, records

    def targets(self, rows: Sequence[ReadRow]) -> list[memoryview]:
        trailers, leads = self._pages(len(rows))
        targets = []
        for position, row in enumerate(rows):
            if self._head:
                targets.append(_page(leads, position))
            is_fit = not self._direct or _aligned(row.buffer)
            targets.append(row.buffer if is_fit else aligned_buffer(row.buffer.nbytes))
            targets.append(_page(trailers, position))
        return targets

    def accept(self, rows: Sequence[ReadRow], targets: Sequence[memoryview]) -> list[str | None]:
        step = 3 if self._head else 2
        reasons: list[str | None] = []
        for position, row in enumerate(rows):
            *leads, content, trailer = targets[position * step : (position + 1) * step]
            if self._head and leads[0][-FRAME_HEAD_BYTES:] != self._head:
                reasons.append("not the head of a raw row's frame")
                continue
            reason = _mismatch(crc32c(content, self._head_checksum), trailer, row.record)
            reasons.append(reason)
            if reason is None and content is not row.buffer:
                row.buffer[:] = content
        return reasons

    def _pages(self, count: int) -> tuple[memoryview, memoryview]:
        """Pages for the trailers of `count` rows, and for their heads if they have any."""
        pages = _scratch.take((2 if self._head else 1) * count * PAGE_BYTES)
        return pages[: count * PAGE_BYTES], pages[count * PAGE_BYTES :]


class PackedRows:
    """`[frame][trailer][what is left of the slot's pages]`"""

    def __init__(self, geometry: SegmentGeometry, codec: RowCodec) -> None:
        self._stride = geometry.stride
        self._codec = codec

    def lay_out(self, rows: Sequence[memoryview]) -> tuple[list[memoryview], list[Record]]:
        """`rows` are frames here."""
        area = _scratch.take(len(rows) * self._stride)
        records = []
        for position, frame in enumerate(rows):
            slot = self._slot(area, position)
            length = frame.nbytes + TRAILER_BYTES
            checksum = crc32c(frame)
            slot[: frame.nbytes] = frame
            slot[frame.nbytes : length] = checksum.to_bytes(TRAILER_BYTES, "little")
            records.append(Record(length, checksum))
        return [area], records

    def targets(self, rows: Sequence[ReadRow]) -> list[memoryview]:
        return [_scratch.take(len(rows) * self._stride)]

    def accept(self, rows: Sequence[ReadRow], targets: Sequence[memoryview]) -> list[str | None]:
        reasons: list[str | None] = []
        for position, row in enumerate(rows):
            slot = self._slot(targets[0], position)
            frame = slot[: row.record.length - TRAILER_BYTES]
            reason = _mismatch(crc32c(frame), slot[frame.nbytes :], row.record)
            if reason is None:
                try:
                    self._codec.decode(frame, row.buffer)
                except BadFrame as exc:
                    reason = str(exc)
            reasons.append(reason)
        return reasons

    def _slot(self, area: memoryview, position: int) -> memoryview:
        return area[position * self._stride : (position + 1) * self._stride]


def _mismatch(found: int, trailer: memoryview, record: Record) -> str | None:
    """What is wrong with a record whose bytes before the trailer have the checksum `found`."""
    said = int.from_bytes(trailer[:TRAILER_BYTES], "little")
    if found == said == record.checksum:
        return None
    return (
        f"crc32c of the record {found:08x}, of its trailer {said:08x}, "
        f"of the key table {record.checksum:08x}"
    )


def _page(pages: memoryview, position: int) -> memoryview:
    return pages[position * PAGE_BYTES : (position + 1) * PAGE_BYTES]


def _aligned(view: memoryview) -> bool:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address % PAGE_BYTES == 0 and view.nbytes % PAGE_BYTES == 0
