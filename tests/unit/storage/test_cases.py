"""Faults that real systems had, each as the test of its case: B01, B02, ...

A block of a case is a row here, `R` its bytes, and room for n blocks is a budget of n segments of
one slot.  Cases about one rule that another test plays through already are named in `ELSEWHERE`,
as are those of the rooms above the store.
"""

from __future__ import annotations

import ast
import dataclasses
import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from storage.device import LocalDevice, SpaceStat
from storage.header import SegmentGeometry
from storage.jobs import JobResult
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.segment import segment_path
from storage.space import (
    DEGRADED_AFTER,
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)
from storage.store import DiskStore
from storage.testing.faulty import FaultyDevice, Operation, Raise, Shorten, Wait
from storage.testing.harness import FaultyHarness
from storage.testing.rows import (
    BudgetWatch,
    aligned_rows,
    bytes_on_disk,
    files_under,
    filled_rows,
    key_of,
    row_of,
)
from storage.types import STORED, RowKey, RowOutcome, SegmentId
from tests.unit.storage.effort import lines_of
from tests.unit.storage.waiting import HANG_S, wait_until

R = 65536
K = [key_of(i) for i in range(256)]
OK, FAILED, DECLINED = RowOutcome.OK, RowOutcome.FAILED, RowOutcome.DECLINED
MISSING, CORRUPT, ALREADY = RowOutcome.MISSING, RowOutcome.CORRUPT, RowOutcome.ALREADY_STORED

ROOT = Path(__file__).resolve().parents[3]
ELSEWHERE = {
    "B05": "tests/unit/storage/test_store.py::test_of_eight_processes_that_start_at_once_one_owns_the_root",
    "B25": "tests/unit/storage/test_corruption.py::test_a_failed_read_touches_nothing_but_its_own_buffers",
    "B27": "tests/unit/tiering/test_worker.py::test_the_first_chunk_may_be_entered_in_its_middle",
    "B32": "tests/unit/storage/test_namespace.py::test_names_are_the_same_in_fresh_interpreters_whatever_the_hash_seed",
    "B37": "tests/integration/test_vllm_identity_fields.py::test_identity_follows_the_weights_and_not_the_path",
    "B38": "tests/integration/test_vllm_identity_fields.py::test_identity_tells_apart_what_shapes_the_bytes",
    "B40": "tests/unit/storage/test_namespace.py::test_every_name_has_a_directory_of_its_own_inside_the_root",
    "B41": "storage/testing/contract.py::test_keys_that_agree_in_part_are_different_rows",
    "B43": "tests/unit/tiering/test_rows.py::test_single_copies_make_the_same_row_at_every_tp",
    "B44": "tests/unit/tiering/test_rows.py::test_known_rows",
    "B48": "tests/unit/tiering/test_worker.py::test_padding_of_pages_is_not_copied",
    "B50": "tests/unit/tiering/test_rows.py::test_every_byte_is_written_by_exactly_one_rank",
    "B52": "tests/unit/tiering/test_region.py::test_missing_ranks_are_named",
    "B55": "tests/unit/storage/test_store.py::test_of_eight_processes_that_start_at_once_one_owns_the_root",
    "B56": "tests/unit/tiering/test_manager.py::test_stores_do_not_take_what_a_request_waits_for_but_a_silent_one_loses_its_holds",
    "B62": "tests/unit/tiering/test_manager.py::test_two_requests_over_a_region_for_one_both_get_through_the_older_first",
    "B65": "tests/unit/tiering/test_region.py::test_what_a_killed_engine_left_is_removed_and_a_living_one_is_not",
    "B66": "tests/unit/tiering/test_region.py::test_everyone_sees_the_same_bytes_and_a_late_joiner_too",
    "B67": "tests/unit/tiering/test_region.py::test_only_the_regions_own_name_is_dropped",
    "B69": "tests/unit/tiering/test_region.py::test_a_full_real_tmpfs",
    "B70": "tests/unit/tiering/test_region.py::test_attaching_never_makes_a_region",
    "B73": "tests/unit/tiering/test_manager.py::test_a_reset_that_the_disk_did_not_take_is_no_reset",
    "B78": "tests/unit/storage/test_store.py::test_four_threads_at_random",
    "B80": "tests/unit/tiering/test_config.py::test_bad_values",
    "B81": "tests/unit/storage/test_sizes.py::test_sizes_as_people_write_them",
    "B82": "tests/unit/tiering/test_config.py::test_unknown_settings_are_refused_by_name",
    "B84": "tests/unit/storage/test_device.py::test_without_preallocation_a_file_gets_its_size_all_the_same",
}  # fmt: skip


@pytest.mark.parametrize("case", ELSEWHERE)
def test_the_table_names_tests_that_are_there(case: str) -> None:
    path, name = ELSEWHERE[case].split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def room_for(root: Path, blocks: int, row_bytes: int = R) -> StoreOptions:
    """A root with room for so many blocks of one namespace, each a segment of its own, that writes
    what it is offered."""
    charge = SegmentGeometry(row_bytes, 1).segment_bytes + SEGMENT_OVERHEAD_BYTES
    budget = blocks * charge + NAMESPACE_OVERHEAD_BYTES + ROOT_OVERHEAD_BYTES
    return StoreOptions(
        root, budget, segment_bytes=1, admission="always", reserve_bytes=0, lock_timeout_s=0.2
    )


@pytest.fixture
def room(memory_path: Path) -> Callable[..., FaultyHarness]:
    """`room(n)`: a store with room for n blocks.  Closed by the test."""

    def make(blocks: int, device: LocalDevice | None = None, **options: object) -> FaultyHarness:
        root = memory_path / "root"
        return FaultyHarness(
            root,
            FaultyDevice(device or LocalDevice()),
            row_bytes=R,
            options=dataclasses.replace(room_for(root, blocks), **options),  # type: ignore[arg-type]
        )

    return make


