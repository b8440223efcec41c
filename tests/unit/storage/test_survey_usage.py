"""What a survey says of a root, held against an independent walk over its files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.device import LocalDevice, ReadOnlyDevice
from storage.errors import DeviceError, RootUnusable
from storage.facts import RowFacts
from storage.findings import Trouble
from storage.header import ENTRY, SegmentGeometry, encode_index, encode_table, new_entries
from storage.namespace import Identity, namespace_metadata, root_metadata, rows_metadata
from storage.segment import segment_path
from storage.status import STATUS_BYTES_MAX, Counters, StatusKeeper, StoreStatus, read_status
from storage.store import DiskStore
from storage.survey import places_of, survey_root
from storage.testing.contract import StoreHarness, options_for
from storage.testing.faulty import FaultyDevice, Raise
from storage.testing.rows import aligned_rows, filled_rows, key_of, soft_row_of
from storage.types import SegmentId
from tests.unit.storage.effort import lines_of

ROOT = Path(__file__).resolve().parents[3]
KEYS = [key_of(i) for i in range(64)]
ROW_BYTES = 8192
FACTS = RowFacts((16,), 8, 8, 8 * ROW_BYTES)


def walk(root: Path) -> tuple[int, int]:
    """(apparent, allocated) bytes of all files below `root`, links not followed."""
    apparent = allocated = 0
    for directory, _, names in os.walk(root):
        for name in names:
            found = os.lstat(os.path.join(directory, name))
            apparent += found.st_size
            allocated += found.st_blocks * 512
    return apparent, allocated


def state_of(root: Path) -> list[tuple[str, int, int, bytes]]:
    """Everything that a look must not change."""
    return sorted(
        (str(path), info.st_mtime_ns, info.st_mode, path.read_bytes() if path.is_file() else b"")
        for path in root.rglob("*")
        for info in [path.lstat()]
    )


operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["write", "write", "write", "remove", "read", "reopen", "shrink", "drop in"]
        ),
        st.integers(0, 63),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("codec", ["none", "blosc-lz4", "zstd"])
@settings(max_examples=8)
@given(history=operations)
def test_usage_of_random_histories(
    memory_path: Path, codec: str, history: list[tuple[str, int, int]]
) -> None:
    root = memory_path / f"root-{time.monotonic_ns()}"
    options = replace(options_for(root, ROW_BYTES, 48), codec=codec, codec_always=codec != "none")
    identities = [Identity("m/a", {}, 2, codec), Identity("b", {"x": 1}, 2, codec)]
    store = DiskStore.open(options)
    stores = [store.open_rows(identity, ROW_BYTES, FACTS) for identity in identities]
    for op, first, count in history:
        rows = stores[first % 2]
        keys = KEYS[first : first + count]
        if op == "write":
            rows.write(keys, filled_rows(keys, ROW_BYTES, soft_row_of))
        elif op == "remove":
            rows.remove(keys)
        elif op == "read":
            rows.read(keys, aligned_rows(len(keys), ROW_BYTES))
        elif op == "drop in":
            (root / f"note-{first}").write_bytes(b"x" * first * 100)
        else:
            store.close()
            if op == "shrink":
                options = replace(options, budget_bytes=options.budget_bytes * 9 // 10)
            store = DiskStore.open(options)
            stores = [store.open_rows(identity, ROW_BYTES, FACTS) for identity in identities]
        seen = survey_root(root)
        weight = seen.weight
        assert (weight.apparent_bytes, weight.allocated_bytes) == walk(root)
        by_name = {namespace.name: namespace for namespace in seen.namespaces}
        for identity, rows in zip(identities, stores, strict=True):
            if identity.directory not in by_name:
                assert not len(rows)
                continue
            namespace = by_name[identity.directory]
            keys_seen = [s.key(slot) for s in namespace.segments for slot in s.named]
            assert sorted(keys_seen) == sorted(rows.keys())
            assert namespace.facts == FACTS
            assert namespace.codec_name == codec
            for key in rows.keys()[:3]:
                place = rows.locate(key)
                assert [(s.number, slot) for s, slot in places_of(namespace, key)] == [place]
        assert {finding.trouble for finding in seen.findings} <= {Trouble.FOREIGN}
    store.close()
    # A store that is opened charges what is there; one that runs charged what it made.
    with DiskStore.open(options) as again:
        assert survey_root(root).charged_bytes == again.usage().used_bytes


def test_usage_is_read_without_a_change(memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:8])
    before = state_of(memory_path)
    assert survey_root(memory_path / "root").owner_pid == os.getpid()
    assert state_of(memory_path) == before
    harness.close()
    assert survey_root(memory_path / "root").owner_pid is None


def test_a_device_for_looking_changes_nothing(tmp_path: Path) -> None:
    device = ReadOnlyDevice()
    path = tmp_path / "file"
    path.write_bytes(b"content")
    for change in (
        lambda: device.open(tmp_path / "new", create=True),
        lambda: device.make_directory(tmp_path / "new"),
        lambda: device.remove_directory(tmp_path),
        lambda: device.remove(path),
        lambda: device.rename(path, tmp_path / "new"),
        lambda: device.write_file(path, b""),
        lambda: device.lock(tmp_path),
    ):
        with pytest.raises(DeviceError, match="EROFS"):
            change()
    fd = device.open(path)
    with pytest.raises(DeviceError):
        device.pwritev(fd, [memoryview(b"x")], 0)
    device.close(fd)
    assert path.read_bytes() == b"content"


# -- damage -------------------------------------------------------------------------------------


def troubles(root: Path) -> list[Trouble]:
    return [finding.trouble for finding in survey_root(root).findings]


@pytest.fixture
def root(memory_path: Path) -> Path:
    """Two segments of four rows."""
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:8])
    harness.close()
    return memory_path / "root"


def namespace_of(root: Path) -> Path:
    return root / Identity("test/model", {"layout": "plain"}, 2).directory


def test_usage_of_a_torn_header(root: Path) -> None:
    """One copy torn costs nothing; both, the segment's rows."""
    path = segment_path(namespace_of(root) / "rows", SegmentId(0))
    geometry = SegmentGeometry(ROW_BYTES, 4)
    for parity, left in ((0, 8), (1, 4)):
        with path.open("r+b") as file:
            file.seek(geometry.table_offset(parity) + 100)
            file.write(b"\xff" * 8)
        (namespace,) = survey_root(root).namespaces
        assert namespace.row_count in (left, 8)
    assert troubles(root) == [Trouble.TORN_HEADER]
    assert namespace.row_count == 4


