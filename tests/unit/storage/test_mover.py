"""Segments that are given back: the coldest rows are lost and the others move, whatever fails."""

from __future__ import annotations

import dataclasses
import errno
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.codec import CODEC_NAMES
from storage.device import LocalDevice
from storage.errors import RootUnusable
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.rowstore import RowStore
from storage.segment import segment_path
from storage.sharing import Holding, choose_donor
from storage.store import DiskStore
from storage.testing.contract import StoreHarness, options_for
from storage.testing.faulty import Crash, Die, FaultyDevice, Raise, Wait, each_operation
from storage.testing.harness import FaultyHarness
from storage.testing.power import PowerLossDevice
from storage.testing.rows import (
    BudgetWatch,
    aligned_rows,
    bytes_on_disk,
    files_under,
    filled_rows,
    key_of,
    row_of,
)
from storage.types import RowKey, RowOutcome
from tests.unit.storage.waiting import wait_until

OK, MISSING = RowOutcome.OK, RowOutcome.MISSING
K = [key_of(i) for i in range(128)]
ROW = 4096


@pytest.fixture
def harness(memory_path: Path) -> Iterator[FaultyHarness]:
    """Room for 16 rows in 4 segments, all taken; every segment holds warm and cold rows."""
    harness = FaultyHarness(memory_path / "root", row_bytes=ROW)
    mix(harness)
    yield harness
    harness.faulty.faults.clear()
    harness.close()


def mix(harness: StoreHarness) -> list[RowKey]:
    for key in K[:16]:
        harness.write([key])
    for key in (K[1], K[4], K[6], K[9], K[12], K[15]):
        harness.read([key])
    harness.store.maintain()
    order = harness.rows.keys()
    assert len(order) == 16
    return order


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_coldest_rows_of_all_are_lost(harness: FaultyHarness, count: int) -> None:
    order = harness.rows.keys()
    gone: list[RowKey] = []
    harness.rows.on_change = lambda _new, old: gone.extend(old)
    numbers = harness.rows.segment_numbers[:count]
    charge = harness.rows.pool.charge_bytes
    assert harness.rows.mover.give_back(numbers) == count * charge
    assert harness.rows.keys() == order[4 * count :], "recency as it was"
    assert gone == order[: 4 * count], "what moved is not announced"
    counters = harness.rows.count()
    assert counters.rows_given_up == 4 * count
    assert counters.rows_moved > 0
    assert counters.rows_evicted == 0
    harness.check(set(order[4 * count :]))
    harness.reopen()
    harness.check(set(order[4 * count :]))


def test_free_slots_are_taken_before_rows_are_lost(harness: FaultyHarness) -> None:
    order = harness.rows.keys()
    removed = [order[n] for n in (0, 5, 9, 13)]
    harness.rows.remove(removed)
    harness.rows.mover.give_back([harness.rows.segment_numbers[1]])
    assert harness.rows.count().rows_given_up == 0
    harness.check(set(order) - set(removed))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_rows_move_as_they_stand_whatever_the_codec(memory_path: Path, codec: str) -> None:
    harness = StoreHarness(memory_path / "root", ROW * 4, 16, codec=codec)
    order = mix(harness)
    numbers = harness.rows.segment_numbers
    harness.rows.mover.give_back(numbers[:1])
    assert harness.keys() == set(order[4:])
    for key, (outcome, row) in zip(order[4:], harness.read(order[4:]), strict=True):
        assert (outcome, row) == (OK, row_of(key, ROW * 4))
    harness.reopen()
    assert harness.keys() == set(order[4:])
    harness.close()


def test_a_row_that_is_corrupt_does_not_move(harness: FaultyHarness) -> None:
    order = harness.rows.keys()
    number = harness.rows.segment_numbers[0]
    places = {key: harness.rows.locate(key) for key in reversed(order)}
    victim, place = next((k, p) for k, p in places.items() if p and p.segment == number)
    with segment_path(harness.rows.directory, place.segment).open("r+b") as file:
        file.seek(harness.rows.geometry.row_offset(place.slot) + 9)
        file.write(b"damage")
    harness.rows.mover.give_back([number])
    harness.check(set(order[4:]) - {victim})


