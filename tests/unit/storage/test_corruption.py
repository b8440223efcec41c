"""Bytes that changed behind the store's back: exactly that row is a miss, and is repaired."""

from __future__ import annotations

import dataclasses
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.device import LocalDevice
from storage.namespace import Identity
from storage.segment import segment_path
from storage.space import NAMESPACE_OVERHEAD_BYTES, ROOT_OVERHEAD_BYTES
from storage.store import DiskStore
from storage.testing.contract import MARK, StoreHarness
from storage.testing.faulty import FaultyDevice, Raise
from storage.testing.rows import aligned_rows, bytes_on_disk, filled_rows, key_of, row_of
from storage.types import Location, RowKey, RowOutcome, SegmentId

OK, MISSING, CORRUPT = RowOutcome.OK, RowOutcome.MISSING, RowOutcome.CORRUPT
KEYS = [key_of(i) for i in range(40)]


@pytest.fixture
def harness(memory_path: Path) -> Iterator[StoreHarness]:
    harness = StoreHarness(memory_path / "root")
    yield harness
    harness.close()


def path_of(harness: StoreHarness, place: Location) -> Path:
    return segment_path(harness.rows.directory, place.segment)


def place_of(harness: StoreHarness, key: RowKey) -> Location:
    place = harness.rows.locate(key)
    assert place is not None
    return place


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def peek(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def outcomes(harness: StoreHarness, keys: list[RowKey]) -> list[RowOutcome]:
    """Of a read whose good rows are checked byte for byte."""
    results = harness.read(keys)
    for key, (outcome, row) in zip(keys, results, strict=True):
        if outcome is OK:
            assert row == row_of(key, harness.row_bytes)
        elif outcome is MISSING:
            assert row == bytes([MARK]) * harness.row_bytes
    return [outcome for outcome, _ in results]


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 4096, 8191, 8192, 8195])
def test_a_flipped_bit(harness: StoreHarness, offset: int, is_reopened: bool) -> None:
    """At the start, in the middle and in the last byte of the row, and in its trailer."""
    harness.write(KEYS[:6])
    place = place_of(harness, KEYS[1])
    path, at = path_of(harness, place), harness.rows.geometry.row_offset(place.slot) + offset
    patch(path, at, bytes([peek(path, at, 1)[0] ^ 0x40]))
    if is_reopened:
        harness.reopen()
    withdrawn: list[RowKey] = []
    harness.rows.on_change = lambda _new, gone: withdrawn.extend(gone)
    assert outcomes(harness, KEYS[:6]) == [OK, CORRUPT, OK, OK, OK, OK]
    assert withdrawn == [KEYS[1]]
    assert harness.rows.count().rows_corrupt == 1
    assert harness.rows.count().rows_read == 5
    assert outcomes(harness, KEYS[:3]) == [OK, MISSING, OK]
    harness.reopen()
    assert outcomes(harness, KEYS[:3]) == [OK, MISSING, OK]
    assert (
        harness.write(KEYS[:6]) == [RowOutcome.ALREADY_STORED, OK] + [RowOutcome.ALREADY_STORED] * 4
    )
    assert outcomes(harness, KEYS[:6]) == [OK] * 6


def test_one_failed_load_not_one_per_request(harness: StoreHarness) -> None:
    harness.write(KEYS[:2])
    place = place_of(harness, KEYS[0])
    patch(path_of(harness, place), harness.rows.geometry.row_offset(place.slot), b"XXXX")
    found = [outcomes(harness, [KEYS[0]])[0] for _ in range(100) if KEYS[0] in harness.rows]
    assert found == [CORRUPT]


def test_rows_that_changed_places_are_caught_both(harness: StoreHarness) -> None:
    """Each has a right trailer; the checksum in the key table belongs to the name."""
    harness.write(KEYS[:4])
    one, two = place_of(harness, KEYS[0]), place_of(harness, KEYS[2])
    geometry = harness.rows.geometry
    places = [(path_of(harness, p), geometry.row_offset(p.slot)) for p in (one, two)]
    records = [peek(path, at, geometry.stride) for path, at in places]
    for (path, at), record in zip(places, reversed(records), strict=True):
        patch(path, at, record)
    assert outcomes(harness, KEYS[:4]) == [CORRUPT, OK, CORRUPT, OK]


