"""Tests on a real device: `pytest tests/gpu`.  Without one, each is skipped with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def device_here() -> str | None:
    """The kind of device that this machine has, by torch's name."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else None


def reason_to_skip() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    if device_here() is None:
        return "no CUDA, ROCm or XPU device here"
    return None


# A module of this folder imports vLLM, which may not be there.
collect_ignore_glob = ["test_*.py"] if importlib.util.find_spec("vllm") is None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = reason_to_skip()
    for item in items:
        if reason is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
