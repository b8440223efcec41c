"""What `make run` runs, with the real vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.models import ROOT
from tests.integration.conftest import needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(900)]


def test_the_demo_keeps_its_promises(tmp_path: Path) -> None:
    """Stored at TP 2, read at TP 1: the same tokens, from one namespace of rows of one copy."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "scripts.serve_demo", "--model", "tiny-mla", "--tp", "2,1"]
    command += ["--documents", "1", "--root", str(tmp_path / "root"), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["faults"] == []
    assert [rows["row_bytes"] for rows in found["rows"]] == [8192]
    assert found["warm"][0]["sources"]["disk"] > 0.9 * found["warm"][0]["prompt_tokens"]
    assert "the same answers, from the disk" in done.stdout
