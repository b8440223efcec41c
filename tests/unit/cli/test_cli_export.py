"""A namespace exported, shipped and imported: the same bytes under the same names, or a refusal."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

from storage.errors import CorruptRecord
from storage.export import Export, batch_rows, export_namespace, import_rows
from storage.facts import RowFacts
from storage.namespace import Identity
from storage.store import DiskStore
from storage.survey import survey_root
from storage.testing.contract import options_for
from storage.testing.rows import aligned_rows, filled_rows, key_of, row_of, soft_row_of
from storage.types import RowKey, RowOutcome
from tiering.cli.main import main

ROW_BYTES = 65536
KEYS = [key_of(i) for i in range(100)]
FACTS = RowFacts((16,), 8, 8, 8 * ROW_BYTES)

Make = Callable[..., Path]


def identity_under(codec: str) -> Identity:
    return Identity("org/model", {"dtype": "bf16", "layers": [["a", 4096]]}, 2, codec)


@pytest.fixture
def make(memory_path: Path) -> Make:
    """A root with the rows of `keys`, used in that order."""

    def make(keys: list[RowKey], codec: str = "none", name: str = "root") -> Path:
        root = memory_path / name
        options = replace(
            options_for(root, ROW_BYTES, 120), codec=codec, codec_always=codec != "none"
        )
        with DiskStore.open(options) as store:
            rows = store.open_rows(identity_under(codec), ROW_BYTES, FACTS)
            for key in keys:
                assert rows.write(
                    [key], filled_rows([key], ROW_BYTES, content(codec))
                ).outcomes == [RowOutcome.OK]
        return root

    return make


def content(codec: str) -> Callable[[RowKey, int], bytes]:
    return row_of if codec == "none" else soft_row_of


def nothing(_count: int) -> None:
    pass


@pytest.mark.parametrize("codec", ["none", "blosc-lz4", "zstd"])
def test_export_and_import_give_the_same_bytes(
    make: Make, memory_path: Path, codec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make(KEYS, codec)
    target, other = memory_path / "export", memory_path / "other"
    assert main(["export", str(root), "model", str(target)]) == 0
    assert "100 rows" in capsys.readouterr().out
    # Any Zarr reader has the rows, their names and their order.
    with warnings.catch_warnings(action="error"):
        group = zarr.open_group(target, mode="r")
        assert sorted(name for name, _ in group.arrays()) == [
            *("checksums", "key_bytes", "keys", "last_use", "rows")
        ]
        rows = np.asarray(group["rows"][:])
        names = [bytes(key)[:36] for key in np.asarray(group["keys"][:])]
    assert names == KEYS
    for key, row in zip(names, rows, strict=True):
        assert row.tobytes() == content(codec)(RowKey(key), ROW_BYTES)
    assert main(["import", str(target), str(other), "--budget", "20MB"]) == 0
    assert "100 of 100 are there" in " ".join(capsys.readouterr().out.split())
    # With the budget of the import: how many rows it encoded depends on how busy the machine was,
    # and rows of many sizes take more segments.
    options = replace(options_for(other, ROW_BYTES, 120), codec=codec, budget_bytes=20_000_000)
    with DiskStore.open(options) as store:
        back = store.open_rows(identity_under(codec), ROW_BYTES)
        assert back.keys() == KEYS, "in the order of their use"
        buffers = aligned_rows(100, ROW_BYTES)
        assert set(back.read(KEYS, buffers).outcomes) == {RowOutcome.OK}
        for key, buffer in zip(KEYS, buffers, strict=True):
            assert bytes(buffer) == content(codec)(key, ROW_BYTES)
    (namespace,) = survey_root(other).namespaces
    assert namespace.facts == FACTS
    assert main(["import", str(target), str(other)]) == 0
    assert "0 rows stored, 100 were there" in " ".join(capsys.readouterr().out.split())


def test_export_of_no_rows(make: Make, memory_path: Path) -> None:
    root = make(KEYS[:1])
    options = options_for(root, ROW_BYTES, 120)
    with DiskStore.open(options) as store:
        store.open_rows(identity_under("none"), ROW_BYTES).remove(KEYS[:1])
    target = memory_path / "export"
    assert main(["export", str(root), "model", str(target)]) == 0
    assert main(["import", str(target), str(memory_path / "other"), "--budget", "9MB"]) == 0


def test_export_leaves_damaged_rows_out(make: Make, memory_path: Path) -> None:
    root = make(KEYS[:10])
    (namespace,) = survey_root(root).namespaces
    segment = namespace.segments[0]
    with segment.path.open("r+b") as file:
        file.seek(segment.geometry.row_offset(1) + 77)
        file.write(b"damage")
    key = segment.key(1)
    target = memory_path / "export"
    assert main(["export", str(root), "model", str(target)]) == 1
    archive = Export(target)
    assert sorted(archive.keys) == sorted(set(KEYS[:10]) - {key})
    for keys, rows in archive.batches():
        assert [bytes(row) for row in rows] == [row_of(key, ROW_BYTES) for key in keys]


def exported(make: Make, memory_path: Path) -> Path:
    target = memory_path / "export"
    (namespace,) = survey_root(make(KEYS[:70])).namespaces
    assert export_namespace(namespace, target, nothing).rows == 70
    return target


def refuses_import(target: Path, memory_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["import", str(target), str(memory_path / "new"), "--budget", "20MB"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert len(printed.err.splitlines()) == 1, printed.err
    return printed.err


@pytest.mark.parametrize("where", ["row", "cut short", "key", "swapped"])
def test_import_refuses_a_damaged_export(
    make: Make, memory_path: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = exported(make, memory_path)
    path = target / "rows" / "c" / "0" / "0"
    raw = bytearray(path.read_bytes())
    if where == "row":
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    elif where == "cut short":
        path.unlink()  # which zarr reads as zeros
    elif where == "key":
        path = next(p for p in (target / "keys" / "c").rglob("*") if p.is_file())
        raw = bytearray(path.read_bytes())
        raw[3] ^= 1
        path.write_bytes(raw)
    else:
        group = zarr.open_group(target, mode="r+")
        rows = group["rows"]
        first, second = rows[0].copy(), rows[1].copy()
        rows[0], rows[1] = second, first
    assert "kvtier: " in refuses_import(target, memory_path, capsys)
    if (memory_path / "new").exists():
        options = options_for(memory_path / "new", ROW_BYTES, 120)
        with DiskStore.open(options) as store:
            rows = store.open_rows(identity_under("none"), ROW_BYTES)
            keys = rows.keys()
            buffers = aligned_rows(max(1, len(keys)), ROW_BYTES)[: len(keys)]
            rows.read(keys, buffers)
            assert [bytes(b) for b in buffers] == [row_of(key, ROW_BYTES) for key in keys]


def test_import_refuses_another_identity_or_version(
    make: Make, memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = exported(make, memory_path)
    whole = json.loads((target / "zarr.json").read_text())
    for name, value in (
        ("model", "another"),
        ("identity", {}),
        ("export_version", 99),
        ("fingerprint", "0" * 32),
        ("codec", "zstd"),
        ("codec", "nonsense"),
    ):
        changed = json.loads(json.dumps(whole))
        changed["attributes"]["kvtier"][name] = value
        (target / "zarr.json").write_text(json.dumps(changed))
        refuses_import(target, memory_path, capsys)
        assert not (memory_path / "new").exists()
    for other in (memory_path / "nowhere", make([KEYS[0]], name="a root"), target / "rows"):
        refuses_import(other, memory_path, capsys)


def test_export_refuses_what_it_cannot_do(
    make: Make, memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make(KEYS[:3])
    taken = memory_path / "taken"
    taken.mkdir()
    (namespace,) = survey_root(root).namespaces
    for arguments in (
        ["export", str(root), "nobody", str(memory_path / "x")],
        ["export", str(root), "model", str(taken)],
        ["export", str(root), "model", "/proc/nowhere/x"],
        ["import", str(taken), str(root)],
    ):
        assert main(arguments) == 2, arguments
        printed = capsys.readouterr()
        assert (printed.out, len(printed.err.splitlines())) == ("", 1)
    shutil.rmtree(namespace.directory / "zarr.json", ignore_errors=True)
    (namespace.directory / "zarr.json").unlink()
    assert main(["export", str(root), namespace.name, str(memory_path / "x")]) == 2
    assert not (memory_path / "x").exists()
    assert not (memory_path / "x.partial").exists()


def test_import_takes_no_room_from_others_unasked(
    make: Make, memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = exported(make, memory_path)
    root = memory_path / "full"
    options = options_for(root, ROW_BYTES, 80)
    with DiskStore.open(options) as store:
        rows = store.open_rows(Identity("other", {}), ROW_BYTES)
        rows.write(KEYS[:80], filled_rows(KEYS[:80], ROW_BYTES))
    assert main(["import", str(target), str(root)]) == 2
    assert "--evict" in capsys.readouterr().err
    assert survey_root(root).namespaces[0].row_count == 80
    assert main(["import", str(target), str(root), "--evict"]) in (0, 1)
    by_model = {n.model: n.row_count for n in survey_root(root).namespaces}
    assert by_model["org/model"] >= 40, "segments of another size waste some of the budget"
    assert by_model.get("other", 0) < 80
    assert survey_root(root).charged_bytes <= options.budget_bytes


def test_import_into_too_small_a_budget_says_so(
    make: Make, memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = exported(make, memory_path)
    root = memory_path / "small"
    options = options_for(root, ROW_BYTES, 16)
    assert main(["import", str(target), str(root), "--budget", str(options.budget_bytes)]) == 1
    assert "of 70 are there now" in " ".join(capsys.readouterr().out.split())
    with DiskStore.open(options) as store:
        rows = store.open_rows(identity_under("none"), ROW_BYTES)
        assert rows.keys() == KEYS[70 - len(rows) : 70], "those used last"


def test_export_batches_are_bounded() -> None:
    assert batch_rows(4096) == 64
    assert batch_rows(40_000_000) == 1
    with pytest.raises(CorruptRecord):
        Export(Path("/nowhere"))
    assert import_rows.__doc__
