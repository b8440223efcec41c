"""Workers: vLLM's `OffloadingWorker` over our region.

On CPU tensors `CpuWorker`: `CopyWorker` behind a `CopyQueue`, in vLLM's words.  On CUDA and XPU
vLLM's own `CPUOffloadingWorker` with its copy kernels: it is told our row layout as canonical page
mappings, and sees the region through `RegionView`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    OffloadingWorker,
    TransferResult,
)

from tiering.copy_queue import CopyQueue
from tiering.region import Region
from tiering.rows import LayerRow, RowLayout
from tiering.worker import BlockRun, CopyWorker, LayerPages

LOAD_GRACE_S = 0.005  # less than a step; a load that it suffices for need not wait for the next


class CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies in a thread of their own: `submit_*` return at once, the engine's step goes on.

    What keeps that safe is what does on a GPU, where transfers run beside the model too.

    - A store reads blocks that are full.  vLLM's connector submits it after the forward pass that
      filled them, which on CPU tensors has ended when it returns; and it calls `wait` before the
      pass of a step in which one of them may be written again: `jobs_to_flush` has the stores of
      preempted requests, and those of blocks that were allocated anew, freed by a request that
      finished or left behind by a sliding window (`OffloadingConnectorScheduler`,
      `_block_id_to_pending_jobs`).
    - A load fills blocks of a request that runs, or is freed, only once `get_finished` has named
      the load on all ranks.  Blocks are zeroed, if at all, before it is submitted.
    - A slot is another chunk's only after `complete_store` or `complete_load`.  After a reset,
      `jobs_to_flush` has all that is under way, and what is submitted later is copied later.

    vLLM asserts that a transfer succeeded.  One that did not, raises: the engine ends, for what the
    blocks hold then is unknown.
    """

    def __init__(self, region: Region, rank: int, kv_caches: Any) -> None:
        kv_caches = with_row_layout(kv_caches, region.layout, rank)
        tensors = [t.tensor for t in kv_caches.tensors]
        groups = [
            [LayerPages(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._blocks_per_chunk = region.layout.blocks_per_chunk
        self._copies = CopyWorker(region, rank, tensors, groups)
        self._queue = CopyQueue()
        self._new_loads: set[int] = set()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        runs = self._runs(src_spec, dst_spec.block_ids)
        self._queue.submit(job_id, partial(self._copies.store, runs))
        return True

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        runs = self._runs(dst_spec, src_spec.block_ids)
        self._queue.submit(job_id, partial(self._copies.load, runs), at_once=expedited)
        self._new_loads.add(job_id)
        return True

    def _runs(self, device_spec: Any, slots: Any) -> list[BlockRun]:
        """One run per group: its share of the blocks and of the chunks that they belong to."""
        runs = []
        block = slot = 0
        for size, first in zip(device_spec.group_sizes, device_spec.block_indices, strict=True):
            skipped = first % self._blocks_per_chunk
            chunks = -(-(size + skipped) // self._blocks_per_chunk) if size else 0
            block_ids = device_spec.block_ids[block : block + size]
            runs.append(BlockRun(block_ids, slots[slot : slot + chunks], first))
            block, slot = block + size, slot + chunks
        assert block == len(device_spec.block_ids), "blocks of no group"
        assert slot == len(slots), "chunks of no block"
        return runs

    def get_finished(self) -> list[Any]:
        """Loads of this step get a moment: vLLM submits them at its end, just before it asks."""
        if self._new_loads:
            self._queue.wait(self._new_loads, LOAD_GRACE_S)
            self._new_loads.clear()
        return [TransferResult(job, True, *copied) for job, copied in self._queue.poll()]

    def wait(self, job_ids: set[int]) -> None:
        self._queue.wait(job_ids)

    def shutdown(self) -> None:
        """Returns once no copy runs; only then the region is unmapped."""
        self._queue.close()
        self._copies.close()


class RegionView:
    """Our region as the `mmap_region` that vLLM's `CPUOffloadingWorker` takes over.

    It asks for one view per tensor, in order, and releases the region when it shuts down.
    """

    def __init__(self, region: Region, rank: int) -> None:
        self._region = region
        self.rank = rank
        self.page_size = 4096
        self.cpu_page_size = region.layout.row_bytes
        self.num_chunks = region.row_count
        self._row_stride = region.layout.row_bytes
        self.total_size_bytes = region.row_count * region.layout.row_bytes
        flat = torch.frombuffer(region.mapping, dtype=torch.int8)
        self._base: torch.Tensor | None = flat[region.rows_offset :]
        self.is_pinned = False
        self.pinned_addresses: list[int] = []
        self._next_layer = 0

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """int8[row_count, tensor_page_size] over the next layer's part of every row."""
        layout = self._region.layout
        layer = layout.layers_of(self.rank)[self._next_layer]
        expected = layout.blocks_per_chunk * layer.block_bytes
        assert tensor_page_size == expected, (layer.name, tensor_page_size, expected)
        assert self._base is not None, "released"
        self._next_layer += 1
        return self._base.as_strided(
            (self.num_chunks, tensor_page_size),
            (self._row_stride, 1),
            self._base.storage_offset() + layer.offset,
        )

    def iter_worker_slot_ranges(self) -> list[tuple[int, int]]:
        """(offset, length) of what a rank pins: all of it, since every rank uses whole rows."""
        return [(0, self.total_size_bytes)]

    def cleanup(self) -> None:
        """Unpin and unmap; vLLM calls it once its copies have ended."""
        if self.is_pinned:
            from vllm.v1.kv_offload.cpu.host_register import host_unregister

            for address in reversed(self.pinned_addresses):
                host_unregister(address)
            self.pinned_addresses.clear()
            self.is_pinned = False
        self._base = None
        self._region.close()


def page_mapping(layer: LayerRow, rank: int, width: int) -> Any:
    """`rank`'s page of `layer` in a row, in vLLM's words; `width` bytes of it are content.

    vLLM elects writers by `(slot * blocks_per_chunk + block) % num_writers`, as
    `RowLayout.is_writer` does.
    """
    piece, content = layer.piece_bytes, width // layer.stretches
    start = layer.shard_of(rank) * piece
    run = CopyRun(0, start, content, layer.stretches, piece, layer.shards * piece)
    return CanonicalPageMapping(
        canonical_page_size_bytes=layer.block_bytes,
        local_page_size_bytes=width,
        runs=(run,),
        num_writers=layer.replicas,
        writer_index=(rank - layer.first_rank) % layer.replicas,
        parallelism_agnostic=not layer.depends_on_ranks,
    )


def with_row_layout(kv_caches: Any, layout: RowLayout, rank: int) -> Any:
    """`kv_caches` by the layers of our rows: the i-th tensor is the i-th of the layers that
    `layout` has on `rank`, cut to its content, and every reference is mapped to where the rows of
    its group have it.  A tensor in unlike rows of several groups comes once for each.
    """
    layers = layout.layers_of(rank)
    indices = [index for index, layer in enumerate(layout.layers) if layer.is_on(rank)]
    position = {index: place for place, index in enumerate(indices)}
    tensors: dict[int, Any] = {}
    groups = []
    for group, refs in zip(layout.groups, kv_caches.group_data_refs, strict=True):
        by_tensor: dict[int, int] = {}  # tensor -> bytes of its pages that the group uses
        for ref in refs:
            by_tensor[ref.tensor_idx] = max(ref.page_size_bytes, by_tensor.get(ref.tensor_idx, 0))
        mapped = []
        for index, tensor in zip(layout.layers_in(group, rank), sorted(by_tensor), strict=True):
            place, layer = position[index], layout.layers[index]
            width = min(by_tensor[tensor], layer.page_bytes)
            pages = kv_caches.tensors[tensor].tensor.view(torch.int8)
            tensors[place] = CanonicalKVCacheTensor(pages[:, : layer.page_bytes], layer.page_bytes)
            mapped.append(CanonicalKVCacheRef(place, width, page_mapping(layer, rank, width)))
        groups.append(mapped)
    return CanonicalKVCaches([tensors[place] for place in range(len(layers))], groups)


def device_worker(region: Region, rank: int, kv_caches: Any) -> Any:
    """vLLM's own worker, copy kernels and pinning, over our region.  For CUDA and XPU."""
    from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

    return CPUOffloadingWorker(
        kv_caches=with_row_layout(kv_caches, region.layout, rank),
        blocks_per_chunk=region.layout.blocks_per_chunk,
        num_cpu_chunks=region.row_count,
        mmap_region=RegionView(region, rank),
        canonical_layout=True,
    )


def make_worker(region: Region, rank: int, kv_caches: Any) -> Any:
    """The worker for the device that the KV cache lives on.  It owns `region` from here on."""
    on_cpu = all(t.tensor.device.type == "cpu" for t in kv_caches.tensors)
    return (CpuWorker if on_cpu else device_worker)(region, rank, kv_caches)
