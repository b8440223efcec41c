"""Rows of several sizes in one root: each in a namespace of its own, together as one store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from storage.drives import DriveStore
from storage.errors import ConfigError
from storage.facts import RowFacts
from storage.jobs import wait
from storage.kinds import KindRows
from storage.namespace import Identity, WantedRows
from storage.options import StoreOptions
from storage.rowstore import RowStore
from storage.sharing import Holding, choose_donor
from storage.store import DiskStore
from storage.testing.rows import aligned_rows, bytes_on_disk, row_of
from storage.types import PAGE_BYTES, RowKey, RowOutcome

OK = RowOutcome.OK
LARGEST = 16 * PAGE_BYTES
SIZES = {0: LARGEST, 3: 6 * PAGE_BYTES, 4: 6 * PAGE_BYTES, 9: PAGE_BYTES}
"""Bytes of a row, by group."""
WANTED = [
    WantedRows(Identity("m", {"rows": size}), size, RowFacts(groups=groups))
    for size, groups in ((LARGEST, (0,)), (6 * PAGE_BYTES, (3, 4)), (PAGE_BYTES, (9,)))
]


def key(group: int, number: int) -> RowKey:
    return RowKey(hashlib.sha256(b"%d" % number).digest() + group.to_bytes(4, "big"))


def keys(count: int) -> list[RowKey]:
    """Of all groups, in the order in which an engine names the chunks of a request."""
    return [key(group, number) for group in SIZES for number in range(count)]


def size_of(name: RowKey) -> int:
    return SIZES[int.from_bytes(name[-4:], "big")]


def options_of(root: Path, budget: int = 8_000_000) -> StoreOptions:
    return StoreOptions(root, budget, segment_bytes=200_000, admission="always")


def open_kinds(store: DiskStore | DriveStore) -> KindRows:
    largest, middle, small = store.open_all(WANTED)
    return KindRows(largest, {3: middle, 4: middle, 9: small})


def run(
    rows: KindRows, names: Sequence[RowKey], buffers: Sequence[memoryview], *, is_read: bool
) -> list[RowOutcome]:
    submit = rows.submit_read if is_read else rows.submit_write
    return wait(lambda done: submit(names, buffers, done)).outcomes


def write(rows: KindRows, names: Sequence[RowKey]) -> list[RowOutcome]:
    """Slots of the largest row, in which the bytes behind a smaller one are somebody's else."""
    buffers = aligned_rows(len(names), LARGEST, 0x77)
    for name, buffer in zip(names, buffers, strict=True):
        buffer[: size_of(name)] = row_of(name, size_of(name))
    return run(rows, names, buffers, is_read=False)


def check(rows: KindRows, names: Sequence[RowKey]) -> None:
    buffers = aligned_rows(len(names), LARGEST, 0x55)
    assert run(rows, names, buffers, is_read=True) == [OK] * len(names)
    for name, buffer in zip(names, buffers, strict=True):
        assert bytes(buffer[: size_of(name)]) == row_of(name, size_of(name))
        assert bytes(buffer[size_of(name) :]).strip(b"\x55") == b"", "behind the row"


@pytest.mark.parametrize("drives", [1, 2])
def test_rows_of_all_sizes_come_back_and_weigh_what_their_groups_use(
    tmp_path: Path, drives: int
) -> None:
    options = [options_of(tmp_path / str(n)) for n in range(drives)]
    names = keys(7)

    def opened() -> DiskStore | DriveStore:
        return DiskStore.open(options[0]) if drives == 1 else DriveStore.open(options)

    store = opened()
    rows = open_kinds(store)
    assert write(rows, names) == [OK] * len(names)
    assert rows.count().bytes_written == sum(map(size_of, names))
    check(rows, names[::-1])
    assert sorted(rows.keys()) == sorted(names)
    store.close()
    store = opened()
    rows = open_kinds(store)
    assert len(rows) == len(names)
    check(rows, names)
    told: list[RowKey] = []
    rows.subscribe(lambda published, _withdrawn: told.extend(published))
    assert sorted(told) == sorted(names)
    assert rows.remove(names[:10]) == 10
    assert sorted(rows.keys()) == sorted(names[10:])
    store.close()


def test_zarr_reads_each_size_as_an_array_of_its_own(tmp_path: Path) -> None:
    with DiskStore.open(options_of(tmp_path / "root")) as store:
        rows = open_kinds(store)
        write(rows, keys(3))
    group = zarr.open_group(str(tmp_path / "root"), mode="r")
    found: dict[int, set[bytes]] = {}
    for _, namespace in group.groups():
        if "rows" in namespace:
            array = namespace["rows"]
            assert isinstance(array, zarr.Array)
            size = array.shape[1]
            found[size] = {bytes(np.asarray(array[i])) for i in range(array.shape[0])}
            found[size].discard(bytes(size))
    for size in set(SIZES.values()):
        assert found[size] == {row_of(n, size) for n in keys(3) if size_of(n) == size}


