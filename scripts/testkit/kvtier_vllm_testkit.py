"""A vLLM plug-in, for tests only: MLA models with prefix caching on the CPU, for any latent size.

vLLM 0.32 switches prefix caching and chunked prefill off for MLA models on CPUs without AMX,
although its shared MLA code can gather cached context there; and its decode kernel takes a latent
of 512 + 64 only. `register` puts both settings back and names a backend whose decode is plain
torch. Slow, exact, and never loaded unless this package is installed.

vLLM calls `register` in every process it starts. `KVTIER_MLA_ON_CPU=0` turns the plug-in off.
"""

# The signatures are vLLM's.
# ruff: noqa: ARG002, ARG003, ARG004, ARG005
from __future__ import annotations

import os
from typing import Any

_BACKEND = "TorchMLABackend"
_REGISTERED = False


def _make_backend() -> type[Any]:
    import torch
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

    # The metadata asks the common class, not the selected backend. Empty means any size.
    MLACommonBackend.get_supported_head_sizes = classmethod(lambda cls: [])

    class TorchMLAImpl(CPUMLAImpl):  # type: ignore[misc]
        def forward_mqa(
            self, q: Any, kv_c_and_k_pe_cache: Any, attn_metadata: Any, layer: Any
        ) -> tuple[Any, None]:
            """q: [tokens, heads, rank + rope]; the cache: [blocks, block_size, rank + rope]."""
            if isinstance(q, tuple):
                q = torch.cat(q, dim=-1)
            decode = attn_metadata.decode
            block_size = kv_c_and_k_pe_cache.shape[1]
            out = q.new_zeros(q.shape[0], q.shape[1], self.kv_lora_rank)
            for row, length in enumerate(decode.seq_lens.tolist()):
                blocks = decode.block_table[row, : -(-length // block_size)].long()
                latent = kv_c_and_k_pe_cache[blocks].flatten(0, 1)[:length].float()
                weights = torch.softmax(q[row].float() @ latent.T * self.scale, dim=-1)
                out[row] = (weights @ latent[:, : self.kv_lora_rank]).to(q.dtype)
            return out, None

    class TorchMLABackend(CPUMLABackend):  # type: ignore[misc]
        @classmethod
        def get_supported_head_sizes(cls) -> list[int]:
            return []

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [MultipleOf(1)]

        @classmethod
        def supports_block_size(cls, block_size: int | None) -> bool:
            return True

        @staticmethod
        def get_impl_cls() -> type[Any]:
            return TorchMLAImpl

    # vLLM finds the class again by its qualified name.
    TorchMLABackend.__qualname__ = _BACKEND
    return TorchMLABackend


def __getattr__(name: str) -> Any:
    """Make the backend when vLLM resolves its name: in `register` it is too early to import it."""
    if name != _BACKEND:
        raise AttributeError(name)
    backend = globals()[_BACKEND] = _make_backend()
    return backend


def register() -> None:
    """Patch vLLM's CPU platform; a second call in one process does nothing."""
    global _REGISTERED
    if _REGISTERED or os.environ.get("KVTIER_MLA_ON_CPU") == "0":
        return
    _REGISTERED = True

    from vllm.platforms.cpu import CpuPlatform

    stock_update = CpuPlatform.check_and_update_config.__func__
    stock_select = CpuPlatform.get_attn_backend_cls.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        prefix_caching = cache.enable_prefix_caching
        chunked_prefill = scheduler.enable_chunked_prefill
        max_batched_tokens = scheduler.max_num_batched_tokens
        block_size = cache.block_size if cache.user_specified_block_size else None
        stock_update(cls, vllm_config)
        if vllm_config.model_config is None or not vllm_config.model_config.use_mla:
            return
        cache.enable_prefix_caching = prefix_caching
        scheduler.enable_chunked_prefill = chunked_prefill
        scheduler.max_num_batched_tokens = max_batched_tokens
        if block_size is not None:
            cache.block_size = block_size

    def get_attn_backend_cls(
        cls: Any, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> Any:
        if attn_selector_config.use_mla:
            return f"{__name__}.{_BACKEND}"
        return stock_select(cls, selected_backend, attn_selector_config, num_heads)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