def test_usage_of_a_segment_cut_short_or_too_long(root: Path) -> None:
    path = segment_path(namespace_of(root) / "rows", SegmentId(0))
    size = path.stat().st_size
    os.truncate(path, size + 4096)
    assert troubles(root) == [Trouble.WRONG_SIZE]
    os.truncate(path, size - 2 * (ROW_BYTES + 4096))
    assert troubles(root) == [Trouble.CUT_SHORT]
    (namespace,) = survey_root(root).namespaces
    assert namespace.row_count == 6
    os.truncate(path, 0)
    assert Trouble.CUT_SHORT in troubles(root)


def test_usage_of_half_a_namespace(root: Path) -> None:
    namespace = namespace_of(root)
    (namespace / "zarr.json").unlink()
    seen = survey_root(root)
    assert [f.trouble for f in seen.findings] == [Trouble.HALF_DELETED]
    assert seen.namespaces[0].model == "test-model"
    assert seen.namespaces[0].row_count == 8, "keys and geometry are still there"
    (namespace / "rows" / "zarr.json").unlink()
    seen = survey_root(root)
    assert [f.trouble for f in seen.findings] == [Trouble.HALF_DELETED] * 2
    assert seen.namespaces[0].row_count == 0
    weight = seen.weight
    assert (weight.apparent_bytes, weight.allocated_bytes) == walk(root)
    (root / "zarr.json").unlink()
    assert troubles(root) == [Trouble.HALF_DELETED] * 3


