"""The preset `enospc` without its disks: verdict, report, and what is not run twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts.demo.scaled_work import WORKS, Work, WorkResult
from scripts.evals import enospc

FULL = WorkResult(
    *("DeepSeek-V4-Flash", 8, False, "none", 40_103_936, 20, 900 * 10**6, 890 * 10**6),
    *("full", "file system has 10 MB left", 2, 0.125, 0, 0),
)
FITS = replace(
    FULL, dedup=True, row_bytes=5_013_504, state="growing", state_changes=0, hit_rate=1.0
)


def test_a_full_disk_without_dedup_is_no_fault_and_a_wrong_byte_is() -> None:
    assert enospc.faults_of([FULL, FITS]) == []
    [fault] = enospc.faults_of([replace(FULL, wrong_bytes=1), FITS])
    assert "1 wrong bytes" in fault
    [fault] = enospc.faults_of([FULL, replace(FITS, hit_rate=0.99)])
    assert "99.0% of its chunks" in fault
    [fault] = enospc.faults_of([FULL, replace(FITS, row_bytes=5_115_904)])
    assert "7.84 times as large, not 8" in fault


def test_every_variant_once_into_a_report_and_never_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    @contextmanager
    def no_disk(*_: Any) -> Iterator[Path]:
        yield tmp_path

    def run_work(work: Work, _disk: Path, _scale: float, *, dedup: bool, codec: str) -> WorkResult:
        ran.append((work.preset, dedup, codec))
        return replace(FITS if dedup else FULL, codec=codec)

    monkeypatch.setattr(enospc, "small_disk", no_disk)
    monkeypatch.setattr(enospc, "run_work", run_work)
    console = Console(width=150, record=True)
    for _ in range(2):
        assert enospc.run_enospc(tmp_path / "report", console, WORKS[1:2]) == 0
    assert ran == [(WORKS[1].preset, *variant) for variant in enospc.VARIANTS]
    said = console.export_text()
    for words in ("without dedup", "with dedup, zstd", "All rows are simulated"):
        assert words in said
    markdown = (tmp_path / "report" / "report.md").read_text()
    assert "| DeepSeek-V4-Flash | 8 | simulated | without dedup | 40,103,936 |" in markdown
    assert "disk full, goes on | 2 | 12.5% |" in markdown
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    assert [row["variant"] for row in rows][-1] == "with dedup, zstd"
    assert (tmp_path / "report" / "report.png").stat().st_size > 20_000
