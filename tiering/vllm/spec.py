"""KvtierSpec: builds the worker of each rank and the manager of the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from vllm.v1.kv_offload.base import OffloadingSpec

from storage.errors import ConfigError, StorageError
from storage.opening import rows_that_fit
from storage.service.client import RegionRows, StoreClient
from storage.service.messages import SmallerRows
from storage.sizes import format_size
from tiering.config import Config
from tiering.manager import TieringManager
from tiering.metrics import ALL
from tiering.primary import REGION, PrimaryTier
from tiering.region import Region, announce_layers, collect_layers
from tiering.rows import RowLayout
from tiering.summary import capacity_line, dedup_line, mean_row_bytes, row_facts
from tiering.topology import Parallelism
from tiering.vllm.adapters import Adapters
from tiering.vllm.facts import EngineFacts, group_layers
from tiering.vllm.identity import display_name, identities
from tiering.vllm.manager import VllmManager
from tiering.vllm.selective import Role, SelectiveManager
from tiering.vllm.stats import metric_definitions
from tiering.vllm.worker import make_worker

log = logging.getLogger("kvtier.vllm")

_CONNECT_TIMEOUT_S = 60.0  # for the headers of a large store; then the engine goes on without


class RankReport(NamedTuple):
    """What a rank tells the scheduler of its rows; `layout` is a `RowLayout` as JSON."""

    row_count: int
    layout: bytes


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
        self._config = Config.parse(
            config.extra_config, dp_rank=config.parallel.data_parallel_index
        )
        if self._config.stores:
            setting = "disk" if config.extra_config.get("disk") else "secondary_tiers"
            _refuse_disk_without_region(facts.parallel, setting)
        self._facts = facts
        self._vllm_config = vllm_config
        self._manager: VllmManager | None = None
        self._worker: Any = None
        self.rank_report: RankReport | None = None
        """What this rank's worker came to; None before there is one."""
        # Writers are elected page by page, in the worker: vLLM must not elect rank 0 for all.
        self.replicated_layout = False
        self.offload_prompt_only = self._config.offload_prompt_only
        self._announces = self.kv_events_config.enable_kv_cache_events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        return metric_definitions(ALL)

    def get_worker(self, kv_caches: Any) -> Any:
        """This rank's worker, over the region that all ranks share or over rows of its own."""
        if self._worker is None:
            try:
                if self._facts.parallel.shares_region:
                    region, rank = self._shared_region(kv_caches), self.config.parallel.rank
                else:
                    region, rank = self._private_region(kv_caches), 0
            except StorageError as exc:
                log.error("%s", exc)  # one line that stands by itself before vLLM's traceback
                raise
            try:
                self._worker = make_worker(region, rank, kv_caches)
            except BaseException:
                region.close()
                raise
            self.rank_report = RankReport(region.row_count, msgspec.json.encode(region.layout))
        return self._worker

    def _shared_region(self, kv_caches: Any) -> Region:
        """Rank 0 makes the region, the others attach to it."""
        engine_id, rank = self.config.engine_id, self.config.parallel.rank
        parallel, facts = self._facts.parallel, self._facts
        groups = group_layers(facts, kv_caches, rank)
        if parallel.pp == 1:
            layout = RowLayout.of_groups(
                groups, parallel, self.blocks_per_chunk, list(facts.layers.values())
            )
            if rank > 0:
                return Region.attach(engine_id, rank=rank, expected=layout)
        elif rank > 0:
            with announce_layers(engine_id, rank, groups):
                return Region.attach(engine_id, rank=rank)
        else:
            others = collect_layers(engine_id, range(1, parallel.world_size))
            layout = RowLayout.of_unlike_ranks([groups, *others.values()], self.blocks_per_chunk)
        return Region.create(engine_id, layout, self._config.region_bytes)

    def _private_region(self, kv_caches: Any) -> Region:
        """This rank's share of the memory, for rows of its own pages alone."""
        rank, world_size = self.config.parallel.rank, self._facts.parallel.world_size
        groups = group_layers(self._facts, kv_caches, rank)
        layout = RowLayout.of_groups(groups, Parallelism(), self.blocks_per_chunk)
        size = self._config.region_bytes // world_size
        region = Region.create(f"{self.config.engine_id}-{rank}", layout, size)
        region.unlink()
        return region

    def get_manager(self) -> VllmManager:
        """The scheduler's manager; all ranks have made their workers before."""
        if self._manager is None:
            make = self._manager_of_shared_rows
            if not self._facts.parallel.shares_region:
                make = self._manager_of_private_rows
            self._manager = make()
        return self._manager

    def _manager_of_shared_rows(self) -> VllmManager:
        region = Region.attach(self.config.engine_id, rank=None)
        try:
            region.wait_for_ranks()
            region.unlink()
            clients = self._connect(region)
        except BaseException:
            region.close()
            raise
        manager = TieringManager(
            PrimaryTier(region.row_count),
            clients,
            promotion_timeout_s=self._config.promotion_timeout_s,
        )
        self._log_start(region.layout, region.row_count)
        return self._vllm_manager(manager, region.layout, region, clients)

    def _manager_of_private_rows(self) -> VllmManager:
        """One without a slot until `ranks_reported`: nothing here can see the ranks' memory."""
        log.warning(
            "ranks keep private rows, without dedup: %s", "; ".join(self._facts.parallel.refusals())
        )
        return self._vllm_manager(TieringManager(PrimaryTier(0)))

    def _vllm_manager(self, *parts: Any) -> VllmManager:
        transfer, lora = self._vllm_config.kv_transfer_config, self._vllm_config.lora_config
        role = Role.of(transfer)
        if lora is None and role == Role():
            return VllmManager(*parts, announces=self._announces)
        return SelectiveManager(role, Adapters(lora), *parts, announces=self._announces)

    def ranks_reported(self, reports: Sequence[RankReport]) -> None:
        """Agree with ranks of private rows on how many slots there are: as many as the one with
        the fewest has."""
        if self._facts.parallel.shares_region or not reports:
            return
        manager = self.get_manager()
        row_count = min(report.row_count for report in reports)
        layouts = [msgspec.json.decode(report.layout, type=RowLayout) for report in reports]
        layout = RowLayout.of_private_rows(layouts, self._facts.parallel)
        manager.use_private_rows(layout, row_count)
        self._log_start(layout, row_count)

    def _log_start(self, layout: RowLayout, row_count: int) -> None:
        mean = mean_row_bytes(layout)
        tiers = {REGION: (row_count, layout.row_bytes)}
        for name, options in self._config.stores.items():
            tiers[name] = (rows_that_fit(options, mean), mean)
        groups = self.config.groups
        tokens = min(group.tokens_per_block for group in groups) * layout.blocks_per_chunk
        log.info(
            "%s; %s",
            dedup_line(layout, self._facts.group_layers),
            capacity_line(len(groups), tokens, tiers),
        )

    def _connect(self, region: Region) -> dict[str, StoreClient]:
        """The store of each secondary tier, by its name.  All of them, or none and the error."""
        clients: dict[str, StoreClient] = {}
        if not self._config.stores:
            return clients
        layout = region.layout
        names = identities(self._vllm_config, self.config, layout, self._config.weights_fingerprint)
        tokens = {group.group_id: group.tokens_per_block for group in self.config.groups}
        label = display_name(self._vllm_config.model_config)
        facts = [row_facts(layout, tokens, label, kind) for kind in layout.kinds()]
        smaller = [
            SmallerRows(kind.numbers, name.fields, kind.row_bytes, of_kind)
            for kind, name, of_kind in zip(layout.kinds(), names, facts, strict=True)
        ][1:]
        rows = RegionRows(region.fd, region.rows_offset, layout.row_bytes, region.row_count)
        try:
            for name, options in self._config.stores.items():
                client = StoreClient(options, names[0], rows, facts=facts[0], smaller=smaller)
                client.connect(_CONNECT_TIMEOUT_S)
                clients[name] = client
                log.info(
                    "disk store %s: budget %s (%d bytes) for the whole root, namespace %s, %d rows "
                    "found",
                    options.root,
                    format_size(options.budget_bytes),
                    options.budget_bytes,
                    ", ".join(each.directory for each in names),
                    len(client),
                )
        except BaseException:
            for client in clients.values():
                client.close()
            raise
        return clients


def _refuse_disk_without_region(parallel: Parallelism, setting: str) -> None:
    """The store process moves rows of the one region that all ranks share.  Raises
    `ConfigError`."""
    if not parallel.shares_region:
        raise ConfigError(
            f"kv_connector_extra_config.{setting}",
            "none, or all ranks as processes of this node (--distributed-executor-backend mp): "
            "the disk holds rows of a region that they share",
            f"{parallel.world_size} ranks that share none",
        )
