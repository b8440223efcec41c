"""Import this before vllm: it and torch warn of their own affairs, and here warnings are errors."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed: make setup-vllm")
    pytest.importorskip("vllm.v1.kv_offload.cpu.gpu_worker", reason="no CPU offloading in vLLM")
    import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector  # noqa: F401
