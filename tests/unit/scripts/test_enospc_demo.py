"""The parts of the demo of dedup on a full disk that need no root."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scripts.demo import enospc
from scripts.demo.report import draw, plain, table
from scripts.demo.scaled_work import DISK_BYTES, SCALE, WORKS, Work, WorkResult
from scripts.demo.small_disk import DiskUnavailable, FileSystem, small_disk
from tiering.planning import row_size
from tiering.presets import load_preset

GB = 10**9
MEASURED_GB = {  # on a disk of 177 GB; None: it ran out of space
    "deepseek-v4-flash": (157, 20),
    "glm-5.3": (None, 103),
    "deepseek-v3.2-exp": (None, 149),
}


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.preset)
def test_the_scaled_work_is_the_measured_one_with_and_without_dedup(work: Work) -> None:
    preset = load_preset(work.preset)
    size = row_size(preset, preset.tp[0], 1)
    without, with_dedup = MEASURED_GB.get(work.preset, (None, 150))
    for chunks, tolerance in ((work.chunks, 0.001), (round(work.chunks / SCALE) * SCALE, 0.01)):
        needed = chunks * size.row_bytes_without_dedup
        if without is None:
            assert needed > DISK_BYTES
        else:
            assert needed == pytest.approx(without * GB, rel=tolerance)
        # "20 GB" is an eighth of 157, rounded.
        expected = (with_dedup if without is None else without / 8) * GB
        assert chunks * size.row_bytes == pytest.approx(expected, rel=tolerance)
        assert chunks * size.row_bytes < DISK_BYTES


@pytest.mark.parametrize("file_system", FileSystem)
def test_without_root_it_says_so(file_system: FileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DiskUnavailable, match="run it as root"), small_disk(file_system, 1 << 20):
        pass


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "gqa-70b"], "--only: expected one of"),
        (["--scale", "1"], "--scale: expected 20 to 3915"),
        (["--scale", "1e9"], "--scale: expected"),
        (["--out", "/nowhere/report.png"], "--out: expected"),
        (["--out", "report.docx"], "--out: expected"),
        (["--json", "/nowhere/report.json"], "--json: expected"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_mounted(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(enospc, "small_disk")
    done = CliRunner().invoke(enospc.app, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def results() -> list[WorkResult]:
    full = WorkResult(
        *("DeepSeek-V4-Flash", 8, False, "none", 40_103_936, 30, 900 * 10**6, 890 * 10**6),
        *("full", "file system has 10 MB left", 2, 0.125, 0, 0),
    )
    fits = replace(
        full,
        dedup=True,
        row_bytes=5_013_504,
        used_bytes=151 * 10**6,
        state="growing",
        state_changes=0,
        hit_rate=1.0,
    )
    return [full, fits]


def test_table_and_figures_of_dedup_are_scaled_back() -> None:
    console = Console(width=160, record=True)
    console.print(table(results(), 100))
    text = console.export_text()
    for figure in ("40,103,936", "120 GB", "89.0 GB", "98.9", "12.5 %", "5,013,504", "15.1 GB"):
        assert figure in text
    figures = plain(results()[0], 100)
    assert figures["full_scale_used_bytes"] == 89 * GB
    assert figures["state_reason"] == "file system has 10 MB left"


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "report.png"
    draw(results(), 100, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000
