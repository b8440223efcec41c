"""One root: its budget, its owner, its restarts."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from storage.device import LocalDevice
from storage.errors import ConfigError, LayoutMismatch, RootInUse, RootUnusable
from storage.jobs import JobResult
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.segment import segment_path
from storage.space import NAMESPACE_OVERHEAD_BYTES, ROOT_OVERHEAD_BYTES
from storage.store import DiskStore
from storage.survey import survey_root
from storage.testing.contract import StoreHarness, options_for
from storage.testing.faulty import FaultyDevice, Raise
from storage.testing.rows import (
    BudgetWatch,
    aligned_rows,
    bytes_on_disk,
    filled_rows,
    key_of,
    row_of,
)
from storage.types import STORED, RowKey, RowOutcome, SegmentId

OK, MISSING = RowOutcome.OK, RowOutcome.MISSING
ROW_BYTES = 8192
KEYS = [key_of(i) for i in range(64)]


@pytest.fixture
def harness(memory_path: Path) -> Iterator[StoreHarness]:
    harness = StoreHarness(memory_path / "root")
    yield harness
    harness.close()


def right(harness: StoreHarness, keys: list[RowKey]) -> bool:
    """Whether all of `keys` are there, byte for byte."""
    return harness.read(keys) == [(OK, row_of(key, harness.row_bytes)) for key in keys]


# -- budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ext4", "tmpfs"])
def test_the_budget_is_never_passed(where: str, direct_path: Path, memory_path: Path) -> None:
    """Sampled every 5 ms, from four threads, through growth, eviction, reopening, a second
    namespace and a lower budget."""
    root = (direct_path if where == "ext4" else memory_path) / "root"
    options = options_for(root, 65536, 24)
    budget = options.budget_bytes
    rows_of = filled_rows(KEYS, 65536)
    with BudgetWatch(root) as watch:
        for turn in range(3):
            with DiskStore.open(options) as store:
                identity = Identity("m", {"namespace": turn % 2})
                rows = store.open_rows(identity, 65536)

                def work(seed: int, rows=rows) -> None:  # type: ignore[no-untyped-def]
                    rng = random.Random(seed)
                    for _ in range(20):
                        numbers = rng.sample(range(64), 5)
                        rows.write([KEYS[n] for n in numbers], [rows_of[n] for n in numbers])

                threads = [threading.Thread(target=work, args=(turn * 4 + i,)) for i in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                usage = store.usage()
                assert bytes_on_disk(root) <= usage.used_bytes <= budget
                assert len(rows) == 24, "an old namespace makes room"
    assert watch.highest <= budget
    assert watch.highest > budget * 0.75
    assert watch.samples > 10


def test_used_bytes_after_a_kill_are_known_before_the_first_write(memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root", device=lambda: FaultyDevice(LocalDevice()))
    harness.write(KEYS[:16])
    used = harness.store.usage().used_bytes
    device = harness.store.device
    assert isinstance(device, FaultyDevice)
    device.abandon()
    harness.store.engine.close(60)
    store = DiskStore.open(harness.options)
    assert store.usage().used_bytes == used
    store.close()
    harness.open()
    assert harness.store.usage().used_bytes == used
    for key in KEYS[20:30]:
        assert harness.write([key]) == [OK]
        assert harness.store.usage().used_bytes == used
    assert len(harness.rows) == 16
    harness.close()


def test_repeats_cost_nothing(harness: StoreHarness) -> None:
    harness.write(KEYS[:1])
    before = harness.store.usage()
    for _ in range(5):
        assert harness.write(KEYS[:1]) == [RowOutcome.ALREADY_STORED]
    assert harness.store.usage() == before
    count = harness.rows.count()
    assert (count.rows_written, count.rows_already_stored, count.rows_evicted) == (1, 5, 0)
    assert count.bytes_written == ROW_BYTES


def test_ten_rounds_of_storing_and_removing_leak_nothing(harness: StoreHarness) -> None:
    for _ in range(10):
        assert harness.write(KEYS[:16]) == [OK] * 16
        used = harness.store.usage().used_bytes
        assert harness.rows.remove(KEYS[:20]) == 16
        assert len(harness.rows) == 0
        assert harness.store.usage().used_bytes == used
        harness.reopen()
        assert harness.keys() == set()
    assert harness.write(KEYS[40:41]) == [OK]


def test_evictions_are_counted_and_nothing_fails(harness: StoreHarness) -> None:
    for key in KEYS[:23]:
        assert harness.write([key]) == [OK]
    assert harness.rows.count().rows_evicted == 7
    assert harness.rows.count().writes_failed == harness.rows.count().writes_declined == 0
    assert harness.rows.keys() == KEYS[7:23]


def test_the_heads_of_a_job_too_large_for_the_store_stay(harness: StoreHarness) -> None:
    """Evicting a chain's own head for its leaf would leave what can't be hit."""
    outcomes = harness.write(KEYS[:30])
    assert outcomes == [OK] * 16 + [RowOutcome.DECLINED] * 14
    assert harness.rows.keys() == KEYS[15::-1], "the leaf goes first"
    harness.reopen()
    assert harness.rows.keys() == KEYS[15::-1]


def test_a_lower_budget_gives_up_the_coldest_rows(
    harness: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:
    for key in KEYS[:16]:
        harness.write([key])
    harness.read(KEYS[:1])
    harness.close()
    lower = options_for(harness.options.root, ROW_BYTES, 16).budget_bytes
    lower -= 2 * harness.rows.pool.charge_bytes
    harness.options = dataclasses.replace(harness.options, budget_bytes=lower)
    with caplog.at_level(logging.WARNING, "kvtier.storage"):
        harness.open()
    assert bytes_on_disk(harness.options.root) <= harness.store.usage().used_bytes <= lower
    # Two segments go, and the coldest rows wherever they stood: KEYS[0] was read.
    left = [*KEYS[9:16], KEYS[0]]
    assert harness.rows.keys() == left, "recency as it was"
    assert harness.rows.count().rows_given_up == 8
    assert harness.rows.count().rows_moved > 0
    assert "more than its budget" in caplog.messages[0]
    assert "2 segments" in caplog.messages[1]
    assert "8 rows given up" in caplog.messages[-1]
    harness.reopen()
    assert harness.rows.keys() == left
    assert right(harness, left)
    assert harness.write([KEYS[30]]) == [OK]


@pytest.mark.parametrize("op", ["remove", "close"])
def test_a_segment_that_cannot_be_given_back_stays_charged(memory_path: Path, op: str) -> None:
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:16])
    charge = harness.rows.pool.charge_bytes
    harness.close()
    lower = harness.options.budget_bytes - 2 * charge
    harness.options = dataclasses.replace(harness.options, budget_bytes=lower)
    device = FaultyDevice(LocalDevice())
    device.add(Raise(5), op, when=lambda op: op.path.name == "0")
    harness.open_on(device)
    usage = harness.store.usage()
    on_disk = bytes_on_disk(harness.options.root)
    assert on_disk <= usage.used_bytes
    assert (
        usage.used_bytes
        == ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + (4 if op == "remove" else 2) * charge
    )
    device.faults.clear()
    harness.close()
    harness.open()
    assert harness.store.usage().used_bytes <= lower
    harness.close()


def test_foreign_files_are_charged_and_left_alone(memory_path: Path) -> None:
    root = memory_path / "root"
    inside = root / Identity("m", {}).directory / "notes"
    inside.mkdir(parents=True)
    (inside / "x").write_bytes(bytes(100_000))
    (root / "lost+found").mkdir()
    (root / "lost+found" / "y").write_bytes(bytes(50_000))
    (root / "z").symlink_to("/etc")
    (root / "keep.partial.txt").write_bytes(bytes(10))
    (root / "lost+found" / "mine.partial").write_bytes(bytes(10))
    with DiskStore.open(options_for(root, ROW_BYTES, 16)) as store:
        used = store.usage().used_bytes
        assert (
            ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 150_000
            <= used
            <= ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 180_000
        )
        rows = store.open_rows(Identity("m", {}), ROW_BYTES)
        rows.write(KEYS, filled_rows(KEYS, ROW_BYTES))
        assert bytes_on_disk(root) <= store.usage().used_bytes <= store.usage().budget_bytes
    for path in (inside / "x", root / "lost+found" / "mine.partial", root / "keep.partial.txt"):
        assert path.exists()


def test_stale_namespaces_make_room_oldest_first(memory_path: Path) -> None:
    options = options_for(memory_path / "root", ROW_BYTES, 24)
    identities = [Identity("m", {"n": n}) for n in range(3)]
    directories = [options.root / identity.directory for identity in identities]
    for n, identity in enumerate(identities[:2]):
        with DiskStore.open(options) as store:
            rows = store.open_rows(identity, ROW_BYTES)
            rows.write(KEYS[:8], filled_rows(KEYS[:8], ROW_BYTES))
        os.utime(directories[n] / "zarr.json", (1000 + n, 1000 + n))
    with DiskStore.open(options) as store:
        rows = store.open_rows(identities[2], ROW_BYTES)
        for key in KEYS[:8]:
            assert rows.write([key], filled_rows([key], ROW_BYTES)).outcomes == [OK]
        assert not directories[0].exists() or not list(directories[0].glob("rows/c/*/0"))
        assert len(list(directories[1].glob("rows/c/*/0"))) >= 1
        for key in KEYS[8:40]:
            assert rows.write([key], filled_rows([key], ROW_BYTES)).outcomes == [OK]
        assert not directories[0].exists(), "and its metadata and directories"
        assert not directories[1].exists()
        assert len(rows) == 24
        assert bytes_on_disk(options.root) <= store.usage().used_bytes
        assert (
            store.usage().used_bytes
            == ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 6 * rows.pool.charge_bytes
        )


def test_what_nobody_will_open_again_makes_room_first(memory_path: Path) -> None:
    options = options_for(memory_path / "root", ROW_BYTES, 24)
    old, new = Identity("m", {"n": 0}), Identity("m", {"n": 1})
    lost = Identity("m", {"n": 0}).unrepeatable("f00d")
    assert lost.fingerprint not in (old.fingerprint, old.unrepeatable("beef").fingerprint)
    for n, identity in enumerate((old, lost)):
        with DiskStore.open(options) as store:
            store.open_rows(identity, ROW_BYTES).write(KEYS[:8], filled_rows(KEYS[:8], ROW_BYTES))
        os.utime(options.root / identity.directory / "zarr.json", (1000 + n, 1000 + n))
    with DiskStore.open(options) as store:
        rows = store.open_rows(new, ROW_BYTES)
        for key in KEYS[:12]:
            assert rows.write([key], filled_rows([key], ROW_BYTES)).outcomes == [OK]
    assert not list((options.root / lost.directory).glob("rows/c/*/0"))
    assert list((options.root / old.directory).glob("rows/c/*/0")), "though it is older"
    with DiskStore.open(options) as store:
        assert len(store.open_rows(old, ROW_BYTES)) > 0


def test_a_new_namespace_on_a_full_disk_opens_and_declines(memory_path: Path) -> None:
    """Never down because of the disk: no room is no hits, not no start."""
    device = FaultyDevice(LocalDevice())
    options = options_for(memory_path / "root", ROW_BYTES, 16)
    with DiskStore.open(options, device):
        pass
    for op in ("write_file", "allocate", "pwritev", "make_directory"):
        device.add(Raise(28), op, when=lambda op: op.path != options.root)
    now = [0.0]
    with DiskStore.open(options, device, now=lambda: now[0]) as store:
        rows = store.open_rows(Identity("m", {}), ROW_BYTES)
        assert (
            rows.write(KEYS[:2], filled_rows(KEYS[:2], ROW_BYTES)).outcomes
            == [RowOutcome.DECLINED] * 2
        )
        assert store.usage().state == "full"
        device.faults.clear()
        now[0] += 1.01
        assert rows.write(KEYS[:2], filled_rows(KEYS[:2], ROW_BYTES)).outcomes == [OK] * 2


@pytest.mark.parametrize("row_bytes", [4096, 65536, 499_712])
def test_the_least_budget_is_one_row_and_less_is_an_error(
    memory_path: Path, row_bytes: int
) -> None:
    least = 12288 + row_bytes + 4096 + ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + 32768
    options = StoreOptions(memory_path / "root", least, admission="always", reserve_bytes=0)
    with DiskStore.open(options) as store:
        rows = store.open_rows(Identity("m", {}), row_bytes)
        for key in KEYS[:3]:
            assert rows.write([key], filled_rows([key], row_bytes)).outcomes == [OK]
        assert rows.keys() == KEYS[2:3]
        assert bytes_on_disk(options.root) <= store.usage().used_bytes <= least
    options = dataclasses.replace(options, root=memory_path / "other", budget_bytes=least - 1)
    with (
        DiskStore.open(options) as store,
        pytest.raises(ConfigError, match=f"budget: expected at least {least} bytes"),
    ):
        store.open_rows(Identity("m", {}), row_bytes)


@pytest.mark.parametrize("segments", [4, 5, 9, 37, 600])
def test_a_root_holds_what_its_budget_says(memory_path: Path, segments: int) -> None:
    """Room for n segments of 4 rows is room for 4 n rows, whatever n."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < segments + 256:
        pytest.skip(f"{files} open files are too few")
    options = options_for(memory_path / "root", 4096, 4 * segments)
    with DiskStore.open(options) as store:
        rows = store.open_rows(Identity("m", {}), 4096)
        keys = [key_of(i) for i in range(4 * segments + 1)]
        buffers = aligned_rows(1, 4096) * len(keys)
        outcomes = rows.write(keys, buffers).outcomes
        assert outcomes.count(OK) == 4 * segments
        names = [len(files) for _, files, _ in os.walk(options.root)]
        assert max(names) <= 1024


