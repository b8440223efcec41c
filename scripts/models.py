"""The models that the demo and the integration tests serve, and how vLLM serves each on a CPU."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from storage.types import PAGE_BYTES, round_up

ROOT = Path(__file__).resolve().parents[1]
MODELS_DIR = ROOT / ".cache" / "models"
MAX_LEN_TOKENS = 4096  # prompt and answer together
RECALL_MAX_LEN_TOKENS = 2048

# The CPU rotary kernel is wrong for tiny MLA heads; vLLM's plain torch one is exact.
MLA_FLAGS = ("--compilation-config", '{"custom_ops":["-rotary_embedding"]}')


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """How one model is made and served. `trained` is False where a question in words is answered
    with nonsense: weights are random, or for another task."""

    name: str
    block_size_tokens: int
    trained: bool
    dtype: str = "float32"
    max_model_len_tokens: int = MAX_LEN_TOKENS
    is_portable: bool = True
    """Whether rows that one number of ranks wrote serve any other."""
    serve_flags: tuple[str, ...] = ()
    draft_tokens: int = 0
    """Tokens that the draft model in `draft/` proposes per step; 0: there is none."""
    row_layers: int = 0
    """Layers in the largest row, of a model with several KV-cache groups; 0: there is one."""

    @property
    def path(self) -> Path:
        return MODELS_DIR / self.name

    @property
    def draft_path(self) -> Path | None:
        return self.path / "draft" if self.draft_tokens else None

    def config(self) -> Mapping[str, int]:
        """The numbers of the model's `config.json`."""
        return _numbers(self.path)

    def flags(self, tensor_parallel: int) -> list[str]:
        """What `vllm serve` needs for this model beyond what every model needs."""
        flags = list(self.serve_flags)
        if self.draft_path is not None:
            speculative = {
                "method": "draft_model",
                "model": str(self.draft_path),
                "num_speculative_tokens": self.draft_tokens,
                "draft_tensor_parallel_size": tensor_parallel,  # vLLM takes no other
            }
            flags += ["--speculative-config", json.dumps(speculative)]
        return flags

    def kv_shapes(self) -> list[LayerShape]:
        """The layers whose KV a block holds, at most, those of the draft model last."""
        shapes = []
        for path in filter(None, (self.path, self.draft_path)):
            config = _numbers(path)
            layers = self.row_layers or config["num_hidden_layers"]
            shapes += [LayerShape.of(config, self.dtype)] * layers
        return shapes

    def row_bytes(self) -> int:
        """What one block weighs with every distinct byte once: the same for any number of ranks."""
        return self._row_bytes(shape.token_bytes for shape in self.kv_shapes())

    def row_bytes_without_dedup(self, tensor_parallel: int) -> int:
        """What one block weighs with every rank's own pages."""
        ranks = range(tensor_parallel)
        return self._row_bytes(
            shape.token_bytes_on_rank(tensor_parallel) for shape in self.kv_shapes() for _ in ranks
        )

    def _row_bytes(self, token_bytes: Iterable[int]) -> int:
        return round_up(self.block_size_tokens * sum(token_bytes), PAGE_BYTES)


class LayerShape(NamedTuple):
    """One layer's KV of one token: `parts` parts that ranks may divide among them."""

    parts: int
    part_bytes: int

    @classmethod
    def of(cls, config: Mapping[str, int], dtype: str) -> LayerShape:
        """One latent that all ranks hold, or keys and values by KV head."""
        element_bytes = {"float32": 4, "bfloat16": 2}[dtype]
        if "kv_lora_rank" in config:
            return cls(1, (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * element_bytes)
        return cls(config["num_key_value_heads"], 2 * config["head_dim"] * element_bytes)

    @property
    def token_bytes(self) -> int:
        return self.parts * self.part_bytes

    def token_bytes_on_rank(self, tensor_parallel: int) -> int:
        return max(1, self.parts // tensor_parallel) * self.part_bytes


def _numbers(path: Path) -> Mapping[str, int]:
    loaded: dict[str, object] = json.loads((path / "config.json").read_text())
    return {name: value for name, value in loaded.items() if type(value) is int}


# All run in fp32: bf16 has near-ties, where the same cache may still flip a token between a prompt
# computed whole and its last tokens computed alone; and CPUs without AVX-512 are 3x slower in bf16.
# The CPU attention wants blocks of a multiple of 32 tokens; MLA alone is served in blocks of 16.
MODELS: Mapping[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        ModelPreset("smollm2", 32, trained=True),
        ModelPreset("tiny-mla", 16, trained=False, serve_flags=MLA_FLAGS),
        # An MLA model with a head-sharded GQA draft: one group of unlike pages. Head order is
        # certified only where all layers have the same KV heads.
        ModelPreset(
            *("tiny-mla-gqa-draft", 32),
            trained=False,
            is_portable=False,
            serve_flags=MLA_FLAGS,
            draft_tokens=3,
        ),
        ModelPreset("tiny-llama", 32, trained=False),
        # One KV head: all ranks hold the same.
        ModelPreset("tiny-mqa", 32, trained=False),
        ModelPreset("tiny-qwen3", 32, trained=False),
        # Layers of full attention and of a window of 64 tokens: KV-cache groups of 2, 2, 2 and 1.
        ModelPreset("tiny-gemma3", 32, trained=False, row_layers=2),
        # Trained for key-value recall and nothing else; scripts/lm_eval_runs.py scores them.
        ModelPreset(
            *("recall-mla", 16),
            trained=False,
            max_model_len_tokens=RECALL_MAX_LEN_TOKENS,
            serve_flags=MLA_FLAGS,
        ),
        ModelPreset("recall-gqa", 32, trained=False, max_model_len_tokens=RECALL_MAX_LEN_TOKENS),
    )
}


def cpu_binding(tensor_parallel: int) -> str:
    """`VLLM_CPU_OMP_THREADS_BIND`: one core per rank, from the cores this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < tensor_parallel:
        raise ValueError(f"TP {tensor_parallel} needs {tensor_parallel} cores, found {len(cores)}")
    return "|".join(str(core) for core in cores[:tensor_parallel])
