"""Histories: what the metrics say of a store, beside what was done to it and seen on its disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from storage.device import LocalDevice, SpaceStat
from storage.drives import open_store
from storage.jobs import JobResult
from storage.kinds import KindRows
from storage.namespace import Identity, WantedRows
from storage.options import DriveOptions, StoreOptions
from storage.segment import segment_path
from storage.service.client import RegionRows, StoreClient
from storage.service.messages import Usage
from storage.service.server import figures_of
from storage.survey import survey_root
from storage.testing.contract import StoreHarness, options_for
from storage.testing.faulty import FaultyDevice, Raise, Wait
from storage.testing.harness import FaultyHarness
from storage.testing.rows import aligned_rows, bytes_on_disk, filled_rows, key_of, soft_row_of
from storage.types import RowKey, RowOutcome
from tests.unit.service.test_client_alone import Clock, PlayedStore
from tests.unit.storage.waiting import played_deadlines, wait_until
from tests.unit.tiering.metrics_truth import Between, History, Observation, by_label, of_disk
from tiering import metrics
from tiering.metrics import Sample, StoreFigures, collect_store

ROW = 4096
K = [key_of(number) for number in range(200)]
OK, CORRUPT = RowOutcome.OK, RowOutcome.CORRUPT
CHECKSUM_BYTES = 4  # behind each frame
_TIMEOUT_S = 60.0
_READ = {
    RowOutcome.OK: "ok",
    RowOutcome.MISSING: "missing",
    RowOutcome.CORRUPT: "corrupt",
    RowOutcome.FAILED: "failed",
    RowOutcome.HUNG: "hung",
}


def samples_of(harness: StoreHarness) -> list[Sample]:
    return list(collect_store(StoreFigures(figures_of(harness.store, harness.rows), True, 0)))


def write_slowly(harness: StoreHarness, keys: Sequence[RowKey]) -> Counter[RowOutcome]:
    """One job per row, so that each finds what the last one left."""
    return Counter(outcome for key in keys for outcome in harness.write([key]))


def read_by_outcome(harness: StoreHarness, keys: Sequence[RowKey]) -> Counter[str]:
    return Counter(_READ[outcome] for outcome, _ in harness.read(keys))


def damage(harness: StoreHarness, key: RowKey) -> None:
    place = harness.rows.locate(key)
    assert place is not None
    with segment_path(harness.rows.directory, place.segment).open("r+b") as file:
        file.seek(harness.rows.geometry.row_offset(place.slot) + 100)
        file.write(b"damage")


@contextlib.contextmanager
def opened(path: Path, capacity_rows: int = 16, **options: object) -> Iterator[FaultyHarness]:
    chosen = replace(options_for(path / "root", ROW, capacity_rows), **options)  # type: ignore[arg-type]
    harness = FaultyHarness(path / "root", row_bytes=ROW, options=chosen)
    try:
        yield harness
    finally:
        harness.faulty.faults.clear()
        harness.close()


def reads_writes_and_evictions(path: Path) -> Observation:
    """Bytes, seconds and outcomes of rows that come, are read, are not there, are damaged, go."""
    with opened(path) as harness:
        started = time.monotonic()
        written = Counter(write_slowly(harness, K[:20]))
        written += Counter(harness.write(K[18:20]))
        reads = read_by_outcome(harness, K[10:20]) + read_by_outcome(harness, K[100:103])
        for key in K[15:17]:
            damage(harness, key)
        reads += read_by_outcome(harness, K[14:18])
        harness.faulty.add(Raise(errno.EIO), "preadv", times=1)
        reads += read_by_outcome(harness, [K[19]])
        resident = [key for key in K if key in harness.rows]
        busy_s = 8 * (time.monotonic() - started)  # no more than all threads all the time
        on_disk, options = bytes_on_disk(harness.options.root), harness.options
        said = samples_of(harness)
    stored = written[OK]
    assert (reads["corrupt"], reads["failed"]) == (2, 1)
    root = str(options.root)
    unreadable = reads["corrupt"] + reads["failed"]
    return Observation(
        said,
        {
            **by_label(metrics.ROWS_READ, dict(reads)),
            **by_label(
                metrics.ROWS_WRITTEN,
                {"ok": stored, "already stored": written[RowOutcome.ALREADY_STORED]},
            ),
            of_disk(metrics.READ_BYTES): reads["ok"] * ROW,
            of_disk(metrics.WRITE_BYTES): stored * ROW,
            of_disk(metrics.READ_SECONDS): Between(1e-9, busy_s),
            of_disk(metrics.WRITE_SECONDS): Between(1e-9, busy_s),
            # What was stored is there, but for what can't be read and what made room.
            of_disk(metrics.CHUNKS_EVICTED): stored - unreadable - len(resident),
            of_disk(metrics.DISK_ROWS): len(resident),
            of_disk(metrics.DISK_USED): Between(on_disk, options.budget_bytes),
            of_disk(metrics.DISK_BUDGET): options.budget_bytes,
            of_disk(metrics.DISK_EFFECTIVE): options.budget_bytes,
            **by_label(metrics.DISK_STATE, {"full": 1}),
            **by_label(metrics.DISK_STATE_CHANGES, {"full": 1}),
            **by_label(metrics.DISK_LIMIT, {"budget": 1}),
            of_disk(metrics.ROOT_USED, root): Between(on_disk, options.budget_bytes),
            of_disk(metrics.ROOT_BUDGET, root): options.budget_bytes,
            of_disk(metrics.ROOT_STATE, root, "full"): 1,
            of_disk(metrics.DISK_DEGRADED): 0,
        },
    )


def writes_that_are_declined(path: Path) -> Observation:
    """No room beside the job's own rows; too many waiting; the same key twice."""
    with opened(path, io_threads=1, write_queue_bytes=ROW) as harness:
        outcomes = Counter(harness.write(K[:16]))
        declined = {"declined full": harness.write([*K[:16], K[16]]).count(RowOutcome.DECLINED)}
        outcomes[RowOutcome.ALREADY_STORED] += 16
        declined["declined twice"] = harness.write([K[17], K[17]]).count(RowOutcome.DECLINED)
        outcomes[OK] += 1
        gate, reached = threading.Event(), threading.Event()
        fault = harness.faulty.add(Wait(gate, reached), "pwritev")
        results: list[RowOutcome] = []
        for key in K[20:25]:  # one is held, one waits
            harness.rows.submit_write(
                [key], filled_rows([key], ROW), lambda result: results.extend(result.outcomes)
            )
            assert reached.wait(_TIMEOUT_S)
        declined["declined busy"] = len(results)
        harness.faulty.faults.remove(fault)
        gate.set()
        wait_until(lambda: len(results) == 5)
        outcomes[OK] += results.count(OK)
        said = samples_of(harness)
    return Observation(
        said,
        by_label(
            metrics.ROWS_WRITTEN,
            {
                **declined,
                "ok": outcomes[OK],
                "already stored": outcomes[RowOutcome.ALREADY_STORED],
            },
        ),
    )


