"""Several drives as one store: the contract holds, and one that dies costs its rows only."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from storage.device import LocalDevice
from storage.drives import DriveRows, DriveStore
from storage.errors import RootUnusable
from storage.namespace import Identity
from storage.testing.contract import MARK, RowStoreContract, options_for
from storage.testing.faulty import FaultyDevice, Raise
from storage.testing.rows import aligned_rows, bytes_on_disk, filled_rows, key_of, row_of
from storage.types import STORED, RowKey, RowOutcome

OK, MISSING, FAILED = RowOutcome.OK, RowOutcome.MISSING, RowOutcome.FAILED
ROW = 8192
K = [key_of(i) for i in range(128)]


class DrivesHarness:
    """Rows over two drives of 16 and 24 rows."""

    def __init__(self, directory: Path) -> None:
        self.row_bytes = ROW
        self.options = [
            options_for(directory / f"drive{number}", ROW, rows)
            for number, rows in enumerate((16, 24))
        ]
        self.capacity_rows = 40
        self.now = 0.0
        self.devices = [FaultyDevice(LocalDevice()) for _ in self.options]
        self.store: DriveStore
        self.rows: DriveRows
        self.open()

    def open(self) -> None:
        self.store = DriveStore.open(self.options, lambda n: self.devices[n], lambda: self.now)
        self.rows = self.store.open_rows(Identity("test/model", {}), ROW)

    def reopen(self) -> None:
        assert self.store.close().is_ended
        self.open()

    def write(self, keys: Sequence[RowKey]) -> list[RowOutcome]:
        return self.rows.write(keys, filled_rows(keys, ROW)).outcomes

    def read(self, keys: Sequence[RowKey]) -> list[tuple[RowOutcome, bytes]]:
        buffers = aligned_rows(len(keys), ROW, fill=MARK)
        outcomes = self.rows.read(keys, buffers).outcomes
        return [(o, bytes(b)) for o, b in zip(outcomes, buffers, strict=True)]

    def row(self, key: RowKey) -> bytes:
        return row_of(key, ROW)

    def touch(self, keys: Sequence[RowKey]) -> None:
        self.rows.touch(keys)

    def keys(self) -> set[RowKey]:
        return set(self.rows.keys())

    def on(self, number: int) -> set[RowKey]:
        return set(self.rows.drives[number].rows.keys())


@pytest.fixture
def harness(memory_path: Path) -> Iterator[DrivesHarness]:
    harness = DrivesHarness(memory_path)
    yield harness
    for device in harness.devices:
        device.faults.clear()
    harness.store.close()


class TestDrives(RowStoreContract):
    @pytest.fixture
    def harness(self, memory_path: Path) -> Iterator[DrivesHarness]:
        harness = DrivesHarness(memory_path)
        yield harness
        harness.store.close()


def right(harness: DrivesHarness, keys: set[RowKey]) -> bool:
    found = harness.read(sorted(keys))
    return found == [(OK, row_of(key, ROW)) for key in sorted(keys)]


def test_rows_are_spread_by_room(harness: DrivesHarness) -> None:
    assert harness.write(K[:20]) == [OK] * 20
    assert len(harness.on(0)) == 6, "24 - 14 = 16 - 6"
    assert len(harness.on(1)) == 14
    assert harness.write(K[20:40]) == [OK] * 20
    assert (len(harness.on(0)), len(harness.on(1))) == (16, 24)
    assert right(harness, set(K[:40]))
    for options, usage in zip(harness.options, harness.store.usages().values(), strict=True):
        assert bytes_on_disk(options.root) <= usage.used_bytes <= options.budget_bytes


def test_a_drive_that_dies_costs_its_rows_and_nothing_else(harness: DrivesHarness) -> None:
    harness.write(K[:40])
    lost, kept = harness.on(0), harness.on(1)
    for op in ("preadv", "pwritev", "allocate", "open", "write_file", "rename"):
        harness.devices[0].add(Raise(errno.EIO), op)
    assert [o for o, _ in harness.read(sorted(lost))] == [FAILED] * len(lost)
    assert right(harness, kept)
    assert harness.keys() == kept
    for key in K[40:60]:
        assert harness.write([key])[0] in (*STORED, FAILED)
    stored = [harness.write([key])[0] for key in K[60:80]]
    assert stored == [OK] * 20, "the other one takes them all"
    states = [usage.state for usage in harness.store.usages().values()]
    assert states == ["suspended", states[1]]
    assert states[1] in ("growing", "full")
    harness.devices[0].faults.clear()
    harness.now += 1000
    for key in K[80:100]:
        harness.write([key])
    assert harness.on(0), "it is back"
    assert right(harness, harness.keys())


def test_start_goes_on_without_a_drive(
    harness: DrivesHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.write(K[:40])
    lost, kept = harness.on(0), harness.on(1)
    harness.store.close()
    fault = harness.devices[0].add(Raise(errno.EIO), "list")
    harness.open()
    assert "going on without" in caplog.text
    assert harness.keys() == kept
    again = sorted(lost)[:4]
    assert harness.write(again) == [OK] * 4
    harness.devices[0].faults.remove(fault)
    harness.reopen()
    assert len(harness.rows.keys()) == len(harness.keys()), "no row twice"
    assert right(harness, harness.keys())


def test_start_needs_one_drive(memory_path: Path) -> None:
    options = [options_for(memory_path / str(n), ROW, 16) for n in range(2)]
    devices = [FaultyDevice(LocalDevice()) for _ in options]
    for device in devices:
        device.add(Raise(errno.EIO), "list")
    make: Callable[[int], FaultyDevice] = devices.__getitem__
    with pytest.raises(RootUnusable, match="root: list"):
        DriveStore.open(options, make)


def test_changes_of_every_drive_are_told(harness: DrivesHarness) -> None:
    harness.write(K[:10])
    seen: set[RowKey] = set()

    def change(published: Sequence[RowKey], withdrawn: Sequence[RowKey]) -> None:
        seen.update(published)
        seen.difference_update(withdrawn)

    harness.rows.subscribe(change)
    assert seen == set(K[:10])
    harness.write(K[10:60])
    harness.rows.remove(K[50:52])
    assert seen == harness.keys()


def test_wrong_calls(harness: DrivesHarness) -> None:
    with pytest.raises(ValueError, match="1 keys, but 0 buffers"):
        harness.rows.read([K[0]], [])
    assert harness.rows.read([], []).outcomes == []
    assert [o for o, _ in harness.read([K[99]])] == [MISSING]
