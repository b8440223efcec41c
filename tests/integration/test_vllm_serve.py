"""The main job with the real `vllm serve`: cold, restarted, warm, damaged; exact tokens in fp32."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path

import httpx
import pytest

from scripts.serving import ServeError, VllmServer
from storage.header import SegmentGeometry
from storage.namespace import read_geometry
from storage.testing.rows import bytes_on_disk
from tests.integration.conftest import (
    StartServer,
    answers,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    regions_left,
    settled,
    tokens_from,
    transfer_config,
)
from tests.integration.settling import HANG_S, current_metrics
from tests.integration.zarr_reading import assert_zarr_equals_store

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

PROMPTS = byte_prompts(4)


def test_cold_restarted_warm_then_zarr_then_corrupt(
    start_server: StartServer, tmp_path: Path
) -> None:
    """One store through its life.  Each part needs the one before, and a start costs half a minute.

    restarted: at TP 2, where each rank takes its own KV head out of rows that one rank wrote.
    zarr: what vLLM wrote is read by zarr-python, every row, byte for byte.
    """
    root = tmp_path / "store"
    config = transfer_config(root)
    server = start_server("tiny-llama", config)
    cold = answers(server, PROMPTS)
    metrics = settled(server)
    assert tokens_from(metrics, "disk") == 0
    assert metrics.value("kvtier:disk_budget_bytes") == 256_000_000
    assert 0 < bytes_on_disk(root) <= metrics.value("kvtier:disk_used_bytes") <= 256_000_000
    rows = int(metrics.value("kvtier:disk_rows"))
    assert rows > 0
    server.stop()
    await_store_gone(root)

    assert len(assert_zarr_equals_store(root, _namespace(root))) == rows

    server = start_server("tiny-llama", config, tp=2)
    assert answers(server, PROMPTS) == cold
    metrics = settled(server)
    assert tokens_from(metrics, "disk") >= 0.95 * sum(len(prompt) for prompt in PROMPTS)
    hits = metrics.value("kvtier:chunk_hits_total", tier="disk")
    assert metrics.value("kvtier:rows_read_total", outcome="ok") == hits
    row_bytes = metrics.value("kvtier:row_bytes", dedup="on")
    assert metrics.value("kvtier:read_bytes_total", tier="disk") == hits * row_bytes
    server.stop()
    await_store_gone(root)

    damaged = _flip_a_bit_in_every_third_row(root)
    server = start_server("tiny-llama", config)
    assert answers(server, PROMPTS) == cold, "damaged rows must be misses, not answers"
    metrics = settled(server)
    corrupt = metrics.value("kvtier:rows_read_total", outcome="corrupt")
    assert 0 < corrupt <= damaged
    assert tokens_from(metrics, "disk") < sum(len(prompt) for prompt in PROMPTS)
    server.stop()


def _namespace(root: Path) -> str:
    [metadata] = root.glob("*/rows/zarr.json")
    return metadata.parents[1].name


def _flip_a_bit_in_every_third_row(root: Path) -> int:
    """How many rows were damaged, of all slots of all segments."""
    [metadata] = root.glob("*/rows/zarr.json")
    geometry, _ = read_geometry(metadata.read_bytes(), str(metadata))
    count = 0
    for segment in (metadata.parent / "c").glob("*/0"):
        count += _flip_bits(segment, geometry)
    return count


def _flip_bits(segment: Path, geometry: SegmentGeometry) -> int:
    slots = range(0, geometry.slots_per_segment, 3)
    with segment.open("r+b") as file:
        for slot in slots:
            offset = geometry.row_offset(slot) + geometry.row_bytes // 2
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))
    return len(slots)


def test_kill_vllm_at_random_moments_loses_nothing_but_work(
    start_server: StartServer, tmp_path: Path
) -> None:
    """kill -9 of every process of the server, five times, during stores and loads."""
    root = tmp_path / "store"
    config = transfer_config(root, budget="8MB")  # so small that rows are evicted all the time
    random_moment = random.Random(20261129)
    server = start_server("tiny-llama", config)
    expected = answers(server, PROMPTS)
    for _ in range(5):
        deadline = time.monotonic() + random_moment.uniform(0.0, 1.5)
        turn = 0
        while time.monotonic() < deadline:
            prompt = PROMPTS[turn % len(PROMPTS)]
            assert answers(server, [prompt]) == [expected[turn % len(PROMPTS)]]
            turn += 1
        _send_and_kill(server, PROMPTS[turn % len(PROMPTS)], random_moment.uniform(0.0, 0.3))
        await_store_gone(root)
        server = start_server("tiny-llama", config)
        assert regions_left(tmp_path) == [], "a region leaked"
        assert not list(root.rglob("*.partial")), "a half-made file leaked"
        assert bytes_on_disk(root) <= 8_000_000
        assert answers(server, PROMPTS) == expected
    assert current_metrics(server).value("kvtier:rows_read_total", outcome="corrupt") == 0
    server.stop()
    await_store_gone(root)
    assert_zarr_equals_store(root, _namespace(root))


def _send_and_kill(server: VllmServer, prompt: str, delay_s: float) -> None:
    """Send a prompt and, while it is answered, kill the server."""
    body = {"model": server.config.preset.name, "prompt": prompt, "max_tokens": 64}
    url = f"http://127.0.0.1:{server.port}/v1/completions"

    def send() -> None:
        # With a connection of its own: `kill` closes the server's while this one waits.
        with contextlib.suppress(httpx.HTTPError):  # the point of the exercise
            httpx.post(url, json=body, timeout=HANG_S, trust_env=False)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(delay_s)
    server.kill()
    thread.join()


BAD_BUDGET = (
    "kvtier: kv_connector_extra_config.disk.budget: expected a size above 0 in bytes, or "
    'with a unit such as "500GB" (10^9) or "1.5TiB" (2^40), got \'10XB\''
)
UNKNOWN_SETTING = (
    "kvtier: kv_connector_extra_config.disk.buget: expected a known setting (did you mean "
    "'budget'?), got 1"
)


@pytest.mark.parametrize(
    ("setting", "line"), [({"budget": "10XB"}, BAD_BUDGET), ({"buget": 1}, UNKNOWN_SETTING)]
)
def test_bad_settings_are_one_line_before_anything_starts(
    start_server: StartServer, tmp_path: Path, setting: dict[str, object], line: str
) -> None:
    config = transfer_config(tmp_path / "store", **setting)
    server = start_server("tiny-llama", config, wait=False)
    with pytest.raises(ServeError, match="ended with code 1"):
        server.start()
    log = server.log_path.read_text()
    assert log.splitlines()[-1] == line
    assert "Traceback" not in log
    assert not (tmp_path / "store").exists()


def test_a_store_that_cannot_be_had_ends_the_start_with_a_line_that_says_why(
    start_server: StartServer, tmp_path: Path
) -> None:
    (tmp_path / "store").write_bytes(b"")  # a file where the root should be
    server = start_server("tiny-llama", transfer_config(tmp_path / "store"), wait=False)
    with pytest.raises(ServeError, match="ended with code"):
        server.start()
    lines = [li for li in server.log_path.read_text().splitlines() if "connector.py" in li]
    why = f"root: lock {tmp_path}/store: Not a directory (ENOTDIR); expected a directory that this"
    assert any("ERROR" in li and why in li for li in lines), lines
    assert regions_left(tmp_path) == []
