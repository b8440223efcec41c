"""vLLM's own `fs` tier as a side of the storage benchmark.  Importing this imports vllm.

Its classes run with their defaults (16 read and 16 write threads, one task per job).  The tier
never evicts: files that an operator would delete are deleted by the benchmark, not measured.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from scripts.bench.sides import RowJob, WrongBytes
from storage.types import RowKey

_POLL_S = 0.0002


class _Spec(OffloadingSpec):  # type: ignore[misc]
    """What the tier asks of a specification: names and sizes, no devices."""

    def get_manager(self) -> OffloadingManager:
        raise NotImplementedError

    def get_worker(self, kv_caches: object) -> OffloadingWorker:
        raise NotImplementedError


def bench_spec(row_bytes: int) -> _Spec:
    """One layer of one rank, one block per chunk."""
    return _Spec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layer",), 0),),
            worker_kv_bytes_per_block=row_bytes,
            enable_kv_cache_events=False,
            extra_config={},
            engine_id="bench",
            model=OffloadingModelConfig("bench", "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(
                rank=0,
                world_size=1,
                tp_size=1,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=None,
                is_parallelism_agnostic=True,
            ),
        )
    )


class FsSide:
    """`FileSystemTierManager` over the region `rows`: uint8[row_count, row_bytes]."""

    def __init__(self, directory: Path, rows: npt.NDArray[np.uint8]) -> None:
        self._directory = directory
        self._context = ReqContext(req_id="bench")
        self._tier = FileSystemTierManager(
            bench_spec(rows.shape[1]), rows.data, "fs", root_dir=str(directory)
        )
        self._job_id = 0

    def write(self, jobs: Sequence[RowJob]) -> None:
        self._finish([self.submit_write(job) for job in jobs])

    def read(self, jobs: Sequence[RowJob]) -> None:
        self._finish([self.submit_read(job) for job in jobs])

    def submit_write(self, job: RowJob) -> int:
        """Queue a job; its id.  Runs on the engine's thread, as in vLLM."""
        transfer = self._transfer(job, is_promotion=False)
        self._tier.submit_store(transfer)
        return self._job_id

    def submit_read(self, job: RowJob) -> int:
        transfer = self._transfer(job, is_promotion=True)
        self._tier.submit_load(transfer)
        return self._job_id

    def _transfer(self, job: RowJob, *, is_promotion: bool) -> TransferJob:
        self._job_id += 1
        slots = np.asarray(job.slots, np.int64)
        return TransferJob(self._job_id, job.keys, slots, is_promotion, self._context)

    def poll(self) -> list[int]:
        """Ids of the jobs that ended.  Raises `WrongBytes` for one that failed."""
        finished = []
        for result in self._tier.get_finished_jobs():
            if not result.success:
                raise WrongBytes(f"vLLM fs: job {result.job_id} failed")
            finished.append(result.job_id)
        return finished

    def _finish(self, job_ids: Sequence[int]) -> None:
        self._tier.drain_jobs()
        left = set(job_ids)
        while left:  # a job's result is queued a moment before the pool counts it as done
            left.difference_update(self.poll())

    def lookup(self, keys: Sequence[RowKey]) -> tuple[float, float]:
        """(seconds on the caller's thread, seconds until all keys were found) of one request."""
        started = time.perf_counter()
        results = [self._tier.lookup(key, self._context) for key in keys]
        self._end_step()
        on_caller = time.perf_counter() - started
        while LookupResult.RETRY in results:
            time.sleep(_POLL_S)
            again = time.perf_counter()
            results = [self._tier.lookup(key, self._context) for key in keys]
            self._end_step()
            on_caller += time.perf_counter() - again
        total = time.perf_counter() - started
        self._tier.on_request_finished(self._context)
        if any(result is not LookupResult.HIT for result in results):
            raise WrongBytes("vLLM fs: a key was not found")
        return on_caller, total

    def _end_step(self) -> None:
        self._tier.on_schedule_end(ScheduleEndContext((), ()))

    def forget(self, keys: Sequence[RowKey]) -> None:
        for key in keys:
            Path(self._tier.file_mapper.get_file_name(key)).unlink()

    def close(self) -> None:
        self._tier.shutdown()
        shutil.rmtree(self._directory)
