"""StoreClient and the real store process."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest

from storage.namespace import Identity
from storage.options import DriveOptions, StoreOptions
from storage.service.client import FinishedJob, RegionRows, StoreClient, StoreRefused
from storage.store import DiskStore
from storage.types import RowKey, RowOutcome

ROW_BYTES = 16384
SLOTS = 32
OFFSET = 4096
TIMEOUT_S = 60.0
IDENTITY = Identity("model", {"dtype": "bfloat16"})


class FakeRegion:
    """Rows in anonymous shared memory: what the store process maps."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("region")
        os.ftruncate(self.fd, OFFSET + SLOTS * ROW_BYTES)
        self._mapping = mmap.mmap(self.fd, OFFSET + SLOTS * ROW_BYTES)
        flat = np.frombuffer(self._mapping, np.uint8)[OFFSET:]
        self.rows: npt.NDArray[np.uint8] = flat.reshape(SLOTS, ROW_BYTES)

    @property
    def description(self) -> RegionRows:
        return RegionRows(self.fd, OFFSET, ROW_BYTES, SLOTS)


def key(number: int) -> RowKey:
    return RowKey(hashlib.sha256(str(number).encode()).digest() + bytes(4))


def content(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, ROW_BYTES, dtype=np.uint8)


def wait(client: StoreClient, count: int = 1) -> list[FinishedJob]:
    jobs: list[FinishedJob] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(jobs) < count:
        assert time.monotonic() < deadline, "no result"
        jobs += client.poll()
        time.sleep(0.001)
    return jobs


def wait_until_up(client: StoreClient) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not client.is_up:
        assert time.monotonic() < deadline, "the store did not come back"
        client.poll()
        time.sleep(0.01)


def write(client: StoreClient, region: FakeRegion, *numbers: int) -> FinishedJob:
    for slot, number in enumerate(numbers):
        region.rows[slot] = content(number)
    client.write([key(n) for n in numbers], range(len(numbers)))
    [job] = wait(client)
    return job


def read_back(client: StoreClient, region: FakeRegion, *numbers: int) -> list[RowOutcome]:
    """Into other slots than `write` used, each compared."""
    region.rows[:] = 0
    slots = [SLOTS - 1 - i for i in range(len(numbers))]
    client.read([key(n) for n in numbers], slots)
    [job] = wait(client)
    for number, slot, outcome in zip(numbers, slots, job.outcomes, strict=True):
        if outcome is RowOutcome.OK:
            assert (region.rows[slot] == content(number)).all()
    return job.outcomes


@pytest.fixture
def region() -> FakeRegion:
    return FakeRegion()


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    return StoreOptions(
        tmp_path / "store",
        4_000_000,
        segment_bytes=200_000,
        admission="always",
        lock_timeout_s=0.2,
    )


@pytest.fixture
def client(options: StoreOptions, region: FakeRegion) -> Iterator[StoreClient]:
    made = StoreClient(options, IDENTITY, region.description)
    made.connect(TIMEOUT_S)
    yield made
    made.close()


