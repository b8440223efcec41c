"""The benchmark of the managers' calls, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALLS = {
    "any call",
    "complete_load",
    "complete_store",
    "has_pending_work",
    "lookup, in the region",
    "lookup, new prompt",
    "lookup, on disk: all",
    "on_new_request",
    "on_request_finished",
    "prepare_load",
    "prepare_store",
    "take_events",
    "touch",
}


@pytest.mark.timeout(900)
def test_both_managers_are_driven_alike(direct_path: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    out = direct_path / "out.json"
    command = [sys.executable, str(ROOT / "scripts/bench/scheduler_path.py"), "--rounds", "1"]
    command += ["--directory", str(direct_path), "--slots", "1024", "--chunks", "2,16"]
    done = subprocess.run(
        [*command, "--long", "200", "--json", str(out)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    compared = [row for row in found["calls"] if row["ratio_p50"] is not None]
    assert {row["call"] for row in compared} >= CALLS
    assert {row["chunks"] for row in compared} == {0, 2, 16}
    assert {row["clock"] for row in compared} == {"wall", "cpu"}
    stopped = {row["call"] for row in found["alone"]["store stopped, wall"]}
    assert stopped >= {"prepare_store", "complete_store", "lookup, on disk: waiting"}
    assert found["alone"]["socket full, cpu"]
    long = {row["call"] for row in found["alone"]["prompt of 200 chunks, cpu"]}
    assert long >= {"lookup, on disk: waiting", "lookup, no slot free: waiting"}
    assert [path.name for path in direct_path.iterdir()] == ["out.json"], "nothing is left behind"