def store(harness: FaultyHarness, keys: Sequence[RowKey]) -> list[RowOutcome]:
    """One job per key, in order."""
    return [harness.write([key])[0] for key in keys]


def hits(harness: FaultyHarness, keys: Sequence[RowKey]) -> set[RowKey]:
    """The keys that load, byte for byte; the others must be clean misses."""
    found = set()
    for key, (outcome, row) in zip(keys, harness.read(keys), strict=True):
        assert outcome in (OK, MISSING)
        if outcome is OK:
            assert row == row_of(key, R)
            found.add(key)
    return found


# -- A. Capacity, ENOSPC, eviction ----------------------------------------------------------------


def test_b01_accounting_does_not_drift_whatever_removes(room: Callable[..., FaultyHarness]) -> None:
    """Segments stay, preallocated: free again is each of their slots, and the charge is theirs."""
    harness = room(4)
    store(harness, K[:4])
    used = harness.store.usage().used_bytes
    for number in range(10):
        assert store(harness, K[:4]) in ([OK] * 4, [ALREADY] * 4)
        if number % 2:
            harness.rows.remove(K[:4])
        else:
            for segment in range(4):
                with segment_path(harness.rows.directory, SegmentId(segment)).open("r+b") as file:
                    file.seek(harness.rows.geometry.row_offset(0))
                    file.write(b"damage")
            assert [o for o, _ in harness.read(K[:4])] == [CORRUPT] * 4
        assert harness.keys() == set()
        assert harness.store.usage().used_bytes == used
        harness.check_nothing_leaked()
    assert harness.write([K[4]]) == [OK]
    assert hits(harness, [K[4]])
    harness.close()


def test_b02_a_resident_key_is_not_counted_twice(room: Callable[..., FaultyHarness]) -> None:
    harness = room(2)
    harness.write([K[0]])
    used = harness.store.usage().used_bytes
    assert store(harness, [K[0]] * 5) == [ALREADY] * 5
    assert harness.store.usage().used_bytes == used
    assert harness.write([K[1]]) == [OK]
    assert hits(harness, K[:2]) == set(K[:2])
    count = harness.rows.count()
    assert (count.rows_evicted, count.bytes_written, count.rows_offered) == (0, 2 * R, 7)
    assert len([name for name in files_under(harness.options.root) if name.endswith("/0")]) == 2
    harness.close()


def test_b03_usage_is_known_after_a_kill(room: Callable[..., FaultyHarness]) -> None:
    harness = room(4)
    store(harness, K[:4])
    used = harness.store.usage().used_bytes
    harness.faulty.abandon()
    harness.store.engine.close(60)
    harness.faulty = FaultyDevice(LocalDevice())
    with BudgetWatch(harness.options.root) as watch:
        harness.open()
        assert harness.store.usage().used_bytes == used
        assert store(harness, K[4:8]) == [OK] * 4
        harness.check(set(K[4:8]))
    assert watch.highest <= harness.options.budget_bytes
    harness.close()


def test_b06_no_directory_is_large(memory_path: Path) -> None:
    root = memory_path / "root"
    options = StoreOptions(root, 1 << 30, reserve_bytes=0)
    harness = FaultyHarness(root, row_bytes=4096, options=options)
    assert set(harness.write([key_of(i) for i in range(5000)])) == {OK}
    assert max(len(files) + len(below) for _, below, files in os.walk(root)) <= 1024
    harness.close()


@pytest.mark.parametrize("op", ["open", "make_directory", "rename"])
def test_b06_enospc_that_is_not_about_space_evicts_nothing(
    room: Callable[..., FaultyHarness], op: str
) -> None:
    """`open(O_CREAT)` says ENOSPC while more than half of the disk is free."""

    class HalfFree(LocalDevice):
        def space(self, path: Path) -> SpaceStat:
            return super().space(path)._replace(total_bytes=10**12, available_bytes=6 * 10**11)

    harness = room(10, HalfFree())
    store(harness, K[:4])
    harness.faulty.add(Raise(errno.ENOSPC), op)
    assert harness.write([K[4]]) == [DECLINED]
    usage = harness.store.usage()
    assert (usage.enospc, usage.enospc_other, usage.limit) == (0, 1, "names")
    assert harness.rows.count().rows_evicted == 0
    harness.check(set(K[:4]))
    # While it lasts, what is there is reused in place: one row for one row.
    coldest = harness.rows.keys()[0]
    assert harness.write([K[5]]) == [OK]
    assert harness.rows.count().rows_evicted == 1
    harness.faulty.faults.clear()
    harness.now += 3
    assert harness.write([K[6]]) == [OK]
    assert harness.store.usage().limit == ""
    harness.check({*K[:4], *K[5:7]} - {coldest})
    harness.close()


def test_b07_inode_exhaustion(mount: Callable[..., Path]) -> None:
    root = mount("tmpfs", "size=64m,nr_inodes=40") / "root"
    options = StoreOptions(root, 32 << 20, segment_bytes=1, admission="always", reserve_bytes=0)
    harness = FaultyHarness(root, row_bytes=4096, options=options)
    resident: list[int] = []
    for key in K[:200]:
        assert harness.write([key]) == [OK]
        assert harness.read([key])[0] == (OK, row_of(key, 4096))
        resident.append(len(harness.keys()))
    assert 10 <= max(resident) <= 20
    assert resident[-1] == max(resident), "what inodes allow"
    usage = harness.store.usage()
    assert usage.limit == "inodes"
    assert usage.effective_bytes < usage.budget_bytes // 10
    assert [o for o, _ in harness.read(K[:100])] == [MISSING] * 100
    harness.check(set(K[200 - resident[-1] : 200]))
    harness.close()