def test_rows_come_back_into_other_slots_and_after_a_restart(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    assert write(client, region, *range(8)).outcomes == [RowOutcome.OK] * 8
    assert all(key(n) in client for n in range(8))
    assert client.usage.rows == 8
    assert client.usage.bytes_written == 8 * ROW_BYTES
    assert client.usage.budget_bytes == options.budget_bytes
    assert read_back(client, region, 3, 9, 1) == [
        RowOutcome.OK,
        RowOutcome.MISSING,
        RowOutcome.OK,
    ]
    assert client.usage.rows_missing == 1
    client.close()
    again = StoreClient(options, IDENTITY, region.description)
    again.connect(TIMEOUT_S)
    assert len(again) == 8
    assert read_back(again, region, *range(8)) == [RowOutcome.OK] * 8
    again.close()


def test_a_codec_is_the_store_process_s_affair(options: StoreOptions, region: FakeRegion) -> None:
    """The setting and the size of a number reach it; its figures come back."""
    identity = replace(IDENTITY, element_bytes=2)
    coded = replace(options, codec="zstd", codec_always=True)
    client = StoreClient(coded, identity, region.description)
    client.connect(TIMEOUT_S)
    soft = [content(number) & 0x0F for number in range(6)]
    region.rows[:6] = soft
    region.rows[6] = content(6)  # does not shrink
    client.write([key(number) for number in range(7)], range(7))
    assert wait(client)[0].outcomes == [RowOutcome.OK] * 7
    region.rows[:] = 0
    client.read([key(number) for number in range(7)], range(20, 27))
    assert wait(client)[0].outcomes == [RowOutcome.OK] * 7
    assert (region.rows[20:26] == soft).all()
    assert (region.rows[26] == content(6)).all()
    usage = client.usage
    assert (usage.rows_encoded, usage.rows_raw) == (6, 1)
    assert usage.bytes_before_codec == 6 * ROW_BYTES
    assert 0 < usage.bytes_after_codec < 0.9 * usage.bytes_before_codec
    assert usage.encode_seconds > 0
    assert usage.decode_seconds > 0
    client.close()
    with DiskStore.open(coded) as store:
        assert len(store.open_rows(identity, ROW_BYTES)) == 7
    with DiskStore.open(options) as store:
        assert len(store.open_rows(identity, ROW_BYTES)) == 0


def test_several_drives_behind_one_socket(options: StoreOptions, region: FakeRegion) -> None:
    """Rows are spread, found again after a restart, and a drive that is away is left out."""
    second = options.root.parent / "second"
    both = replace(options, more_drives=(DriveOptions(second, 4_000_000),))
    client = StoreClient(both, IDENTITY, region.description)
    client.connect(TIMEOUT_S)
    assert write(client, region, 1, 2, 3, 4).outcomes == [RowOutcome.OK] * 4
    assert read_back(client, region, 1, 2, 3, 4) == [RowOutcome.OK] * 4
    assert set(client.usage.roots) == {str(options.root), str(second)}
    assert client.usage.budget_bytes == 8_000_000
    assert sum(of.used_bytes for of in client.usage.roots.values()) == client.usage.used_bytes
    client.close()
    shutil.rmtree(second)
    second.write_text("not a directory")
    client = StoreClient(both, IDENTITY, region.description)
    client.connect(TIMEOUT_S)
    assert len(client) == 2
    found = read_back(client, region, 1, 2, 3, 4)
    assert found.count(RowOutcome.OK) == found.count(RowOutcome.MISSING) == 2
    assert write(client, region, 5, 6).outcomes == [RowOutcome.OK] * 2
    client.close()


def test_the_replica_follows_evictions(client: StoreClient, region: FakeRegion) -> None:
    for start in range(0, 480, 16):
        write(client, region, *range(start, start + 16))
    assert client.usage.rows_evicted > 0
    assert len(client) == client.usage.rows == 480 - client.usage.rows_evicted
    assert key(479) in client
    assert key(0) not in client
    assert client.usage.used_bytes <= client.usage.budget_bytes


def test_clear_forgets_on_disk_too(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    write(client, region, 1, 2)
    client.clear()
    wait(client)
    assert len(client) == 0
    client.close()
    with DiskStore.open(options) as store:
        assert len(store.open_rows(IDENTITY, ROW_BYTES)) == 0


def test_after_a_clear_rows_are_for_this_client_alone(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    write(client, region, 1, 2)
    client.clear()
    [cleared] = wait(client)
    assert cleared.outcomes == [RowOutcome.OK]
    assert not client.is_up
    assert key(2) not in client
    wait_until_up(client)
    assert read_back(client, region, 1) == [RowOutcome.MISSING]
    assert write(client, region, 2, 3).outcomes == [RowOutcome.OK] * 2
    assert read_back(client, region, 2, 3) == [RowOutcome.OK] * 2
    assert client.restarts == 0, "the store did not fail"
    assert client.usage.rows_written == 4, "counted on"
    client.close()

    with DiskStore.open(options) as store:
        assert len(store.open_rows(IDENTITY, ROW_BYTES)) == 0, "a later engine finds none of it"
        assert store.usage().rows == 0


def test_renewed_rows_are_for_this_client_alone_and_the_old_ones_for_a_later_engine(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    write(client, region, 1, 2)
    client.renew()
    assert not client.is_up
    assert key(1) not in client
    wait_until_up(client)
    assert read_back(client, region, 1) == [RowOutcome.MISSING]
    assert write(client, region, 2, 3).outcomes == [RowOutcome.OK] * 2
    assert read_back(client, region, 2, 3) == [RowOutcome.OK] * 2
    assert client.restarts == 0, "the store did not fail"
    client.close()
    with DiskStore.open(options) as store:
        assert set(store.open_rows(IDENTITY, ROW_BYTES).keys()) == {key(1), key(2)}


def test_another_identity_shares_nothing(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    write(client, region, 1)
    client.close()
    other = StoreClient(options, Identity("model", {"dtype": "float16"}), region.description)
    other.connect(TIMEOUT_S)
    assert key(1) not in other
    assert read_back(other, region, 1) == [RowOutcome.MISSING]
    other.close()


def test_a_root_in_use_is_refused_with_its_owner(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    second = StoreClient(options, IDENTITY, region.description)
    with pytest.raises(
        StoreRefused, match=rf"belongs to process {client.store_pid} on .*\({os.getpid()}\);"
    ):
        second.connect(TIMEOUT_S)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("file", "root: "),
        ("newer", "format_version: expected at most 1"),
        ("tiny budget", "budget: expected at least"),
    ],
)
def test_roots_that_cannot_be_had(
    options: StoreOptions, region: FakeRegion, prepare: str, message: str
) -> None:
    root, budget = options.root, options.budget_bytes
    if prepare == "file":
        root.write_bytes(b"")
    elif prepare == "newer":
        with DiskStore.open(options):
            pass
        text = (root / "zarr.json").read_text()
        (root / "zarr.json").write_text(text.replace('"format_version": 1', '"format_version": 2'))
    else:
        budget = 50_000
    refused = StoreClient(
        StoreOptions(root, budget, lock_timeout_s=0.1), IDENTITY, region.description
    )
    with pytest.raises(StoreRefused) as error:
        refused.connect(TIMEOUT_S)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_killed_store_process_fails_its_jobs_and_comes_back(
    client: StoreClient, region: FakeRegion
) -> None:
    write(client, region, *range(8))
    assert client.store_pid is not None
    os.kill(client.store_pid, signal.SIGSTOP)
    client.read([key(1)], [20])
    os.kill(client.store_pid, signal.SIGKILL)
    [job] = wait(client)
    assert job.outcomes == [RowOutcome.FAILED]
    assert key(1) not in client
    client.write([key(100)], [0])
    assert client.poll()[0].outcomes == [RowOutcome.FAILED], "at once, while it is away"
    wait_until_up(client)
    assert client.restarts == 1
    assert len(client) == client.usage.rows == 8
    assert client.usage.rows_written == 8, "by the one that was killed"
    assert read_back(client, region, *range(8)) == [RowOutcome.OK] * 8
    assert (client.usage.rows_read, client.usage.rows_written) == (8, 8)


@pytest.mark.slow
def test_nothing_waits_for_a_store_that_stands_still(
    client: StoreClient, region: FakeRegion
) -> None:
    write(client, region, 1)
    assert client.store_pid is not None
    os.kill(client.store_pid, signal.SIGSTOP)
    try:
        seconds = []
        for number in range(3000):
            started = time.perf_counter()
            client.write([key(number)], [number % SLOTS])
            assert key(1) in client
            client.poll()
            seconds.append(time.perf_counter() - started)
        # Generous: the claim is "does not wait", not a speed; and any machine stops now and then.
        assert sorted(seconds)[-10] < 1.0, "it waited"
    finally:
        os.kill(client.store_pid, signal.SIGCONT)
    assert len(wait(client, 3000)) == 3000
    assert client.pending_jobs == 0


def test_a_slot_outside_the_region_ends_the_session_not_the_data(
    client: StoreClient, region: FakeRegion
) -> None:
    write(client, region, 1)
    client.read([key(1)], [SLOTS])
    [job] = wait(client)
    assert job.outcomes == [RowOutcome.FAILED]
    wait_until_up(client)
    assert read_back(client, region, 1) == [RowOutcome.OK]


_ENGINE = """
import sys, time
from pathlib import Path
from tests.unit.service.test_client import *
region = FakeRegion()
client = StoreClient(StoreOptions(Path(sys.argv[1]), 4_000_000), IDENTITY, region.description)
client.connect(30)
write(client, region, 1, 2, 3)
client.write([key(n) for n in range(10, 40)], range(30))
print(client.store_pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_store_process_ends_with_a_killed_engine_and_finishes_its_writes(
    options: StoreOptions,
) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(options.root)],
        cwd=Path(__file__).resolve().parents[3],
        stdout=subprocess.PIPE,
    )
    assert engine.stdout is not None
    store = psutil.Process(int(engine.stdout.readline()))
    engine.kill()
    engine.communicate()
    store.wait(TIMEOUT_S)
    with DiskStore.open(options) as opened:
        rows = opened.open_rows(IDENTITY, ROW_BYTES)
        assert all(key(n) in rows for n in (1, 2, 3))


def test_a_stranger_on_the_socket_is_told_and_left() -> None:
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-m", "storage.service", "--fd", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        cwd=Path(__file__).resolve().parents[3],
    )
    theirs.close()
    ours.sendall(b"\xff" * 100)
    assert b"protocol" in ours.recv(4096)
    assert process.wait(TIMEOUT_S) == 0
    ours.close()