def a_disk_that_fails(path: Path) -> Observation:
    """An error suspends it, EROFS makes it read-only; then it recovers."""
    with opened(path) as harness:
        written = Counter(harness.write(K[:2]))
        fault = harness.faulty.add(Raise(errno.EIO), "pwritev")
        written += write_slowly(harness, K[2:5])
        harness.faulty.faults.remove(fault)
        fault = harness.faulty.add(Raise(errno.EROFS), "pwritev")
        harness.now += 1000
        written += write_slowly(harness, K[5:6])
        said = samples_of(harness)
    assert written[RowOutcome.FAILED] == 2
    return Observation(
        said,
        {
            **by_label(
                metrics.ROWS_WRITTEN,
                {
                    "ok": written[OK],
                    "failed": written[RowOutcome.FAILED],
                    "declined disk": written[RowOutcome.DECLINED],
                },
            ),
            **by_label(metrics.DISK_STATE, {"read-only": 1}),
            **by_label(metrics.DISK_STATE_CHANGES, {"suspended": 1, "read-only": 1}),
            **by_label(metrics.ROOT_STATE, {"read-only": 1}, str(path / "root")),
            of_disk(metrics.DISK_DEGRADED): 1,
        },
    )


def a_disk_that_hangs(path: Path) -> Observation:
    """Its one thread is caught by a read, so that the next one can't begin; then by a write."""
    with played_deadlines() as deadlines, opened(path, io_threads=1) as harness:
        written = Counter(harness.write(K[:3]))
        reads: Counter[str] = Counter()
        for op in ("preadv", "pwritev"):
            gate, reached = threading.Event(), threading.Event()
            fault = harness.faulty.add(Wait(gate, reached), op)
            passing = deadlines.pass_once(reached)
            if op == "preadv":
                reads += read_by_outcome(harness, K[:2])
                reads["expired"] += [outcome for outcome, _ in harness.read(K[2:3])].count(
                    RowOutcome.FAILED
                )
            else:
                written += Counter(harness.write(K[5:7]))
            passing.join()
            harness.faulty.faults.remove(fault)
            gate.set()
            wait_until(lambda: harness.rows.pin_count == harness.rows.writing_count == 0)
        said = samples_of(harness)
    assert (reads["hung"], reads["expired"], written[RowOutcome.HUNG]) == (2, 1, 2)
    outcomes = {"ok": written[OK], "hung": written[RowOutcome.HUNG]}
    return Observation(
        said,
        {**by_label(metrics.ROWS_READ, dict(reads)), **by_label(metrics.ROWS_WRITTEN, outcomes)},
    )