def test_an_old_row_under_a_new_name_is_caught(harness: StoreHarness) -> None:
    """What a lost write of the row leaves, its header having reached the disk."""
    harness.write(KEYS[:4])
    place = place_of(harness, KEYS[0])
    path, at = path_of(harness, place), harness.rows.geometry.row_offset(place.slot)
    old = peek(path, at, harness.rows.geometry.stride)
    harness.rows.remove([KEYS[0]])
    assert harness.write([KEYS[9]]) == [OK]
    assert place_of(harness, KEYS[9]) == place
    patch(path, at, old)
    assert outcomes(harness, [KEYS[9], KEYS[1]]) == [CORRUPT, OK]


def test_segment_files_that_changed_places_are_right_or_missing(harness: StoreHarness) -> None:
    harness.write(KEYS[:8])
    one, two = (segment_path(harness.rows.directory, SegmentId(n)) for n in (0, 1))
    harness.close()
    one.rename(one.with_name("x"))
    two.rename(one)
    one.with_name("x").rename(two)
    harness.open()
    assert outcomes(harness, KEYS[:8]) == [OK] * 8, "a segment describes itself"


def test_a_segment_of_another_namespace_is_not_read(memory_path: Path) -> None:
    """The same keys, the same geometry, other bytes: as after a file system's mix-up."""
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:4])
    harness.close()
    store = DiskStore.open(harness.options)
    other = store.open_rows(Identity("test/model", {"layout": "other"}), harness.row_bytes)
    rows = aligned_rows(4, harness.row_bytes, fill=9)
    assert other.write(KEYS[:4], rows).outcomes == [OK] * 4
    source = segment_path(other.directory, SegmentId(0))
    store.close()
    shutil.copyfile(source, segment_path(harness.rows.directory, SegmentId(0)))
    harness.open()
    assert outcomes(harness, KEYS[:4]) == [MISSING] * 4
    assert harness.write(KEYS[:4]) == [OK] * 4
    assert outcomes(harness, KEYS[:4]) == [OK] * 4
    harness.close()


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_a_segment_cut_short(harness: StoreHarness, share: float, is_reopened: bool) -> None:
    """Zarr 3.1 reads what is missing as fill value; we do not."""
    harness.write(KEYS[:8])
    path = segment_path(harness.rows.directory, SegmentId(0))
    if is_reopened:
        harness.close()
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    if is_reopened:
        harness.open()
    bad = MISSING if is_reopened else CORRUPT
    left = 2 if share == 0.6 else 0
    assert outcomes(harness, KEYS[:8]) == [OK] * left + [bad] * (4 - left) + [OK] * 4
    assert outcomes(harness, KEYS[:8]) == [OK] * left + [MISSING] * (4 - left) + [OK] * 4
    stored = harness.write(KEYS[:8])
    assert stored.count(OK) == 4 - left
    used = harness.store.usage().used_bytes
    assert (
        used == ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 2 * harness.rows.pool.charge_bytes
    )
    assert bytes_on_disk(harness.options.root) <= used
    harness.reopen()
    assert outcomes(harness, KEYS[:8]) == [OK] * 8
    assert path.stat().st_blocks * 512 >= harness.rows.geometry.segment_bytes


def test_a_segment_cut_short_that_has_no_room_to_be_whole_is_removed(memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:16])
    charge = harness.rows.pool.charge_bytes
    harness.close()
    with segment_path(harness.rows.directory, SegmentId(1)).open("r+b") as file:
        file.truncate(4096)
    budget = harness.options.budget_bytes - charge
    harness.options = dataclasses.replace(harness.options, budget_bytes=budget)
    harness.open()
    assert outcomes(harness, KEYS[:16]).count(OK) == 12
    usage = harness.store.usage()
    assert usage.used_bytes == ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 3 * charge
    assert bytes_on_disk(harness.options.root) <= usage.used_bytes <= budget
    harness.close()


