"""What counts as the same model, in the real `vllm serve`: exact tokens in fp32, hits where the
bytes are the same and nowhere else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.make_model import ensure_model
from scripts.models import MODELS
from scripts.serving import REQUEST_TIMEOUT_S, VllmServer
from tests.integration.conftest import (
    StartServer,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    settled,
    tokens_from,
    transfer_config,
)

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

PROMPTS = byte_prompts(2, 500)
SHARE_ON_DISK = 0.9  # of a prompt: all but its last, partial block
ANSWER_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Asked:
    """What a server answered to every prompt, and how many tokens of the prompts it took from
    outside of the device."""

    tokens: tuple[tuple[int, ...], ...]
    from_store: float

    @property
    def hit(self) -> bool:
        return self.from_store >= SHARE_ON_DISK * sum(len(prompt) for prompt in PROMPTS)

    @property
    def missed(self) -> bool:
        return self.from_store == 0


def ask(server: VllmServer, model: str | None = None, **body: Any) -> Asked:
    before = _from_store(server)
    tokens = []
    for prompt in PROMPTS:
        response = httpx.post(
            f"http://127.0.0.1:{server.port}/v1/completions",
            json={
                "model": model or server.config.preset.name,
                "prompt": prompt,
                "max_tokens": ANSWER_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                **body,
            },
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        )
        assert response.status_code == httpx.codes.OK, response.text
        tokens.append(tuple(response.json()["choices"][0]["token_ids"]))
    return Asked(tuple(tokens), _from_store(server) - before)


def _from_store(server: VllmServer) -> float:
    metrics = settled(server)
    return sum(tokens_from(metrics, source) for source in ("disk", "host"))


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA of `tiny-llama` that changes its answers.  The same `seed`, the same files."""
    import torch
    from safetensors.torch import save_file

    numbers = torch.Generator().manual_seed(seed)
    rank, hidden = 8, MODELS["tiny-llama"].config()["hidden_size"]
    shapes = {"q_proj": 128, "v_proj": 64}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight": torch.randn(
            (rank, hidden) if side == "A" else (out, rank), generator=numbers
        )
        * 0.2
        for layer in range(2)
        for name, out in shapes.items()
        for side in "AB"
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(shapes),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def train_a_little(model: Path) -> None:
    """Other numbers in every tensor, of the same shapes and under the same names: as the next
    checkpoint of a run has them."""
    import torch
    from safetensors.torch import load_file, save_file

    path = model / "model.safetensors"
    numbers = torch.Generator().manual_seed(1)
    size = path.stat().st_size
    tensors = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=numbers)
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    assert path.stat().st_size == size


def test_identity_of_models_adapters_and_salts(start_server: StartServer, tmp_path: Path) -> None:
    """One store; a model, its copy elsewhere, its next checkpoint in place, and another RoPE."""
    root, here, there = tmp_path / "store", tmp_path / "here" / "m", tmp_path / "elsewhere"
    shutil.copytree(ensure_model("tiny-llama"), here)
    config = transfer_config(root)
    kept, changed = (make_adapter(tmp_path / name, 1) for name in ("kept", "changed"))
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--lora-modules"]
    flags += [f"kept={kept}", f"changed={changed}"]

    def start(path: Path, *more: str) -> VllmServer:
        return start_server("tiny-llama", config, path=path, flags=more)

    def stop(server: VllmServer) -> None:
        server.stop()
        await_store_gone(root)

    server = start(here, *flags)
    cold = ask(server)
    adapted = ask(server, "kept")
    assert ask(server, "changed").tokens == adapted.tokens != cold.tokens
    salted = ask(server, cache_salt="mine")
    assert cold.missed
    assert adapted.missed, "an adapter's KV is its own"
    assert salted.missed
    assert salted.tokens == cold.tokens
    stop(server)

    shutil.move(here, there)
    make_adapter(changed, 2)
    server = start(there, *flags)
    again = ask(server)
    assert again.tokens == cold.tokens
    assert again.hit, "one model under two paths"
    again = ask(server, "kept")
    assert again.tokens == adapted.tokens
    assert again.hit, "the same adapter"
    retrained = ask(server, "changed")
    assert retrained.missed, "an adapter with other weights under its old name"
    assert retrained.tokens != adapted.tokens
    assert ask(server, cache_salt="mine").hit
    assert ask(server, cache_salt="another").missed
    stop(server)
    assert len(_namespaces(root)) == 1

    train_a_little(there)
    server = start(there)
    trained = ask(server)
    assert trained.missed, "two models under one path"
    assert trained.tokens != cold.tokens
    stop(server)
    assert len(_namespaces(root)) == 2

    shutil.copytree(ensure_model("tiny-llama"), here)
    theta = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    server = start(here, "--hf-overrides", json.dumps(theta))
    rotated = ask(server)
    assert rotated.missed, "another RoPE"
    assert rotated.tokens != cold.tokens
    stop(server)
    assert len(_namespaces(root)) == 3


def _namespaces(root: Path) -> Sequence[Path]:
    return [path.parents[1] for path in root.glob("*/rows/zarr.json")]