def test_b08_free_is_what_this_user_may_take(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stat:
        f_frsize, f_bsize, f_blocks, f_bfree, f_bavail = 4096, 1 << 20, 2000, 1000, 10
        f_files, f_favail = 100, 50

    assert os.statvfs(memory_path).f_bavail
    root = memory_path / "root"
    options = dataclasses.replace(room_for(root, 4, 16384), reserve_bytes=64 << 10)
    harness = FaultyHarness(root, row_bytes=16384, options=options)
    monkeypatch.setattr(os, "statvfs", lambda _path: Stat)
    assert harness.faulty.space(root).available_bytes == 40960
    assert harness.write([K[0]]) == [DECLINED]
    assert harness.store.usage().limit == "space"
    monkeypatch.undo()
    harness.close()


def test_b08_blocks_reserved_for_root_on_a_real_ext4(mount: Callable[..., Path]) -> None:
    disk = mount("ext4", mkfs=("-m", "20"))
    stat = os.statvfs(disk)
    assert stat.f_bfree > stat.f_bavail
    assert LocalDevice().space(disk).available_bytes == stat.f_bavail * stat.f_frsize


def test_b09_a_quota_that_statvfs_does_not_show(room: Callable[..., FaultyHarness]) -> None:
    class Quota(LocalDevice):
        def space(self, path: Path) -> SpaceStat:
            return super().space(path)._replace(available_bytes=10**12)

    harness = room(100, Quota())
    charge = harness.rows.pool.charge_bytes
    taken = lambda op: int(op.path.parent.name) >= 5  # noqa: E731
    harness.faulty.add(Raise(errno.EDQUOT), "allocate", when=taken)
    assert store(harness, K[:20]) == [OK] * 20
    assert harness.keys() == set(K[15:20])
    usage = harness.store.usage()
    assert usage.limit == "quota"
    assert usage.enospc == 1
    assert usage.effective_bytes == usage.used_bytes
    assert usage.effective_bytes <= 5 * charge + NAMESPACE_OVERHEAD_BYTES + ROOT_OVERHEAD_BYTES
    assert harness.faulty.count("allocate") <= 6
    harness.check(set(K[15:20]))
    harness.close()


def data_writes(op: Operation) -> bool:
    return op.size_bytes == R + 4096


def test_b10_enospc_once_is_retried_once(room: Callable[..., FaultyHarness]) -> None:
    harness = room(10)
    store(harness, K[:4])
    harness.rows.remove([K[0]])
    harness.faulty.add(Raise(errno.ENOSPC), "pwritev", when=data_writes, times=1)
    assert harness.write([K[4]]) == [OK]
    assert harness.rows.count().rows_evicted == 1
    assert harness.store.usage().enospc == 1
    harness.check({*K[2:5]})
    harness.close()


def test_b10_enospc_always_fails_after_two_attempts(room: Callable[..., FaultyHarness]) -> None:
    harness = room(10)
    store(harness, K[:4])
    used = harness.store.usage().used_bytes
    harness.rows.remove([K[0]])
    fault = harness.faulty.add(Raise(errno.ENOSPC), "pwritev", when=data_writes)
    assert harness.write([K[4]]) == [FAILED]
    assert fault.struck == 2
    assert harness.store.usage().used_bytes == used
    harness.check({*K[2:4]})
    harness.close()


def test_b11_enospc_is_forgotten_when_space_is_there_again(
    room: Callable[..., FaultyHarness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = room(30)
    store(harness, K[:5])
    caplog.set_level(logging.INFO, "kvtier.storage")
    fault = harness.faulty.add(Raise(errno.ENOSPC), "allocate")
    for key in K[5:15]:
        assert harness.write([key]) == [OK], "it is reused instead"
        assert harness.read([key])[0][0] is OK
    assert harness.store.usage().state == "full"
    harness.faulty.faults.remove(fault)
    harness.now += 2.01
    assert harness.write([K[20]]) == [OK]
    assert hits(harness, [K[20]])
    usage = harness.store.usage()
    assert usage.state == "growing"
    assert usage.state_changes == {"full": 1, "growing": 1}
    assert len([m for m in caplog.messages if " is now " in m]) == 2
    harness.close()


def test_b12_writers_together_stay_within_the_budget(room: Callable[..., FaultyHarness]) -> None:
    harness = room(3, io_threads=8)
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "pwritev", when=data_writes)
    results: list[RowOutcome] = []
    threads = [
        threading.Thread(target=lambda k=key: results.extend(harness.write([k]))) for key in K[:6]
    ]
    with BudgetWatch(harness.options.root) as watch:
        for thread in threads:
            thread.start()
        assert reached.wait(60)
        assert harness.store.usage().used_bytes <= harness.options.budget_bytes
        harness.faulty.faults.remove(fault)
        gate.set()
        for thread in threads:
            thread.join()
    assert watch.highest <= harness.options.budget_bytes
    assert set(results) <= {OK, DECLINED}
    assert len(harness.keys()) == 3
    harness.check(harness.keys())
    harness.close()


def test_b12_pinned_rows_are_not_evicted(room: Callable[..., FaultyHarness]) -> None:
    harness = room(3)
    store(harness, K[:3])
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "preadv")
    buffers = aligned_rows(3, R)
    results: list[JobResult] = []
    for key, buffer in zip(K[:3], buffers, strict=True):
        harness.rows.submit_read([key], [buffer], results.append)
    wait_until(lambda: harness.rows.pin_count == 3)
    assert harness.write([K[3]]) == [DECLINED]
    assert harness.rows.count().declined_full == 1
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: len(results) == 3)
    assert [r.outcomes for r in results] == [[OK]] * 3
    assert buffers == filled_rows(K[:3], R)
    assert harness.write([K[3]]) == [OK]
    harness.close()


