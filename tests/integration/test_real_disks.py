"""Small file systems of their own, filled to the last byte.  Needs root: mounts."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.pool import charge_of
from storage.store import DiskStore
from storage.testing.mixed import SLOTS, MixedHarness, keys_of
from storage.testing.rows import aligned_rows, bytes_on_disk, filled_rows, key_of, row_of
from storage.types import RowOutcome

OK, MISSING = RowOutcome.OK, RowOutcome.MISSING
ROW_BYTES = 65536


@pytest.fixture(params=["tmpfs", "ext4", "ext4 -m 20"])
def disk(request: pytest.FixtureRequest, mount: Callable[..., Path]) -> Path:
    """An empty file system of 24 MiB."""
    kind, *mkfs = request.param.split()
    return mount(kind, "size=24m" if kind == "tmpfs" else "", mkfs=tuple(mkfs))


@pytest.fixture
def few_inodes(mount: Callable[..., Path]) -> Path:
    """A tmpfs of 64 MiB with room for 24 files and directories."""
    return mount("tmpfs", "size=64m,nr_inodes=24")


IDENTITY = Identity("m", {})


def store_and_check(store: DiskStore, count: int, first: int = 0) -> int:
    """Store rows one by one, all of which must go well; how many are resident, all right."""
    rows = store.open_rows(IDENTITY, ROW_BYTES)
    for n in range(first, first + count):
        key = key_of(n)
        assert rows.write([key], filled_rows([key], ROW_BYTES)).outcomes == [OK], n
    keys = rows.keys()
    assert keys[-1] == key_of(first + count - 1)
    buffers = aligned_rows(len(keys), ROW_BYTES)
    assert rows.read(keys, buffers).outcomes == [OK] * len(keys)
    for key, buffer in zip(keys, buffers, strict=True):
        assert bytes(buffer) == row_of(key, ROW_BYTES)
    return len(keys)


def test_a_disk_smaller_than_the_budget_is_filled_and_reused(disk: Path) -> None:
    budget = 10 << 30
    for reserve, least in ((0, 10 << 20), (4 << 20, 6 << 20)):
        options = StoreOptions(
            disk / f"root{reserve}", budget, 1 << 20, reserve_bytes=reserve, admission="always"
        )
        with DiskStore.open(options) as store:
            resident = store_and_check(store, 500)
            assert store.usage().state == "full"
            assert resident * ROW_BYTES >= least
            stat = os.statvfs(disk)
            assert stat.f_bavail * stat.f_frsize >= reserve
            assert bytes_on_disk(options.root) <= store.usage().used_bytes
        with DiskStore.open(options) as store:
            assert len(store.open_rows(IDENTITY, ROW_BYTES)) == resident
        subprocess.run(["rm", "-r", str(options.root)], check=True)


def test_a_disk_that_others_fill_to_the_last_byte(disk: Path) -> None:
    options = StoreOptions(disk / "root", 1 << 30, 1 << 20, reserve_bytes=0, admission="always")
    with DiskStore.open(options) as store:
        assert store_and_check(store, 60) == 60
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    # It starts on the full disk, reads what is there, and reuses slots.
    with DiskStore.open(options) as store:
        resident = store_and_check(store, 200, first=1000)
        assert 45 <= resident <= 75
        assert store.usage().state == "full"
    filler.unlink()
    with DiskStore.open(options) as store:
        assert store_and_check(store, 150, first=2000) > resident


def test_inodes_that_run_out_are_a_full_disk(few_inodes: Path) -> None:
    options = StoreOptions(
        few_inodes / "root", 32 << 20, 1 << 18, reserve_bytes=0, admission="always"
    )
    with DiskStore.open(options) as store:
        resident = store_and_check(store, 200)
        assert 12 <= resident <= 60
        assert store.usage().state == "full"
        assert "No space left" in store.usage().state_reason
        assert store.usage().limit == "inodes"
    with DiskStore.open(options) as store:
        assert len(store.open_rows(IDENTITY, ROW_BYTES)) == resident


@pytest.mark.parametrize("is_filled_by_others", [False, True])
def test_size_classes_on_a_full_disk(disk: Path, is_filled_by_others: bool) -> None:
    """Rows that shrink otherwise than those before them still find room, made of what is there.

    How soon depends on the file system: ext4 may refuse for a moment what was just freed.
    """
    harness = MixedHarness(disk / "root", segments=10_000)
    with harness.store:  # ended whatever happens: the mount must go
        for key in keys_of(0, 200 if is_filled_by_others else 700):
            assert harness.write([key]) == [OK]
        filler = disk / "filler"
        if is_filled_by_others:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        else:
            assert harness.store.usage().state == "full"
        before = bytes_on_disk(harness.options.root)
        for kind in (2, 1, 3, 0):
            declined = 0
            keys = keys_of(kind, 300, 20_000)
            for key in keys:
                [outcome] = harness.write([key])
                declined += outcome is not OK
            assert declined <= 10, kind
            place = harness.rows.locate(keys[-1])
            assert place is not None
            a_fifth = before // 5 // charge_of(harness.rows.pool[place.segment].geometry) * SLOTS
            assert len(harness.keys() & set(keys)) >= min(150, a_fifth), kind
            harness.check()
