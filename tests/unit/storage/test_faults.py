"""A disk that refuses: what fails is reported, leaves nothing behind, and ends with the fault."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storage.device import LocalDevice, SpaceStat
from storage.errors import RootUnusable
from storage.jobs import JobResult
from storage.segment import partial_path
from storage.store import DiskStore
from storage.testing.faulty import Fault, FaultyDevice, Operation, Raise, Wait, each_operation
from storage.testing.harness import FaultyHarness
from storage.testing.rows import (
    aligned_rows,
    filled_rows,
    key_of,
    row_of,
)
from storage.types import STORED, RowOutcome, SegmentId
from tests.unit.storage.waiting import Deadlines, played_deadlines, wait_until

OK, FAILED, DECLINED = RowOutcome.OK, RowOutcome.FAILED, RowOutcome.DECLINED
KEYS = [key_of(i) for i in range(64)]


@pytest.fixture
def harness(memory_path: Path) -> Iterator[FaultyHarness]:
    harness = FaultyHarness(memory_path / "root")
    yield harness
    harness.faulty.faults.clear()
    harness.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("resident", [0, 3, 4, 16])
def test_whatever_operation_of_a_write_fails(
    memory_path: Path, code: int, resident: int, open_fds: Callable[[], int]
) -> None:
    """The first write, one beside other rows, one that grows, one that evicts."""
    rounds = 0
    for number, _ in enumerate(iter(int, 1)):
        harness = FaultyHarness(memory_path / str(number))
        fds = open_fds()
        if resident:
            assert harness.write(KEYS[:resident]) == [OK] * resident
        fault = harness.faulty.add(Raise(code), nth=number + 1)
        new = KEYS[20:22]
        outcomes = harness.write(new)
        was_struck = bool(fault.struck)
        harness.faulty.faults.clear()
        expected = {key for key, o in zip(new, outcomes, strict=True) if o in STORED}
        left = harness.keys()
        assert left - set(KEYS[:resident]) == expected
        lost = set(KEYS[:resident]) - left
        assert len(lost) <= (4 if resident == 16 else 2)
        harness.check(left)
        if not was_struck:
            assert outcomes == [OK, OK]
            harness.close()
            break
        # It comes back after the back-off, for the same keys.
        harness.now += 2.5
        assert all(o in STORED for o in harness.write(new)), (number, outcomes)
        assert harness.write([KEYS[30]]) == [OK]
        assert harness.store.usage().state in ("growing", "full")
        harness.check(harness.keys())
        kept = harness.keys()
        harness.reopen()
        harness.check(kept)
        if not resident:
            # The lock was held before; a place that failed may make it two segments.
            segments = len(harness.rows.segment_numbers)
            assert open_fds() == fds + segments <= fds + 2
        harness.close()
        rounds += 1
    assert rounds >= 3


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_whatever_operation_of_an_opening_fails(
    memory_path: Path, code: int, open_fds: Callable[[], int]
) -> None:
    """It opens, or it says why not; what was stored is there after it or the next opening."""
    refused = 0
    # A full disk refuses these to nobody: where it is full, the store opens and reads.
    never_full = {"read_file", "list", "stat", "lock", "space", "make_directory"}
    root = memory_path / "root"
    harness = FaultyHarness(root)
    harness.write(KEYS[:6])
    harness.close()
    fds = open_fds()
    threads = threading.active_count()
    for number, device in enumerate(each_operation(LocalDevice, Raise(code))):
        try:
            again = FaultyHarness(root, device)
        except RootUnusable:
            refused += 1
            struck = device.operations[number].name
            assert code != errno.ENOSPC or struck in never_full, struck
        else:
            device.faults.clear()
            for key, (outcome, row) in zip(KEYS[:6], again.read(KEYS[:6]), strict=True):
                assert outcome in (OK, RowOutcome.MISSING)
                assert outcome is not OK or row == row_of(key, again.row_bytes)
            again.close()
        device.abandon()
        assert open_fds() == fds
        assert threading.active_count() == threads
    assert refused
    last = FaultyHarness(root)
    last.check(set(KEYS[:6]))
    last.close()


def test_enospc_once_in_a_row_is_retried_in_an_evicted_slot(harness: FaultyHarness) -> None:
    assert harness.write(KEYS[:9]) == [OK] * 9
    before = harness.faulty.count("pwritev")
    harness.faulty.add(Raise(errno.ENOSPC), "pwritev", nth=1)
    assert harness.write([KEYS[20]]) == [OK]
    assert harness.rows.count().rows_evicted == 1
    assert harness.store.usage().state == "full"
    assert harness.faulty.count("pwritev") - before <= 2 + 2 + 2  # two attempts, two headers
    harness.check({*KEYS[:8], KEYS[20]})


def test_enospc_always_fails_after_two_attempts(harness: FaultyHarness) -> None:
    assert harness.write(KEYS[:9]) == [OK] * 9
    used = harness.store.usage().used_bytes
    data = lambda op: op.size_bytes == harness.rows.geometry.stride  # noqa: E731
    fault = harness.faulty.add(Raise(errno.ENOSPC), "pwritev", when=data)
    assert harness.write([KEYS[20]]) == [FAILED]
    assert fault.struck == 2
    assert harness.store.usage().used_bytes == used
    assert harness.rows.count().rows_evicted == 1
    harness.check(set(KEYS[:8]))


def test_without_preallocation_a_full_disk_is_reused(memory_path: Path) -> None:
    """Growth is sparse there, so fresh slots fail and only the slots of rows can be written."""
    written: set[tuple[Path, int]] = set()
    full = False

    def is_fresh(op: Operation) -> bool:
        place = (op.path.parent, op.offset)
        if not full:
            written.add(place)
        return full and place not in written

    device = FaultyDevice(LocalDevice(), Fault(Raise(errno.EOPNOTSUPP), "allocate"))
    device.add(Raise(errno.ENOSPC), "pwritev", when=is_fresh)
    harness = FaultyHarness(memory_path / "root", device)
    for key in KEYS[:6]:
        assert harness.write([key]) == [OK]
    full = True
    for key in KEYS[20:30]:
        assert harness.write([key]) == [OK], "reuse instead of grow"
    harness.check(set(KEYS[24:30]))
    harness.close()


@pytest.mark.parametrize("op", ["make_directory", "open", "allocate", "write_file", "rename"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES])
def test_when_nothing_new_can_be_made_slots_are_reused(
    harness: FaultyHarness, op: str, code: int
) -> None:
    for key in KEYS[:4]:
        harness.write([key])
    harness.faulty.add(Raise(code), op)
    if code == errno.ENOSPC and op != "allocate":
        # There is room, so it is not about room: nothing is evicted for the row that met it.
        assert harness.write([KEYS[19]]) == [DECLINED]
        assert harness.rows.count().rows_evicted == 0
    for key in KEYS[20:26]:
        assert harness.write([key]) == [OK]
    assert harness.store.usage().state == "full"
    attempts = harness.faulty.count("space")
    assert attempts <= 4, "growth is not tried again before its back-off"
    harness.check(set(KEYS[22:26]))
    harness.faulty.faults.clear()
    harness.now += 1.01
    assert harness.write([KEYS[30]]) == [OK]
    assert harness.store.usage().state == "growing"
    harness.check({*KEYS[22:26], KEYS[30]})


@pytest.mark.parametrize(("code", "state"), [(errno.EROFS, "read-only"), (errno.EIO, "suspended")])
def test_a_disk_that_takes_no_writes_still_reads_and_is_seldom_asked(
    harness: FaultyHarness, code: int, state: str
) -> None:
    assert harness.write(KEYS[:6]) == [OK] * 6
    for op in ("make_directory", "open", "allocate", "pwritev", "write_file", "rename", "remove"):
        harness.faulty.add(Raise(code), op)
    assert harness.write(KEYS[20:22]) == [FAILED, FAILED]
    assert harness.store.usage().state == state
    asked = len(harness.faulty.operations)
    for _ in range(100):
        assert harness.write(KEYS[20:22]) == [DECLINED, DECLINED]
    assert len(harness.faulty.operations) == asked
    harness.check(set(KEYS[:6]))
    probes = 0
    for _ in range(120):
        harness.now += 0.5
        probes += FAILED in harness.write(KEYS[20:22])
    assert 3 <= probes <= 6, "1, 2, 4, 8, ... seconds"
    harness.check(set(KEYS[:6]))
    harness.faulty.faults.clear()
    harness.now += 64
    assert harness.write(KEYS[20:22]) == [OK, OK]
    assert harness.store.usage().state == "growing"
    harness.check({*KEYS[:6], *KEYS[20:22]})


@pytest.mark.parametrize(
    ("code", "disk", "full"), [(errno.EROFS, 3, 0), (errno.EIO, 3, 0), (errno.ENOSPC, 0, 3)]
)
def test_rows_for_which_nothing_could_be_made_are_counted_by_why(
    harness: FaultyHarness, code: int, disk: int, full: int
) -> None:
    harness.faulty.add(Raise(code), "allocate")
    assert harness.write(KEYS[:3]) == [DECLINED] * 3
    counted = harness.rows.count()
    assert (counted.declined_disk, counted.declined_full) == (disk, full)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_a_store_that_never_could_grow_recovers(memory_path: Path, code: int) -> None:
    harness = FaultyHarness(memory_path / "root")
    harness.faulty.add(Raise(code), "open", when=lambda op: "partial" in op.path.name)
    for _ in range(5):
        assert harness.write(KEYS[:2]) == [DECLINED, DECLINED]
    harness.check(set())
    harness.faulty.faults.clear()
    harness.now += 1.01
    assert harness.write(KEYS[:2]) == [OK, OK]
    harness.check(set(KEYS[:2]))
    harness.close()


def test_a_place_that_cannot_be_written_is_left_out(harness: FaultyHarness) -> None:
    """One bad sector of a disk that is well otherwise must not stop all writes, for ever."""
    harness.write(KEYS[:16])
    harness.rows.remove(KEYS[:16])
    bad = harness.rows.geometry.row_offset(2)
    fault = harness.faulty.add(
        Raise(errno.EIO),
        "pwritev",
        when=lambda op: op.path.parent.name == "0" and op.offset <= bad < op.offset + op.size_bytes,
    )
    assert harness.write(KEYS[:4]) == [FAILED] * 4, "nobody knows which one"
    usage = harness.store.usage()
    assert (usage.state, usage.errno) == ("growing", errno.EIO)
    assert harness.write(KEYS[:12]) == [OK] * 12
    harness.check(set(KEYS[:12]))
    harness.store.maintain()  # a second chance, after which it is known
    for key in KEYS[20:24]:
        assert harness.write([key]) in ([OK], [FAILED])
    assert fault.struck == 2
    harness.store.maintain()
    for key in KEYS[30:62]:
        assert harness.write([key]) == [OK]
    assert fault.struck == 2
    assert len(harness.rows) == 15
    harness.check(set(KEYS[47:62]))
    harness.faulty.faults.clear()
    harness.reopen()
    assert harness.write([KEYS[0]]) == [OK]
    assert len(harness.rows) == 16


def test_a_probe_is_not_spent_on_rows_that_are_there(harness: FaultyHarness) -> None:
    harness.write(KEYS[:2])
    harness.faulty.add(Raise(errno.EIO), "pwritev")
    assert harness.write([KEYS[5]]) == [FAILED]
    harness.faulty.faults.clear()
    harness.now += 1.01
    assert harness.write(KEYS[:2]) == [RowOutcome.ALREADY_STORED] * 2
    assert harness.write([KEYS[5]]) == [OK]


def test_a_bad_key_does_not_sink_the_batch(harness: FaultyHarness) -> None:
    """Store [K0 (resident), K1, K2 (EIO), K3]; load [K0, K9 (absent), K1]."""
    harness.write(KEYS[:16])
    harness.rows.remove([KEYS[1], KEYS[5], KEYS[9]])  # three slots that are no neighbours
    bad = harness.rows.geometry.row_offset(1)
    harness.faulty.add(
        Raise(errno.EIO), "pwritev", when=lambda op: op.offset == bad and op.path.parent.name == "1"
    )
    outcomes = harness.write([KEYS[0], KEYS[20], KEYS[21], KEYS[22]])
    assert sorted(outcomes) == sorted([RowOutcome.ALREADY_STORED, OK, FAILED, OK])
    assert [o for o, _ in harness.read([KEYS[0], KEYS[40], KEYS[2]])] == [
        OK,
        RowOutcome.MISSING,
        OK,
    ]
    harness.check(harness.keys())


def test_a_write_that_fails_at_the_header_publishes_nothing(harness: FaultyHarness) -> None:
    harness.write(KEYS[:2])
    for nth in (2, 3):  # the row goes well, then the table, or the index
        fault = harness.faulty.add(Raise(errno.EIO), "pwritev", nth=nth)
        assert harness.write([KEYS[5]]) == [FAILED]
        harness.faulty.faults.remove(fault)
        harness.check(set(KEYS[:2]))
        harness.now += 10.0
        harness.write([KEYS[6 + nth]])
        harness.rows.remove([KEYS[6 + nth]])
    assert harness.write([KEYS[5]]) == [OK]
    harness.check({*KEYS[:2], KEYS[5]})


def test_a_part_costs_two_header_writes_however_scattered(harness: FaultyHarness) -> None:
    """Steady state: the table without the old rows, the rows, the table with the new ones; the
    index is what it was."""
    for key in KEYS[:16]:
        harness.write([key])
    for scattered, calls in ((False, 1), (True, 2)):
        at = 16 if scattered else 0
        before = len(harness.faulty.operations)
        assert harness.write(KEYS[20 + at : 23 + at]) == [OK] * 3
        writes = [o for o in harness.faulty.operations[before:] if o.name == "pwritev"]
        assert len(writes) == calls + 2
        harness.touch([KEYS[3], KEYS[5]])  # the next victims are 4, 6 and 7 of segment 1


def test_close_that_fails_is_no_reason_to_keep_the_root(
    memory_path: Path, open_fds: Callable[[], int]
) -> None:
    harness = FaultyHarness(memory_path / "root")
    harness.write(KEYS[:5])
    fds = open_fds()
    harness.faulty.add(Raise(errno.ENOSPC), "close")
    harness.faulty.add(Raise(errno.ENOSPC), "pwritev")
    assert harness.store.close().is_ended
    assert open_fds() == fds - 3  # two segments and the lock
    harness.faulty.faults.clear()
    harness.open()
    harness.check(set(KEYS[:5]))
    harness.close()


def test_a_segment_that_cannot_be_undone_stays_charged_and_is_used_again(
    memory_path: Path,
) -> None:
    harness = FaultyHarness(memory_path / "root")
    harness.write(KEYS[:4])
    used = harness.store.usage().used_bytes
    for op in ("rename", "remove", "truncate"):
        harness.faulty.add(Raise(errno.EIO), op, when=lambda op: "c" in op.path.parts)
    harness.write([KEYS[10]])
    assert partial_path(harness.rows.directory, SegmentId(1)).exists()
    charge = harness.rows.pool.charge_bytes
    assert harness.store.usage().used_bytes == used + charge
    for _ in range(3):
        harness.now += 100
        harness.write([KEYS[11]])
    assert harness.store.usage().used_bytes == used + charge
    harness.faulty.faults.clear()
    harness.now += 100
    assert harness.write(KEYS[12:16]) == [OK] * 4
    assert harness.store.usage().used_bytes == used + charge
    harness.check_nothing_leaked()
    harness.close()


def test_free_space_less_the_reserve_bounds_growth(memory_path: Path) -> None:
    available = 10**9

    class Small(LocalDevice):
        def space(self, path: Path) -> SpaceStat:
            return super().space(path)._replace(available_bytes=available)

    harness = FaultyHarness(memory_path / "root", FaultyDevice(Small()))
    harness.store.space.reserve_bytes = 1 << 20
    harness.write(KEYS[:4])
    available = (1 << 20) + harness.rows.pool.charge_bytes - 1
    assert harness.write([KEYS[4]]) == [OK]
    harness.check({*KEYS[:3], KEYS[4]})
    assert "left" in harness.store.usage().state_reason
    available += 1
    harness.now += 1.01
    assert harness.write([KEYS[5]]) == [OK]
    harness.check({*KEYS[:3], *KEYS[4:6]})
    harness.close()


def test_a_quota_that_statvfs_does_not_show(harness: FaultyHarness) -> None:
    """EDQUOT once two segments are there: the store settles at that, two attempts per growth."""
    harness.faulty.add(
        Raise(errno.EDQUOT), "allocate", when=lambda op: op.path.parent.name not in ("0", "1")
    )
    for key in KEYS[:20]:
        assert harness.write([key]) == [OK]
    assert harness.faulty.count("allocate") == 3
    harness.check(set(KEYS[12:20]))


def reporter(results: list[JobResult], done: threading.Event) -> Callable[[JobResult], None]:
    def report(result: JobResult) -> None:
        results.append(result)
        done.set()

    return report


def test_rows_that_are_being_read_are_not_evicted(harness: FaultyHarness) -> None:
    harness.write(KEYS[:16])
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "preadv")
    buffers = aligned_rows(16, harness.row_bytes)
    done = threading.Event()
    results: list[JobResult] = []
    harness.rows.submit_read(KEYS[:16], buffers, reporter(results, done))
    assert reached.wait(60)
    assert harness.rows.pin_count == 16
    assert harness.write([KEYS[20]]) == [DECLINED]
    assert harness.rows.remove(KEYS[:16]) == 0
    harness.faulty.faults.remove(fault)
    gate.set()
    assert done.wait(60)
    assert results[0].outcomes == [OK] * 16
    assert buffers == filled_rows(KEYS[:16], harness.row_bytes)
    assert harness.write([KEYS[20]]) == [OK]
    harness.check({*KEYS[:15], KEYS[20]})


@pytest.fixture
def deadlines() -> Iterator[Deadlines]:
    """Of stores that are opened by the test."""
    with played_deadlines() as deadlines:
        yield deadlines


@pytest.mark.parametrize("op", ["preadv", "pwritev"])
def test_a_call_that_hangs_ends_as_a_miss_and_keeps_its_buffer(
    memory_path: Path, op: str, deadlines: Deadlines
) -> None:
    """The row that hangs is reported by the deadline, its buffer when the call returns; the other
    parts of the job, other jobs and the end of the store go their way."""
    harness = FaultyHarness(memory_path / "root")
    harness.write(KEYS[:8])
    gate, reached = threading.Event(), threading.Event()
    hangs = lambda o: o.path.parent.name == "0"  # noqa: E731
    if op == "pwritev":
        harness.rows.remove(KEYS[:8])
    fault = harness.faulty.add(Wait(gate, reached), op, when=hangs)
    done, released = threading.Event(), threading.Event()
    results: list[JobResult] = []
    places: list[int] = []

    def release(positions: list[int]) -> None:
        places.extend(positions)
        released.set()

    keys = KEYS[:6] if op == "preadv" else KEYS[20:26]
    buffers = filled_rows(keys, harness.row_bytes)
    submit = harness.rows.submit_read if op == "preadv" else harness.rows.submit_write
    submit(keys, buffers, reporter(results, done), release)
    assert reached.wait(60)
    assert not done.is_set()
    deadlines.pass_all()
    assert done.wait(60)
    outcomes = results[0].outcomes
    assert outcomes[:4] == [RowOutcome.HUNG] * 4
    assert not released.is_set()
    usage = harness.store.usage()
    assert usage.errno == errno.ETIMEDOUT
    assert (usage.state == "suspended") == (op == "pwritev")
    if op == "preadv":
        assert [o for o, _ in harness.read(KEYS[4:8])] == [OK] * 4, "one thread is lost, not all"
        assert harness.write([KEYS[30]]) == [OK]
    harness.faulty.faults.remove(fault)
    gate.set()
    assert released.wait(60)
    assert places == [i for i, o in enumerate(outcomes) if o is RowOutcome.HUNG]
    assert results[0].outcomes == outcomes, "what was reported stays so"
    harness.now += 2
    assert harness.write([KEYS[31]]) == [OK]
    harness.check(harness.keys())
    count = harness.rows.count()
    assert (count.writes_hung > 0) == (op == "pwritev")
    assert (count.reads_hung > 0) == (op == "preadv")
    declined_or_failed = count.writes_declined + count.writes_failed + count.writes_hung
    assert count.rows_offered == (
        count.rows_written + count.rows_already_stored + declined_or_failed
    )
    harness.close()


def test_a_disk_that_hangs_altogether_answers_every_read_by_its_deadline(
    memory_path: Path, deadlines: Deadlines
) -> None:
    harness = FaultyHarness(memory_path / "root")
    harness.close()
    harness.options = dataclasses.replace(harness.options, io_threads=2)
    harness.open()
    harness.write(KEYS[:8])
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "preadv")
    jobs = [threading.Event() for _ in KEYS[:8]]
    results: list[JobResult] = []
    released: list[int] = []
    for key, done in zip(KEYS[:8], jobs, strict=True):
        buffers = aligned_rows(1, harness.row_bytes)
        harness.rows.submit_read([key], buffers, reporter(results, done), released.extend)
    wait_until(lambda: fault.struck == 2)
    assert not any(done.is_set() for done in jobs)
    deadlines.pass_all()
    assert all(done.wait(60) for done in jobs)
    found = sorted(result.outcomes[0] for result in results)
    assert found == [FAILED] * 6 + [RowOutcome.HUNG] * 2
    assert [o for o, _ in harness.read(KEYS[:1])] == [FAILED], "at once: nobody could read it"
    assert harness.store.usage().errno == errno.ETIMEDOUT
    harness.faulty.faults.remove(fault)
    gate.set()
    wait_until(lambda: len(released) == 2)
    assert released == [0, 0]
    harness.check(set(KEYS[:8]))
    harness.close()


def test_a_key_that_is_being_written_is_declined_to_others(harness: FaultyHarness) -> None:
    gate, reached = threading.Event(), threading.Event()
    fault = harness.faulty.add(Wait(gate, reached), "pwritev")
    done = threading.Event()
    results: list[JobResult] = []
    harness.rows.submit_write(
        KEYS[:1], filled_rows(KEYS[:1], harness.row_bytes), reporter(results, done)
    )
    assert reached.wait(60)
    assert KEYS[0] not in harness.rows
    assert [o for o, _ in harness.read([KEYS[0]])] == [RowOutcome.MISSING]
    assert harness.write([KEYS[0]]) == [DECLINED]
    harness.faulty.faults.remove(fault)
    gate.set()
    assert done.wait(60)
    assert results[0].outcomes == [OK]
    harness.check({KEYS[0]})


def test_a_read_that_the_disk_refuses_fails_once(harness: FaultyHarness) -> None:
    """EIO drops the row, so that no request asks for it again; other errors are not the row's."""
    harness.write(KEYS[:6])
    place = harness.rows.locate(KEYS[0])
    assert place is not None
    for code, outcome in ((errno.ESTALE, OK), (errno.EIO, RowOutcome.MISSING)):
        harness.faulty.add(Raise(code), "preadv")
        assert [o for o, _ in harness.read([KEYS[0]])] == [FAILED]
        harness.faulty.faults.clear()
        assert [o for o, _ in harness.read([KEYS[0]])] == [outcome]
    harness.check(set(KEYS[1:6]))
    assert harness.write([KEYS[0]]) == [OK]
    harness.check(set(KEYS[:6]))


