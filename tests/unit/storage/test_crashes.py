"""The process dies, or the power goes, at any moment: never a wrong byte, nothing leaked."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from storage.device import LocalDevice
from storage.namespace import Identity
from storage.segment import segment_path
from storage.space import ROOT_OVERHEAD_BYTES
from storage.testing.contract import MARK, StoreHarness, options_for
from storage.testing.faulty import Crash, Die, FaultyDevice, each_operation
from storage.testing.power import PowerLossDevice
from storage.testing.rows import aligned_rows, bytes_on_disk, files_under, key_of, row_of
from storage.types import STORED, RowKey, RowOutcome

OK = RowOutcome.OK
KEYS = [key_of(i) for i in range(64)]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "kvtier.storage")


class CrashingHarness(StoreHarness):
    """`run` plays a history; when the device crashes, the store is dropped as a dead process
    drops it.  `stored` is what was reported and not evicted or removed since."""

    def __init__(self, root: Path, device: FaultyDevice) -> None:
        self.stored: set[RowKey] = set()
        self.faulty = device
        super().__init__(root, row_bytes=4096)

    def open(self) -> None:
        self.open_on(self.faulty)
        self.rows.on_change = self._changed

    def _changed(self, published: Sequence[RowKey], withdrawn: Sequence[RowKey]) -> None:
        self.stored.update(published)
        self.stored.difference_update(withdrawn)

    def abandon(self) -> None:
        self.faulty.abandon()
        self.store.engine.close(10)


def history(harness: CrashingHarness) -> None:
    """Grows, evicts, overwrites in place, removes, touches, reads and stops in good order."""
    harness.write(KEYS[:3])
    harness.write(KEYS[3:16])
    harness.read(KEYS[2:5])
    harness.write(KEYS[20:23])
    harness.rows.remove(KEYS[4:6])
    harness.write([KEYS[30]])
    harness.touch(KEYS[8:10])
    harness.rows.flush(recency=True)
    harness.write(KEYS[31:34])


def check_after_crash(root: Path, stored: set[RowKey], *, may_lose: bool = False) -> StoreHarness:
    """Open with a good device; every row that is there is right, and nothing is leaked."""
    harness = StoreHarness(root, row_bytes=4096)
    found = harness.keys()
    if not may_lose:
        assert stored <= found, f"{len(stored - found)} published rows are lost"
    for key, (outcome, row) in zip(found, harness.read(list(found)), strict=True):
        assert outcome is OK or may_lose
        assert outcome is not OK or row == row_of(key, 4096)
    rows = harness.rows
    free = sum(rows.pool[number].free_count for number in rows.pool.numbers)
    assert free + len(rows) == 4 * len(rows.pool.numbers)
    assert not [name for name in files_under(root) if "partial" in name]
    usage = harness.store.usage()
    assert bytes_on_disk(root) <= usage.used_bytes <= usage.budget_bytes
    made = 65536 if rows.directory.exists() else 0
    assert usage.used_bytes == ROOT_OVERHEAD_BYTES + made + rows.pool.charge_bytes * len(
        rows.pool.numbers
    )
    # And it works: as many rows as there is room for.
    for i in range(100, 116, 4):
        assert harness.write([key_of(j) for j in range(i, i + 4)]) == [OK] * 4
    assert harness.keys() == {key_of(i) for i in range(100, 116)}
    return harness


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "torn_bytes", "least"),
    [(None, 0, 60), ("pwritev", 1, 20), ("pwritev", 4096, 20), ("pwritev", 9000, 20),
     ("write_file", 100, 5)],
)  # fmt: skip
def test_a_crash_at_any_operation(
    memory_path: Path, op: str | None, torn_bytes: int, least: int
) -> None:
    crashes = 0
    for device in each_operation(LocalDevice, Die(torn_bytes), op):
        root = memory_path / "root"
        stored: set[RowKey] = set()
        try:
            harness = CrashingHarness(root, device)
        except Crash:
            device.abandon()
        else:
            with contextlib.suppress(Crash):
                history(harness)
                harness.store.close()
            stored = harness.stored
            crashes += device.has_crashed
            harness.abandon()
        check_after_crash(root, stored).close()
        shutil.rmtree(root)
    assert crashes >= least


@pytest.mark.slow
def test_a_crash_at_any_operation_of_an_opening(memory_path: Path) -> None:
    """That also repairs, shrinks to a lower budget and gives back a stale namespace."""
    made = CrashingHarness(memory_path / "made", FaultyDevice(LocalDevice()))
    history(made)
    stale = made.store.open_rows(Identity("stale", {}), 4096)
    made.rows.remove(made.rows.keys())
    stale.write(KEYS[:1], aligned_rows(1, 4096))
    made.write(KEYS[:8])
    made.abandon()
    crashes = 0
    for device in each_operation(LocalDevice, Die()):
        root = memory_path / "root"
        shutil.copytree(memory_path / "made", root)
        partial = root / made.identity.directory / "rows/c/0/0.partial"
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(bytes(10_000))
        harness = StoreHarness.__new__(StoreHarness)
        harness.row_bytes, harness.identity = 4096, made.identity
        full = options_for(root, 4096, 16)
        harness.options = dataclasses.replace(full, budget_bytes=full.budget_bytes * 3 // 4)
        try:
            harness.open_on(device)
        except Crash:
            crashes += 1
            device.abandon()
        else:
            device.faults.clear()
            harness.close()
        harness.open_on(None)
        for key, (_, row) in zip(KEYS, harness.read(KEYS[:8]), strict=False):
            assert row in (row_of(key, 4096), bytes([MARK]) * 4096)
        assert (
            bytes_on_disk(root) <= harness.store.usage().used_bytes <= harness.options.budget_bytes
        )
        assert not [name for name in files_under(root) if "partial" in name]
        harness.close()
        shutil.rmtree(root)
    assert crashes > 30


@pytest.mark.parametrize("seed", range(25))
def test_power_loss_mixes_what_was_not_synced(memory_path: Path, seed: int) -> None:
    """Any page may hold any older content: rows may be missed, none is wrong."""
    rng = random.Random(seed)
    power = PowerLossDevice()
    harness = CrashingHarness(memory_path / "root", FaultyDevice(power))
    history(harness)
    for _ in range(rng.randrange(20)):
        harness.write([KEYS[rng.randrange(40, 64)] for _ in range(1)])
    harness.abandon()
    lost = power.lose(rng, rng.choice((0.1, 0.2, 0.5, 0.9)))
    assert lost, f"seed {seed}"
    check_after_crash(memory_path / "root", set(), may_lose=True).close()


def test_the_power_model_does_lose(memory_path: Path) -> None:
    """The canary: with every unsynced page gone, nothing is found."""
    power = PowerLossDevice()
    harness = CrashingHarness(memory_path / "root", FaultyDevice(power))
    harness.write(KEYS[:4])
    harness.abandon()

    class First(random.Random):
        def choice(self, seq):  # type: ignore[no-untyped-def]
            return seq[0]

    power.lose(First(0), 1.1)
    again = StoreHarness(memory_path / "root", row_bytes=4096)
    assert again.keys() == set()
    again.close()


def test_recency_of_a_killed_process_is_that_of_its_last_headers(memory_path: Path) -> None:
    harness = CrashingHarness(memory_path / "root", FaultyDevice(LocalDevice()))
    for key in KEYS[:16]:
        harness.write([key])
    harness.touch([KEYS[0]])
    harness.store.maintain()
    harness.abandon()
    again = StoreHarness(memory_path / "root", row_bytes=4096)
    assert again.write([KEYS[20]]) == [OK]
    assert again.keys() == {KEYS[0], *KEYS[2:16], KEYS[20]}
    again.close()


class AnyHistory(RuleBasedStateMachine):
    """Writes, reads, touches, removals, stops, crashes and flipped bits, against a dict."""

    @initialize()
    def start(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
        self.root = self.directory / "root"
        self.open()
        self.model: set[RowKey] = set()
        self.damaged: set[RowKey] = set()

    def open(self) -> None:
        self.device = FaultyDevice(LocalDevice())
        self.harness = CrashingHarness(self.root, self.device)

    keys = st.lists(st.sampled_from(KEYS[:24]), min_size=1, max_size=6, unique=True)

    @rule(keys=keys)
    def write(self, keys: list[RowKey]) -> None:
        outcomes = self.harness.write(keys)
        assert all(outcome in STORED for outcome in outcomes)
        now = self.harness.keys()
        assert set(keys) <= now
        assert now <= self.model | set(keys)
        assert len(now) == min(16, len(self.model | set(keys)))
        self.model = now
        self.damaged &= now

    @rule(keys=keys)
    def read(self, keys: list[RowKey]) -> None:
        for key, (outcome, row) in zip(keys, self.harness.read(keys), strict=True):
            if key in self.damaged:
                assert outcome is RowOutcome.CORRUPT
                self.damaged.discard(key)
                self.model.discard(key)
            elif key in self.model:
                assert outcome is OK
                assert row == row_of(key, 4096)
            else:
                assert outcome is RowOutcome.MISSING

    @rule(keys=keys)
    def touch(self, keys: list[RowKey]) -> None:
        self.harness.touch(keys)

    @rule(keys=keys)
    def remove(self, keys: list[RowKey]) -> None:
        assert self.harness.rows.remove(keys) == len(self.model & set(keys))
        self.model -= set(keys)
        self.damaged -= set(keys)

    @rule(key=st.sampled_from(KEYS[:24]), bit=st.integers(0, 8 * 4100 - 1))
    def damage(self, key: RowKey, bit: int) -> None:
        place = self.harness.rows.locate(key)
        if place is None or key in self.damaged:
            return
        with segment_path(self.harness.rows.directory, place.segment).open("r+b") as file:
            file.seek(self.harness.rows.geometry.row_offset(place.slot) + bit // 8)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1 << bit % 8]))
        self.damaged.add(key)

    @rule()
    def reopen(self) -> None:
        order = self.harness.rows.keys()
        assert self.harness.store.close().is_ended
        self.open()
        assert self.harness.rows.keys() == order, "recency is kept"

    @rule(keys=keys, operation=st.integers(1, 12), torn_bytes=st.sampled_from([0, 4096, 6000]))
    def crash_while_writing(self, keys: list[RowKey], operation: int, torn_bytes: int) -> None:
        before = set(self.model)
        self.device.add(Die(torn_bytes), nth=operation)
        self.harness.write(keys)
        kept = set(self.harness.stored) if self.device.has_crashed else self.harness.keys()
        self.harness.abandon()
        self.open()
        found = self.harness.keys()
        assert found <= before | set(keys)
        assert found >= kept & (before | set(keys)) - self.damaged - set(keys)
        self.model = found
        self.damaged &= found

    @invariant()
    def the_index_is_the_model(self) -> None:
        assert self.harness.keys() == self.model
        assert self.harness.rows.pin_count == 0
        usage = self.harness.store.usage()
        assert bytes_on_disk(self.root) <= usage.used_bytes <= usage.budget_bytes

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.store.close()
            shutil.rmtree(self.directory)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs: too slow")
@pytest.mark.slow
class TestAnyHistory(AnyHistory.TestCase):  # type: ignore[valid-type, misc]
    settings = settings(max_examples=25, stateful_step_count=25, print_blob=True)
