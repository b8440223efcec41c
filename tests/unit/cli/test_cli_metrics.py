"""`kvtier metrics`: what Prometheus gets of a store that no vLLM exports."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from storage.status import STATUS, read_status
from storage.testing.contract import StoreHarness
from storage.testing.rows import key_of
from tiering.cli.main import main
from tiering.exporter import STANDALONE, StatusCollector
from tiering.metrics import ALL

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def root(memory_path: Path) -> Path:
    """A store that was written to, read from and closed."""
    harness = StoreHarness(memory_path / "root")
    keys = [key_of(i) for i in range(harness.capacity_rows + 3)]
    for key in keys:
        harness.write([key])
    harness.read(keys[-4:])
    harness.read(keys[:1])
    harness.close()
    return harness.options.root


def scraped(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_cli_metrics_are_those_of_the_store(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["metrics", str(root), "--once"]) == 0
    found = scraped(capsys.readouterr().out)

    def value(name: str, **labels: str) -> float:
        return found[f"kvtier:{name}", tuple(sorted({"root": str(root), **labels}.items()))]

    assert value("rows_written_total", tier="disk", outcome="ok") == 19
    assert value("rows_read_total", tier="disk", outcome="ok") == 4
    assert value("rows_read_total", tier="disk", outcome="missing") == 1
    assert value("rows_read_total", tier="disk", outcome="corrupt") == 0
    assert value("read_bytes_total", tier="disk") == 4 * 8192
    assert value("chunks_evicted_total", tier="disk") == 3
    assert 0 < value("disk_used_bytes", tier="disk") <= value("disk_budget_bytes", tier="disk")
    assert value("disk_state", tier="disk", state="full") == 1
    assert value("disk_limit", tier="disk", limit="budget") == 1
    assert value("disk_free_bytes") > 0


def test_cli_metrics_have_the_names_and_labels_of_the_engine(root: Path) -> None:
    known = {metric.name: metric for metric in (*ALL, *STANDALONE)}
    for family in StatusCollector([root]).collect():
        metric = known[family.name]
        assert metric.kind.value == family.type
        for sample in family.samples:
            assert set(sample.labels) == {"root", *metric.labels}


def test_cli_metrics_say_how_old_they_are(root: Path) -> None:
    status = read_status(root, StatusCollector([root])._device)
    assert status is not None
    collector = StatusCollector([root], now=lambda: status.written_s + 42)
    (age,) = [f for f in collector.collect() if f.name == "kvtier:status_age_seconds"]
    assert [sample.value for sample in age.samples] == [42]


def test_cli_metrics_without_a_status_show_the_free_space_alone(root: Path) -> None:
    (root / STATUS / "zarr.json").write_text("{")
    names = {family.name for family in StatusCollector([root, root / "gone"]).collect()}
    assert names == {"kvtier:disk_free_bytes"}


def test_cli_metrics_are_served(root: Path) -> None:
    command = [sys.executable, "-m", "tiering.cli.main", "metrics", str(root), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            (url,) = re.findall(r"http://\S+", process.stderr.readline())
            with urllib.request.urlopen(url, timeout=280) as reply:
                found = scraped(reply.read().decode())
        finally:
            process.terminate()
    assert any(name == "kvtier:disk_used_bytes" for name, _ in found)


def test_cli_metrics_refuse_what_is_no_store(
    memory_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (memory_path / "nowhere", memory_path):
        assert main(["metrics", str(path), "--once"]) == 2
        assert capsys.readouterr().err == f"kvtier: {path}: not a kvtier store\n"
