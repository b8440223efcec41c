"""The store is a Zarr v3 hierarchy: zarr-python and tensorstore read every row, and zarr-python
checks every checksum."""

from __future__ import annotations

import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from storage.codec import CODEC_NAMES, NO_CODEC
from storage.namespace import Identity
from storage.segment import segment_path
from storage.testing.contract import StoreHarness
from storage.testing.mixed import MixedHarness, keys_of, mixed_row_of
from storage.testing.rows import key_of, row_of
from storage.types import RowKey, SegmentId
from tests.integration.zarr_reading import assert_zarr_equals_store

KEYS = [key_of(i) for i in range(60)]


@pytest.fixture
def harness(memory_path: Path) -> Iterator[StoreHarness]:
    harness = StoreHarness(memory_path / "root")
    yield harness
    harness.close()


def assert_rows(harness: StoreHarness, keys: set[RowKey]) -> None:
    """Of the closed store: zarr, our reader and the keys' own rows agree."""
    rows = assert_zarr_equals_store(harness.options.root, harness.identity)
    assert rows.keys() == keys
    for key, row in rows.items():
        assert row.tobytes() == row_of(key, harness.row_bytes)


@pytest.mark.parametrize("seed", range(6))
def test_zarr_reads_every_row_of_a_random_history(harness: StoreHarness, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        for _ in range(rng.randrange(1, 15)):
            keys = rng.sample(KEYS, rng.randint(1, 5))
            harness.write(keys)
            harness.rows.remove(rng.sample(KEYS, rng.randint(0, 3)))
            harness.read(rng.sample(KEYS, 3))
        keys_now = harness.keys()
        harness.close()
        assert_rows(harness, keys_now)
        harness.open()
        assert harness.keys() == keys_now


@pytest.mark.parametrize("codec", [name for name in CODEC_NAMES if name != NO_CODEC])
@pytest.mark.parametrize("seed", range(4))
def test_zarr_reads_every_row_of_a_random_history_under_a_codec(
    memory_path: Path, codec: str, seed: int
) -> None:
    """Rows of every size class and raw ones, while classes take segments from each other."""
    rng = random.Random(seed)
    harness = MixedHarness(memory_path / "root", codec, segments=8)
    classes = set()
    for turn in range(4):
        kinds = rng.sample(range(4), 2)
        for _ in range(rng.randrange(5, 25)):
            keys = keys_of(rng.choice(kinds), 30, 100 * rng.randrange(5))
            harness.write(rng.sample(keys, rng.randint(1, 6)))
            harness.rows.remove(rng.sample(keys, rng.randint(0, 2)))
            harness.read(rng.sample(keys, 3))
            classes |= harness.segments_by_class.keys()
        keys_now = harness.keys()
        harness.close()
        rows = assert_zarr_equals_store(harness.options.root, harness.identity)
        assert rows.keys() == keys_now, f"seed {seed} turn {turn}"
        for key, row in rows.items():
            assert row.tobytes() == mixed_row_of(key)
        harness.open()
        assert harness.keys() == keys_now
    assert len(classes) >= 3
    harness.close()


def test_zarr_reads_a_row_at_its_location_while_the_store_is_open(harness: StoreHarness) -> None:
    harness.write(KEYS[:10])
    array = zarr.open_array(str(harness.rows.directory), mode="r")
    for key in KEYS[:10]:
        place = harness.rows.locate(key)
        assert place is not None
        row = place.segment * harness.rows.geometry.slots_per_segment + place.slot
        assert np.asarray(array[row]).tobytes() == row_of(key, harness.row_bytes)


@pytest.mark.parametrize("row_bytes", [4096, 499_712])
def test_zarr_reads_rows_of_any_size(memory_path: Path, row_bytes: int) -> None:
    harness = StoreHarness(memory_path / "root", row_bytes=row_bytes)
    harness.write(KEYS[:9])
    keys = harness.keys()
    harness.close()
    assert_rows(harness, keys)


@pytest.mark.parametrize("offset", [0, 4096, 8191, 8192])
def test_zarr_raises_on_a_flipped_bit(harness: StoreHarness, offset: int) -> None:
    harness.write(KEYS[:4])
    place = harness.rows.locate(KEYS[1])
    assert place is not None
    with segment_path(harness.rows.directory, place.segment).open("r+b") as file:
        file.seek(harness.rows.geometry.row_offset(place.slot) + offset)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    array = zarr.open_array(str(harness.rows.directory), mode="r")
    with pytest.raises(ValueError, match=r"(?i)checksum"):
        array[place.slot]
    assert np.any(array[place.slot + 1])


def test_zarr_raises_on_a_torn_index_which_the_store_repairs(harness: StoreHarness) -> None:
    harness.write(KEYS[:4])
    keys = harness.keys()
    harness.close()
    with segment_path(harness.rows.directory, SegmentId(0)).open("r+b") as file:
        file.seek(3)
        file.write(b"X")
    array = zarr.open_array(str(harness.rows.directory), mode="r")
    with pytest.raises(ValueError, match=r"(?i)checksum"):
        array[0]
    harness.open()
    harness.close()
    assert_rows(harness, keys)
    harness.open()


def test_zarr_lists_the_hierarchy_without_warnings(memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root", capacity_rows=24)
    other = harness.store.open_rows(Identity("org/other", {"x": 1}), harness.row_bytes)
    harness.write(KEYS[:5])
    other.write(KEYS[:1], [memoryview(bytearray(row_of(KEYS[0], harness.row_bytes)))])
    harness.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        group = zarr.open_group(str(harness.options.root), mode="r")
        assert group.attrs["kvtier"]["format_version"] == 1  # type: ignore[index, call-overload]
        assert sorted(name for name, _ in group.groups()) == sorted(
            [harness.identity.directory, other.identity.directory, "status"]
        )
        members = dict(group.members(max_depth=None))
        assert sorted(members) == sorted(
            [
                "status",
                *(
                    path
                    for identity in (harness.identity, other.identity)
                    for path in (identity.directory, f"{identity.directory}/rows")
                ),
            ]
        )
        namespace = members[other.identity.directory]
        attributes = namespace.attrs["kvtier"]
        assert attributes["model"] == "org/other"  # type: ignore[index, call-overload]
        assert attributes["identity"] == {"x": 1}  # type: ignore[index, call-overload]
        array = members[f"{harness.identity.directory}/rows"]
        assert isinstance(array, zarr.Array)
        assert array.metadata.dimension_names == ("slot", "byte")  # type: ignore[union-attr]


def test_zarr_reads_a_store_that_was_copied_elsewhere(
    harness: StoreHarness, tmp_path: Path
) -> None:
    harness.write(KEYS[:7])
    harness.close()
    shutil.copytree(harness.options.root, tmp_path / "copy")
    rows = assert_zarr_equals_store(tmp_path / "copy", harness.identity.directory)
    assert rows.keys() == set(KEYS[:7])
    harness.open()


def test_zarr_comparison_can_fail(harness: StoreHarness) -> None:
    """The canary: a wrong row with a right trailer passes zarr and not the comparison."""
    harness.write(KEYS[:4])
    harness.close()
    path = segment_path(harness.rows.directory, SegmentId(0))
    geometry = harness.rows.geometry
    raw = bytearray(path.read_bytes())
    one, two = geometry.row_offset(0), geometry.row_offset(1)
    raw[one : one + geometry.stride] = raw[two : two + geometry.stride]
    path.write_bytes(raw)
    assert np.any(zarr.open_array(str(harness.rows.directory), mode="r")[0])
    with pytest.raises(AssertionError):
        assert_zarr_equals_store(harness.options.root, harness.identity)
    harness.open()