# -- restart ------------------------------------------------------------------------------------


def test_times_of_files_do_not_matter(harness: StoreHarness) -> None:
    for key in KEYS[:16]:
        harness.write([key])
    harness.read([KEYS[0]])
    harness.close()
    for number, when in ((1, 2**31), (2, 0)):
        os.utime(segment_path(harness.rows.directory, SegmentId(number)), (when, when))
    harness.open()
    assert harness.rows.keys() == [*KEYS[1:16], KEYS[0]]


def test_what_survives_a_restart_is_not_written_again(harness: StoreHarness) -> None:
    harness.write(KEYS[:5])
    harness.reopen()
    assert harness.write(KEYS[:5]) == [RowOutcome.ALREADY_STORED] * 5
    assert harness.rows.count().bytes_written == 0
    assert right(harness, KEYS[:5])


def test_namespaces_do_not_mix(memory_path: Path) -> None:
    """The same key in namespaces that differ in one field holds different bytes."""
    options = options_for(memory_path / "root", ROW_BYTES, 24)
    identities = [Identity("m", {"layout": layout}) for layout in ("A", "B")]
    with DiskStore.open(options) as store:
        for n, identity in enumerate(identities):
            rows = store.open_rows(identity, ROW_BYTES)
            assert KEYS[0] not in rows
            rows.write(KEYS[:1], aligned_rows(1, ROW_BYTES, fill=n + 1))
    with DiskStore.open(options) as store:
        for n, identity in enumerate(identities):
            buffers = aligned_rows(1, ROW_BYTES)
            assert store.open_rows(identity, ROW_BYTES).read(KEYS[:1], buffers).outcomes == [OK]
            assert set(buffers[0]) == {n + 1}


