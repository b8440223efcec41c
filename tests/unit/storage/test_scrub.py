"""The scrubber and the quarantine: damage is found before it is needed, and kept for a person."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zarr

from storage.device import LocalDevice
from storage.errors import ConfigError
from storage.namespace import METADATA
from storage.quarantine import QUARANTINE, Quarantine
from storage.segment import segment_path
from storage.testing.contract import StoreHarness
from storage.testing.faulty import Crash, Die, FaultyDevice, Raise, Wait, each_operation
from storage.testing.harness import FaultyHarness
from storage.testing.rows import bytes_on_disk, key_of, row_of
from storage.types import RowKey, RowOutcome
from tests.unit.storage.waiting import wait_until

OK, MISSING, CORRUPT = RowOutcome.OK, RowOutcome.MISSING, RowOutcome.CORRUPT
K = [key_of(i) for i in range(64)]


def damage(harness: StoreHarness, key: RowKey, offset: int = 100) -> None:
    place = harness.rows.locate(key)
    assert place is not None
    with segment_path(harness.rows.directory, place.segment).open("r+b") as file:
        file.seek(harness.rows.geometry.row_offset(place.slot) + offset)
        file.write(b"damage")


@pytest.fixture
def harness(memory_path: Path) -> Iterator[FaultyHarness]:
    harness = FaultyHarness(memory_path / "root")
    yield harness
    harness.faulty.faults.clear()
    harness.close()


def reopen_with(harness: FaultyHarness, **options: object) -> None:
    if not harness.store.engine._closing:
        harness.close()
    more = 0
    if rows := options.get("quarantine_rows"):
        assert isinstance(rows, int)
        more = Quarantine(harness.options.root, LocalDevice(), rows).most_bytes(
            harness.row_bytes + 4096
        )
    harness.options = dataclasses.replace(
        harness.options,
        budget_bytes=harness.options.budget_bytes + more,
        **options,  # type: ignore[arg-type]
    )
    harness.open()


# -- scrubber ---------------------------------------------------------------------------------


def test_scrub_finds_what_is_damaged_and_leaves_the_rest(harness: FaultyHarness) -> None:
    harness.write(K[:10])
    order = harness.rows.keys()
    for key in (K[3], K[7]):
        damage(harness, key)
    gone: list[RowKey] = []
    harness.rows.on_change = lambda _new, old: gone.extend(old)
    harness.rows.verify(order)
    assert sorted(gone) == sorted([K[3], K[7]])
    count = harness.rows.count()
    assert (count.rows_scrubbed, count.rows_scrubbed_corrupt) == (10, 2)
    assert count.rows_read == count.rows_corrupt == 0, "nobody asked"
    assert harness.rows.keys() == [key for key in order if key not in gone], "recency as it was"
    assert [o for o, _ in harness.read([K[3]])] == [MISSING]
    assert harness.write([K[3]]) == [OK], "storing it again repairs it"
    harness.check({*K[:7], *K[8:10]})


def test_scrub_sees_a_trailer_that_changed_and_names_over_other_rows(
    harness: FaultyHarness,
) -> None:
    harness.write(K[:4])
    damage(harness, K[0], harness.row_bytes + 1)
    places = [harness.rows.locate(key) for key in K[1:3]]
    assert places[0] is not None
    assert places[1] is not None
    path = segment_path(harness.rows.directory, places[0].segment)
    geometry = harness.rows.geometry
    with path.open("r+b") as file:
        records = []
        for place in places:
            assert place is not None
            file.seek(geometry.row_offset(place.slot))
            records.append(file.read(geometry.stride))
        for place, record in zip(places, reversed(records), strict=True):
            assert place is not None
            file.seek(geometry.row_offset(place.slot))
            file.write(record)
    harness.rows.verify(K[:4])
    assert harness.keys() == {K[3]}


def test_scrub_of_a_place_that_the_disk_refuses(harness: FaultyHarness) -> None:
    harness.write(K[:3])
    bad = harness.rows.geometry.row_offset(1)
    place = next(key for key in K[:3] if (p := harness.rows.locate(key)) and p.slot == 1)
    hits = lambda op: op.offset <= bad < op.offset + op.size_bytes  # noqa: E731
    harness.faulty.add(Raise(5), "preadv", when=hits)
    harness.rows.verify(K[:3])
    harness.faulty.faults.clear()
    harness.check({*K[:3]} - {place})


@pytest.mark.slow
def test_scrub_runs_by_itself_coldest_first_and_in_passes(harness: FaultyHarness) -> None:
    harness.write(K[:12])
    damage(harness, K[5])
    reopen_with(harness, scrub_bytes_per_s=1 << 30)
    wait_until(lambda: harness.rows.count().scrub_passes >= 1)
    assert K[5] not in harness.rows
    count = harness.rows.count()
    assert count.rows_scrubbed_corrupt == 1
    assert count.rows_scrubbed >= 12
    wait_until(lambda: harness.rows.count().scrub_passes >= 2)
    harness.check({*K[:5], *K[6:12]})


def test_scrub_order_is_coldest_first_without_what_was_used_since(harness: FaultyHarness) -> None:
    harness.write(K[:6])
    before = harness.store._now_use()
    harness.read([K[2]])
    order = harness.rows.keys()
    assert harness.rows.cold_keys(before) == [key for key in order if key != K[2]]


def test_scrub_keeps_its_pace(memory_path: Path) -> None:
    harness = FaultyHarness(memory_path / "root", row_bytes=1 << 20, capacity_rows=16)
    harness.write(K[:8])
    harness.close()
    harness.options = dataclasses.replace(harness.options, scrub_bytes_per_s=10 << 20)
    started = time.monotonic()
    harness.open()
    wait_until(lambda: harness.rows.count().scrub_passes == 1)
    assert time.monotonic() - started > 0.6, "8 MiB at 10 MiB/s"
    assert harness.rows.count().rows_scrubbed == 8
    harness.close()


def test_scrub_waits_for_reads(harness: FaultyHarness) -> None:
    harness.write(K[:8])
    reopen_with(harness, scrub_bytes_per_s=1 << 30, io_threads=1)
    gate, reached = threading.Event(), threading.Event()
    wait_until(lambda: harness.rows.count().scrub_passes >= 1)
    fault = harness.faulty.add(Wait(gate, reached), "preadv")
    done: list[object] = []
    for key in K[:3]:
        buffers = [memoryview(bytearray(harness.row_bytes))]
        harness.rows.submit_read([key], buffers, done.append)
    assert reached.wait(60)
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: len(done) == 3)


def test_scrub_ends_with_the_store_while_it_is_busy(harness: FaultyHarness) -> None:
    harness.write(K[:8])
    reopen_with(harness, scrub_bytes_per_s=1)  # a batch takes hours
    wait_until(lambda: harness.rows.count().rows_scrubbed > 0)
    harness.close()
    assert not [t for t in threading.enumerate() if t.name == "kvtier-scrub"]
    harness.open()


@pytest.mark.slow
def test_crash_at_any_operation_of_a_scrub_that_drops_and_keeps(memory_path: Path) -> None:
    crashes = 0
    for device in each_operation(LocalDevice, Die()):
        root = memory_path / f"root{crashes}"
        faults, device.faults = device.faults, []
        harness = FaultyHarness(root, device)
        reopen_with(harness, quarantine_rows=2)
        harness.write(K[:6])
        damage(harness, K[2])
        damage(harness, K[4])
        device.faults = faults
        try:
            harness.rows.verify(K[:6])
        except Crash:
            crashes += 1
        device.faults = []
        options = harness.options
        device.abandon()
        harness.store.engine.close(60)
        again = FaultyHarness(root, options=options)
        for key, (outcome, row) in zip(K[:6], again.read(K[:6]), strict=True):
            assert outcome in ((OK,) if key not in (K[2], K[4]) else (CORRUPT, MISSING))
            assert outcome is not OK or row == row_of(key, again.row_bytes)
        usage = again.store.usage()
        assert bytes_on_disk(root) <= usage.used_bytes <= usage.budget_bytes
        zarr_reads(root)
        again.close()
    assert crashes >= 8


# -- quarantine -------------------------------------------------------------------------------


def zarr_reads(root: Path) -> dict[str, zarr.Array]:
    """Every array below quarantine, the hierarchy having been listed without a warning."""
    members = dict(zarr.open_group(root, mode="r").members(max_depth=None))
    return {
        name.split("/")[1]: node
        for name, node in members.items()
        if name.startswith(f"{QUARANTINE}/") and isinstance(node, zarr.Array)
    }


def test_quarantine_keeps_the_bytes_with_key_place_and_checksums(harness: FaultyHarness) -> None:
    reopen_with(harness, quarantine_rows=2)
    harness.write(K[:4])
    used = harness.store.usage().used_bytes
    place = harness.rows.locate(K[1])
    assert place is not None
    damage(harness, K[1])
    assert [o for o, _ in harness.read(K[:4])] == [OK, CORRUPT, OK, OK]
    [(name, kept)] = zarr_reads(harness.options.root).items()
    assert name.startswith(f"{harness.identity.directory}-{place.segment}-{place.slot}-")
    expected = bytearray(row_of(K[1], harness.row_bytes))
    expected[100:106] = b"damage"
    assert bytes(kept[:])[: harness.row_bytes] == bytes(expected)
    said = kept.attrs["kvtier"]
    assert said["key"] == K[1].hex()
    assert (said["segment"], said["slot"]) == (place.segment, place.slot)
    assert said["checksum_expected"] == said["checksum_of_trailer"] != said["checksum_found"]
    assert harness.store.usage().used_bytes == used, "it was charged before"
    assert bytes_on_disk(harness.options.root) <= used
    assert harness.write([K[1]]) == [OK]
    harness.reopen()
    assert harness.store.usage().used_bytes == used
    assert len(zarr_reads(harness.options.root)) == 1
    assert [o for o, _ in harness.read(K[:4])] == [OK] * 4


def test_quarantine_is_bounded_and_says_so(
    harness: FaultyHarness, caplog: pytest.LogCaptureFixture
) -> None:
    reopen_with(harness, quarantine_rows=2)
    harness.write(K[:8])
    for key in K[:3]:
        damage(harness, key)
    with caplog.at_level(logging.WARNING, "kvtier.storage"):
        harness.read(K[:8])
        harness.reopen()
        damage(harness, K[4])
        harness.read([K[4]])
    assert len(zarr_reads(harness.options.root)) == 2
    assert sum("quarantine is full" in message for message in caplog.messages) == 2
    assert set(harness.rows.keys()) == {K[3], *K[5:8]}


def test_quarantine_is_off_by_default(harness: FaultyHarness) -> None:
    harness.write(K[:2])
    damage(harness, K[0])
    assert [o for o, _ in harness.read(K[:2])] == [CORRUPT, OK]
    assert not (harness.options.root / QUARANTINE).exists()


@pytest.mark.parametrize("op", ["make_directory", "write_file", "rename", "preadv"])
def test_quarantine_that_the_disk_refuses_costs_nothing_else(
    harness: FaultyHarness, op: str
) -> None:
    reopen_with(harness, quarantine_rows=2)
    harness.write(K[:4])
    damage(harness, K[1])
    nth = 3 if op == "preadv" else None  # after the run, and the row by itself
    harness.faulty.add(Raise(28), op, nth=nth)
    outcomes = [o for o, _ in harness.read([K[1]])]
    assert outcomes == [CORRUPT]
    harness.faulty.faults.clear()
    rows = harness.rows
    slots = sum(rows.pool[number].free_count for number in rows.pool.numbers) + len(rows)
    assert slots == len(rows.pool.numbers) * rows.geometry.slots_per_segment
    assert [o for o, _ in harness.read(K[:4])] == [OK, MISSING, OK, OK]
    assert harness.write([K[1]]) == [OK]


def test_quarantine_half_made_by_a_crash_is_removed(harness: FaultyHarness) -> None:
    reopen_with(harness, quarantine_rows=2)
    harness.write(K[:2])
    harness.close()
    half = harness.options.root / QUARANTINE / "half" / "c"
    half.mkdir(parents=True)
    (half / "0").write_bytes(b"x" * 10_000)
    foreign = harness.options.root / QUARANTINE / "notes.txt"
    foreign.write_text("looked at K1")
    harness.open()
    assert not half.parent.exists()
    assert foreign.exists()


def test_quarantine_must_fit_the_budget(memory_path: Path) -> None:
    harness = FaultyHarness(memory_path / "root")
    harness.close()
    harness.options = dataclasses.replace(harness.options, quarantine_rows=1000)
    with pytest.raises(ConfigError, match="budget: expected at least"):
        harness.open()


def test_quarantine_metadata_is_json_beside_the_bytes(harness: FaultyHarness) -> None:
    reopen_with(harness, quarantine_rows=1)
    harness.write(K[:1])
    damage(harness, K[0])
    harness.read(K[:1])
    [entry] = [p for p in (harness.options.root / QUARANTINE).iterdir() if p.is_dir()]
    attributes = json.loads((entry / METADATA).read_text())["attributes"]["kvtier"]
    assert "crc32c" in attributes["reason"]
    assert isinstance(harness.faulty, FaultyDevice)