def test_b14_a_row_just_stored_is_the_last_to_go(room: Callable[..., FaultyHarness]) -> None:
    harness = room(3)
    store(harness, K[:3])
    harness.read([K[0]])
    assert harness.write([K[3]]) == [OK]
    assert hits(harness, K[:4]) == {K[0], K[2], K[3]}
    assert harness.rows.count().bytes_written == 4 * R
    harness.close()


def test_b15_eviction_does_not_wait_behind_writes(room: Callable[..., FaultyHarness]) -> None:
    harness = room(2, io_threads=2, write_threads=1, write_queue_bytes=2 * R)
    store(harness, K[:2])
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "pwritev")
    results: list[RowOutcome] = []
    for key in K[2:7]:
        harness.rows.submit_write(
            [key], filled_rows([key], R), lambda result: results.extend(result.outcomes)
        )
        assert reached.wait(60)
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: len(results) == 5)
    assert Counter(results) == {OK: 3, DECLINED: 2}
    assert hits(harness, [K[4]]), "the last one that was accepted"
    assert harness.store.usage().used_bytes <= harness.options.budget_bytes
    harness.close()


def test_b16_a_second_limit_evicts_too(room: Callable[..., FaultyHarness]) -> None:
    """Segments that can't be had, whatever keeps them: here, descriptors."""
    harness = room(100)
    few = lambda op: int(op.path.parent.name) >= 3 if op.path.suffix else False  # noqa: E731
    harness.faulty.add(Raise(errno.EMFILE), "open", when=few)
    assert store(harness, K[:10]) == [OK] * 10
    assert harness.keys() == set(K[7:10])
    count = harness.rows.count()
    assert (count.rows_evicted, count.writes_failed, count.writes_declined) == (7, 0, 0)
    assert harness.store.usage().limit == "descriptors"
    harness.check(set(K[7:10]))
    harness.close()


