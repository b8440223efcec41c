from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from storage.device import LocalDevice
from storage.errors import CorruptRecord, DeviceError
from storage.header import Record, SegmentGeometry
from storage.record import ReadRow
from storage.segment import ROWS_PER_CALL, Segment, partial_path, runs, segment_path
from storage.testing.faulty import (
    Fault,
    FaultyDevice,
    FlipBit,
    Raise,
    Shorten,
    each_operation,
)
from storage.testing.rows import aligned_rows, files_under, filled_rows, key_of
from storage.types import SegmentId, SlotId

GEOMETRY = SegmentGeometry(8192, 6)
NAMESPACE = bytes(16)
LOCK = threading.Lock()
ALL_SLOTS = [SlotId(n) for n in range(GEOMETRY.slots_per_segment)]


def create(device: FaultyDevice, path: Path) -> Segment:
    return Segment.create(device, path, SegmentId(0), GEOMETRY, NAMESPACE, direct=False)


def reopen(path: Path) -> Segment:
    return Segment.open(LocalDevice(), path, SegmentId(0), GEOMETRY, NAMESPACE, direct=False)


@pytest.fixture
def device() -> FaultyDevice:
    return FaultyDevice(LocalDevice())


def publish(segment: Segment, numbers: range) -> list[int]:
    """Rows of `key_of(n)` into slot n, named and flushed; their records."""
    rows = filled_rows([key_of(n) for n in numbers], GEOMETRY.row_bytes)
    records = segment.write_rows(SlotId(numbers.start), rows)
    with LOCK:
        for n, record in zip(numbers, records, strict=True):
            segment.name(SlotId(n), key_of(n), record, n)
    segment.flush_header(LOCK)
    return records


def test_a_segment_describes_itself(device: FaultyDevice, memory_path: Path) -> None:
    segment = create(device, memory_path)
    records = publish(segment, range(1, 4))
    segment.close()
    assert files_under(memory_path) == ["c/0/0"]
    again = reopen(memory_path)
    assert again.rows() == [(n, key_of(n), n) for n in (1, 2, 3)]
    assert again.take_free(9) == [0, 4, 5]
    assert again.last_use == 3
    buffers = aligned_rows(3, GEOMETRY.row_bytes, fill=7)
    asked = [ReadRow(SlotId(n), c, buffers[n - 1]) for n, c in zip((1, 2, 3), records, strict=True)]
    assert again.read_rows(asked) == [None] * 3
    assert buffers == filled_rows([key_of(n) for n in (1, 2, 3)], GEOMETRY.row_bytes)
    again.close()


def test_slots_come_lowest_first_and_come_back(device: FaultyDevice, memory_path: Path) -> None:
    segment = create(device, memory_path)
    assert segment.take_free(4) == [0, 1, 2, 3]
    segment.withdraw(SlotId(2), free=True)
    segment.withdraw(SlotId(1), free=False)
    assert segment.free_count == 3
    assert segment.take_free(9) == [2, 4, 5]
    assert segment.take_free(1) == []
    assert segment.last_use == -1
    segment.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failed_creation_leaves_nothing(memory_path: Path, code: int) -> None:
    failed = 0
    for number, device in enumerate(each_operation(LocalDevice, Raise(code))):
        directory = memory_path / str(number)
        try:
            segment = create(device, directory)
        except DeviceError:
            assert files_under(directory) == []
            failed += 1
        else:
            device.faults.clear()
            segment.close()
            assert files_under(directory) == ["c/0/0"]
    # make_directory, open, allocate, pwritev, rename; a failed removal of nothing is no failure.
    assert failed == 5


def test_a_partial_file_that_could_not_be_removed_is_replaced(memory_path: Path) -> None:
    device = FaultyDevice(
        LocalDevice(), Fault(Raise(errno.EIO), "pwritev"), Fault(Raise(errno.EIO), "remove")
    )
    with pytest.raises(DeviceError):
        create(device, memory_path)
    assert partial_path(memory_path, SegmentId(0)).exists()
    device.faults.clear()
    create(device, memory_path).close()
    assert files_under(memory_path) == ["c/0/0"]


def test_short_transfers_of_rows(device: FaultyDevice, memory_path: Path) -> None:
    segment = create(device, memory_path)
    device.add(Shorten(1000))
    records = publish(segment, range(6))
    buffers = aligned_rows(6, GEOMETRY.row_bytes, fill=7)
    asked = [ReadRow(SlotId(n), records[n], buffers[n]) for n in range(6)]
    assert segment.read_rows(asked) == [None] * 6
    assert buffers == filled_rows([key_of(n) for n in range(6)], GEOMETRY.row_bytes)
    assert device.count("preadv") > 70
    segment.close()


@pytest.mark.parametrize("offset", [0, 4096, 8191, 8192, 8195])
def test_a_bad_row_does_not_fail_its_neighbours(
    device: FaultyDevice, memory_path: Path, offset: int
) -> None:
    segment = create(device, memory_path)
    records = publish(segment, range(3))
    with segment_path(memory_path, SegmentId(0)).open("r+b") as file:
        file.seek(GEOMETRY.row_offset(1) + offset)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 0x10]))
    buffers = aligned_rows(3, GEOMETRY.row_bytes)
    asked = [ReadRow(SlotId(n), records[n], buffers[n]) for n in range(3)]
    results = segment.read_rows(asked)
    assert [type(result) for result in results] == [type(None), CorruptRecord, type(None)]
    assert "slot 1" in str(results[1])
    assert buffers[2] == filled_rows([key_of(2)], GEOMETRY.row_bytes)[0]
    segment.close()