def a_disk_that_is_suspended(path: Path) -> Observation:
    """After one error, until a probe succeeds."""
    with opened(path) as harness:
        harness.faulty.add(Raise(errno.EIO), "pwritev")
        write_slowly(harness, K[:1])
        said = samples_of(harness)
    return Observation(
        said,
        {
            **by_label(metrics.DISK_STATE, {"suspended": 1}),
            **by_label(metrics.DISK_STATE_CHANGES, {"suspended": 1}),
            **by_label(metrics.ROOT_STATE, {"suspended": 1}, str(path / "root")),
        },
    )


def a_disk_that_recovers(path: Path) -> Observation:
    with opened(path) as harness:
        fault = harness.faulty.add(Raise(errno.EIO), "pwritev")
        write_slowly(harness, K[:1])
        harness.faulty.faults.remove(fault)
        harness.now += 1000
        assert harness.write(K[1:2]) == [OK]
        said = samples_of(harness)
    return Observation(
        said,
        {
            **by_label(metrics.DISK_STATE, {"growing": 1}),
            **by_label(metrics.DISK_STATE_CHANGES, {"suspended": 1, "growing": 1}),
            **by_label(metrics.ROOT_STATE, {"growing": 1}, str(path / "root")),
            of_disk(metrics.DISK_DEGRADED): 0,
        },
    )


class RoomyDevice(LocalDevice):
    """More than half of the disk is free, whatever else it says, but for `inodes`."""

    inodes = 10**6

    def space(self, path: Path) -> SpaceStat:
        stat = super().space(path)._replace(total_bytes=10**12, available_bytes=6 * 10**11)
        return stat._replace(total_inodes=10**6, available_inodes=self.inodes)


def a_disk_without_space(path: Path, code: int, op: str, limit: str, kind: str) -> Observation:
    """Making a segment, or writing a row, fails with `code`."""
    with opened(path) as harness:
        harness.close()
        device = RoomyDevice()
        harness.faulty = FaultyDevice(device)
        harness.open()
        assert set(harness.write(K[:3])) == {OK}
        if op != "pwritev":
            assert harness.write(K[3:4]) == [OK]
        device.inodes = 1 if limit == "inodes" else device.inodes
        is_meant = lambda call: op != "pwritev" or call.size_bytes == ROW + 4096  # noqa: E731
        fault = harness.faulty.add(Raise(code), op, when=is_meant)
        harness.write([K[4]])
        said, struck = samples_of(harness), fault.struck
        assert struck > 0
        effective = harness.store.usage().used_bytes if limit == "quota" else None
    counts = {kind: struck} if kind else {}
    return Observation(
        said,
        {
            **by_label(metrics.DISK_LIMIT, {limit: 1}),
            **by_label(metrics.DISK_NO_SPACE, counts or {"space": 0}),
            **({of_disk(metrics.DISK_EFFECTIVE): effective} if effective else {}),
        },
    )


def rows_not_worth_a_write(path: Path) -> Observation:
    """Once it is full, a name must have been seen before."""
    with opened(path, admission="second-touch") as harness:
        outcomes = Counter(harness.write(K[:16]))
        later = write_slowly(harness, K[50:60])
        said = samples_of(harness)
    assert later[RowOutcome.DECLINED] > 0
    counts = {"ok": outcomes[OK] + later[OK], "not admitted": later[RowOutcome.DECLINED]}
    return Observation(said, by_label(metrics.ROWS_WRITTEN, counts))


def more_than_the_drive_s_bytes_of_the_day(path: Path) -> Observation:
    with opened(path, write_bytes_per_day=8 * 4 * ROW) as harness:
        outcomes = Counter(harness.write(K[:6]))
        said = samples_of(harness)
    counts = {"ok": outcomes[OK], "declined write budget": outcomes[RowOutcome.DECLINED]}
    return Observation(said, by_label(metrics.ROWS_WRITTEN, counts))