def test_segment_size_of_a_namespace_stays_what_it_was(harness: StoreHarness) -> None:
    harness.write(KEYS[:6])
    harness.close()
    harness.options = dataclasses.replace(harness.options, segment_bytes=1)
    harness.open()
    assert harness.rows.geometry.slots_per_segment == 4
    assert right(harness, KEYS[:6])


def test_another_row_size_is_refused(harness: StoreHarness) -> None:
    harness.write(KEYS[:1])
    harness.close()
    with (
        DiskStore.open(harness.options) as store,
        pytest.raises(LayoutMismatch, match="row_bytes: expected 4096, found 8192"),
    ):
        store.open_rows(harness.identity, 4096)
    harness.open()
    assert right(harness, KEYS[:1])


@pytest.mark.parametrize("where", ["root", "rows"])
def test_a_newer_format_is_refused_and_untouched(harness: StoreHarness, where: str) -> None:
    harness.write(KEYS[:1])
    harness.close()
    path = (harness.options.root if where == "root" else harness.rows.directory) / "zarr.json"
    original = path.read_bytes()
    metadata = json.loads(original)
    metadata["attributes"]["kvtier"]["format_version"] = 2
    newer = json.dumps(metadata)
    path.write_text(newer)
    with pytest.raises((RootUnusable, LayoutMismatch), match="a newer kvtier wrote this"):
        harness.open()
    assert path.read_text() == newer
    path.write_bytes(original)
    harness.open()
    assert right(harness, KEYS[:1])