def test_a_bit_that_flips_on_its_way_is_seen(device: FaultyDevice, memory_path: Path) -> None:
    segment = create(device, memory_path)
    device.add(FlipBit(100), "pwritev", nth=1)
    records = publish(segment, range(2))
    buffers = aligned_rows(2, GEOMETRY.row_bytes)
    asked = [ReadRow(SlotId(n), records[n], buffers[n]) for n in range(2)]
    results = segment.read_rows(asked)
    assert isinstance(results[0], CorruptRecord)
    assert results[1] is None
    device.faults.clear()
    device.add(FlipBit(12288 + 5), "preadv", nth=1)
    results = segment.read_rows(asked)
    assert isinstance(results[0], CorruptRecord)
    assert isinstance(results[1], CorruptRecord)
    assert segment.read_rows(asked)[1] is None
    segment.close()


def test_a_device_error_in_a_run_is_the_error_of_that_row(
    device: FaultyDevice, memory_path: Path
) -> None:
    segment = create(device, memory_path)
    records = publish(segment, range(3))
    bad = GEOMETRY.row_offset(1)
    device.add(
        Raise(errno.EIO), "preadv", when=lambda op: op.offset <= bad < op.offset + op.size_bytes
    )
    buffers = aligned_rows(3, GEOMETRY.row_bytes)
    results = segment.read_rows([ReadRow(SlotId(n), records[n], buffers[n]) for n in range(3)])
    assert [type(result) for result in results] == [type(None), DeviceError, type(None)]
    segment.close()


@pytest.mark.parametrize("size", [0, 1, 4096, GEOMETRY.header_bytes, GEOMETRY.row_offset(2) + 100])
def test_a_file_cut_short_loses_the_rows_that_it_lost(
    device: FaultyDevice, memory_path: Path, size: int
) -> None:
    segment = create(device, memory_path)
    publish(segment, range(4))
    segment.close()
    path = segment_path(memory_path, SegmentId(0))
    with path.open("r+b") as file:
        file.truncate(size)
    again = reopen(memory_path)
    kept = 2 if size > GEOMETRY.row_offset(2) else 0
    assert [slot for slot, _, _ in again.rows()] == list(range(kept))
    assert again.free_count == 6 - kept
    assert path.stat().st_size == GEOMETRY.segment_bytes
    again.flush_header(LOCK)
    again.close()
    once_more = reopen(memory_path)
    assert len(once_more.rows()) == kept
    once_more.close()


def test_a_file_that_grew_is_cut(device: FaultyDevice, memory_path: Path) -> None:
    segment = create(device, memory_path)
    publish(segment, range(4))
    segment.close()
    path = segment_path(memory_path, SegmentId(0))
    with path.open("ab") as file:
        file.write(bytes(100_000))
    again = reopen(memory_path)
    assert len(again.rows()) == 4
    assert path.stat().st_size == GEOMETRY.segment_bytes
    again.close()


def test_a_header_write_serves_all_changes_so_far(device: FaultyDevice, memory_path: Path) -> None:
    segment = create(device, memory_path)
    publish(segment, range(2))
    writes = device.count("pwritev")
    segment.flush_header(LOCK)
    assert device.count("pwritev") == writes
    segment.withdraw(SlotId(0), free=True)
    segment.withdraw(SlotId(1), free=True)
    segment.flush_header(LOCK)
    assert device.count("pwritev") == writes + 2
    assert not segment.may_be_named_on_disk(ALL_SLOTS)
    segment.close()


def test_what_a_failed_header_write_may_have_named_stays_named(
    device: FaultyDevice, memory_path: Path
) -> None:
    segment = create(device, memory_path)
    publish(segment, range(2))
    for nth in (1, 2):  # the table, the index
        fault = device.add(Raise(errno.EIO), "pwritev", nth=nth)
        segment.withdraw(SlotId(0), free=False)
        segment.name(SlotId(3), key_of(3), Record(4100, 0), 9)
        with pytest.raises(DeviceError):
            segment.flush_header(LOCK)
        device.faults.remove(fault)
        assert all(segment.may_be_named_on_disk([SlotId(n)]) for n in (1, 3))
        segment.withdraw(SlotId(3), free=False)
    segment.flush_header(LOCK)
    assert [n for n in ALL_SLOTS if segment.may_be_named_on_disk([n])] == [1]
    segment.close()


def test_removal_gives_everything_back_even_if_close_complains(
    device: FaultyDevice, memory_path: Path
) -> None:
    segment = create(device, memory_path)
    device.add(Raise(errno.EIO), "close")
    segment.remove()
    assert not (memory_path / "c" / "0").exists()


def test_runs_are_consecutive_and_not_too_long() -> None:
    def of(*slots: int) -> list[tuple[int, int]]:
        return runs([SlotId(slot) for slot in slots])

    assert of() == []
    assert of(3) == [(0, 1)]
    assert of(1, 2, 3, 5, 6, 9) == [(0, 3), (3, 5), (5, 6)]
    assert of(5, 5, 6) == [(0, 1), (1, 3)]
    assert of(*range(ROWS_PER_CALL + 1)) == [(0, ROWS_PER_CALL), (ROWS_PER_CALL, ROWS_PER_CALL + 1)]
