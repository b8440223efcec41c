"""The reopening benchmark in small, and the memory of the index."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from scripts.bench import reopen
from storage.namespace import Identity
from storage.store import DiskStore

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = str(ROOT / "scripts" / "bench" / "reopen.py")


@pytest.mark.slow
def test_a_tiny_run_says_everything(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, PROGRAM, "--directory", str(tmp_path), "--rows", "3000"]
    command += ["--row-bytes", "8KiB", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "recency kept" in done.stdout
    found = json.loads(out.read_text())
    assert found["rows"] == 3000
    assert found["crash_s"] > 0
    assert found["clean_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--row-bytes", "5000"), "--row-bytes: expected a multiple of 4096, got 5000"),
        (("--directory", "/nowhere"), "--directory: expected a directory, got '/nowhere'"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], reason: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 2
    assert done.stderr == f"{reason}\n"


def test_a_row_takes_at_most_200_bytes_of_memory(memory_path: Path) -> None:
    """All that a published row adds to a store: table, index, recency, segments.  What Python's
    own table of interned strings grows by, now and then, is not counted."""
    rows, row_bytes = 30_000, 8192
    identity = Identity("memory", {})
    geometry = reopen.geometry_of(rows, row_bytes)
    reopen.make_store(memory_path, rows, geometry, identity)
    tracemalloc.start()
    try:
        store = DiskStore.open(reopen.options_of(memory_path, rows, geometry))
        opened = store.open_rows(identity, row_bytes)
        gc.collect()
        ours = tracemalloc.Filter(True, f"{ROOT}/storage/*")
        traces = tracemalloc.take_snapshot().filter_traces([ours]).statistics("filename")
    finally:
        tracemalloc.stop()
    assert len(opened) == rows
    store.close()
    assert 104 < sum(trace.size for trace in traces) / rows < 160
