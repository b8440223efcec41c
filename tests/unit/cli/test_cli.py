"""What all commands have in common."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tiering.cli.main import main

ROOT = Path(__file__).resolve().parents[3]


def test_cli_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version("kvtier")


@pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"]])
def test_cli_refuses_bad_usage_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("kvtier: ")


def test_cli_without_a_command_shows_its_help() -> None:
    command = [sys.executable, "-m", "tiering.cli.main"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode in (0, 2)
    assert "Usage" in done.stdout
    assert done.stderr == ""