def test_a_segment_full_of_zeros_and_rows_full_of_zeros(harness: StoreHarness) -> None:
    harness.write(KEYS[:4])
    path = segment_path(harness.rows.directory, SegmentId(0))
    geometry = harness.rows.geometry
    patch(path, geometry.header_bytes, bytes(geometry.segment_bytes - geometry.header_bytes))
    assert outcomes(harness, KEYS[:4]) == [CORRUPT] * 4
    zeros = aligned_rows(1, harness.row_bytes)
    assert harness.rows.write([KEYS[5]], zeros).outcomes == [OK]
    harness.reopen()
    read = aligned_rows(1, harness.row_bytes, fill=MARK)
    assert harness.rows.read([KEYS[5]], read).outcomes == [OK]
    assert bytes(read[0]) == bytes(harness.row_bytes)
    harness.close()
    patch(path, 0, bytes(geometry.segment_bytes))
    harness.open()
    assert outcomes(harness, [*KEYS[:4], KEYS[5]]) == [MISSING] * 5


def test_a_failed_read_touches_nothing_but_its_own_buffers(harness: StoreHarness) -> None:
    """Load [K1, K0, K2] into rows 2, 5, 6 of a region; K0 is bad."""
    harness.write(KEYS[:3])
    place = place_of(harness, KEYS[0])
    patch(path_of(harness, place), harness.rows.geometry.row_offset(place.slot), b"XXXX")
    region = aligned_rows(8, harness.row_bytes, fill=MARK)
    keys = [KEYS[1], KEYS[0], KEYS[2]]
    result = harness.rows.read(keys, [region[2], region[5], region[6]])
    assert result.outcomes == [OK, CORRUPT, OK]
    assert result.bytes_moved == 2 * harness.row_bytes
    assert bytes(region[2]) == row_of(KEYS[1], harness.row_bytes)
    assert bytes(region[6]) == row_of(KEYS[2], harness.row_bytes)
    for untouched in (0, 1, 3, 4, 7):
        assert bytes(region[untouched]) == bytes([MARK]) * harness.row_bytes


@pytest.mark.parametrize("is_torn", ["table", "index", "both tables"])
def test_a_damaged_header_costs_an_update_at_most(harness: StoreHarness, is_torn: str) -> None:
    harness.write(KEYS[:4])
    path, geometry = segment_path(harness.rows.directory, SegmentId(0)), harness.rows.geometry
    harness.close()
    tables = [geometry.table_offset(0), geometry.table_offset(1)]
    newest = max(tables, key=lambda at: int.from_bytes(peek(path, at + 8, 8), "little"))
    places = {"table": [newest], "index": [0], "both tables": tables}[is_torn]
    for at in places:
        patch(path, at + 40, b"XXXXXXXX")
    harness.open()
    found = outcomes(harness, KEYS[:4])
    if is_torn == "both tables":
        assert found == [MISSING] * 4
    elif is_torn == "index":
        assert found == [OK] * 4
    else:
        assert set(found) <= {OK, MISSING}
    assert not any(o is CORRUPT for o in found)
    harness.write(KEYS[:4])
    harness.reopen()
    assert outcomes(harness, KEYS[:4]) == [OK] * 4


@pytest.mark.parametrize("damage", ["lost", "empty", "garbage", "foreign"])
def test_metadata_of_the_array_is_made_anew(harness: StoreHarness, damage: str) -> None:
    harness.write(KEYS[:6])
    before = (harness.rows.directory / "zarr.json").read_bytes()
    harness.close()
    metadata = harness.rows.directory / "zarr.json"
    if damage == "lost":
        metadata.unlink()
    else:
        metadata.write_bytes({"empty": b"", "garbage": b"{", "foreign": b'{"a": 1}'}[damage])
    harness.open()
    assert outcomes(harness, KEYS[:6]) == [OK] * 6
    assert metadata.read_bytes() == before