def test_b17_a_lower_budget_is_announced_then_met(
    room: Callable[..., FaultyHarness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = room(6)
    store(harness, K[:6])
    harness.close()
    harness.options = room_for(harness.options.root, 2)
    with caplog.at_level(logging.WARNING, "kvtier.storage"):
        harness.open()
    assert harness.keys() == set(K[4:6])
    assert bytes_on_disk(harness.options.root) <= harness.options.budget_bytes
    assert harness.store.usage().used_bytes <= harness.options.budget_bytes
    assert "more than its budget" in caplog.messages[0]
    harness.check(set(K[4:6]))
    harness.close()


@pytest.mark.parametrize("where", ["second write", "rename", "close"])
def test_b18_enospc_that_is_told_late(
    room: Callable[..., FaultyHarness], where: str, open_fds: Callable[[], int]
) -> None:
    """A row is written and published by `pwritev` alone; what `close` says of one is no news."""
    harness = room(4)
    store(harness, K[:2])
    harness.faulty.add(Raise(errno.EIO), "allocate")  # so that it is written to a slot in place
    used, fds = harness.store.usage().used_bytes, open_fds()
    harness.rows.remove([K[0]])
    if where == "second write":
        harness.faulty.add(Shorten(4096), "pwritev", times=1, when=data_writes)
        harness.faulty.add(Raise(errno.ENOSPC), "pwritev", when=lambda op: op.size_bytes == R)
        assert harness.write([K[3]]) in ([FAILED], [OK])
    else:
        harness.faulty.faults.clear()
        harness.faulty.add(Raise(errno.ENOSPC), "rename" if where == "rename" else "close")
        harness.rows.remove([K[1]])
        assert store(harness, K[10:13])[-1] in (DECLINED, OK)
    harness.faulty.faults.clear()
    harness.now += 100
    left = harness.keys()
    harness.check(left)
    assert not [name for name in files_under(harness.options.root) if "partial" in name]
    if where != "close":
        assert harness.store.usage().used_bytes == used
        assert open_fds() == fds
    harness.reopen()
    harness.check(left)
    harness.close()


# -- B. Corruption and partial writes -------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, R // 2, R - 1])
def test_b19_right_length_wrong_bytes(room: Callable[..., FaultyHarness], offset: int) -> None:
    harness = room(4)
    store(harness, K[:3])
    place = harness.rows.locate(K[0])
    assert place is not None
    path = segment_path(harness.rows.directory, place.segment)
    with path.open("r+b") as file:
        file.seek(harness.rows.geometry.row_offset(place.slot) + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert [o for o, _ in harness.read(K[:3])] == [CORRUPT, OK, OK]
    assert harness.rows.count().rows_corrupt == 1
    assert [o for o, _ in harness.read(K[:3])] == [MISSING, OK, OK]
    harness.close()


def test_b19_two_segments_that_changed_places(room: Callable[..., FaultyHarness]) -> None:
    harness = room(4)
    store(harness, K[:2])
    one, two = (segment_path(harness.rows.directory, SegmentId(n)) for n in (0, 1))
    a, b = one.read_bytes(), two.read_bytes()
    row = harness.rows.geometry.row_offset(0)
    for path, own, other in ((one, a, b), (two, b, a)):
        path.write_bytes(own[:row] + other[row:])  # each name over the other's bytes
    assert [o for o, _ in harness.read(K[:2])] == [CORRUPT, CORRUPT]
    harness.close()


def test_b20_a_bad_row_fails_one_load_and_is_a_miss_until_stored_again(
    room: Callable[..., FaultyHarness],
) -> None:
    harness = room(4)
    harness.write([K[0]])
    path = segment_path(harness.rows.directory, SegmentId(0))
    os.truncate(path, harness.rows.geometry.row_offset(0) + R // 2)
    failed = [harness.read([K[0]])[0][0] for _ in range(100) if K[0] in harness.rows]
    assert failed == [CORRUPT]
    assert harness.write([K[0]]) == [OK]
    assert hits(harness, [K[0]])
    harness.close()


@pytest.mark.parametrize("content", ["empty", "zeros", "zero rows"])
def test_b22_what_a_power_cut_leaves(room: Callable[..., FaultyHarness], content: str) -> None:
    harness = room(4)
    zeros = RowKey(b"a row of zeros")
    store(harness, K[:2])
    assert harness.rows.write([zeros], aligned_rows(1, R)).outcomes == [OK]
    harness.close()
    path = segment_path(harness.rows.directory, SegmentId(0))
    whole = path.read_bytes()
    row = harness.rows.geometry.row_offset(0)
    path.write_bytes(
        {"empty": b"", "zeros": bytes(len(whole)), "zero rows": whole[:row] + bytes(R + 4096)}[
            content
        ]
    )
    harness.open()
    assert harness.read([K[0]])[0][0] in (CORRUPT, MISSING)
    assert harness.read([K[1]])[0] == (OK, row_of(K[1], R))
    assert harness.read([zeros])[0] == (OK, bytes(R)), "zeros may be what was stored"
    harness.close()


def test_b23_names_of_what_is_half_made_are_one_writers(room: Callable[..., FaultyHarness]) -> None:
    """Two writers of one key, again and again, and a reader: one root has one owner, so they are
    threads; the second of a key that is being written is declined."""
    harness = room(4)
    stop = threading.Event()
    wrong: list[object] = []

    def write() -> None:
        rows = filled_rows([K[0]], R)
        for _ in range(300):
            outcome = harness.rows.write([K[0]], rows).outcomes[0]
            if outcome not in (*STORED, DECLINED):
                wrong.append(outcome)
            harness.rows.remove([K[0]])

    def read() -> None:
        while not stop.is_set():
            for outcome, row in harness.read([K[0]]):
                if outcome not in (OK, MISSING) or (outcome is OK and row != row_of(K[0], R)):
                    wrong.append(outcome)

    writers = [threading.Thread(target=write) for _ in range(2)]
    reader = threading.Thread(target=read)
    for thread in (*writers, reader):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert wrong == []
    assert harness.write([K[0]]) in ([OK], [ALREADY])
    harness.check({K[0]})
    harness.close()


def test_b26_namespaces_of_the_same_key_keep_their_own_bytes(memory_path: Path) -> None:
    options = room_for(memory_path / "root", 6)
    ranks = [Identity("m", {"rank": rank}) for rank in range(2)]
    for is_again in (False, True):
        with DiskStore.open(options) as opened:
            for number, identity in enumerate(ranks):
                rows = opened.open_rows(identity, R)
                if not is_again:
                    assert rows.write([K[0]], aligned_rows(1, R, fill=number + 1)).outcomes == [OK]
                buffers = aligned_rows(1, R)
                assert rows.read([K[0]], buffers).outcomes == [OK]
                assert set(buffers[0]) == {number + 1}


def test_b28_short_transfers(room: Callable[..., FaultyHarness]) -> None:
    harness = room(4)
    harness.faulty.refuses_direct = True
    harness.reopen()
    harness.faulty.add(Shorten(1000), "pwritev")
    harness.faulty.add(Shorten(1000), "preadv")
    assert harness.write(K[:2]) == [OK, OK]
    assert hits(harness, K[:2]) == set(K[:2])
    harness.faulty.faults.clear()
    path = segment_path(harness.rows.directory, SegmentId(0))
    assert path.stat().st_size == harness.rows.geometry.segment_bytes
    os.truncate(path, harness.rows.geometry.row_offset(0) + 1000)
    assert harness.read([K[0]])[0][0] is CORRUPT, "an early end is no success"
    harness.close()


def test_b29_a_failed_write_leaks_nothing(room: Callable[..., FaultyHarness]) -> None:
    harness = room(4)
    fault = harness.faulty.add(Raise(errno.EIO), "pwritev", when=data_writes)
    assert harness.write([K[0]]) == [FAILED]
    harness.check(set())
    assert harness.read([K[0]])[0][0] is MISSING
    harness.faulty.faults.remove(fault)
    harness.now += 1.01
    assert harness.write([K[0]]) == [OK]
    harness.check({K[0]})
    harness.close()


def test_b30_one_bad_key_does_not_sink_the_batch(room: Callable[..., FaultyHarness]) -> None:
    harness = room(4)
    store(harness, [K[0], *K[20:23]])
    harness.rows.remove(K[20:23])
    bad = lambda op: data_writes(op) and op.path.parent.name == "2"  # noqa: E731
    harness.faulty.add(Raise(errno.EIO), "pwritev", when=bad)
    outcomes = harness.write(K[:4])
    assert Counter(outcomes) == {ALREADY: 1, OK: 2, FAILED: 1}
    harness.faulty.faults.clear()
    kept = [key for key, o in zip(K[:4], outcomes, strict=True) if o in STORED]
    assert [o for o, _ in harness.read([kept[0], K[9], kept[1]])] == [OK, MISSING, OK]
    harness.check(set(kept))
    harness.close()


# -- C. Restart and persistence, D. Identity ------------------------------------------------------


@pytest.mark.parametrize("is_killed", [False, True])
def test_b31_the_index_survives(room: Callable[..., FaultyHarness], is_killed: bool) -> None:
    harness = room(6)
    harness.write(K[:5])
    if is_killed:
        harness.faulty.abandon()
        harness.store.engine.close(60)
        harness.faulty = FaultyDevice(LocalDevice())
    else:
        harness.close()
    harness.open()
    assert hits(harness, K[:5]) == set(K[:5])
    assert harness.write(K[:5]) == [ALREADY] * 5
    assert harness.rows.count().bytes_written == 0
    harness.close()


def test_b34_recency_survives_whatever_files_say(room: Callable[..., FaultyHarness]) -> None:
    harness = room(3)
    store(harness, K[:3])
    harness.read([K[0]])
    harness.close()
    for number, when in ((2, time.time() + 10 * 365 * 86400), (1, 0)):
        os.utime(segment_path(harness.rows.directory, SegmentId(number)), (when, when))
    harness.open()
    assert harness.write([K[3]]) == [OK]
    assert harness.keys() == {K[0], K[2], K[3]}
    harness.close()


def test_b35_the_reference_is_the_configuration_not_a_file(memory_path: Path) -> None:
    options = room_for(memory_path / "root", 8)
    old, new = Identity("m", {"format": "A"}), Identity("m", {"format": "B"})
    with DiskStore.open(options) as opened:
        opened.open_rows(old, R).write(K[:1], filled_rows(K[:1], R))
        opened.open_rows(new, R).write(K[1:6], filled_rows(K[1:6], R))
    with DiskStore.open(options) as opened:
        rows = opened.open_rows(new, R)
        assert set(rows.keys()) == set(K[1:6])
        assert rows.read(K[:1], aligned_rows(1, R)).outcomes == [MISSING]


@pytest.mark.parametrize("field", [("layout", "A", "B"), ("runner", 1, 2)])
def test_b36_what_shapes_the_bytes_is_a_namespace(
    memory_path: Path, field: tuple[str, object, object]
) -> None:
    name, one, two = field
    options = room_for(memory_path / "root", 8)
    identities = [Identity("m", {name: value}) for value in (one, two)]  # type: ignore[dict-item]
    with DiskStore.open(options) as opened:
        opened.open_rows(identities[0], R).write(K[:1], filled_rows(K[:1], R))
    with DiskStore.open(options) as opened:
        assert opened.open_rows(identities[1], R).keys() == []
    with DiskStore.open(options) as opened:
        buffers = aligned_rows(1, R)
        assert opened.open_rows(identities[0], R).read(K[:1], buffers).outcomes == [OK]
        assert buffers[0] == row_of(K[0], R)
    assert Identity("m", {name: one, "new": None}).namespace != identities[0].namespace  # type: ignore[dict-item]


# -- F. Concurrency, G. Performance and blocking --------------------------------------------------


def test_b53_removed_between_the_lookup_and_the_read(room: Callable[..., FaultyHarness]) -> None:
    harness = room(2)
    store(harness, K[:2])
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "preadv")
    results: list[JobResult] = []
    buffers = aligned_rows(1, R)
    harness.rows.submit_read([K[0]], buffers, results.append)
    assert reached.wait(60)
    assert harness.rows.remove([K[0]]) == 0, "it is being read"
    assert harness.write([K[2]]) == [OK]
    assert K[0] in harness.rows, "another one went"
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: bool(results))
    assert results[0].outcomes == [OK]
    assert buffers[0] == row_of(K[0], R)
    harness.close()


def test_b54_a_file_that_somebody_removed(room: Callable[..., FaultyHarness]) -> None:
    harness = room(2)
    store(harness, K[:2])
    used = harness.store.usage().used_bytes
    place = harness.rows.locate(K[0])
    assert place is not None
    segment_path(harness.rows.directory, place.segment).unlink()
    assert harness.write([K[2]]) == [OK]
    assert harness.keys() == {K[1], K[2]}
    usage = harness.store.usage()
    assert (usage.used_bytes, usage.external_removals) == (used, 1)
    assert harness.rows.count().rows_given_up + harness.rows.count().rows_evicted == 1
    harness.check({K[1], K[2]})
    harness.reopen()
    harness.check({K[1], K[2]})
    harness.close()


def test_b54_a_removal_is_noticed_without_a_write(room: Callable[..., FaultyHarness]) -> None:
    harness = room(3)
    store(harness, K[:3])
    used = harness.store.usage().used_bytes
    for number in (0, 2):
        segment_path(harness.rows.directory, SegmentId(number)).unlink()
    foreign = segment_path(harness.rows.directory, SegmentId(2))
    foreign.write_text("not ours")
    harness.store.maintain()
    usage = harness.store.usage()
    assert usage.external_removals == 2
    assert usage.used_bytes == used - 2 * harness.rows.pool.charge_bytes
    assert harness.keys() == {K[1]}
    assert foreign.read_text() == "not ours"
    foreign.unlink()
    assert store(harness, K[5:7]) == [OK] * 2
    harness.check({K[1], *K[5:7]})
    harness.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EBUSY])