def test_a_directory_with_another_zarr_group_is_refused(memory_path: Path) -> None:
    root = memory_path / "root"
    root.mkdir()
    (root / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    with pytest.raises(RootUnusable, match="not the metadata of a kvtier store"):
        DiskStore.open(options_for(root, ROW_BYTES, 16))


def test_foreign_files_that_leave_no_room_are_told(
    memory_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = memory_path / "root"
    options = options_for(root, ROW_BYTES, 16)
    (root / "films").mkdir(parents=True)
    for size, is_told in ((options.budget_bytes // 3, False), (options.budget_bytes, True)):
        (root / "films" / "x").write_bytes(bytes(size))
        caplog.clear()
        with DiskStore.open(options) as store:
            rows = store.open_rows(Identity("m", {}), ROW_BYTES)
            outcomes = rows.write(KEYS[:4], filled_rows(KEYS[:4], ROW_BYTES)).outcomes
        assert outcomes == [RowOutcome.DECLINED if is_told else OK] * 4
        assert ("not kvtier's" in caplog.text) is is_told


@pytest.mark.parametrize("left", [b"", bytes(303)])
def test_a_root_whose_metadata_a_power_cut_emptied_keeps_its_rows(
    harness: StoreHarness, left: bytes
) -> None:
    harness.write(KEYS[:8])
    harness.close()
    path = harness.options.root / "zarr.json"
    path.write_bytes(left)
    harness.open()
    assert right(harness, KEYS[:8])
    assert json.loads(path.read_text())["node_type"] == "group"


@pytest.mark.parametrize("number", [2**31, 10**20])
def test_a_segment_whose_number_no_index_holds_is_left_out(
    harness: StoreHarness, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    harness.write(KEYS[:8])
    array = harness.rows.directory
    harness.close()
    path = segment_path(array, SegmentId(number))
    path.parent.mkdir()
    path.write_bytes(segment_path(array, SegmentId(0)).read_bytes())
    harness.open()
    assert right(harness, KEYS[:8])
    assert f"segment left out: {number}" in caplog.text
    assert bytes_on_disk(harness.options.root) <= harness.store.usage().used_bytes


def test_a_pipe_in_the_place_of_a_file_holds_nothing_up(harness: StoreHarness) -> None:
    harness.write(KEYS[:8])
    array = harness.rows.directory
    harness.close()
    path = segment_path(array, SegmentId(0))
    path.unlink()
    os.mkfifo(path)
    (array.parent / "zarr.json").unlink()
    os.mkfifo(array.parent / "zarr.json")
    survey_root(harness.options.root)
    harness.open()
    assert [outcome for outcome, _ in harness.read(KEYS[:8])] == [MISSING] * 4 + [OK] * 4
    assert harness.write(KEYS[:4]) == [OK] * 4


def test_a_reserve_larger_than_the_file_system_is_refused(memory_path: Path) -> None:
    options = options_for(memory_path / "root", ROW_BYTES, 16)
    total = LocalDevice().space(memory_path).total_bytes
    with (
        DiskStore.open(dataclasses.replace(options, reserve_bytes=total)) as store,
        pytest.raises(ConfigError, match=f"^reserve: expected at most .*, got {total}$"),
    ):
        store.open_rows(Identity("m", {}), ROW_BYTES)


@pytest.mark.parametrize("make", ["file", "below a file"])
def test_a_root_that_cannot_be_a_directory(memory_path: Path, make: str) -> None:
    (memory_path / "f").write_text("x")
    root = memory_path / "f" if make == "file" else memory_path / "f" / "root"
    with pytest.raises(RootUnusable, match="expected a directory"):
        DiskStore.open(options_for(root, ROW_BYTES, 16))


# -- owner --------------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_told_of_the_first(
    harness: StoreHarness, open_fds: Callable[[], int]
) -> None:
    fds = open_fds()
    with pytest.raises(RootInUse, match=f"belongs to process {os.getpid()} on "):
        DiskStore.open(harness.options)
    assert open_fds() == fds
    harness.write(KEYS[:1])
    assert right(harness, KEYS[:1])


def _own(options: StoreOptions, barrier: Any, everybody_tried: Any, results: Connection) -> None:
    barrier.wait()
    try:
        with DiskStore.open(options) as store:
            rows = store.open_rows(Identity("m", {}), ROW_BYTES)
            rows.write(KEYS[:6], filled_rows(KEYS[:6], ROW_BYTES))
            results.send("owner")
            everybody_tried.wait(60)
    except RootInUse as exc:
        results.send(str(exc))
    except BaseException as exc:
        results.send(f"unexpected {exc!r}")


def test_of_eight_processes_that_start_at_once_one_owns_the_root(memory_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["storage.store", "storage.testing.rows"])
    barrier, everybody_tried = context.Barrier(8), context.Event()
    options = options_for(memory_path / "a" / "b" / "root", ROW_BYTES, 16)
    pairs = [context.Pipe(duplex=False) for _ in range(8)]
    processes = [
        context.Process(target=_own, args=(options, barrier, everybody_tried, w)) for _, w in pairs
    ]
    for process in processes:
        process.start()
    answers = [r.recv() if r.poll(60) else "no answer" for r, _ in pairs]
    everybody_tried.set()
    for process in processes:
        process.join(30)
    assert answers.count("owner") == 1, answers
    for answer in answers:
        assert answer == "owner" or "belongs to" in answer, answer
    assert options.root.stat().st_mode & 0o777 == 0o700
    assert bytes_on_disk(options.root) <= options.budget_bytes
    with DiskStore.open(options) as store:
        assert len(store.open_rows(Identity("m", {}), ROW_BYTES)) == 6


def test_a_root_is_free_again_after_a_failed_opening(memory_path: Path) -> None:
    options = options_for(memory_path / "root", ROW_BYTES, 16)
    device = FaultyDevice(LocalDevice())
    device.add(Raise(5), "space")
    threads = threading.active_count()
    with pytest.raises(RootUnusable):
        DiskStore.open(dataclasses.replace(options, reserve_bytes=None), device)
    assert threading.active_count() == threads
    DiskStore.open(options).close()


# -- the interface ------------------------------------------------------------------------------


def test_changes_are_told_in_order(harness: StoreHarness) -> None:
    seen: set[RowKey] = set()

    def change(published, withdrawn):  # type: ignore[no-untyped-def]
        assert not seen & set(published)
        assert seen >= set(withdrawn)
        seen.update(published)
        seen.difference_update(withdrawn)

    harness.rows.on_change = change
    rng = random.Random(7)
    for _ in range(60):
        keys = rng.sample(KEYS, 3)
        assert all(outcome in STORED for outcome in harness.write(keys))
        harness.rows.remove(rng.sample(KEYS, 2))
        assert seen == harness.keys()


def test_a_wrong_call_is_an_error_of_the_caller(harness: StoreHarness) -> None:
    good = aligned_rows(1, ROW_BYTES)
    for keys, buffers in (
        ([KEYS[0]], []),
        ([RowKey(b"")], good),
        ([RowKey(b"x" * 73)], good),
        ([KEYS[0]], aligned_rows(1, ROW_BYTES + 4096)),
        ([KEYS[0]], [memoryview(bytearray(2 * ROW_BYTES))[::2]]),
    ):
        for call in (harness.rows.read, harness.rows.write):
            with pytest.raises(ValueError, match=r"expected|but"):
                call(keys, buffers)
    with pytest.raises(ValueError, match="writable"):
        harness.rows.read([KEYS[0]], [memoryview(bytes(ROW_BYTES))])
    with pytest.raises(ValueError, match="multiple of 4096"):
        harness.store.open_rows(Identity("x", {}), 1000)
    assert harness.rows.read([], []).outcomes == []
    assert harness.write([RowKey(b"x" * 72)]) == [OK]


def test_the_same_key_twice_in_a_job(harness: StoreHarness) -> None:
    assert sorted(harness.write([KEYS[0], KEYS[0]])) == [OK, RowOutcome.DECLINED]
    assert harness.read([KEYS[0], KEYS[0]]) == [(OK, row_of(KEYS[0], ROW_BYTES))] * 2
    assert harness.rows.pin_count == 0


def test_a_row_stands_where_locate_says(harness: StoreHarness) -> None:
    harness.write(KEYS[:10])
    geometry = harness.rows.geometry
    for key in KEYS[:10]:
        place = harness.rows.locate(key)
        assert place is not None
        with segment_path(harness.rows.directory, place.segment).open("rb") as file:
            file.seek(geometry.row_offset(place.slot))
            assert file.read(ROW_BYTES) == row_of(key, ROW_BYTES)
    assert harness.rows.locate(KEYS[11]) is None


def test_jobs_are_reported_once_also_after_close(harness: StoreHarness) -> None:
    results: list[JobResult] = []
    for n in range(20):
        keys = KEYS[n : n + 3]
        harness.rows.submit_write(keys, filled_rows(keys, ROW_BYTES), results.append)
    assert harness.store.close().is_ended
    assert len(results) == 20, "close runs what is queued"
    harness.rows.submit_write(KEYS[:2], filled_rows(KEYS[:2], ROW_BYTES), results.append)
    harness.rows.submit_read(KEYS[:2], aligned_rows(2, ROW_BYTES), results.append)
    assert [r.outcomes for r in results[20:]] == [
        [RowOutcome.DECLINED] * 2,
        [RowOutcome.FAILED] * 2,
    ]
    assert harness.store.close().is_ended, "a second close does nothing"
    harness.open()
    assert len(harness.rows) == 16


def test_four_threads_at_random(harness: StoreHarness) -> None:
    """5000 rows stored, read and removed: the figures are those of a fresh scan."""

    def work(seed: int) -> None:
        rng = random.Random(seed)
        buffers = aligned_rows(4, ROW_BYTES)
        for _ in range(250):
            keys = rng.sample(KEYS[:40], rng.randint(1, 4))
            what = rng.random()
            if what < 0.5:
                harness.rows.write(keys, filled_rows(keys, ROW_BYTES))
            elif what < 0.9:
                found = harness.rows.read(keys, buffers[: len(keys)]).outcomes
                for key, outcome, buffer in zip(keys, found, buffers, strict=False):
                    if outcome is not OK:
                        failures.extend([] if outcome is MISSING else [outcome])
                    elif bytes(buffer) != row_of(key, ROW_BYTES):
                        failures.append(key)
            else:
                harness.rows.remove(keys)
            usage = harness.store.usage()
            if not 0 <= usage.used_bytes <= usage.budget_bytes:
                failures.append(usage)

    failures: list[object] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    count = harness.rows.count()
    assert count.rows_written == count.bytes_written // ROW_BYTES > 100
    assert count.rows_corrupt == count.reads_failed == count.writes_failed == 0
    order, used = harness.rows.keys(), harness.store.usage().used_bytes
    assert harness.rows.pin_count == 0
    harness.reopen()
    assert harness.rows.keys() == order
    assert harness.store.usage().used_bytes == used
    assert right(harness, order)
