"""The demo of dedup on a full disk, small: real ranks, region, store process and file system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.demo.small_disk import DiskUnavailable, FileSystem, disk_space, small_disk

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "scripts/demo/enospc.py"]
TIMEOUT_S = 800.0  # of a hang

pytestmark = pytest.mark.timeout(900)


EXT4, TMPFS = FileSystem.EXT4, FileSystem.TMPFS


@pytest.fixture
def file_system(request: pytest.FixtureRequest) -> FileSystem:
    kind: FileSystem = request.param
    try:
        with small_disk(kind, 16 << 20) as disk:
            assert 14 << 20 < disk_space(disk).size_bytes <= 16 << 20
        assert not disk.exists()
    except DiskUnavailable as exc:
        pytest.skip(str(exc))
    return kind


@pytest.mark.parametrize(
    ("file_system", "preset", "scale"),
    [(EXT4, "deepseek-v2-lite", 2000), (TMPFS, "glm-5.3", 1500)],
    indirect=["file_system"],
    ids=["ext4, tp 2", "tmpfs, tp 8"],
)
def test_enospc_without_dedup_costs_hits_only_and_with_dedup_it_fits(
    preset: str, scale: int, file_system: FileSystem, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            *DEMO,
            *("--only", preset, "--scale", str(scale), "--file-system", file_system.value),
            *("--out", str(tmp_path / "report.png"), "--json", str(tmp_path / "report.json")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    off, on = json.loads((tmp_path / "report.json").read_bytes())["rows"]
    assert (off["dedup"], on["dedup"]) == (False, True)
    for row in (off, on):
        assert (row["wrong_bytes"], row["errors"]) == (0, 0), done.stderr
        assert row["used_bytes"] <= row["disk_bytes"]
    # Without: the file system says stop, once per start; rows are reused from there on.
    assert (off["state"], off["state_changes"]) == ("full", 2)
    assert off["state_reason"].startswith("file system has")
    # ext4 keeps 2 % for itself.
    assert off["disk_bytes"] - off["used_bytes"] < 2 * off["row_bytes"] + off["disk_bytes"] // 50
    assert off["hit_rate"] < 0.5
    # With: all of it, and nothing else than the rows and their headers.
    assert (on["state"], on["state_changes"], on["hit_rate"]) == ("growing", 0, 1.0)
    assert on["used_bytes"] == pytest.approx(on["needed_bytes"], rel=0.05)
    assert off["row_bytes"] / on["row_bytes"] > 1.99


@pytest.fixture
def running_demo(file_system: FileSystem) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*DEMO, "--only", "glm-5.3", "--scale", "500", "--file-system", file_system.value],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("file_system", "how"),
    [(EXT4, signal.SIGINT), (TMPFS, signal.SIGTERM)],
    indirect=["file_system"],
    ids=["ext4, interrupted", "tmpfs, terminated"],
)
def test_enospc_demo_that_is_ended_leaves_no_file_system(
    how: signal.Signals, running_demo: subprocess.Popen[str]
) -> None:
    deadline = time.monotonic() + TIMEOUT_S / 2
    while not (mounted := disks_of(running_demo.pid)):
        assert running_demo.poll() is None, running_demo.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while not list(mounted[0].glob("store/*-*")):  # the ranks run and the first rows are written
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how is signal.SIGINT:  # as a terminal does: to every process of the group
        os.killpg(running_demo.pid, how)
    else:
        running_demo.send_signal(how)
    said, _ = running_demo.communicate(timeout=TIMEOUT_S / 2)
    assert running_demo.returncode == 128 + how, said
    assert "Traceback" not in said
    assert not disks_of(running_demo.pid)
    assert not mounted[0].parent.exists()


def disks_of(pid: int) -> list[Path]:
    """Mount points of the demo's disks; their directories carry the process id."""
    mounts = Path("/proc/mounts").read_text().splitlines()
    points = [Path(line.split()[1]) for line in mounts]
    return [point for point in points if point.parent.name.startswith(f"kvtier-disk-{pid}-")]