def test_b54_a_segment_that_cannot_be_removed_stays_charged(
    room: Callable[..., FaultyHarness], code: int
) -> None:
    harness = room(4)
    store(harness, K[:4])
    used = harness.store.usage().used_bytes
    harness.faulty.add(Raise(code), "remove", when=lambda op: op.path.name == "0", times=1)
    assert harness.rows.mover.give_back(harness.rows.mover.choose(1)) == 0
    assert harness.store.usage().used_bytes == used
    assert harness.rows.mover.give_back(harness.rows.mover.choose(1)) > 0, "another one"
    assert bytes_on_disk(harness.options.root) <= harness.store.usage().used_bytes < used
    harness.close()


def test_b59_back_pressure_declines_at_once_and_reads_stay_quick(
    room: Callable[..., FaultyHarness],
) -> None:
    harness = room(64, io_threads=2, write_queue_bytes=32 * R)
    harness.write([K[200]])
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "pwritev", when=data_writes)
    results: list[RowOutcome] = []
    row = filled_rows([K[0]], R)
    for number in range(10_000):
        key = RowKey(number.to_bytes(8, "big"))
        harness.rows.submit_write([key], row, lambda result: results.extend(result.outcomes))
        if number == 0:
            assert reached.wait(60)
    assert len(results) == 10_000 - 33, "one runs, 32 wait"
    assert set(results) == {DECLINED}
    assert harness.rows.count().declined_busy == len(results)
    assert harness.read([K[200]])[0][0] is OK, "while all writes are held"
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: len(results) == 10_000)
    assert Counter(results)[OK] == 33
    harness.close()


