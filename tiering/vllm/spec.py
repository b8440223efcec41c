"""KvtierSpec: builds the worker of each rank and the manager of the scheduler."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingSpec,
)

from storage.errors import ConfigError
from storage.service.client import RegionRows, StoreClient
from storage.sizes import format_size
from tiering.config import Config
from tiering.manager import TieringManager
from tiering.metrics import ALL, Kind
from tiering.primary import PrimaryTier
from tiering.region import Region
from tiering.rows import RowLayout, one_line
from tiering.topology import Parallelism
from tiering.vllm.facts import EngineFacts, identity, row_layers
from tiering.vllm.manager import VllmManager
from tiering.vllm.worker import make_worker

log = logging.getLogger("kvtier.vllm")

_CONNECT_TIMEOUT_S = 120.0  # for reading the headers of a large store after a crash


class KvtierSpec(OffloadingSpec):  # type: ignore[misc]
    """Made by `KvtierConnector`, which sees the per-layer facts that a row needs."""

    def __init__(
        self, config: Any, facts: EngineFacts | None = None, vllm_config: Any = None
    ) -> None:
        super().__init__(config)
        if facts is None:
            raise ConfigError(
                "kv_connector",
                '"KvtierConnector" (kv_connector_module_path "tiering.vllm.connector")',
                "OffloadingConnector",
            )
        _refuse_what_cannot_share(facts.parallel)
        self._config = Config.parse(config.extra_config)
        self._facts = facts
        self._vllm_config = vllm_config
        self._manager: VllmManager | None = None
        self._worker: Any = None
        # Writers are elected page by page, in the worker: vLLM must not elect rank 0 for all.
        self.replicated_layout = False
        self.offload_prompt_only = self._config.offload_prompt_only

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        kinds = {Kind.COUNTER: OffloadingCounterMetadata, Kind.GAUGE: OffloadingGaugeMetadata}
        return {m.name: kinds[m.kind](documentation=m.help, labelnames=m.labels) for m in ALL}

    def get_worker(self, kv_caches: Any) -> Any:
        """This rank's worker.  Rank 0 makes the region, the others attach to it."""
        if self._worker is None:
            rank = self.config.parallel.rank
            layout = RowLayout.of(
                row_layers(self._facts, kv_caches), self._facts.parallel, self.blocks_per_chunk
            )
            if rank == 0:
                region = Region.create(self.config.engine_id, layout, self._config.region_bytes)
            else:
                region = Region.attach(self.config.engine_id, rank=rank, expected=layout)
            try:
                self._worker = make_worker(region, rank, kv_caches)
            except BaseException:
                region.close()
                raise
        return self._worker

    def get_manager(self) -> VllmManager:
        """The scheduler's manager; all ranks have made their workers before."""
        if self._manager is None:
            region = Region.attach(self.config.engine_id, rank=None)
            try:
                region.wait_for_ranks()
                region.unlink()
                client = self._connect(region)
            except BaseException:
                region.close()
                raise
            manager = TieringManager(
                PrimaryTier(region.row_count),
                client,
                promotion_timeout_s=self._config.promotion_timeout_s,
            )
            self._manager = VllmManager(manager, region, client)
            log.info("%s", one_line(region.layout, self._facts.parallel.refusals()))
        return self._manager

    def _connect(self, region: Region) -> StoreClient | None:
        options = self._config.store
        if options is None:
            return None
        name = identity(self._vllm_config, self.config, region.layout)
        rows = RegionRows(region.fd, region.rows_offset, region.layout.row_bytes, region.row_count)
        client = StoreClient(options, name, rows)
        client.connect(_CONNECT_TIMEOUT_S)
        log.info(
            "disk store %s: budget %s (%d bytes) for the whole root, namespace %s, %d rows found",
            options.root,
            format_size(options.budget_bytes),
            options.budget_bytes,
            name.directory,
            len(client),
        )
        return client


def _refuse_what_cannot_share(parallel: Parallelism) -> None:
    """One region of equal rows is all that there is so far: every rank must map it and hold the
    same layers.  Raises `ConfigError`."""
    if not parallel.shares_region:
        raise ConfigError(
            "--distributed-executor-backend",
            '"mp" with all ranks on this node: they share one region',
            f"{parallel.world_size} ranks that do not",
        )
    if parallel.pp > 1:
        raise ConfigError("--pipeline-parallel-size", "1: ranks of equal layers", parallel.pp)