def test_usage_of_damaged_and_newer_metadata(root: Path) -> None:
    path = namespace_of(root) / "zarr.json"
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert troubles(root) == [Trouble.BAD_METADATA]
    metadata = json.loads(whole)
    for name, value in (("model", 3), ("identity", 3), ("codec", [])):
        ours = {**metadata["attributes"]["kvtier"], name: value}
        path.write_text(json.dumps({**metadata, "attributes": {"kvtier": ours}}))
        assert troubles(root) == [Trouble.BAD_METADATA], name
    path.write_text(whole.replace('"plain"', '"other"'))
    assert troubles(root) == [Trouble.BAD_METADATA], "an identity of another namespace"
    path.write_text(whole.replace('"format_version": 1', '"format_version": 99'))
    assert troubles(root) == [Trouble.NEWER_FORMAT]


def test_usage_tells_foreign_and_half_made_files(root: Path) -> None:
    namespace = namespace_of(root)
    for path in (
        root / "notes.txt",
        namespace / "notes.txt",
        namespace / "rows" / "notes.txt",
        namespace / "rows" / "c" / "notes",
        namespace / "rows" / "c" / "0" / "1",
        root / "status" / "notes",
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 5000)
    (namespace / "rows" / "c" / "0" / "0.partial").write_bytes(b"")
    (root / "link").symlink_to(memory := root.parent / "elsewhere")
    memory.write_bytes(b"x" * 100_000)
    found = troubles(root)
    assert sorted(t.value for t in found) == ["foreign"] * 7 + ["leftover"]
    seen = survey_root(root)
    assert (seen.weight.apparent_bytes, seen.weight.allocated_bytes) == walk(root)


def test_usage_counts_a_key_that_is_named_twice_once(root: Path) -> None:
    rows = namespace_of(root) / "rows"
    geometry = SegmentGeometry(ROW_BYTES, 4)
    (namespace,) = survey_root(root).namespaces
    entries = [segment.entries.copy() for segment in namespace.segments]
    twin = entries[0][2].copy()
    twin["offset"] = entries[1]["offset"][3]
    entries[1][3] = twin
    entries[1]["last_use"][3] += 10
    with segment_path(rows, SegmentId(1)).open("r+b") as file:
        file.write(encode_index(geometry, entries[1]))
        for generation in (8, 9):
            file.write(encode_table(geometry, entries[1], generation, namespace.fingerprint))
    seen = survey_root(root)
    assert [f.trouble for f in seen.findings] == [Trouble.NAMED_TWICE]
    assert seen.namespaces[0].row_count == 7
    key = namespace.segments[0].key(2)
    assert [(s.number, slot) for s, slot in places_of(seen.namespaces[0], key)] == [(1, 3)]


@pytest.mark.parametrize("what", ["missing", "file", "empty", "newer", "damaged", "namespace"])
def test_usage_refuses_what_is_no_store(root: Path, what: str) -> None:
    path = root
    if what == "missing":
        path = root / "nowhere"
    elif what == "file":
        path = root / "zarr.json"
    elif what == "empty":
        path = root.parent / "empty"
        path.mkdir()
    elif what == "newer":
        text = (root / "zarr.json").read_text()
        (root / "zarr.json").write_text(text.replace('"format_version": 1', '"format_version": 2'))
    elif what == "damaged":
        (root / "zarr.json").write_text("{}")
    else:
        path = namespace_of(root)
    with pytest.raises(RootUnusable) as caught:
        survey_root(path)
    assert "\n" not in str(caught.value)


# -- beside a running store ---------------------------------------------------------------------