def test_rows_that_are_being_read_keep_their_segment_until_then(harness: FaultyHarness) -> None:
    order = harness.rows.keys()
    number = harness.rows.segment_numbers[0]
    inside = [k for k in order if (p := harness.rows.locate(k)) and p.segment == number]
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(
        Wait(gate, reached), "preadv", when=lambda op: op.path.parent.name == str(number), times=1
    )
    buffers = aligned_rows(1, ROW)
    results: list[RowOutcome] = []
    harness.rows.submit_read([inside[-1]], buffers, lambda r: results.extend(r.outcomes))
    assert reached.wait(60)
    order = harness.rows.keys()
    used = harness.store.usage().used_bytes
    assert harness.rows.mover.give_back([number]) == 0, "not yet"
    assert harness.store.usage().used_bytes == used
    assert harness.keys() == set(order[4:])
    assert harness.read([inside[-1]])[0] == (OK, row_of(inside[-1], ROW)), "from its new place"
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: bool(results))
    assert results == [OK]
    assert buffers[0] == row_of(inside[-1], ROW)
    wait_until(lambda: harness.store.usage().used_bytes < used)
    harness.check(set(order[4:]))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_fault_at_any_operation_loses_rows_and_nothing_else(memory_path: Path, code: int) -> None:
    struck = 0
    for device in each_operation(LocalDevice, Raise(code)):
        faults, device.faults = device.faults, []
        harness = FaultyHarness(memory_path / f"root{struck}", device, row_bytes=ROW)
        order = mix(harness)
        device.faults = faults
        harness.rows.mover.give_back(harness.rows.segment_numbers[:2])
        device.faults = []
        left = harness.keys()
        assert left <= set(order[8:])
        for key, (outcome, row) in zip(left, harness.read(list(left)), strict=True):
            assert (outcome, row) == (OK, row_of(key, ROW)), key
        assert harness.rows.pin_count == 0
        usage = harness.store.usage()
        assert bytes_on_disk(harness.options.root) <= usage.used_bytes <= usage.budget_bytes
        harness.reopen()
        again = harness.keys()
        assert left <= again, "what could not be removed may be found again"
        for key, (outcome, row) in zip(again, harness.read(list(again)), strict=True):
            assert (outcome, row) == (OK, row_of(key, ROW)), key
        harness.close()
        struck += 1
    assert struck > 12


@pytest.mark.parametrize("torn_bytes", [0, 1, 4096, 9000])
def test_crash_at_any_operation_of_a_move(memory_path: Path, torn_bytes: int) -> None:
    """No wrong byte, no row lost but the coldest, nothing leaked; the budget is met afterwards."""
    crashes = 0
    op = "pwritev" if torn_bytes else None
    for device in each_operation(LocalDevice, Die(torn_bytes), op):
        faults, device.faults = device.faults, []
        root = memory_path / "root"
        harness = FaultyHarness(root, device, row_bytes=ROW)
        order = mix(harness)
        device.faults = faults
        try:
            harness.rows.mover.give_back(harness.rows.segment_numbers[:2])
        except Crash:
            crashes += 1
        device.faults = []
        device.abandon()
        harness.store.engine.close(60)
        lower = dataclasses.replace(
            harness.options,
            budget_bytes=harness.options.budget_bytes - 2 * harness.rows.pool.charge_bytes,
        )
        again = FaultyHarness(root, row_bytes=ROW, options=lower)
        assert again.keys() == set(order[8:]), f"operation {crashes}"
        again.check(set(order[8:]))
        again.close()
        shutil.rmtree(root)
    assert crashes >= (4 if torn_bytes else 12)


