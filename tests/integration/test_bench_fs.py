"""The storage benchmark with vLLM's own fs tier, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_vllms_fs_tier_runs_in_the_same_harness(direct_path: Path) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    out = direct_path / "out.json"
    command = [sys.executable, str(ROOT / "scripts/bench/storage.py"), "--sizes", "32KiB"]
    command += ["--directory", str(direct_path), "--rounds", "1", "--per-round", "1MB"]
    done = subprocess.run(
        [*command, "--json", str(out)], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    for row in found["rows"]:
        assert row["ratio_fs"] > 0
        assert row["cpu_ratio_fs"] > 0
    assert {loop["side"] for loop in found["loop"]} == {"kvtier", "fs"}
    assert found["lookup_1000_ms"]["fs"] > 0