WRITER = """
import random, sys
from pathlib import Path
from storage.testing.contract import StoreHarness, options_for
from storage.testing.rows import key_of
harness = StoreHarness(Path(sys.argv[1]), 8192, 64)
rng = random.Random(1)
print("ready", flush=True)
while True:
    harness.write([key_of(rng.randrange(200)), key_of(200 + rng.randrange(100))])
    harness.store.write_status()
"""


@pytest.mark.slow
def test_usage_beside_a_process_that_writes(memory_path: Path) -> None:
    root = memory_path / "root"
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            most, looks = 0, 0
            deadline = time.monotonic() + 3
            while time.monotonic() < deadline or most < 60 or looks < 5:
                seen = survey_root(root)
                assert not seen.findings
                assert seen.owner_pid == writer.pid
                for namespace in seen.namespaces:
                    keys = [s.key(slot) for s in namespace.segments for slot in s.named]
                    assert set(keys) <= {key_of(i) for i in range(300)}
                    most = max(most, len(keys))
                assert most <= 64
                assert seen.charged_bytes <= options_for(root, 8192, 64).budget_bytes
                looks += 1
            assert seen.status is not None
            assert seen.status.is_open
        finally:
            writer.kill()


# -- what a root remembers ----------------------------------------------------------------------


def test_usage_is_remembered_over_openings(memory_path: Path) -> None:
    options = options_for(memory_path / "root", ROW_BYTES, 16)
    for turn in range(1, 4):
        with DiskStore.open(options) as store:
            rows = store.open_rows(Identity("m", {}), ROW_BYTES, FACTS if turn == 1 else None)
            keys = KEYS[turn * 2 : turn * 2 + 2]
            rows.write(keys, filled_rows(keys, ROW_BYTES))
            rows.read([keys[0], KEYS[60]], aligned_rows(2, ROW_BYTES))
            store.write_status()
            status = read_status(options.root, LocalDevice())
            assert status is not None
            assert status.is_open
        status = read_status(options.root, LocalDevice())
        assert status is not None
        assert not status.is_open
        assert (status.budget_bytes, status.rows) == (options.budget_bytes, 2 * turn)
        for counters in (status.counters, status.namespaces[rows.identity.directory].counters):
            assert (counters.rows_written, counters.rows_read, counters.rows_missing) == (
                *(2 * turn, turn, turn),
            )
    (namespace,) = survey_root(options.root).namespaces
    assert namespace.facts == FACTS, "an opening that knows none keeps those of the last"
    group = zarr.open_group(options.root, mode="r")
    assert sorted(name for name, _ in group.groups()) == sorted([namespace.name, "status"])
    assert group["status"].attrs["kvtier"]["status"]["rows"] == 6


@pytest.mark.slow
def test_the_history_of_usage_is_bounded(tmp_path: Path) -> None:
    now = [1_800_000_000.0]
    keeper = StatusKeeper(tmp_path, LocalDevice(), lambda: now[0])
    path = tmp_path / "status" / "zarr.json"
    big = 10**15
    for turn in range(3000):
        now[0] += 61
        counters = Counters(big + turn, big, big, big, big, big * turn, big)
        names = {f"{'m' * 60}-{number:032x}": counters for number in range(turn % 50)}
        keeper.write(StoreStatus(used_bytes=big + turn, state_reason="r" * 300), names)
        assert path.stat().st_size <= STATUS_BYTES_MAX
    status = read_status(tmp_path, LocalDevice())
    assert status is not None
    assert 50 <= len(status.history) <= 201
    times = [point.time_s for point in status.history]
    assert times == sorted(times)
    assert times[0] < 1_800_000_000 + 61 * 200, "it reaches back to the start"
    assert times[-1] > now[0] - 2 * status.history_interval_s


