"""Our disk as a tier of vLLM's own spec in the real `vllm serve`; exact tokens in fp32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.make_model import ensure_model
from scripts.models import MODELS
from scripts.serving import Metrics, ServeConfig, ServeError, VllmServer
from tests.integration.conftest import (
    answers,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    tokens_from,
)
from tests.integration.processes import serves, store_processes
from tests.integration.settling import await_that, current_metrics, settled_metrics
from tiering.cli.main import main as kvtier

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

MODEL = "tiny-llama"
PROMPTS = byte_prompts(4)
BLOCK = MODELS[MODEL].block_size_tokens
ROWS = [len(prompt) // BLOCK for prompt in PROMPTS]
LINE = (
    "kvtier: kv_connector_extra_config.secondary_tiers[1].budget: expected a size above 0 in "
    'bytes, or with a unit such as "500GB" (10^9) or "1.5TiB" (2^40), got \'10XB\''
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the model, for these tests to change."""
    ensure_model(MODEL)
    directory = tmp_path_factory.mktemp("models")
    path = directory / MODEL
    shutil.copytree(MODELS[MODEL].path, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scripts.models.MODELS_DIR", directory)
        yield path


def transfer_config(tiers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """vLLM's connector and, but for its worker that wants a GPU, its own tiering spec."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "FsOnCpuSpec",
            "spec_module_path": "scripts.testkit.vllm_fs_on_cpu",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": list(tiers),
        },
    }


class Servers:
    """One server after the other, of one model, on one root."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "store"
        self.disk = {"type": "disk", "root": str(self.root), "budget": "256MB"}
        self.fs = {"type": "fs", "root_dir": str(directory / "fs")}
        self._directory = directory
        self._started: list[VllmServer] = []

    def start(self, *tiers: Mapping[str, Any], wait: bool = True) -> VllmServer:
        log = self._directory / f"serve-{len(self._started)}.log"
        config = ServeConfig(MODELS[MODEL], transfer_config(tiers), 1, 64 << 20, seqs_max=32)
        server = VllmServer(config, log)
        self._started.append(server)
        return server.start() if wait else server

    def stop(self, server: VllmServer) -> None:
        server.stop()
        await_store_gone(self.root)

    def kill(self) -> None:
        for server in self._started:
            if server.port:
                server.kill()


@pytest.fixture
def servers(tmp_path: Path, model_path: Path) -> Iterator[Servers]:  # noqa: ARG001
    made = Servers(tmp_path)
    yield made
    made.kill()


def test_cold_restarted_warm_damaged_and_without_a_store(
    servers: Servers, model_path: Path
) -> None:
    """One root through its life, beside vLLM's fs tier in either order.

    A start costs half a minute, so each part begins where the one before ended.
    """
    server = servers.start(servers.disk, servers.fs)
    cold = answers(server, PROMPTS)
    metrics = _settled(server, ("1:disk", "2:fs"), sum(ROWS))
    row_bytes = metrics.value(WRITE_BYTES, tier="1:disk") / sum(ROWS)
    assert row_bytes % 4096 == 0
    assert metrics.value(WRITE_BYTES, tier="2:fs") == sum(ROWS) * row_bytes
    assert metrics.value(READ_BYTES) == 0
    assert metrics.value("kvtier:disk_rows") == sum(ROWS)
    assert metrics.value("kvtier:write_bytes_total", tier="disk") == sum(ROWS) * row_bytes
    servers.stop(server)
    assert kvtier(["verify", str(servers.root)]) == 0

    shutil.rmtree(servers.fs["root_dir"])
    server = servers.start(servers.fs, servers.disk)
    warm, damaged, alone = PROMPTS[:2], PROMPTS[2:3], PROMPTS[3:]
    assert answers(server, warm) == cold[:2]
    metrics = current_metrics(server)
    found = sum(ROWS[:2])
    assert metrics.value(READ_BYTES, tier="2:disk") == found * row_bytes
    assert metrics.value("kvtier:rows_read_total", outcome="ok") == found
    assert metrics.value("kvtier:read_bytes_total", tier="disk") == found * row_bytes
    assert tokens_from(metrics, "disk") == found * BLOCK
    assert metrics.value(READ_BYTES, tier="1:fs") == 0

    _damage(servers.root)
    assert answers(server, damaged) == cold[2:3], "damaged rows must be misses, not answers"
    metrics = current_metrics(server)
    assert metrics.value("kvtier:rows_read_total", outcome="corrupt") == ROWS[2]
    assert metrics.value(READ_BYTES, tier="2:disk") == found * row_bytes

    [process] = [process for process in store_processes() if serves(process, servers.root)]
    process.kill()
    assert answers(server, alone) == cold[3:]
    assert answers(server, PROMPTS) == cold
    await_that(
        lambda: current_metrics(server).value("kvtier:store_restarts_total") > 0,
        "no new store process",
    )
    servers.stop(server)

    _change_weights(model_path)
    server = servers.start(servers.disk)
    others = answers(server, PROMPTS)
    assert others != cold, "the weights are others"
    metrics = current_metrics(server)
    assert tokens_from(metrics, "disk") == 0
    assert metrics.value("kvtier:rows_read_total") == 0
    servers.stop(server)
    namespaces = [path.parent for path in servers.root.glob("*/rows")]
    assert len(namespaces) == 2


WRITE_BYTES = "vllm:kv_offload_tiering_write_bytes_total"
READ_BYTES = "vllm:kv_offload_tiering_read_bytes_total"


def _settled(server: VllmServer, tiers: Sequence[str], rows: int) -> Metrics:
    """Metrics once `rows` rows of the prompts are in each of the tiers, one of them ours."""

    def all_are_written(metrics: Metrics) -> bool:
        written = {metrics.value(WRITE_BYTES, tier=tier) for tier in tiers}
        return metrics.value("kvtier:disk_rows") == rows and len(written) == 1

    return settled_metrics(server, all_are_written, "not every stored chunk reached its tiers")


def _damage(root: Path) -> None:
    """Flip a bit in every page of every segment's rows."""
    for segment in root.glob("*/rows/c/*/0"):
        content = bytearray(segment.read_bytes())
        for at in range(len(content) // 16, len(content), 4096):
            content[at] ^= 1
        segment.write_bytes(content)


def _change_weights(path: Path) -> None:
    """Other weights under the same names, in files of the same size."""
    from safetensors.numpy import load_file, save_file

    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: tensor[::-1].copy() for name, tensor in tensors.items()}, file)


def test_bad_settings_of_the_secondary_tier_are_one_line_before_anything_starts(
    servers: Servers,
) -> None:
    server = servers.start(servers.fs, {**servers.disk, "budget": "10XB"}, wait=False)
    with pytest.raises(ServeError, match="ended with code 1"):
        server.start()
    log = server.log_path.read_text()
    assert log.splitlines()[-1] == LINE
    assert "Traceback" not in log
    assert not servers.root.exists()
