"""Every command on small stores, through the program's own entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as replace_struct

from storage.facts import RowFacts
from storage.namespace import Identity
from storage.segment import segment_path
from storage.store import DiskStore
from storage.survey import survey_root
from storage.testing.contract import options_for
from storage.testing.rows import (
    aligned_rows,
    bytes_on_disk,
    filled_rows,
    key_of,
    row_of,
    soft_row_of,
)
from storage.types import RowOutcome, SegmentId
from tiering.cli import words
from tiering.cli.console import parse_span, short_name
from tiering.cli.figures import root_figures
from tiering.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
ROW_BYTES = 65536
KEYS = [key_of(i) for i in range(32)]
IDENTITY = Identity("org/model-a", {"dtype": "bf16"}, 2)
CODED = Identity("org/model-b", {"dtype": "bf16"}, 2, "zstd")
FACTS = RowFacts((16, 32), 8, 8, 8 * ROW_BYTES)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def root(memory_path: Path) -> Path:
    """Eight rows of each of two models, the second under a codec."""
    root = memory_path / "root"
    for identity, of in ((IDENTITY, row_of), (CODED, soft_row_of)):
        options = replace(
            options_for(root, ROW_BYTES, 40), codec=identity.codec, codec_always=identity is CODED
        )
        with DiskStore.open(options) as store:
            rows = store.open_rows(identity, ROW_BYTES, FACTS)
            rows.write(KEYS[:8], filled_rows(KEYS[:8], ROW_BYTES, of))
            rows.read([*KEYS[:6], KEYS[20]], aligned_rows(7, ROW_BYTES))
    return root


def damage(root: Path, slot: int = 2, identity: Identity = IDENTITY) -> str:
    """Flip a bit of a row; its key."""
    (namespace,) = [n for n in survey_root(root).namespaces if n.name == identity.directory]
    segment = namespace.segments[0]
    offset = int(segment.entries["offset"][slot]) + 5000
    with segment.path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))
    return segment.key(slot).hex()


def state_of(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes())
        for path in root.rglob("*")
        if path.is_file()
    }


# -- du -----------------------------------------------------------------------------------------


def test_cli_du_as_json_holds_true_figures(root: Path, run: Run) -> None:
    before = state_of(root)
    code, out, err = run("du", root, "--json")
    assert (code, err) == (0, "")
    (found,) = json.loads(out)
    assert state_of(root) == before
    assert found["disk_bytes"] == bytes_on_disk(root)
    plain, coded = sorted(found["namespaces"], key=lambda n: n["namespace"])
    for one in (plain, coded):
        directory = root / one["namespace"]
        assert one["disk_bytes"] == bytes_on_disk(directory)
        assert (one["rows"], one["row_bytes"], one["tokens"]) == (8, ROW_BYTES, 8 * 16)
        assert one["logical_bytes"] == 8 * ROW_BYTES
        assert one["bytes_without_dedup"] == 64 * ROW_BYTES
        assert one["saved_by_dedup_bytes"] == 56 * ROW_BYTES
        assert (one["hits"], one["misses"]) == (6, 1)
        assert one["segments"] == one["segments_full"] + one["segments_open"] + one["segments_free"]
        assert 0 <= one["last_use_age_s"] < 120
    assert plain["saved_by_codec_bytes"] == 0
    assert (coded["codec"], plain["codec"]) == ("zstd", "none")
    (directory,) = [n for n in survey_root(root).namespaces if n.codec_name == "zstd"]
    used = sum(len(s.named) * s.geometry.stride for s in directory.segments)
    assert coded["saved_by_codec_bytes"] == 8 * (ROW_BYTES + 4096) - used > 0
    total = found["total"]
    for name in ("rows", "tokens", "disk_bytes", "hits", "saved_by_codec_bytes"):
        assert total[name] == plain[name] + coded[name]


def test_cli_du_tokens_that_fit_do_fit(root: Path) -> None:
    figures = root_figures(survey_root(root), 1e9)
    options = replace(options_for(root, ROW_BYTES, 40), codec=CODED.codec, codec_always=True)
    with DiskStore.open(options) as store:
        rows = store.open_rows(CODED, ROW_BYTES)
        promised = (figures.tokens_that_fit or 0) // 16
        keys = [key_of(1000 + i) for i in range(promised)]
        rows.write(keys, filled_rows(keys, ROW_BYTES, soft_row_of))
        assert promised > 8
        assert rows.count().rows_evicted <= 4, "about one segment: classes are of several sizes"


@pytest.mark.parametrize("columns", [80, 140])
def test_cli_du_fits_its_terminal(
    root: Path, run: Run, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, _ = run("du", root)
    assert code == 0
    assert all(len(line) <= columns for line in out.splitlines())
    assert "…" not in "".join(line for line in out.splitlines() if "dedup" in line)
    for figure in ("8 =8x", "524 KB", "total", "86 %", "4.19 MB"):
        assert figure in out, out


def test_cli_du_of_usage_before_and_after_dedup(root: Path, memory_path: Path, run: Run) -> None:
    other = memory_path / "dedup-off"
    with DiskStore.open(options_for(other, 8 * ROW_BYTES, 40)) as store:
        rows = store.open_rows(IDENTITY, 8 * ROW_BYTES, replace_facts())
        rows.write(KEYS[:16], filled_rows(KEYS[:16], 8 * ROW_BYTES))
    code, out, _ = run("du", other, root, "--compare")
    assert code == 0
    assert "dedup-off" in out
    assert "8.00x" in out, out
    assert run("du", root, "--compare")[0] == 2


def replace_facts() -> RowFacts:
    return RowFacts((16,), 8, 8, 8 * ROW_BYTES)


def test_cli_du_warns(root: Path, run: Run) -> None:
    (root / "notes.txt").write_text("x")
    path = root / IDENTITY.directory / "zarr.json"
    os.utime(path, (1e9, 1e9))
    status = root / "status" / "zarr.json"
    known = json.loads(status.read_text())
    known["attributes"]["kvtier"]["status"]["budget_bytes"] = 10**18
    status.write_text(json.dumps(known))
    code, out, _ = run("du", root)
    assert code == 0
    for warning in ("foreign", "stale", "budget: 1e+03 PB", "notes.txt"):
        assert warning in out, out


def test_cli_du_of_a_store_that_nobody_opened_yet(memory_path: Path, run: Run) -> None:
    DiskStore.open(options_for(memory_path / "root", ROW_BYTES, 16)).close()
    code, out, _ = run("du", memory_path / "root")
    assert code == 0
    assert "budget" in out


def test_cli_du_draws(root: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ending in ("png", "svg"):
        target = tmp_path / f"du.{ending}"
        assert run("du", root, root, "--plot", target)[0] == 0
        assert target.stat().st_size > 5000
    code, _, err = run("du", root, "--plot", tmp_path / "du.nonsense")
    assert code == 2
    assert len(err.splitlines()) == 1


def test_the_program_of_disk_usage_is_cli_du(root: Path) -> None:
    command = [sys.executable, "scripts/disk_usage.py", str(root), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["disk_bytes"] == bytes_on_disk(root)


# -- ls and inspect -----------------------------------------------------------------------------


def test_cli_ls(root: Path, run: Run) -> None:
    code, out, _ = run("ls", root)
    assert code == 0
    assert IDENTITY.directory in out
    assert CODED.directory in out
    code, out, _ = run("ls", root, "model-a", "--limit", 3)
    assert code == 0
    assert len(out.splitlines()) == 4
    assert KEYS[0].hex() in out
    code, out, _ = run("ls", root, "model-b", "--json")
    assert {row["key"] for row in json.loads(out)} == {key.hex() for key in KEYS[:8]}
    assert json.loads(run("ls", root, "--json")[1])[0]["identity"] == IDENTITY.fields


def test_cli_takes_the_name_that_people_gave_a_model(memory_path: Path, run: Run) -> None:
    """Where the identity only says what kind of model it is."""
    root, identity = memory_path / "root", Identity("LlamaForCausalLM", {})
    with DiskStore.open(options_for(root, ROW_BYTES, 40)) as store:
        facts = replace_struct(FACTS, model_name="our-chat")
        store.open_rows(identity, ROW_BYTES, facts).write(
            KEYS[:2], filled_rows(KEYS[:2], ROW_BYTES)
        )
    assert "our-chat" in run("ls", root)[1]
    assert len(run("ls", root, "OUR-chat")[1].splitlines()) == 3
    assert json.loads(run("ls", root, "--json")[1])[0]["model"] == "our-chat"
    assert "0 of 1 namespaces" in run("gc", root, "--name", "our-ch")[1]
    assert "1 of 1 namespaces" in run("gc", root, "--name", "our-*")[1]


def test_cli_inspect(root: Path, run: Run) -> None:
    code, out, _ = run("inspect", root, KEYS[3].hex()[:12], "--json")
    assert code == 0
    reports = json.loads(out)
    assert {report["namespace"] for report in reports} == {IDENTITY.directory, CODED.directory}
    for report in reports:
        assert report["state"] == "whole"
        assert report["checksum_table"] == report["checksum_trailer"] == report["checksum_content"]
        assert report["neighbours"]
    key = damage(root)
    code, out, _ = run("inspect", root, key)
    assert code == 1
    assert "crc32c of the record" in out
    assert key in out


# -- verify and repair --------------------------------------------------------------------------


@pytest.mark.parametrize("identity", [IDENTITY, CODED], ids=["raw", "zstd"])
def test_cli_verify_finds_and_repairs(root: Path, run: Run, identity: Identity) -> None:
    assert run("verify", root)[0] == 0
    key = damage(root, identity=identity)
    before = state_of(root)
    code, out, _ = run("verify", root, "--json")
    assert code == 1
    report = json.loads(out)
    assert report["rows"] == 16
    assert [one["key"] for one in report["damaged"]] == [key]
    assert state_of(root) == before, "a look repairs nothing"
    code, out, _ = run("verify", root, "--repair")
    assert code == 1
    assert "1 rows dropped" in out
    assert run("verify", root)[0] == 0
    (hurt,) = [n for n in survey_root(root).namespaces if n.name == identity.directory]
    (whole,) = [n for n in survey_root(root).namespaces if n.name != identity.directory]
    assert (hurt.row_count, whole.row_count) == (7, 8)
    options = replace(options_for(root, ROW_BYTES, 40), codec=identity.codec)
    with DiskStore.open(options) as store:
        rows = store.open_rows(identity, ROW_BYTES)
        outcomes = rows.read(KEYS[:8], aligned_rows(8, ROW_BYTES)).outcomes
        assert sorted(outcomes) == [RowOutcome.OK] * 7 + [RowOutcome.MISSING]


def test_cli_verify_checks_a_name_against_its_row(root: Path, run: Run) -> None:
    """Two rows that changed places: their own trailers are right."""
    segment = survey_root(root).namespaces[0].segments[0]
    stride = segment.geometry.stride
    raw = bytearray(segment.path.read_bytes())
    first, second = (segment.geometry.row_offset(slot) for slot in (0, 1))
    raw[first : first + stride], raw[second : second + stride] = (
        raw[second : second + stride],
        raw[first : first + stride],
    )
    segment.path.write_bytes(raw)
    code, out, _ = run("verify", root, "--json")
    assert code == 1
    assert len(json.loads(out)["damaged"]) == 2


def test_cli_verify_repairs_a_torn_header(root: Path, run: Run) -> None:
    path = segment_path(root / IDENTITY.directory / "rows", SegmentId(0))
    with path.open("r+b") as file:
        file.write(bytes(survey_root(root).namespaces[0].segments[0].geometry.header_bytes))
    code, out, _ = run("verify", root)
    assert code == 1
    assert "torn header" in out
    assert run("verify", root, "--repair")[0] == 1
    assert run("verify", root)[0] == 0


def test_cli_verify_keeps_its_pace(root: Path, run: Run) -> None:
    import time

    started = time.monotonic()
    assert run("verify", root, "--namespace", "model-a", "--rate", "500KB")[0] == 0
    assert time.monotonic() - started > 8 * ROW_BYTES / 500_000 * 0.8
    assert run("verify", root, "--rate", "fast")[0] == 2


WRITER = """
import random, sys
from pathlib import Path
from storage.testing.contract import StoreHarness
from storage.testing.rows import key_of
harness = StoreHarness(Path(sys.argv[1]), 8192, 16)
rng = random.Random(1)
print("ready", flush=True)
while True:
    harness.write([key_of(rng.randrange(100))])