def test_usage_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    keeper = StatusKeeper(tmp_path, LocalDevice())
    keeper.write(StoreStatus(rows=1), {})
    before = (tmp_path / "status" / "zarr.json").stat().st_ino
    keeper.write(StoreStatus(rows=1), {})
    assert (tmp_path / "status" / "zarr.json").stat().st_ino == before
    keeper.write(StoreStatus(rows=2), {})
    assert (tmp_path / "status" / "zarr.json").stat().st_ino != before


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"attributes":{"kvtier":{"status":3}}}'])
def test_usage_that_is_damaged_is_forgotten(memory_path: Path, content: bytes) -> None:
    harness = StoreHarness(memory_path / "root")
    harness.write(KEYS[:4])
    harness.close()
    (memory_path / "root" / "status" / "zarr.json").write_bytes(content)
    assert survey_root(memory_path / "root").status is None
    harness.open()
    assert harness.keys() == set(KEYS[:4])
    harness.close()
    assert read_status(memory_path / "root", LocalDevice()) is not None


def test_a_disk_that_refuses_the_usage_is_no_less_used(memory_path: Path) -> None:
    device = FaultyDevice(LocalDevice())
    harness = StoreHarness(memory_path / "root", device=lambda: device)
    device.add(Raise(28), "write_file", when=lambda op: "status" in op.path.parts)
    harness.write(KEYS[:4])
    harness.store.write_status()
    assert harness.store.usage().state == "growing"
    assert harness.keys() == set(KEYS[:4])
    harness.close()
    assert read_status(memory_path / "root", LocalDevice()) is None


# -- size ---------------------------------------------------------------------------------------


def synthetic_root(root: Path, rows: int) -> None:
    """Headers of so many rows in segments without blocks for them."""
    root.mkdir()
    identity, geometry = Identity("m", {}), SegmentGeometry(499712, 1024)
    directory = root / identity.directory
    (directory / "rows" / "c").mkdir(parents=True)
    (root / "zarr.json").write_bytes(root_metadata({"pid": 1}))
    (directory / "zarr.json").write_bytes(namespace_metadata(identity, FACTS))
    count = -(-rows // 1024)
    (directory / "rows" / "zarr.json").write_bytes(rows_metadata(geometry, count))
    rng = np.random.default_rng(1)
    for number in range(count):
        used = min(1024, rows - number * 1024)
        entries = new_entries(geometry)
        named = np.zeros(used, ENTRY)
        named["key_bytes"], named["length"] = 36, geometry.record_bytes
        named["offset"] = geometry.row_offset(0) + geometry.stride * np.arange(used)
        named["last_use"] = 1_790_000_000_000_000 + rng.integers(0, 10**12, used)
        keys = np.zeros((used, 72), np.uint8)
        keys[:, :32] = rng.integers(0, 256, (used, 32))
        named["key"] = keys.view("V72")[:, 0]
        entries[:used] = named
        path = segment_path(directory / "rows", SegmentId(number))
        path.parent.mkdir()
        with path.open("wb") as file:
            file.write(encode_index(geometry, entries))
            for generation in (2, 3):
                file.write(encode_table(geometry, entries, generation, identity.namespace))
            file.truncate(geometry.segment_bytes)


@pytest.mark.slow
def test_usage_of_a_million_rows_is_read_by_the_segment(tmp_path: Path) -> None:
    root = tmp_path / "root"
    synthetic_root(root, 1_000_000)
    assert survey_root(root).namespaces[0].row_count == 1_000_000
    lines = lines_of(lambda: survey_root(root))
    assert lines < 1_500_000, "for 977 segments; a line for each row would be a million more"


def test_usage_of_a_root_that_may_not_be_read(root: Path) -> None:
    for op in ("stat", "list", "read_file"):
        device = FaultyDevice(ReadOnlyDevice())
        device.add(Raise(13), op, when=lambda op: root in (op.path, op.path.parent))
        with pytest.raises(RootUnusable, match="EACCES"):
            survey_root(root, device)
