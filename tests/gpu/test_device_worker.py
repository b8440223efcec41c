"""vLLM's own worker on a real device, over our region: bytes, order, pinning, speed."""

from __future__ import annotations

from typing import Any

import torch

from scripts.bench import device_copies
from tests.gpu.conftest import device_here
from tests.integration.worker_contract import MLA, Ranks, WorkerContract

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.host_register import host_register


class TestDeviceWorker(WorkerContract):
    device = device_here() or "cpu"

    def test_it_is_vllms_own(self, ranks: Any) -> None:
        assert isinstance(ranks(MLA, 1, 1).ranks[0].worker, CPUOffloadingWorker)

    def test_a_store_waits_for_the_model_and_a_load_for_what_writes_its_blocks(
        self, ranks: Any
    ) -> None:
        """Nothing is waited for here: the streams keep the order."""
        engine: Ranks = ranks(MLA, 1, 1)
        [rank] = engine.ranks
        block, row = GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([2])
        busy = torch.ones((4096, 4096), device=self.device)
        for _ in range(20):
            busy = busy @ busy / 4096
        rank.memory.fill_(7)
        rank.worker.submit_store(1, block, row)
        rank.worker.wait({1})
        content = bytes(engine.region.row(2)[: engine.layout.payload_bytes])
        assert content == b"\7" * len(content)
        for _ in range(20):
            busy = busy @ busy / 4096
        rank.memory.fill_(1)
        rank.worker.submit_load(2, row, block)
        rank.worker.wait({2})
        assert all((tensor[3] == 7).all() for tensor in rank.tensors)
        assert all((tensor[4] == 1).all() for tensor in rank.tensors)

    def test_rows_are_pinned_until_the_end(self, ranks: Any) -> None:
        engine: Ranks = ranks(MLA, 1, 1)
        [rank] = engine.ranks
        view = rank.worker._mmap_region
        assert view.is_pinned
        addresses = list(view.pinned_addresses)
        assert addresses == [view._base.data_ptr()]
        assert not host_register(addresses[0], 4096), "registered twice"
        rank.worker.shutdown()
        assert not view.is_pinned
        engine.ranks.clear()
        # Another engine's rows at the same address are pinned again.
        again: Ranks = ranks(MLA, 1, 1, name="again")
        assert again.ranks[0].worker._mmap_region.is_pinned

    def test_blocks_move_at_the_speed_of_one_pinned_copy(self, memory_path: Any) -> None:
        """The figures, for a person; only that all of it ran is asserted."""
        figures = device_copies.run(self.device, 256 << 20, 5, memory_path)
        for figure in figures:
            print(figure)
        assert len(figures) == 2 * len(device_copies.SHAPES)
