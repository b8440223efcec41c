"""vLLM's own tiers on the CPU, for comparison: its tiering spec with a worker that copies in torch.

vLLM's spec makes workers for GPUs only; everything else of its tiers runs anywhere. A server finds
it by `spec_name` and `spec_module_path`. Importing this imports vllm.
"""

# The signatures are vLLM's.
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TorchCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies within `submit_*`, in the caller's thread; what it did is reported afterwards."""

    def __init__(
        self, caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = caches.group_data_refs
        self._results: list[TransferResult] = []
        self._device: list[torch.Tensor] = []  # int8[blocks, page]
        self._host: list[torch.Tensor] = []  # int8[chunks, blocks_per_chunk, page]
        for cache in caches.tensors:  # in order: the region hands out views one after the other
            page = cache.page_size_bytes
            self._device.append(cache.tensor.view(torch.int8).view(-1, page))
            view = region.create_next_worker_view(page * blocks_per_chunk)
            self._host.append(view.view(view.shape[0], blocks_per_chunk, page))

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec.block_ids, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._move(job_id, dst_spec, src_spec.block_ids, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Sequence[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()  # views of the region: before it goes
        self._region.cleanup()

    def _move(self, job_id: int, device: GPULoadStoreSpec, chunks: Any, *, is_store: bool) -> bool:
        """`device` lists the blocks of all groups one after the other, `chunks` their chunks."""
        started = time.perf_counter()
        moved = block_at = chunk_at = 0
        groups = zip(self._groups, device.group_sizes, device.block_indices, strict=True)
        for refs, count, first in groups:
            if count == 0:
                continue
            # A request may enter its first chunk in the middle.
            positions = np.arange(count) + first % self._blocks_per_chunk
            chunk_count = int(positions[-1]) // self._blocks_per_chunk + 1
            own = np.asarray(chunks[chunk_at : chunk_at + chunk_count], np.int64)
            rows = torch.from_numpy(own[positions // self._blocks_per_chunk])
            subs = torch.from_numpy(positions % self._blocks_per_chunk)
            ids = torch.from_numpy(
                np.asarray(device.block_ids[block_at : block_at + count], np.int64)
            )
            for ref in refs:
                width = ref.page_size_bytes  # without padding
                pages, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
                if is_store:
                    host[rows, subs, :width] = pages[ids, :width]
                else:
                    pages[ids, :width] = host[rows, subs, :width]
                moved += int(count) * width
            block_at += count
            chunk_at += chunk_count
        seconds = max(time.perf_counter() - started, 1e-9)
        self._results.append(TransferResult(job_id, True, moved, seconds))
        return True


class FsOnCpuSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec, whose own `get_worker` refuses every platform but GPUs."""

    _worker: OffloadingWorker | None  # the base's, which shuts it down

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert not self.config.canonical_layout, "the direct layout alone"
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return TorchCopyWorker(kv_caches, self.blocks_per_chunk, region)
        except BaseException:
            region.cleanup()
            raise
