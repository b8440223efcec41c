"""Namespaces under a codec: slots of several sizes, that follow what the rows shrink to."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import random
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

from storage.codec import CODEC_NAMES, NO_CODEC, Codec, RowCodec
from storage.device import LocalDevice
from storage.errors import DeviceError
from storage.namespace import Identity
from storage.pool import charge_of
from storage.segment import segment_path
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
)
from storage.testing.contract import MARK
from storage.testing.faulty import Crash, Die, FaultyDevice, Raise, each_operation
from storage.testing.mixed import ROW_BYTES, SLOTS, MixedHarness, keys_of, mixed_row_of
from storage.testing.power import PowerLossDevice
from storage.testing.rows import bytes_on_disk, files_under, key_of
from storage.types import RowKey, RowOutcome

OK = RowOutcome.OK
CODECS = [name for name in CODEC_NAMES if name != NO_CODEC]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "kvtier.storage")


class TickingHarness(MixedHarness):
    """Whose back-off is over whenever it is asked."""

    def open(self) -> None:
        assert self._device is not None
        seconds = itertools.count(0, 100)
        self.open_on(self._device(), lambda: float(next(seconds)))


def history(harness: MixedHarness) -> None:
    """Grows in several classes, evicts, and gives segments of one class for another."""
    harness.write(keys_of(3, 6))
    harness.write(keys_of(0, 9))
    harness.write(keys_of(2, 5))
    harness.read(keys_of(0, 3))
    with contextlib.suppress(DeviceError):  # that a header could not be written
        harness.rows.remove(keys_of(3, 2))
    harness.write([*keys_of(1, 3), *keys_of(0, 4, 1000)])
    harness.rows.flush(recency=True)
    harness.write(keys_of(2, 14, 1000))
    harness.write(keys_of(3, 9, 1000))


# -- faults and crashes ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "op", "torn_bytes"),
    [("zstd", None, 0), ("zstd", "pwritev", 4096), ("blosc-lz4", "pwritev", 9000)],
)
def test_a_crash_at_any_operation(
    memory_path: Path, codec: str, op: str | None, torn_bytes: int
) -> None:
    crashes = 0
    for device in each_operation(LocalDevice, Die(torn_bytes), op):
        root = memory_path / "root"
        stored: set[RowKey] = set()
        try:
            harness = MixedHarness(root, codec, device=lambda device=device: device)  # type: ignore[misc]
        except Crash:
            device.abandon()
        else:
            with contextlib.suppress(Crash):
                history(harness)
                harness.store.close()
            stored = harness.stored
            crashes += device.has_crashed
            device.abandon()
            harness.store.engine.close(10)
        again = MixedHarness(root, codec)
        assert stored <= again.keys(), f"{len(stored - again.keys())} published rows are lost"
        assert not [name for name in files_under(root) if "partial" in name]
        again.check()
        for kind in range(4):
            assert again.write(keys_of(kind, 2, 5000)) == [OK, OK]
        again.check()
        again.close()
        shutil.rmtree(root)
    assert crashes >= 20


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_fault_at_any_operation(memory_path: Path, code: int) -> None:
    struck = 0
    for number in itertools.count(1):
        device = FaultyDevice(LocalDevice())
        harness = TickingHarness(memory_path / f"root{number}", device=lambda device=device: device)  # type: ignore[misc]
        fault = device.add(Raise(code), nth=number)
        history(harness)
        device.faults.clear()
        assert harness.rows.keys(), f"operation {number}"
        harness.check()
        assert harness.rows.pin_count == 0
        assert harness.rows.writing_count == 0
        harness.close()
        again = MixedHarness(harness.options.root)
        again.check()
        for kind in range(4):
            assert again.write(keys_of(kind, 1, 6000)) == [OK]
        again.close()
        shutil.rmtree(harness.options.root)
        if not fault.struck:
            break
        struck += 1
    assert struck > 60


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("seed", range(6))
def test_power_loss_mixes_what_was_not_synced(memory_path: Path, codec: str, seed: int) -> None:
    """Any page may hold any older content, of another class's segment too: no row is wrong."""
    rng = random.Random(seed)
    power = PowerLossDevice()
    device = FaultyDevice(power)
    harness = MixedHarness(memory_path / "root", codec, device=lambda: device)
    history(harness)
    for kind in rng.choices(range(4), k=8):
        harness.write(rng.sample(keys_of(kind, 30, 3000), 3))
    device.abandon()
    harness.store.engine.close(10)
    assert power.lose(rng, rng.choice((0.1, 0.3, 0.9))), f"seed {seed}"
    again = MixedHarness(memory_path / "root", codec)
    keys = again.rows.keys()
    for key, (outcome, row) in zip(keys, again.read(keys), strict=True):
        assert outcome in (OK, RowOutcome.CORRUPT), f"seed {seed}"
        assert outcome is not OK or row == mixed_row_of(key)
    again.check()
    for kind in range(4):
        assert again.write(keys_of(kind, 2, 5000)) == [OK, OK]
    again.check()
    again.close()