@pytest.mark.parametrize("seed", range(12))
def test_power_loss_after_a_move_mixes_and_never_lies(memory_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    power = PowerLossDevice()
    harness = FaultyHarness(memory_path / "root", FaultyDevice(power), row_bytes=ROW)
    mix(harness)
    harness.rows.mover.give_back(harness.rows.segment_numbers[: rng.randint(1, 3)])
    for key in K[40 : 40 + rng.randint(0, 12)]:
        harness.write([key])
    harness.faulty.abandon()
    harness.store.engine.close(60)
    power.lose(rng, rng.choice((0.1, 0.3, 0.6, 0.9)))
    again = StoreHarness(memory_path / "root", ROW)
    for key, (outcome, row) in zip(K, again.read(K), strict=True):
        assert outcome is not OK or row == row_of(key, ROW), f"seed {seed}"
    assert not [name for name in files_under(again.options.root) if "partial" in name]
    again.close()


def test_writes_and_reads_go_on_while_segments_are_given_back(memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root", ROW, 64)
    for key in K[:64]:
        harness.write([key])
    wrong: list[object] = []
    stop = threading.Event()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            keys = rng.sample(K, 3)
            if rng.random() < 0.4:
                harness.write(keys)
                continue
            for key, (outcome, row) in zip(keys, harness.read(keys), strict=True):
                if outcome not in (OK, MISSING) or (outcome is OK and row != row_of(key, ROW)):
                    wrong.append((outcome, key))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(25):
        harness.rows.mover.give_back(harness.rows.mover.choose(1))
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    harness.rows.mover.finish()
    assert wrong == []
    assert harness.rows.pin_count == 0
    rows = harness.rows
    free = sum(rows.pool[number].free_count for number in rows.pool.numbers)
    assert free + len(rows) == 4 * len(rows.pool.numbers)
    keys = rows.keys()
    for key, (outcome, row) in zip(keys, harness.read(keys), strict=True):
        assert (outcome, row) == (OK, row_of(key, ROW))
    usage = harness.store.usage()
    assert bytes_on_disk(harness.options.root) <= usage.used_bytes <= usage.budget_bytes
    harness.reopen()
    assert set(keys) == harness.keys()
    harness.close()


# -- sharing ------------------------------------------------------------------------------------


def test_who_gives_to_whom() -> None:
    new, poor, rich = Holding(0, 0, None), Holding(20, 2, 50), Holding(80, 8, 10)
    last = Holding(10, 1, 1)
    chosen = choose_donor(new, 10, [poor, rich, last], 100, 99)
    assert chosen == 1, "the coldest row; no last segment"
    assert choose_donor(new, 10, [last], 100, 99) is None
    assert choose_donor(poor, 10, [rich], 100, 99) == 0
    assert choose_donor(rich, 10, [poor], 100, 99) is None, "more than its share"
    warm = Holding(80, 8, 60)
    assert choose_donor(poor, 10, [warm], 100, 99) is None, "its rows are warmer than the asker's"
    nearly_equal = choose_donor(Holding(45, 4, 50), 10, [Holding(55, 5, 10)], 100, 99)
    assert nearly_equal is None


def fill(rows: RowStore, keys: list[RowKey]) -> list[RowOutcome]:
    return [rows.write([key], filled_rows([key], ROW)).outcomes[0] for key in keys]


def shared(memory_path: Path) -> StoreOptions:
    return options_for(memory_path / "root", ROW, 40)  # 10 segments


def test_a_new_namespace_takes_room_from_an_open_one(memory_path: Path) -> None:
    options = shared(memory_path)
    with BudgetWatch(options.root) as watch, DiskStore.open(options) as store:
        one = store.open_rows(Identity("one", {}), ROW)
        assert fill(one, K[:40]) == [OK] * 40
        assert len(one) == 40
        two = store.open_rows(Identity("two", {}), ROW)
        assert fill(two, K[40:41]) == [OK], "at once, though the disk is full until its next probe"
        assert one.keys() == K[len(K[:40]) - len(one) : 40], "the coldest went"
        assert fill(two, K[41:80]) == [OK] * 39
        share = 5 * 4
        assert share - 8 <= len(two) <= share + 4, "it grows to about its share"
        assert len(one) >= share - 4
        assert two.keys() == K[80 - len(two) : 80]
        for rows in (one, two):
            keys, buffers = rows.keys(), aligned_rows(len(rows), ROW)
            assert rows.read(keys, buffers).outcomes == [OK] * len(rows)
            assert [bytes(b) for b in buffers] == [row_of(key, ROW) for key in keys]
        usage = store.usage()
        assert bytes_on_disk(options.root) <= usage.used_bytes <= usage.budget_bytes
        assert usage.state == "full"
    assert watch.highest <= options.budget_bytes


def test_two_busy_namespaces_settle(memory_path: Path) -> None:
    with DiskStore.open(shared(memory_path)) as store:
        stores = [store.open_rows(Identity(name, {}), ROW) for name in ("one", "two")]
        for number in range(300):
            rows = stores[number % 2]
            key = RowKey(number.to_bytes(8, "big"))
            assert rows.write([key], aligned_rows(1, ROW)).outcomes == [OK]
        sizes = [len(rows.segment_numbers) for rows in stores]
        given_up = sum(rows.count().rows_given_up for rows in stores)
        assert min(sizes) >= 3
        for number in range(300, 600):
            rows = stores[number % 2]
            key = RowKey(number.to_bytes(8, "big"))
            rows.write([key], aligned_rows(1, ROW))
        assert sum(rows.count().rows_given_up for rows in stores) == given_up, "nothing goes over"
        assert [len(rows.segment_numbers) for rows in stores] == sizes


def test_the_last_segment_is_nobodys_to_take(memory_path: Path) -> None:
    with DiskStore.open(options_for(memory_path / "root", ROW, 16)) as store:
        stores = [store.open_rows(Identity(str(n), {}), ROW) for n in range(6)]
        for number, rows in enumerate(stores):
            fill(rows, K[number * 10 : number * 10 + 10])
        counts = [len(rows.segment_numbers) for rows in stores]
        assert sum(counts) >= 2, "each namespace costs its own metadata"
        assert max(counts) == 1
        for rows, count in zip(stores, counts, strict=True):
            assert (len(rows) > 0) == (count > 0)


def test_sharing_from_four_threads(memory_path: Path) -> None:
    options = shared(memory_path)
    wrong: list[object] = []
    with BudgetWatch(options.root) as watch, DiskStore.open(options) as store:
        stores = [store.open_rows(Identity(str(n), {}), ROW) for n in range(3)]

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(150):
                rows, key = rng.choice(stores), rng.choice(K)
                if rng.random() < 0.6:
                    outcome = rows.write([key], filled_rows([key], ROW)).outcomes[0]
                    if outcome is RowOutcome.FAILED:
                        wrong.append(outcome)
                    continue
                buffers = aligned_rows(1, ROW)
                outcome = rows.read([key], buffers).outcomes[0]
                if outcome not in (OK, MISSING) or (
                    outcome is OK and bytes(buffers[0]) != row_of(key, ROW)
                ):
                    wrong.append((outcome, key))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage = store.usage()
        assert bytes_on_disk(options.root) <= usage.used_bytes <= usage.budget_bytes
    assert wrong == []
    assert watch.highest <= options.budget_bytes


@pytest.mark.slow
def test_crash_while_a_namespace_takes_a_segment(memory_path: Path) -> None:
    crashes = 0
    for device in each_operation(LocalDevice, Die()):
        faults, device.faults = device.faults, []
        root = memory_path / "root"
        options = options_for(root, ROW, 20)
        store = DiskStore.open(options, device)
        one = store.open_rows(Identity("one", {}), ROW)
        two = store.open_rows(Identity("two", {}), ROW)
        fill(one, K[:20])
        one.read(K[:3], aligned_rows(3, ROW))
        warm = set(one.keys()[12:])
        device.faults = faults
        try:
            two.write([K[30]], filled_rows([K[30]], ROW))
        except Crash:
            raise AssertionError("on an I/O thread") from None
        crashes += device.has_crashed
        device.faults = []
        device.abandon()
        store.engine.close(60)
        with DiskStore.open(options) as again:
            rows = again.open_rows(Identity("one", {}), ROW)
            assert warm <= set(rows.keys())
            keys = rows.keys()
            buffers = aligned_rows(len(keys), ROW)
            assert rows.read(keys, buffers).outcomes == [OK] * len(keys)
            assert [bytes(b) for b in buffers] == [row_of(k, ROW) for k in keys]
            usage = again.usage()
            assert bytes_on_disk(root) <= usage.used_bytes <= usage.budget_bytes
        shutil.rmtree(root)
    assert crashes >= 15


def test_a_root_that_cannot_be_had_is_named(memory_path: Path) -> None:
    device = FaultyDevice(LocalDevice())
    device.add(Raise(errno.EIO), "list")
    with pytest.raises(RootUnusable, match="root: list"):
        DiskStore.open(shared(memory_path), device)
