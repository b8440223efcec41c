"""What is evaluated: presets, the sides that keep KV, and the order of runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.evals.harness import EvalWork
from scripts.evals.tamper import Damage, tamper, tamper_files
from scripts.evals.tasks import RECALL, document_tasks
from storage.device import LocalDevice
from storage.root import take_root
from storage.sizes import parse_size

KVTIER, NO_DEDUP, FS = "kvtier", "no-dedup", "fs"
"""kvtier; kvtier that keeps each rank's copy; vLLM's own tier."""
_LOCK_TIMEOUT_S = 30.0  # for the store process of a server that has just ended


@dataclass(frozen=True, slots=True)
class ExactWork:
    """Random prompts for a model of one token per byte; every token of every answer counts."""

    prompts: int = 8
    prompt_tokens: int = 900
    answer_tokens: int = 32

    def texts(self) -> list[str]:
        """They share no prefix."""
        rng = random.Random(0)
        letters = "abcdefghijklmnopqrstuvwxyz"
        return ["".join(rng.choices(letters, k=self.prompt_tokens)) for _ in range(self.prompts)]


@dataclass(frozen=True, slots=True)
class EvalPreset:
    """One evaluation as it is run when nothing else is asked for."""

    name: str
    model: str
    work: EvalWork | ExactWork
    tp: int = 1
    tolerance: float = 0.01
    """By how much a warm score may differ from the cold one."""
    differing_max: float = 0.01
    """Which share of answers may differ from the cold run's."""
    region: str = "16MiB"
    budget: str = "1GB"
    kv_cache_bytes: int = 64 << 20


PRESETS: Mapping[str, EvalPreset] = {
    preset.name: preset
    for preset in (
        EvalPreset("recall-mla-tp2", "recall-mla", EvalWork((RECALL,)), tp=2),
        EvalPreset("recall-mla", "recall-mla", EvalWork((RECALL,))),
        EvalPreset("recall-gqa", "recall-gqa", EvalWork((RECALL,))),
        EvalPreset(
            "documents-smollm2",
            "smollm2",
            EvalWork(tuple(task.name for task in document_tasks()), concurrency=2),
            tolerance=0.0,
            differing_max=0.0,
            region="256MiB",
            budget="2GB",
            kv_cache_bytes=512 << 20,
        ),
        EvalPreset("exact-mla", "tiny-mla", ExactWork(), tolerance=0.0, differing_max=0.0),
        EvalPreset("exact-llama", "tiny-llama", ExactWork(), tolerance=0.0, differing_max=0.0),
    )
}


@dataclass(frozen=True, slots=True)
class Side:
    """Something that keeps KV on disk below one root: `KVTIER`, `NO_DEDUP` or `FS`."""

    name: str
    region: str
    budget: str

    def transfer_config(self, root: Path) -> dict[str, Any]:
        """`--kv-transfer-config`."""
        if self.name == FS:
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "FsOnCpuSpec",
                    "spec_module_path": "scripts.testkit.vllm_fs_on_cpu",
                    "cpu_bytes_to_use": parse_size(self.region, "--region"),
                    "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
                },
            }
        return {
            "kv_connector": "KvtierConnector",
            "kv_connector_module_path": "tiering.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": self.region,
                "dedup": self.name != NO_DEDUP,
                "disk": {"root": str(root), "budget": self.budget},
            },
        }

    def damage(self, root: Path, damage: Damage) -> int:
        """Damage what a server left there, past all checksums; how many rows."""
        if self.name == FS:
            return tamper_files(root, damage)
        device = LocalDevice()
        lock = take_root(root, device, _LOCK_TIMEOUT_S)  # nobody else has the store open
        try:
            return tamper(root, damage)
        finally:
            device.close(lock)


@dataclass(frozen=True, slots=True)
class Step:
    """One run, and what is done to the store before it."""

    kind: str
    damage: Damage | None = None


PLAN = (Step("cold"), Step("warm"), Step("warm"))
# Milder first: once all rows have changed places there is nothing left to see.
TAMPERED_PLAN = (Step("cold"), *(Step(damage.value, damage) for damage in Damage))