class CountingDevice(LocalDevice):
    """Transfers of rows wait until as many run at once as `awaited` says of their kind; `most` is
    how many did."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: Counter[str] = Counter()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._changed = threading.Condition()

    def await_more(self, kind: str, count: int) -> None:
        with self._changed:
            self.awaited[kind] = count
            self._changed.notify_all()

    def _slow(self, kind: str, size: int) -> None:
        if size < R:
            return
        with self._changed:
            self.now[kind] += 1
            self.most[kind] = max(self.most[kind], self.now[kind])
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most[kind] >= self.awaited[kind], HANG_S)
        time.sleep(0.005)  # for one too many to come
        with self._changed:
            self.now[kind] -= 1

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._slow("read", sum(b.nbytes for b in buffers))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._slow("write", sum(b.nbytes for b in buffers))
        return super().pwritev(fd, buffers, offset)


@pytest.mark.parametrize(("io_threads", "write_threads"), [(2, 1), (4, 2), (4, 4)])
def test_b61_the_numbers_of_threads_mean_something(
    room: Callable[..., FaultyHarness], io_threads: int, write_threads: int
) -> None:
    device = CountingDevice()
    harness = room(40, device, io_threads=io_threads, write_threads=write_threads)
    store(harness, K[:4])
    device.most.clear()
    results: list[JobResult] = []
    device.await_more("write", write_threads + (write_threads < io_threads))  # never so many
    for key in K[10:30]:
        harness.rows.submit_write([key], filled_rows([key], R), results.append)
    if write_threads < io_threads:
        wait_until(lambda: device.now["write"] == write_threads)
        assert harness.read([K[0]])[0][0] is OK
        assert len(results) == 0, "not behind 20 writes"
        device.await_more("write", write_threads)
    wait_until(lambda: len(results) == 20)
    device.await_more("read", io_threads)
    reads: list[JobResult] = []
    for key in K[10:30]:
        harness.rows.submit_read([key], aligned_rows(1, R), reads.append)
    wait_until(lambda: len(reads) == 20)
    assert device.most["write"] == write_threads
    assert device.most["read"] == io_threads
    harness.close()


def test_b64_a_lookup_asks_no_disk(memory_path: Path) -> None:
    root = memory_path / "root"
    harness = FaultyHarness(
        root, row_bytes=4096, options=StoreOptions(root, 1 << 30, reserve_bytes=0)
    )
    row = aligned_rows(1, 4096)
    lines = []
    first = 0
    for count in (100, 20_000):
        keys = [key_of(i) for i in range(first, count)]
        assert set(harness.rows.write(keys, row * len(keys)).outcomes) == {OK}
        first = count
        asked = len(harness.faulty.operations)
        wanted = [key_of(i) for i in range(0, count, count // 100)]
        lines.append(sum(lines_of(lambda key=key: key in harness.rows) for key in wanted))  # type: ignore[misc]
        assert all(key in harness.rows for key in wanted)
        assert len(harness.faulty.operations) == asked
    assert 0 < lines[1] < 2 * lines[0], "hardly more work where there are more rows"
    harness.close()


# -- I. Shutdown, J. Reports ----------------------------------------------------------------------


def test_b72_close_does_not_wait_for_a_write_that_hangs(
    room: Callable[..., FaultyHarness],
) -> None:
    harness = room(4, io_threads=1)
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "pwritev", when=data_writes)
    results: list[JobResult] = []
    harness.rows.submit_write([K[0]], filled_rows([K[0]], R), results.append)
    assert reached.wait(60)
    assert not harness.store.close(0.3).is_ended
    assert not harness.store.close().is_ended, "a second one does nothing"
    assert not results
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: bool(results))
    harness.faulty.abandon()
    harness.faulty = FaultyDevice(LocalDevice())
    harness.open()
    harness.check(harness.keys())
    harness.close()


@pytest.mark.parametrize("timeout_s", [HANG_S, 0.05])
def test_b74_close_reports_what_it_dropped(
    room: Callable[..., FaultyHarness], timeout_s: float
) -> None:
    """With little time a write holds the others up until they are dropped."""
    goes_on = threading.Event()

    class Slow(LocalDevice):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if sum(b.nbytes for b in buffers) >= R:
                assert goes_on.wait(HANG_S)
            return super().pwritev(fd, buffers, offset)

    harness = room(32, Slow(), io_threads=1)
    results: list[RowOutcome] = []

    def report_of(result: JobResult) -> None:
        results.extend(result.outcomes)
        if DECLINED in results:
            goes_on.set()

    for key in K[:20]:
        harness.rows.submit_write([key], filled_rows([key], R), report_of)
    if timeout_s >= 1:
        goes_on.set()
    report = harness.store.close(timeout_s)
    assert report.is_ended
    outcomes = Counter(results)
    assert outcomes[OK] + outcomes[DECLINED] == 20
    assert report.dropped_rows == outcomes[DECLINED]
    assert (report.dropped_rows > 0) == (timeout_s < 1)
    harness.open()
    assert len(hits(harness, K[:20])) == outcomes[OK]
    harness.check(harness.keys())
    harness.close()


def test_b76_every_outcome_has_a_counter(room: Callable[..., FaultyHarness]) -> None:
    harness = room(2, io_threads=1, write_queue_bytes=1)
    assert harness.write([K[0]]) == [OK]
    assert harness.write([K[0]]) == [ALREADY]
    assert harness.write([K[1], K[1]]) == [OK, DECLINED]
    # Full: the only rows are the job's own.
    assert Counter(harness.write([*K[:2], K[2]])) == {ALREADY: 2, DECLINED: 1}
    # Busy: one write is held, one waits.
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "pwritev", when=data_writes)
    results: list[RowOutcome] = []
    for key in K[3:6]:
        harness.rows.submit_write(
            [key], filled_rows([key], R), lambda result: results.extend(result.outcomes)
        )
        assert reached.wait(60)
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: len(results) == 3)
    assert Counter(results) == {OK: 2, DECLINED: 1}
    # The disk: one fails, the next is not tried.
    fault = harness.faulty.add(Raise(errno.EIO), "pwritev")
    assert store(harness, K[10:12]) == [FAILED, DECLINED]
    harness.faulty.faults.remove(fault)
    [left] = harness.keys()
    assert [o for o, _ in harness.read([left, K[99]])] == [OK, MISSING]
    place = harness.rows.locate(left)
    assert place is not None
    with segment_path(harness.rows.directory, place.segment).open("r+b") as file:
        file.seek(harness.rows.geometry.row_offset(place.slot))
        file.write(b"damage")
    assert harness.read([left])[0][0] is CORRUPT
    count = harness.rows.count()
    assert count.rows_offered == 12
    assert count.rows_written == 4
    assert count.rows_already_stored == 3
    assert count.declined_full == count.declined_busy == 1
    assert count.declined_disk == count.declined_twice == 1
    assert count.writes_failed == 1
    assert count.rows_evicted == 3
    assert count.rows_read == count.rows_missing == count.rows_corrupt == 1
    assert count.rows_offered == (
        count.rows_written + count.rows_already_stored + count.writes_declined + count.writes_failed
    )
    harness.close()


def test_b77_a_useless_store_is_not_healthy(room: Callable[..., FaultyHarness]) -> None:
    harness = room(30)
    harness.write([K[0]])
    assert harness.store.usage().health == "ok"
    for op in ("pwritev", "allocate"):
        harness.faulty.add(Raise(errno.EIO), op)
    for key in K[1:21]:
        assert harness.write([key])[0] in (FAILED, DECLINED)
        harness.now += 100
    usage = harness.store.usage()
    assert (usage.health, usage.errno) == ("degraded", errno.EIO)
    harness.faulty.faults.clear()
    harness.now += 100
    assert harness.write([K[1]]) == [OK]
    assert harness.store.usage().health == "ok"
    harness.faulty.add(Raise(errno.ESTALE), "preadv")
    for _ in range(DEGRADED_AFTER):
        assert harness.store.usage().health == "ok"
        harness.read([K[1]])
    assert DEGRADED_AFTER <= 10
    assert (harness.store.usage().health, harness.store.usage().errno) == ("degraded", errno.ESTALE)
    harness.faulty.faults.clear()
    harness.read([K[1]])
    assert harness.store.usage().health == "ok"
    harness.close()


def test_b77_written_and_never_read_is_flagged(
    room: Callable[..., FaultyHarness], caplog: pytest.LogCaptureFixture
) -> None:
    harness = room(110)
    for key in K[:100]:
        harness.write([key])
    assert [o for o, _ in harness.read(K[100:200])] == [MISSING] * 100
    with caplog.at_level(logging.INFO, "kvtier.storage"):
        harness.close()
    [line] = [m for m in caplog.messages if "rows written" in m]
    assert "100 rows written, 0 of 100 found: nothing of it was ever read" in line


# -- K. Configuration and file-system differences -------------------------------------------------


def test_b85_nothing_is_made_outside_the_root(
    room: Callable[..., FaultyHarness], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    harness = room(4)
    store(harness, K[:6])
    root = harness.options.root
    made = [op for op in harness.faulty.operations if op.name in ("open", "write_file", "rename")]
    assert made
    assert all(op.path.is_relative_to(root) for op in made)
    assert list(tmp_path.iterdir()) == []
    harness.close()


def test_b86_a_stale_handle_is_a_miss_and_costs_no_row(
    room: Callable[..., FaultyHarness],
) -> None:
    harness = room(4)
    harness.write([K[0]])
    harness.faulty.add(Raise(errno.ESTALE), "preadv", times=1)
    assert harness.read([K[0]])[0][0] is FAILED
    assert segment_path(harness.rows.directory, SegmentId(0)).exists()
    assert hits(harness, [K[0]])
    assert harness.write([K[0]]) == [ALREADY]
    harness.close()


def test_b87_the_budget_is_the_roots_whoever_uses_it(memory_path: Path) -> None:
    """Eight namespaces share one budget: it is not one per user."""
    options = room_for(memory_path / "root", 16)
    with BudgetWatch(options.root) as watch, DiskStore.open(options) as opened:
        for rank in range(8):
            rows = opened.open_rows(Identity("m", {"rank": rank}), R)
            for key in K[:4]:
                assert rows.write([key], filled_rows([key], R)).outcomes[0] in (OK, DECLINED)
        assert opened.usage().used_bytes <= options.budget_bytes
    assert watch.highest <= options.budget_bytes
