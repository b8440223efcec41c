"""The storage benchmark in small, so that it can't rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import storage as bench

ROOT = Path(__file__).resolve().parents[3]
ROW_BYTES = 16384


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a person does: by its path, from anywhere."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench" / "storage.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd="/",
        env=environment,
    )


@pytest.mark.slow
def test_a_tiny_run_says_everything(direct_path: Path) -> None:
    out = direct_path / "out.json"
    done = run(
        *("--directory", str(direct_path), "--sizes", f"{ROW_BYTES},32KiB", "--rounds", "2"),
        *("--per-round", "1MB", "--without-fs", "--json", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert "vLLM left out" in done.stdout
    found = json.loads(out.read_text())
    assert [(row["row_bytes"], row["op"]) for row in found["rows"]] == [
        (ROW_BYTES, "write"),
        (ROW_BYTES, "read"),
        (2 * ROW_BYTES, "write"),
        (2 * ROW_BYTES, "read"),
    ]
    for row in found["rows"]:
        assert row["ratio_raw"] > 0
        assert row["ratio_fs"] is None
        assert row["cpu_s_per_gb"] > 0
    assert found["rows"][0]["fill_ratio_raw"] > 0
    assert {loop["op"] for loop in found["loop"]} == {"write", "read"}
    assert found["targets"]
    assert os.listdir(direct_path) == ["out.json"], "the benchmark leaves nothing behind"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--sizes", "4097"), "--sizes: expected multiples of 4096, got 4097"),
        (("--sizes", "many"), "--sizes: expected"),
        (("--directory", "/nowhere"), "--directory: expected a directory, got '/nowhere'"),
        (("--per-round", "9999TB"), "--directory: expected"),
        (("--json", "/nowhere/out.json"), "--json: expected"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], reason: str) -> None:
    done = run("--without-fs", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(reason)
    assert done.stderr.count("\n") == 1


def test_without_vllm_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _name: None)
    assert "vllm is not installed" in str(bench.why_no_fs())


def test_a_wrong_row_is_found() -> None:
    region = bench.BenchRegion(8192, 4)
    jobs = bench.bench_jobs("a", 8192, 4)
    region.mark(jobs)
    region.check(jobs, "side")
    region.rows[2][-1] ^= 1
    with pytest.raises(bench.WrongBytes):
        region.check(jobs, "side")
    region.close()
