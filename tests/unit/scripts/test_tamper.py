"""The negative control: rows with other bytes, and not one checksum that tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evals.plans import KVTIER, Side
from scripts.evals.tamper import CannotTamper, Damage, tamper_files
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.store import DiskStore
from storage.testing.rows import aligned_rows, key_of, row_of
from storage.types import RowKey, RowOutcome

ROW_BYTES = 8192
KEYS = [key_of(i) for i in range(60)]
IDENTITY = Identity("model", {})


def options(root: Path, codec: str = "none") -> StoreOptions:
    """Several segments, the last one not full."""
    return StoreOptions(
        root=root, budget_bytes=16 << 20, segment_bytes=300_000, codec=codec, codec_always=False
    )


def fill(root: Path, codec: str = "none") -> None:
    buffers = aligned_rows(len(KEYS), ROW_BYTES)
    for key, buffer in zip(KEYS, buffers, strict=True):
        buffer[:] = row_of(key, ROW_BYTES)
    with DiskStore.open(options(root, codec)) as store:
        result = store.open_rows(IDENTITY, ROW_BYTES).write(KEYS, buffers)
        assert set(result.outcomes) == {RowOutcome.OK}


def read(root: Path) -> dict[RowKey, bytes]:
    """Every row, as the store itself reads and verifies it."""
    buffers = aligned_rows(len(KEYS), ROW_BYTES, fill=0xEE)
    with DiskStore.open(options(root)) as store:
        rows = store.open_rows(IDENTITY, ROW_BYTES)
        result = rows.read(KEYS, buffers)
        assert set(result.outcomes) == {RowOutcome.OK}, "a checksum told"
        assert rows.count().rows_corrupt == 0
    return {key: bytes(buffer) for key, buffer in zip(KEYS, buffers, strict=True)}


def test_every_row_holds_the_bytes_of_another(tmp_path: Path) -> None:
    fill(tmp_path)
    before = read(tmp_path)
    assert Side(KVTIER, "1MiB", "16MiB").damage(tmp_path, Damage.SWAPPED) == len(KEYS)
    after = read(tmp_path)
    assert all(after[key] != before[key] for key in KEYS)
    assert sorted(after.values()) == sorted(before.values())


def test_a_quarter_of_the_rows_are_zeroed_and_no_other_is_touched(tmp_path: Path) -> None:
    fill(tmp_path)
    count = Side(KVTIER, "1MiB", "16MiB").damage(tmp_path, Damage.ZEROED)
    after = read(tmp_path)
    zeroed = [key for key in KEYS if after[key] == bytes(ROW_BYTES)]
    assert len(zeroed) == count
    assert 0.1 * len(KEYS) < count < 0.4 * len(KEYS)
    assert all(after[key] == row_of(key, ROW_BYTES) for key in KEYS if key not in zeroed)


def test_a_store_under_a_codec_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, "zstd")
    with pytest.raises(CannotTamper, match="codecs"):
        Side(KVTIER, "1MiB", "16MiB").damage(tmp_path, Damage.SWAPPED)


def test_files_of_vllms_own_tier(tmp_path: Path) -> None:
    files = [tmp_path / "a" / f"{i}.bin" for i in range(40)]
    files[0].parent.mkdir()
    for i, file in enumerate(files):
        file.write_bytes(bytes([i + 1]) * 100)
    assert tamper_files(tmp_path, Damage.SWAPPED) == 40
    assert all(file.read_bytes()[0] != i + 1 for i, file in enumerate(files))
    assert {file.read_bytes()[0] for file in files} == set(range(1, 41))
    count = tamper_files(tmp_path, Damage.ZEROED)
    assert sum(file.read_bytes() == bytes(100) for file in files) == count > 0
