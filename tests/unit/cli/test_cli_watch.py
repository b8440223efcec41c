"""What `kvtier watch` makes of a root and of an engine's metrics."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from storage.testing.contract import StoreHarness
from storage.testing.rows import key_of
from tiering.cli.main import main
from tiering.cli.watch import read_root

METRICS = """# HELP kvtier:disk_state 1 for the state
# TYPE kvtier:disk_state gauge
kvtier:disk_state{engine="0",state="growing"} 0.0
kvtier:disk_state{engine="0",state="full"} 1.0
# TYPE kvtier:disk_used_bytes gauge
kvtier:disk_used_bytes{engine="0"} 5e+09
# TYPE kvtier:disk_budget_bytes gauge
kvtier:disk_budget_bytes{engine="0"} 1e+10
# TYPE kvtier:chunk_hits counter
kvtier:chunk_hits_total{engine="0",tier="region"} 30.0
kvtier:chunk_hits_total{engine="0",tier="disk"} 45.0
# TYPE kvtier:chunk_misses counter
kvtier:chunk_misses_total{engine="0"} 25.0
# TYPE kvtier:read_bytes counter
kvtier:read_bytes_total{engine="0",tier="disk"} 1e+09
"""


class Answer(BaseHTTPRequestHandler):
    text: ClassVar[str] = METRICS

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    thread.join()
    server.server_close()
    Answer.text = METRICS


def test_cli_watch_of_metrics(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", url, "--once"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for figure in ("state full", "5 GB of 10 GB (50 %)", "75 % of 100", "disk hits 45 %"):
        assert figure in out, out
    Answer.text = "# nothing\n"
    assert main(["watch", url, "--once"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_cli_watch_of_a_root(memory_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = StoreHarness(memory_path / "root")
    harness.write([key_of(i) for i in range(4)])
    harness.read([key_of(0), key_of(9)])
    harness.store.write_status()
    assert main(["watch", str(memory_path / "root"), "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)
    assert (reading["rows"], reading["found"], reading["missing"]) == (4, 1, 1)
    assert reading["state"] == "growing"
    assert reading["lines"]["owner"].startswith("process ")
    harness.close()
    assert read_root(memory_path / "root").lines["owner"].startswith("nobody")


def test_cli_watch_shows_what_changes(
    memory_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks, with rows written between them; then Ctrl-C."""
    harness = StoreHarness(memory_path / "root")
    harness.store.write_status()
    looks = 0

    def write_meanwhile(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            raise KeyboardInterrupt
        harness.write([key_of(looks)])
        harness.read([key_of(looks), key_of(99)])
        harness.store.write_status()

    clock = SimpleNamespace(sleep=write_meanwhile, time=time.time)
    monkeypatch.setattr("tiering.cli.watch.time", clock)
    assert main(["watch", str(memory_path / "root")]) == 0
    monkeypatch.undo()
    harness.close()
    out = " ".join(capsys.readouterr().out.split())
    assert "/s now" in out
    assert "; 50 % now" in out


@pytest.mark.parametrize("source", ["/nowhere", "http://127.0.0.1:9/metrics", "http://[bad"])
def test_cli_watch_refuses_what_it_cannot_read(
    source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", source, "--once"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 1)
