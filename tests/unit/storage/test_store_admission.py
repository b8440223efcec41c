"""What the store asks the policies of admission and eviction, and what it does with the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.admission import ADMISSION, SECOND_TOUCH, RuleAdmission
from storage.device import LocalDevice, SpaceStat
from storage.errors import ConfigError
from storage.namespace import Identity
from storage.store import DiskStore
from storage.testing.contract import StoreHarness, options_for
from storage.testing.rows import key_of, row_of
from storage.types import RowOutcome

ROW_BYTES = 8192
CAPACITY = 16
KEYS = [key_of(i) for i in range(400)]
OK, DECLINED, ALREADY = RowOutcome.OK, RowOutcome.DECLINED, RowOutcome.ALREADY_STORED

Make = Callable[..., StoreHarness]


@pytest.fixture
def make(memory_path: Path) -> Iterator[Make]:
    made: list[StoreHarness] = []

    def open_store(**settings: Any) -> StoreHarness:
        options = options_for(memory_path / "root", ROW_BYTES, CAPACITY)
        made.append(StoreHarness(Path(), ROW_BYTES, options=replace(options, **settings)))
        return made[-1]

    yield open_store
    for harness in made:
        harness.close()


def test_by_default_a_flood_that_nobody_reads_stops_being_written(make: Make) -> None:
    harness = make(admission=next(iter(ADMISSION)))
    for start in range(0, len(KEYS), 4):
        harness.write(KEYS[start : start + 4])
    counters = harness.rows.count()
    assert counters.declined_admission > len(KEYS) / 2
    assert counters.writes_declined == counters.declined_admission
    assert counters.rows_written + counters.declined_admission == counters.rows_offered
    assert counters.rows_evicted == counters.rows_written - CAPACITY


def test_at_second_touch_a_full_disk_takes_what_it_declined_before(make: Make) -> None:
    harness = make(admission="second-touch")
    assert harness.write(KEYS[:CAPACITY]) == [OK] * CAPACITY
    assert OK in harness.write(KEYS[16:20]), "this one finds out that there is no more room"
    kept = harness.keys()
    assert harness.write(KEYS[20:24]) == [DECLINED] * 4
    assert harness.keys() == kept, "nothing was evicted for what was not written"
    assert harness.write(KEYS[20:25]) == [OK] * 4 + [DECLINED]
    assert harness.read(KEYS[20:21]) == [(OK, row_of(KEYS[20], ROW_BYTES))]
    assert harness.write([KEYS[30], KEYS[24]]) == [DECLINED] * 2, "a tail without its head"


def test_free_slots_are_for_anybody(make: Make) -> None:
    harness = make(admission="second-touch")
    harness.write(KEYS[:20])
    resident = sorted(harness.keys())
    harness.rows.remove(resident[:2])
    assert harness.write(KEYS[40:44]) == [OK, OK, DECLINED, DECLINED]


def test_a_disk_that_got_room_again_is_found_out_though_nothing_is_admitted(
    memory_path: Path,
) -> None:
    class Disk(LocalDevice):
        available = 1 << 30

        def space(self, path: Path) -> SpaceStat:  # noqa: ARG002
            return SpaceStat(1 << 40, self.available, 1 << 20, 1 << 20)

    device, clock = Disk(), [0.0]
    options = options_for(memory_path / "root", ROW_BYTES, CAPACITY)
    harness = StoreHarness(
        Path(), ROW_BYTES, options=replace(options, admission="second-touch"), device=Disk
    )
    harness.close()
    harness.open_on(device, lambda: clock[0])
    harness.write(KEYS[:8])
    device.available = 0
    harness.write(KEYS[8:16])
    assert harness.store.usage().state == "full"
    assert harness.write(KEYS[20:24]) == [DECLINED] * 4
    device.available = 1 << 30
    assert harness.write(KEYS[24:28]) == [DECLINED] * 4, "asked again after a back-off only"
    clock[0] += 120
    assert harness.write(KEYS[28:32])[0] is OK
    assert harness.store.usage().state == "growing"
    assert harness.write(KEYS[32:36]) == [OK] * 4
    harness.close()


def test_every_job_is_told_once_and_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, list[bytes]]] = []

    class Recorder(RuleAdmission):
        def read(self, keys: Sequence[bytes], *, slots: int) -> None:
            assert slots == CAPACITY
            told.append(("read", list(keys)))

        def touch(self, keys: Sequence[bytes]) -> None:
            told.append(("touch", list(keys)))

        def offer(self, keys: Sequence[bytes], *, slots: int, free: int) -> int:
            told.append(("offer", list(keys)))
            return super().offer(keys, slots=slots, free=free)

    monkeypatch.setattr("storage.rowstore._WRITE_PART_BYTES", ROW_BYTES)
    monkeypatch.setattr("storage.rowstore._READ_PART_BYTES", ROW_BYTES)
    monkeypatch.setitem(ADMISSION, "always", lambda: Recorder(SECOND_TOUCH))
    harness = make(admission="always")
    assert harness.write(KEYS[:16]) == [OK] * 16
    harness.touch(KEYS[:2])
    harness.read(KEYS[14:18])
    harness.store.close()
    assert told == [
        ("offer", KEYS[:16]),
        ("touch", KEYS[:2]),
        ("read", KEYS[14:16]),
    ]


def test_the_drive_is_given_its_bytes_of_the_day_and_no_more(memory_path: Path) -> None:
    clock = [0.0]
    options = replace(
        options_for(memory_path / "root", ROW_BYTES, CAPACITY),
        write_bytes_per_day=8 * 4 * ROW_BYTES,
    )
    harness = StoreHarness(Path(), ROW_BYTES, options=options)
    harness.close()
    harness.open_on(None, lambda: clock[0])
    assert harness.write(KEYS[:6]) == [OK] * 4 + [DECLINED] * 2
    assert harness.write(KEYS[:4]) == [ALREADY] * 4, "costs nothing"
    clock[0] += 86_400 / 28  # one more row
    assert harness.write(KEYS[6:8]) == [OK, DECLINED]
    counters = harness.rows.count()
    assert (counters.declined_write_budget, counters.writes_declined) == (3, 3)
    harness.close()


def test_a_day_s_bytes_that_no_row_fits_are_refused(memory_path: Path) -> None:
    options = replace(
        options_for(memory_path / "root", ROW_BYTES, CAPACITY), write_bytes_per_day=ROW_BYTES
    )
    with (
        DiskStore.open(options) as store,
        pytest.raises(ConfigError, match=f"write_bytes_per_day: expected at least {8 * ROW_BYTES}"),
    ):
        store.open_rows(Identity("m", {}), ROW_BYTES)


@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_what_goes_first_is_kept_over_a_restart(make: Make, eviction: str) -> None:
    harness = make(eviction=eviction)
    for key in KEYS[:CAPACITY]:
        harness.write([key])
    harness.touch(KEYS[:1])
    harness.reopen()
    harness.write(KEYS[20:21])
    gone = set(KEYS[:CAPACITY]) - harness.keys()
    assert gone == ({KEYS[1]} if eviction == "lru" else {KEYS[0]})