"""


@pytest.mark.slow
def test_cli_verify_and_du_beside_a_process_that_writes(memory_path: Path, run: Run) -> None:
    root = memory_path / "root"
    command = [sys.executable, "-c", WRITER, str(root)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            for _ in range(12):
                code, out, _ = run("verify", root, "--json")
                assert code == 0, out
                assert run("du", root)[0] == 0
            for change in (
                ("verify", root, "--repair"),
                ("gc", root, "--name", "*"),
            ):
                code, out, err = run(*change)
                assert (code, out) == (2, "")
                assert f"process {writer.pid}" in err
                assert len(err.splitlines()) == 1
            assert writer.poll() is None
        finally:
            writer.kill()


# -- gc -----------------------------------------------------------------------------------------


def test_cli_gc_removes_by_age_and_name(root: Path, run: Run) -> None:
    os.utime(root / IDENTITY.directory / "zarr.json", (1e9, 1e9))
    before = state_of(root)
    for arguments in (("--older-than", "30d"), ("--name", "*model-a*")):
        code, out, _ = run("gc", root, *arguments, "--dry-run", "--json")
        assert code == 0
        assert [one["namespace"] for one in json.loads(out)["namespaces"]] == [IDENTITY.directory]
    assert state_of(root) == before
    assert run("gc", root, "--older-than", "30d", "--name", "*model-b*")[0] == 0
    assert state_of(root) == before
    code, out, _ = run("gc", root, "--older-than", "30d")
    assert code == 0
    assert "1 of 2 namespaces" in out
    assert not (root / IDENTITY.directory).exists()
    assert [n.name for n in survey_root(root).namespaces] == [CODED.directory]
    assert run("verify", root)[0] == 0


def test_cli_gc_leaves_what_is_not_its_own(root: Path, run: Run) -> None:
    note = root / IDENTITY.directory / "notes.txt"
    note.write_text("x")
    code, out, _ = run("gc", root, "--name", IDENTITY.directory)
    assert code == 1
    assert IDENTITY.directory in out
    assert note.read_text() == "x"


# -- bad input ----------------------------------------------------------------------------------


COMMANDS: list[tuple[Any, ...]] = [
    ("du",),
    ("ls",),
    ("inspect", "00"),
    ("verify",),
    ("verify", "--repair"),
    ("gc", "--name", "*"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
@pytest.mark.parametrize("what", ["missing", "file", "empty", "newer", "damaged"])
def test_cli_refuses_what_is_no_store(
    root: Path, run: Run, command: tuple[str, ...], what: str
) -> None:
    path = {"missing": root / "none", "file": root / "zarr.json", "empty": root.parent / "e"}.get(
        what, root
    )
    if what == "empty":
        path.mkdir()
    elif what in ("newer", "damaged"):
        text = (root / "zarr.json").read_text()
        changed = text.replace('"format_version": 1', '"format_version": 7')
        (root / "zarr.json").write_text(changed if what == "newer" else text[:40])
    before = state_of(root.parent)
    name, *rest = command
    code, out, err = run(name, path, *rest)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    assert state_of(root.parent) == before
    assert not (root / "none").exists()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command))
def test_cli_on_a_half_deleted_store_is_no_traceback(
    root: Path, run: Run, command: tuple[str, ...]
) -> None:
    (root / IDENTITY.directory / "zarr.json").unlink()
    (root / IDENTITY.directory / "rows" / "zarr.json").unlink()
    (root / "zarr.json").unlink()
    name, *rest = command
    code, out, err = run(name, root, *rest)
    assert code in (0, 1, 2)
    assert "Traceback" not in out + err
    if name in ("du", "ls"):
        assert "half deleted" in out


def test_cli_options_that_make_no_sense(root: Path, run: Run) -> None:
    for arguments in (
        ("gc", root),
        ("gc", root, "--older-than", "soon"),
        ("du", root, "--stale-after", "-3d"),
        ("du",),
        ("ls", root, "nobody"),
        ("ls", root, "model"),
        ("inspect", root, "xyz"),
        ("inspect", root, ""),
        ("inspect", root, "ff" * 80),
        ("verify", root, "--namespace", "nobody"),
    ):
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), arguments
        assert len(err.splitlines()) == 1, err


# -- words --------------------------------------------------------------------------------------


def test_cli_words() -> None:
    assert [words.span(s) for s in (None, 0, 59, 119, 7200, 86400, 864000)] == [
        *("-", "0 s", "59 s", "119 s", "2 h", "24 h", "10 days")
    ]
    assert [words.count(n) for n in (None, 0, 99_999, 123_456, 999_700, 1e12)] == [
        *("-", "0", "99,999", "123 k", "1 M", "1 T")
    ]
    assert parse_span("1.5h", "x") == 5400
    name = f"{'m' * 60}-{'0123456789abcdef' * 2}"
    assert short_name(name, 22) == f"{'m' * 14}…-012345"
    assert short_name(name, 200) == name
    assert short_name(name, 22, "org/name") == "org/name-012345"
    assert short_name(name, 200, "org/name") == f"org/name-{name[-32:]}"
    assert short_name("total", 22, "total") == "total"