def test_keys_of_no_group_that_is_named_are_the_largest_rows(tmp_path: Path) -> None:
    with DiskStore.open(options_of(tmp_path / "root")) as store:
        rows = open_kinds(store)
        other = key(77, 1)
        buffers = aligned_rows(1, LARGEST)
        buffers[0][:] = row_of(other, LARGEST)
        assert run(rows, [other], buffers, is_read=False) == [OK]
        assert rows.count().bytes_written == LARGEST
        assert run(rows, [other], aligned_rows(1, LARGEST), is_read=True) == [OK]


def test_jobs_of_nothing_end(tmp_path: Path) -> None:
    with DiskStore.open(options_of(tmp_path / "root")) as store:
        rows = open_kinds(store)
        assert run(rows, [], [], is_read=True) == []
        with pytest.raises(ValueError, match="1 keys, but 0 buffers"):
            rows.submit_read(keys(1)[:1], [], lambda _result: None)


def test_a_lower_budget_takes_from_all_sizes_and_not_from_those_that_open_later(
    tmp_path: Path,
) -> None:
    """Namespaces that are opened together count as open from the first on."""
    options = options_of(tmp_path / "root")
    with DiskStore.open(options) as store:
        rows = open_kinds(store)
        for number in range(40):
            write(rows, [key(group, number) for group in SIZES])
        assert len(rows) == 160
        full = store.usage().used_bytes
    with DiskStore.open(replace(options, budget_bytes=full // 2)) as store:
        rows = open_kinds(store)
        assert store.usage().used_bytes <= full // 2
        assert bytes_on_disk(options.root) <= full // 2
        left = rows.keys()
        assert all(key(group, 39) in left for group in SIZES), "the warmest of each stay"
        check(rows, left)
    with DiskStore.open(replace(options, budget_bytes=full // 2)) as store:
        rows = open_kinds(store)
        assert sorted(rows.keys()) == sorted(left), "none was in a file that went as stale"
        check(rows, left)


def test_every_size_gets_a_segment_of_the_least_budget(tmp_path: Path) -> None:
    least = 550_000
    with DiskStore.open(options_of(tmp_path / "a", least - 50_000)) as store:
        largest = store.open_rows(*WANTED[0])
        assert largest.row_bytes == LARGEST, "alone it would fit"
    with (
        DiskStore.open(options_of(tmp_path / "b", least - 50_000)) as store,
        pytest.raises(ConfigError, match="budget: expected at least"),
    ):
        store.open_all(WANTED)
    with DiskStore.open(options_of(tmp_path / "c", least)) as store:
        rows = open_kinds(store)
        for number in range(20):
            one_of_each = [key(group, number) for group in (0, 3, 9)]
            assert write(rows, one_of_each) == [OK] * 3
            check(rows, one_of_each)
        assert bytes_on_disk(tmp_path / "c") <= least


def test_namespaces_of_one_engine_give_what_was_used_far_longer_ago() -> None:
    """Whatever their shares; 1.5 times as long, so that they settle."""
    asker = Holding(90, 9, 100, "engine")
    far, near = Holding(10, 2, 40, "engine"), Holding(10, 2, 60, "engine")
    assert choose_donor(asker, 10, [far], 100, now_use=200) == 0
    assert choose_donor(asker, 10, [near], 100, now_use=200) is None
    assert choose_donor(asker, 10, [replace(far, segments=1)], 100, now_use=200) is None
    assert choose_donor(asker, 10, [replace(far, engine="other")], 100, now_use=200) is None


def test_a_full_disk_follows_what_the_groups_are_used_for(tmp_path: Path) -> None:
    """First many rows of one group, then many of another: segments go over to that."""
    with DiskStore.open(options_of(tmp_path / "root", 2_000_000)) as store:
        rows = open_kinds(store)
        largest, middle, _ = (r for r in store._open_stores())
        for number in range(120):
            write(rows, [key(3, number), *[key(0, number)] * (number < 5)])
        before = segments(largest, middle)
        for number in range(200, 600):
            write(rows, [key(0, number)])
        after = segments(largest, middle)
        assert before[0] < before[1]
        assert after[0] > after[1] >= 1
        assert store.usage().used_bytes <= 2_000_000


def segments(*stores: RowStore) -> list[int]:
    return [len(rows.segment_numbers) for rows in stores]
