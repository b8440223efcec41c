"""Real `vllm serve` runs for the tests in this folder.  They need `make setup-vllm`."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from scripts.make_model import ensure_model
from scripts.models import MODELS, ModelPreset
from scripts.serving import Completion, Metrics, ServeConfig, VllmServer
from tests.integration.processes import serves, store_processes
from tests.integration.settling import await_that, settled_metrics

ANSWER_TOKENS = 16

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup-vllm"
)

StartServer = Callable[..., VllmServer]

# What a kernel does about a request that its disk has lost takes 30 s, and writes wait for it: in
# tests of something else these are no writes that hang.
WRITE_TIMEOUT_S = 100.0


def transfer_config(root: Path, **extra: Any) -> Mapping[str, Any]:
    """`--kv-transfer-config` for a store in `root`; `extra` replaces settings of the disk tier."""
    disk = {
        "root": str(root),
        "budget": "256MB",
        "write_timeout_s": WRITE_TIMEOUT_S,
        **extra,
    }
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "tiering.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", "disk": disk},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelElsewhere(ModelPreset):
    """A model that was copied, or changed, under `where`."""

    where: Path

    @property
    def path(self) -> Path:
        return self.where


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts servers and, whatever the test does, leaves none running."""
    started: list[VllmServer] = []

    def start(
        model: str,
        config: Mapping[str, Any] | None,
        *,
        tp: int = 1,
        kv_cache_bytes: int = 64 << 20,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        path: Path | None = None,
        wait: bool = True,
    ) -> VllmServer:
        """`path`: where the model lies, if not where it was made."""
        ensure_model(model)
        preset = MODELS[model]
        if path is not None:
            values = {f.name: getattr(preset, f.name) for f in fields(preset)}
            preset = ModelElsewhere(**values, where=path)
        log = tmp_path / f"serve-{len(started)}.log"
        serve = ServeConfig(
            preset, config, tp, kv_cache_bytes, 32, extra_flags=tuple(flags), extra_env=env or {}
        )
        server = VllmServer(serve, log)
        started.append(server)
        return server.start() if wait else server

    yield start
    for server in started:
        if server.port:  # it was started
            server.kill()


def byte_prompts(count: int, tokens: int = 900) -> list[str]:
    """Prompts of about `tokens` one-byte tokens that share no prefix."""
    return [
        "".join(chr(97 + (i * 7 + j * j + i * i * (j + 1)) % 26) for i in range(tokens + 13 * j))
        for j in range(count)
    ]


def short_prompts(count: int, tokens: int) -> list[str]:
    """Prompts of `tokens` random one-byte tokens."""
    letters = random.Random(20261129)
    return ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=tokens)) for _ in range(count)]


def answers(server: VllmServer, prompts: Sequence[str]) -> list[tuple[int, ...]]:
    """The greedy tokens of each prompt."""
    return [_complete(server, prompt).token_ids for prompt in prompts]


def _complete(server: VllmServer, prompt: str) -> Completion:
    return server.complete(prompt, ANSWER_TOKENS, ignore_eos=True)


def settled(server: VllmServer) -> Metrics:
    """Metrics once every chunk that was stored is on disk."""

    def all_are_written(metrics: Metrics) -> bool:
        stored = metrics.value("kvtier:chunks_stored_total")
        return metrics.value("kvtier:rows_written_total") == stored

    return settled_metrics(server, all_are_written, "not every stored chunk reached the disk")


def tokens_from(metrics: Metrics, source: str) -> float:
    """Prompt tokens that came from "device", "host" or "disk"."""
    return metrics.value("vllm:prompt_tokens_cached_by_source_total", source=source)


def await_store_gone(root: Path) -> None:
    await_that(
        lambda: not any(serves(process, root) for process in store_processes()),
        "a store process outlived its engine",
    )


def regions_left(logs: Path) -> list[str]:
    """Regions made by servers that log below `logs` and whose names are still in shared memory."""
    made = [
        path
        for log in logs.glob("serve-*.log")
        for path in re.findall(r"made (/dev/shm/kvtier-\S+\.region)", log.read_text())
    ]
    assert made, "no server made a region"
    return [path for path in made if Path(path).exists()]