def segments_that_go(path: Path) -> Observation:
    """One is given back, its warm rows moved; the file of another is removed by somebody."""
    with opened(path) as harness:
        write_slowly(harness, K[:16])
        for key in (K[1], K[4], K[6], K[9], K[12], K[15]):
            harness.read([key])
        before = places(harness)
        harness.rows.mover.give_back(harness.rows.segment_numbers[:1])
        after = places(harness)
        moved = sum(before[key] != place for key, place in after.items())
        gone = segment_path(harness.rows.directory, harness.rows.segment_numbers[0])
        gone.unlink()
        harness.store.maintain()
        left = places(harness)
        said = samples_of(harness)
    assert moved > 0
    return Observation(
        said,
        {
            of_disk(metrics.ROWS_MOVED): moved,
            of_disk(metrics.ROWS_GIVEN_UP): len(before) - len(left),
            of_disk(metrics.EXTERNAL_REMOVALS): 1,
            of_disk(metrics.CHUNKS_EVICTED): 0,
            of_disk(metrics.DISK_ROWS): len(left),
        },
    )


def places(harness: StoreHarness) -> dict[RowKey, object]:
    return {key: harness.rows.locate(key) for key in K if key in harness.rows}


def rows_scrubbed(path: Path) -> Observation:
    with opened(path) as harness:
        harness.write(K[:10])
        for key in K[3:5]:
            damage(harness, key)
        harness.rows.verify(harness.rows.keys())
        harness.rows.note_pass()
        said = samples_of(harness)
    return Observation(
        said,
        {
            **by_label(metrics.ROWS_SCRUBBED, {"ok": 8, "corrupt": 2}),
            of_disk(metrics.SCRUB_PASSES): 1,
            **by_label(metrics.ROWS_READ, {"corrupt": 0}),
        },
    )


def rows_under_a_codec(path: Path) -> Observation:
    """What stands on disk is what the metric says a row became."""
    soft = set(K[:5])

    def row(key: RowKey, size: int) -> bytes:
        return soft_row_of(key, size) if key in soft else filled_rows([key], size)[0].tobytes()

    started = time.monotonic()
    harness = StoreHarness(path / "root", 16 * ROW, 16, codec="zstd", row_of=row)
    assert set(harness.write(K[:7])) == {OK}
    assert read_by_outcome(harness, K[:7]) == {"ok": 7}
    busy_s = 8 * (time.monotonic() - started)
    said = samples_of(harness)
    harness.close()
    [namespace] = survey_root(path / "root").namespaces
    lengths = {
        segment.key(slot): int(segment.entries["length"][slot])
        for segment in namespace.segments
        for slot in segment.named.tolist()
    }
    frames = [lengths[key] - CHECKSUM_BYTES for key in soft]
    return Observation(
        said,
        {
            **by_label(metrics.CODEC_ROWS, {"encoded": 5, "raw": 2}),
            **by_label(metrics.CODEC_BYTES, {"before": 5 * 16 * ROW, "after": sum(frames)}),
            **by_label(
                metrics.CODEC_SECONDS,
                {"encode": Between(1e-9, busy_s), "decode": Between(1e-9, busy_s)},
            ),
            of_disk(metrics.WRITE_BYTES): 7 * 16 * ROW,
            of_disk(metrics.READ_BYTES): 7 * 16 * ROW,
        },
    )


def two_drives(path: Path) -> Observation:
    """Each root by itself, and together."""
    first = options_for(path / "a", ROW, 16)
    second = DriveOptions(path / "b", first.budget_bytes)
    options: StoreOptions = replace(first, more_drives=(second,))
    store = open_store(options)
    try:
        rows = store.open_rows(harness_identity(path), ROW)
        assert set(rows.write(K[:8], filled_rows(K[:8], ROW)).outcomes) == {OK}
        assert set(rows.read(K[:8], aligned_rows(8, ROW)).outcomes) == {OK}
        said = list(collect_store(StoreFigures(figures_of(store, rows), True, 0)))
        used = {str(root): bytes_on_disk(root) for root in (path / "a", path / "b")}
    finally:
        store.close()
    budget = first.budget_bytes
    return Observation(
        said,
        {
            **by_label(metrics.ROOT_USED, {r: Between(b, budget) for r, b in used.items()}),
            **by_label(metrics.ROOT_BUDGET, dict.fromkeys(used, budget)),
            **{of_disk(metrics.ROOT_STATE, root, "growing"): 1 for root in used},
            of_disk(metrics.DISK_BUDGET): 2 * budget,
            of_disk(metrics.DISK_USED): Between(sum(used.values()), 2 * budget),
            of_disk(metrics.DISK_ROWS): 8,
            of_disk(metrics.WRITE_BYTES): 8 * ROW,
            of_disk(metrics.READ_BYTES): 8 * ROW,
        },
    )


def harness_identity(path: Path) -> Identity:
    return Identity("test/model", {"layout": path.name})