# -- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", range(4))
def test_any_flipped_bit_of_a_record_is_found(memory_path: Path, codec: str, kind: int) -> None:
    harness = MixedHarness(memory_path / "root", codec)
    keys = keys_of(kind, 4)
    rng = random.Random(kind)
    for _ in range(12):
        assert OK in (outcomes := harness.write(keys))
        key = rng.choice(keys)
        place = harness.rows.locate(key)
        assert place is not None
        segment = harness.rows.pool[place.segment]
        start, length = (int(segment.entries[field][place.slot]) for field in ("offset", "length"))
        flip_bit_of(segment.path, start + rng.choice((0, 3, 12, rng.randrange(length), length - 1)))
        corrupt = harness.rows.count().rows_corrupt
        assert harness.read([key])[0][0] is RowOutcome.CORRUPT, outcomes
        assert harness.rows.count().rows_corrupt == corrupt + 1
        assert harness.rows.locate(key) is None
        assert harness.read([k for k in keys if k != key]) == [
            (OK, mixed_row_of(k)) for k in keys if k != key
        ]
    harness.write(keys)
    harness.check()
    harness.close()


def flip_bit_of(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("codec", CODECS)
def test_a_frame_with_right_checksums_that_does_not_decode_is_corrupt(
    memory_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a codec with a bug, or a forger, would leave it: dropped, counted, its neighbours read."""
    harness = MixedHarness(memory_path / "root", codec)
    good, bad = keys_of(1, 3), keys_of(1, 40, 1000)
    encode = Codec.encode
    rng = random.Random(1)

    def forge(self: Codec, row: memoryview) -> memoryview:
        raw = bytearray(encode(self, row))
        what = rng.randrange(4)
        if what == 0:  # another row size
            raw[4:8] = (ROW_BYTES + 4096 * rng.choice((-1, 1, 1000))).to_bytes(4, "little")
        elif what == 1:  # longer than it is
            raw[12:16] = (len(raw) + rng.randrange(1, 1 << 24)).to_bytes(4, "little")
        elif what == 2:  # an offset of a block that points anywhere
            raw[16:20] = rng.randbytes(4)
        else:
            raw[16 : 16 + 64] = rng.randbytes(64)
        return memoryview(bytes(raw))

    assert harness.write(good) == [OK] * 3
    corrupt = 0
    for key in bad:
        with monkeypatch.context() as patch:
            patch.setattr(Codec, "encode", forge)
            assert harness.write([key]) == [OK]
        results = harness.read([good[0], key, good[2]])
        assert results[0] == (OK, mixed_row_of(good[0]))
        assert results[2] == (OK, mixed_row_of(good[2]))
        corrupt += results[1][0] is RowOutcome.CORRUPT
        assert harness.rows.count().rows_corrupt == corrupt
        assert (harness.rows.locate(key) is None) == (results[1][0] is RowOutcome.CORRUPT)
        harness.rows.remove([key])
    # What still decodes was forged with its checksums: no reader could know.
    assert corrupt >= 30
    harness.check()
    harness.close()


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_segment_cut_short_costs_its_rows_at_most(memory_path: Path, share: float) -> None:
    harness = MixedHarness(memory_path / "root")
    for kind in range(4):
        harness.write(keys_of(kind, 3))
    before = harness.stored.copy()
    harness.close()
    path = segment_path(harness.rows.directory, harness.rows.segment_numbers[1])
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    harness.open()
    assert harness.stored <= before
    assert len(harness.keys()) >= 9
    harness.check()
    for kind in range(4):
        assert harness.write(keys_of(kind, 4, 700)) == [OK] * 4
    harness.check()
    harness.close()


# -- which class gets the room ---------------------------------------------------------------


def test_no_class_starves_however_full_the_store_is(memory_path: Path) -> None:
    harness = MixedHarness(memory_path / "root", segments=8)
    for kind in (0, 3, 1, 2):
        for key in keys_of(kind, 60, 100 * kind):
            assert harness.write([key]) == [OK]
            assert harness.read([key]) == [(OK, mixed_row_of(key))]
        harness.check()
    harness.close()


@pytest.mark.parametrize("seed", range(4))
def test_room_follows_a_shift_of_what_rows_shrink_to(memory_path: Path, seed: int) -> None:
    """Rows of one kind fill the store; then only others come: soon nearly all the room is theirs,
    in any order of kinds, never past the budget, and no write is declined."""
    rng = random.Random(seed)
    harness = MixedHarness(memory_path / "root", segments=12)
    kinds = rng.sample(range(4), 4)
    for number, kind in enumerate(kinds):
        classes = harness.segments_by_class
        keys = keys_of(kind, 400, 10_000 * number)
        while keys:
            some = [keys.pop() for _ in range(min(len(keys), rng.randrange(1, 6)))]
            assert harness.write(some) == [OK] * len(some)
            usage = harness.store.usage()
            assert bytes_on_disk(harness.options.root) <= usage.used_bytes <= usage.budget_bytes
        harness.check()
        (size_class, _), *_ = harness.segments_by_class.most_common()
        room = charge_of(size_class) * harness.segments_by_class[size_class]
        assert room >= 0.75 * usage.budget_bytes, (seed, kinds, number)
        assert harness.segments_by_class != classes
    harness.close()


@pytest.mark.parametrize("seed", range(3))
def test_hits_are_nearly_those_of_one_order_over_all_rows(memory_path: Path, seed: int) -> None:
    """A skewed mix of kinds, against a least-recently-used dict of rows that weigh their part of
    what a segment is charged."""
    rng = random.Random(seed)
    harness = MixedHarness(memory_path / "root", segments=24)
    codec = RowCodec(Codec("zstd", 2), harness.rows.pool.classes, always=True)
    keys = [key_of(i) for i in range(400)]
    weight = {
        key: charge_of(codec.encode(memoryview(mixed_row_of(key)))[0]) / SLOTS for key in keys
    }
    ideal: OrderedDict[RowKey, None] = OrderedDict()
    room = harness.options.budget_bytes - NAMESPACE_OVERHEAD_BYTES - ROOT_OVERHEAD_BYTES
    hits = ideal_hits = 0
    for step in range(3000):
        key = keys[min(int(rng.expovariate(1 / 90)), 399)]
        if key in ideal:
            ideal_hits += step >= 500
        ideal[key] = None
        ideal.move_to_end(key)
        while sum(map(weight.__getitem__, ideal)) > room:
            ideal.popitem(last=False)
        if key in harness.rows:
            hits += step >= 500
            harness.touch([key])
        else:
            assert harness.write([key]) == [OK]
    harness.check()
    harness.close()
    assert hits >= 0.85 * ideal_hits, f"seed {seed}: {hits} hits, ideal {ideal_hits}"


def test_rows_that_shrink_take_less_of_the_disk(direct_path: Path) -> None:
    used = {}
    for codec in (NO_CODEC, *CODECS):
        root = direct_path / codec
        harness = MixedHarness(root, "zstd", segments=20)
        harness.close()
        shutil.rmtree(root)
        harness.options = replace(harness.options, codec=codec, codec_always=codec != NO_CODEC)
        harness.open()
        for kind in (2, 3):
            assert harness.write(keys_of(kind, 16)) == [OK] * 16
        used[codec] = bytes_on_disk(root)
        assert used[codec] <= harness.store.usage().used_bytes
        harness.close()
    for codec in CODECS:
        assert used[codec] < 0.6 * used[NO_CODEC], used


# -- the setting -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_another_codec_is_another_array_and_the_first_is_found_again(
    memory_path: Path, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvtier.storage")
    root = memory_path / "root"
    keys = [*keys_of(0, 3), *keys_of(2, 3)]
    harness = MixedHarness(root, codec, segments=12)
    settings = {
        codec: harness.options,
        NO_CODEC: replace(harness.options, codec=NO_CODEC, codec_always=False),
    }
    harness.close()
    shutil.rmtree(root)
    directories = set()
    for turn, name in enumerate((NO_CODEC, codec, NO_CODEC, codec)):
        harness.options = settings[name]
        caplog.clear()
        harness.open()
        directories.add(harness.rows.directory)
        other = codec if name == NO_CODEC else NO_CODEC
        said = f"codec is {name} now: what was stored under {other} stays in "
        assert (said in caplog.text) == (turn > 0)
        if turn < 2:
            assert harness.keys() == set(), "rows of another codec are no rows of this one"
            assert harness.read(keys) == [(RowOutcome.MISSING, bytes([MARK]) * ROW_BYTES)] * 6
            assert harness.write(keys) == [OK] * 6
        assert harness.keys() == set(keys)
        harness.check_rows()
        harness.close()
    assert len(directories) == 2
    # What is not read gives way first.
    harness.options = settings[NO_CODEC]
    harness.open()
    assert harness.write(keys_of(0, 40, 500)) == [OK] * 40
    assert harness.store.usage().used_bytes <= harness.options.budget_bytes
    assert not segment_path(next(iter(directories - {harness.rows.directory})), 0).exists()
    harness.close()


def test_the_element_size_is_part_of_the_array_only_under_a_codec() -> None:
    plain = {Identity("m", {}, element_bytes=size).fingerprint for size in (1, 2, 4)}
    coded = {Identity("m", {}, size, codec).fingerprint for size in (1, 2) for codec in CODECS}
    assert len(plain) == 1
    assert len(plain | coded) == 5


def test_lost_metadata_of_the_array_are_made_anew(memory_path: Path) -> None:
    harness = MixedHarness(memory_path / "root")
    for kind in range(4):
        harness.write(keys_of(kind, 3))
    keys = harness.keys()
    harness.close()
    (harness.rows.directory / "zarr.json").write_bytes(b"{}")
    harness.open()
    assert harness.keys() == keys
    harness.check()
    harness.close()