def test_a_namespace_that_was_half_removed_starts_anew(harness: StoreHarness) -> None:
    harness.write(KEYS[:6])
    harness.close()
    namespace = harness.rows.directory.parent
    for left in ("rows/c/0/0", "rows/c", "rows", "zarr.json"):
        path = namespace / left
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        harness.open()
        assert set(outcomes(harness, KEYS[:6])) <= {OK, MISSING}
        harness.write(KEYS[:6])
        harness.reopen()
        assert outcomes(harness, KEYS[:6]) == [OK] * 6
        usage = harness.store.usage()
        assert usage.segments == 2
        assert (
            usage.used_bytes
            == ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 2 * harness.rows.pool.charge_bytes
        )
        harness.close()
    harness.open()


def test_a_segment_that_cannot_be_opened_is_left_alone_and_charged(memory_path: Path) -> None:
    """Neither overwritten by growth, nor counted twice, nor lost once it can be opened again."""
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:8])
    harness.close()
    used = None
    device = FaultyDevice(LocalDevice())
    device.add(Raise(errno.EIO), "open", when=lambda op: op.path.parts[-2:] == ("0", "0"))
    harness.open_on(device)
    used = harness.store.usage().used_bytes
    assert (
        used == ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 2 * harness.rows.pool.charge_bytes
    )
    assert outcomes(harness, KEYS[:8]) == [MISSING] * 4 + [OK] * 4
    for key in KEYS[20:32]:
        harness.write([key])
    assert harness.store.usage().used_bytes == used + 2 * harness.rows.pool.charge_bytes
    assert harness.rows.pool.numbers == [1, 2, 3]
    harness.close()
    harness.open()
    assert outcomes(harness, KEYS[:4]) == [OK] * 4
    assert harness.store.usage().used_bytes == used + 2 * harness.rows.pool.charge_bytes
    harness.close()


def test_short_reads_at_the_end_of_a_device_are_failures(memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root", device=lambda: FaultyDevice(LocalDevice()))
    harness.write(KEYS[:2])
    device = harness.store.device
    assert isinstance(device, FaultyDevice)

    original = device.preadv
    device.preadv = lambda *_: 0  # type: ignore[method-assign]
    assert outcomes(harness, KEYS[:2]) == [CORRUPT, CORRUPT]
    device.preadv = original  # type: ignore[method-assign]
    harness.close()


def test_rows_in_any_place_of_any_buffer(harness: StoreHarness) -> None:
    """Unaligned memory too, through a copy; and never a byte outside."""
    memory = bytearray(3 * harness.row_bytes)
    view = memoryview(memory)[123 : 123 + harness.row_bytes]
    view[:] = row_of(KEYS[0], harness.row_bytes)
    assert harness.rows.write([KEYS[0]], [view]).outcomes == [OK]
    harness.reopen()
    memory[:] = bytes([MARK]) * len(memory)
    assert harness.rows.read([KEYS[0]], [view]).outcomes == [OK]
    assert bytes(view) == row_of(KEYS[0], harness.row_bytes)
    assert set(memory[:123]) == set(memory[123 + harness.row_bytes :]) == {MARK}
    assert filled_rows(KEYS[:1], harness.row_bytes) == [view]


def test_of_a_row_that_is_there_twice_the_more_recent_counts(harness: StoreHarness) -> None:
    """As after an eviction whose header was lost: the other slot is free again."""
    harness.write(KEYS[:4])
    path = segment_path(harness.rows.directory, SegmentId(0))
    old = path.read_bytes()
    harness.rows.remove([KEYS[0]])
    harness.write([KEYS[20]])
    harness.write([KEYS[0]])
    assert place_of(harness, KEYS[0]).segment == 1
    harness.close()
    path.write_bytes(old)
    harness.open()
    assert place_of(harness, KEYS[0]).segment == 1
    assert harness.rows.keys()[-1] == KEYS[0]
    assert harness.keys() == set(KEYS[:4])
    assert [harness.rows.pool[number].free_count for number in (SegmentId(0), SegmentId(1))] == [
        1,
        3,
    ]
    assert outcomes(harness, KEYS[:4]) == [OK] * 4
