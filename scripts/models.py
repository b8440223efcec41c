"""The models that the demo and the integration tests serve, and how vLLM serves each on a CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS_DIR = ROOT / ".cache" / "models"

# The CPU rotary kernel is wrong for tiny MLA heads; vLLM's plain torch one is exact.
MLA_FLAGS = ("--compilation-config", '{"custom_ops":["-rotary_embedding"]}')


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """How one model is made and served. `trained` is False for random weights."""

    name: str
    dtype: str
    block_size_tokens: int
    max_model_len_tokens: int
    trained: bool
    serve_flags: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return MODELS_DIR / self.name

    def config(self) -> Mapping[str, int]:
        """The numbers of the model's `config.json`."""
        loaded: dict[str, object] = json.loads((self.path / "config.json").read_text())
        return {name: value for name, value in loaded.items() if type(value) is int}


# All run in fp32: bf16 has near-ties, where the same cache may still flip a token between a prompt
# computed whole and its last tokens computed alone; and CPUs without AVX-512 are 3x slower in bf16.
# The CPU attention wants blocks of a multiple of 32 tokens; MLA is served in blocks of 16.
MODELS: Mapping[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        ModelPreset("smollm2", "float32", 32, 4096, trained=True),
        ModelPreset("tiny-mla", "float32", 16, 4096, trained=False, serve_flags=MLA_FLAGS),
        ModelPreset("tiny-llama", "float32", 32, 4096, trained=False),
        ModelPreset("tiny-qwen3", "float32", 32, 4096, trained=False),
    )
}


def cpu_binding(tensor_parallel: int) -> str:
    """`VLLM_CPU_OMP_THREADS_BIND`: one core per rank, from the cores this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < tensor_parallel:
        raise ValueError(f"TP {tensor_parallel} needs {tensor_parallel} cores, found {len(cores)}")
    return "|".join(str(core) for core in cores[:tensor_parallel])