def rows_of_two_sizes(path: Path) -> Observation:
    """Of two KV-cache groups: each row counts with the bytes that it uses."""
    large, small = 2 * ROW, ROW
    store = open_store(options_for(path / "root", large, 64))
    try:
        identities = [Identity("test/model", {"group": name}) for name in ("large", "small")]
        wanted = [
            WantedRows(identity, row_bytes, None)
            for identity, row_bytes in zip(identities, (large, small), strict=True)
        ]
        largest, smaller = store.open_all(wanted)
        rows = KindRows(largest, {1: smaller})
        keys = [RowKey(key[:-4] + bytes([0, 0, 0, n % 2])) for n, key in enumerate(K[:7])]
        results: list[JobResult] = []
        rows.submit_write(keys, filled_rows(keys, large), results.append)
        wait_until(lambda: len(results) == 1)
        rows.submit_read(keys, aligned_rows(7, large), results.append)
        wait_until(lambda: len(results) == 2)
        assert [set(result.outcomes) for result in results] == [{OK}, {OK}]
        said = list(collect_store(StoreFigures(figures_of(store, rows), True, 0)))
    finally:
        store.close()
    return Observation(
        said,
        {
            of_disk(metrics.WRITE_BYTES): 4 * large + 3 * small,
            of_disk(metrics.READ_BYTES): 4 * large + 3 * small,
            of_disk(metrics.DISK_ROWS): 7,
            **by_label(metrics.ROWS_WRITTEN, {"ok": 7}),
            **by_label(metrics.ROWS_READ, {"ok": 7}),
        },
    )


def a_store_process_that_dies(path: Path) -> Observation:
    """What the processes counted is added up, whatever was seen of it in between; what they
    measured is the last one's."""
    store, clock = PlayedStore(), Clock()
    client = played_client(path, store, clock)
    store.say(Usage(rows_read=7, read_seconds=0.5, rows=9, state_changes={"full": 2}))
    client.poll()
    for reads in (5, 8):  # the second more than the first: no smaller number gives it away
        store.hang_up()
        store.has_ended = True
        client.poll()
        assert not client.is_up
        clock.now += 1000.0
        client.poll()
        store.say(Usage(rows=9), Usage(rows_read=reads, rows=reads, state_changes={"full": 1}))
        client.poll()
    said = list(collect_store(StoreFigures(client.usage, client.is_up, client.restarts)))
    store.hang_up()
    store.has_ended = True
    client.close()
    return Observation(
        said,
        {
            **by_label(metrics.ROWS_READ, {"ok": 7 + 5 + 8}),
            **by_label(metrics.DISK_STATE_CHANGES, {"full": 2 + 1 + 1}),
            of_disk(metrics.READ_SECONDS): 0.5,
            of_disk(metrics.DISK_ROWS): 8,
            of_disk(metrics.STORE_RESTARTS): 2,
            of_disk(metrics.DISK_UP): 1,
        },
    )


def played_client(path: Path, store: PlayedStore, clock: Clock) -> StoreClient:
    fd = os.memfd_create("region")
    client = StoreClient(
        StoreOptions(path, 1 << 20),
        Identity("model", {}),
        RegionRows(fd, 4096, 4096, 8),
        store.spawn,
        clock,
    )
    os.close(fd)
    client.connect(60.0)
    return client


def no_space(code: int, op: str, limit: str, kind: str) -> History:
    return lambda path: a_disk_without_space(path, code, op, limit, kind)


HISTORIES: dict[str, History] = {
    history.__name__: history
    for history in (
        reads_writes_and_evictions,
        writes_that_are_declined,
        a_disk_that_fails,
        a_disk_that_hangs,
        a_disk_that_is_suspended,
        a_disk_that_recovers,
        rows_not_worth_a_write,
        more_than_the_drive_s_bytes_of_the_day,
        segments_that_go,
        rows_scrubbed,
        rows_under_a_codec,
        two_drives,
        rows_of_two_sizes,
        a_store_process_that_dies,
    )
} | {
    "no names": no_space(errno.ENOSPC, "open", "names", "other"),
    "no inodes": no_space(errno.ENOSPC, "open", "inodes", "space"),
    "no space": no_space(errno.ENOSPC, "allocate", "space", "space"),
    "no space for a row": no_space(errno.ENOSPC, "pwritev", "space", "space"),
    "no quota": no_space(errno.EDQUOT, "allocate", "quota", "space"),
    "no larger files": no_space(errno.EFBIG, "allocate", "file size", ""),
    "no descriptors": no_space(errno.EMFILE, "open", "descriptors", ""),
    "no new files": no_space(errno.EIO, "make_directory", "device", ""),
}
