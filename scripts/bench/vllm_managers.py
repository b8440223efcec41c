"""The two managers that `scheduler_path.py` compares.  Importing this imports vllm.

vLLM's: `TieringOffloadingManager` over `CPUPrimaryTierOffloadingManager` and the `fs` tier, made as
`TieringOffloadingSpec` makes them, with their defaults.  Ours: `VllmManager` as `KvtierSpec` makes
it, with a store process.  Same slots, same row size, files on one file system.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from scripts.bench.scheduler_calls import Answer
from scripts.bench.vllm_fs import bench_spec
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from tiering.manager import TieringManager
from tiering.primary import PrimaryTier
from tiering.region import Region
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism
from tiering.vllm.manager import VllmManager

ROW_BYTES = 4096  # a manager's call takes as long for any
_START_S = 60.0
_ANSWER = Answer(LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.RETRY)


class _VllmSide:
    """What both have in common: vLLM's own contexts."""

    name: str
    manager: Any
    answer = _ANSWER

    def context(self, request_id: str) -> Any:
        return ReqContext(req_id=request_id)

    def step_context(self, new_request_ids: Sequence[str]) -> Any:
        return ScheduleEndContext(new_request_ids, ())


class FsManagerSide(_VllmSide):
    """vLLM's own."""

    def __init__(self, directory: Path, slot_count: int) -> None:
        self.name = "vLLM"
        self._directory = directory
        region = SharedOffloadRegion(
            engine_id=f"kvtier-bench-{uuid.uuid4().hex[:12]}",
            num_chunks=slot_count,
            rank=None,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=slot_count, mmap_region=region)
        tier = FileSystemTierManager(
            bench_spec(ROW_BYTES), primary.get_kv_memoryview(), "fs", root_dir=str(directory)
        )
        self.manager = TieringOffloadingManager(primary, [tier])

    def jobs(self) -> int:
        return len(self.manager._jobs)

    def close(self) -> None:
        self.manager.shutdown()
        shutil.rmtree(self._directory)


class KvtierSide(_VllmSide):
    """Ours."""

    def __init__(self, directory: Path, slot_count: int, budget_bytes: int) -> None:
        self.name = "kvtier"
        self._directory = directory
        layout = RowLayout.of([LayerFacts("layer", ROW_BYTES)], Parallelism(), 1)
        engine_id = f"kvtier-bench-{uuid.uuid4().hex[:12]}"
        region = Region.create(engine_id, layout, (slot_count + 1) * ROW_BYTES)
        region.unlink()
        self.client = StoreClient(
            StoreOptions(directory, budget_bytes, admission="always", reserve_bytes=0),
            Identity("bench", {}),
            RegionRows(region.fd, region.rows_offset, ROW_BYTES, region.row_count),
        )
        try:
            self.client.connect(_START_S)
        except BaseException:
            region.close()
            raise
        # Long enough that a disk which stands still is one that requests wait for.
        self.tiering = TieringManager(
            PrimaryTier(slot_count), {"disk": self.client}, promotion_timeout_s=3600.0
        )
        self.manager = VllmManager(self.tiering, layout, region, {"disk": self.client})

    def jobs(self) -> int:
        return self.tiering.pending_reads + self.tiering.pending_writes

    def signal(self, number: int) -> None:
        """To the store process."""
        assert self.client.store_pid is not None
        os.kill(self.client.store_pid, number)

    def close(self) -> None:
        self.manager.shutdown()
        shutil.rmtree(self._directory)