def test_a_bug_in_a_part_holds_nothing(
    harness: FaultyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised on an I/O thread: the job is reported, no pin, slot or key is held."""
    from storage.segment import Segment

    harness.write(KEYS[:4])
    calls: list[tuple[str, Callable[[], list[RowOutcome]]]] = [
        ("write_rows", lambda: harness.write(KEYS[20:23])),
        ("flush_header", lambda: harness.write(KEYS[20:23])),
        ("read_rows", lambda: [o for o, _ in harness.read(KEYS[:3])]),
    ]
    for name, act in calls:
        with monkeypatch.context() as patch:
            patch.setattr(Segment, name, lambda *_: 1 / 0)
            assert act() == [FAILED] * 3
        harness.check(set(KEYS[:4]))


@pytest.mark.parametrize("is_moved", [False, True])
def test_nothing_is_made_in_a_root_that_somebody_took_away_and_made_again(
    harness: FaultyHarness, is_moved: bool
) -> None:
    """The lock is of the directory that is gone; the one of its name may be another's.  A file
    system that is unmounted from a running store, as `umount -l` does, is moved away too."""
    harness.write(KEYS[:4])
    root = harness.options.root
    if is_moved:
        root.rename(root.with_name("moved"))
    else:
        shutil.rmtree(root)
    assert not harness.store.has_root()
    root.mkdir()
    assert not harness.store.has_root()
    harness.store.maintain()
    assert harness.keys() == (set(KEYS[:4]) if is_moved else set())
    outcomes = [harness.write([key])[0] for key in KEYS[9:20]]
    assert is_moved or OK not in outcomes, "a segment that is open is the root's, where it is now"
    assert "find" in harness.store.usage().state_reason
    harness.store.write_status()
    assert list(root.iterdir()) == []
    harness.store.close()
    assert list(root.iterdir()) == []
    with DiskStore.open(harness.options) as other:
        assert other.has_root()


def test_the_order_of_use_outlives_a_clock_that_jumps(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = FaultyHarness(memory_path / "root")  # 16 rows
    ten_years_ns = 10 * 365 * 86400 * 10**9
    for number, jump_ns in enumerate((0, ten_years_ns, -ten_years_ns, 0)):
        now_ns = time.time_ns() + jump_ns
        with monkeypatch.context() as patch:
            patch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
            for key in KEYS[4 * number :][:4]:
                assert harness.write([key]) == [OK]
            harness.rows.touch([KEYS[0]])
            if number == 2:
                harness.reopen()
    for key in KEYS[40:48]:
        assert harness.write([key]) == [OK]
    assert harness.keys() >= {KEYS[0], *KEYS[9:16], *KEYS[40:48]}
    harness.check(harness.keys())
    harness.close()
