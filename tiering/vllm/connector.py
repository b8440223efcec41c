"""KvtierConnector: what `--kv-transfer-config` names.

    {"kv_connector": "KvtierConnector", "kv_connector_module_path": "tiering.vllm.connector",
     "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": "16GiB",
     "disk": {"root": "/var/lib/kvtier", "budget": "500GB"}}}

vLLM's own offloading connector with our spec.  It is a class of its own because only a connector
sees the KV-cache configuration, and with it each layer's page and number of distinct shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)

# Under another name: vLLM looks connectors up in this module, and must find only ours.
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector as _OffloadingConnector,
)

from storage.errors import StorageError
from tiering.config import Config, refuse_shared_root
from tiering.vllm.facts import EngineFacts, refuse_unreusable
from tiering.vllm.plugin import configure_logging, log
from tiering.vllm.scheduler import WindowScheduler
from tiering.vllm.selective import SelectiveManager
from tiering.vllm.spec import KvtierSpec, RankReport

_SPEC = {"spec_name": "KvtierSpec", "spec_module_path": "tiering.vllm.spec"}


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A `RankReport` on its way from a rank to the scheduler."""

    row_count: int
    layout: bytes

    @property
    def report(self) -> RankReport:
        return RankReport(self.row_count, self.layout)


class KvtierConnector(_OffloadingConnector):  # type: ignore[misc]
    """One per process of an engine: in the scheduler with a manager, in each rank with a worker."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        configure_logging()
        self._canonical_layout = False  # vLLM's canonical pages; our rows are another layout
        self.connector_scheduler = None
        self.connector_worker = None
        try:
            settings = _settings(vllm_config)
            config = build_offloading_config(vllm_config, kv_cache_config)
            facts = EngineFacts.of(vllm_config, kv_cache_config, dedup=settings.dedup)
            spec = KvtierSpec(config, facts, vllm_config)
            self._spec = spec
            if role == KVConnectorRole.SCHEDULER:
                self.connector_scheduler = WindowScheduler(spec, vllm_config, kv_cache_config)
            else:
                self.connector_worker = OffloadingConnectorWorker(
                    spec, vllm_config, kv_cache_config
                )
        except StorageError as exc:
            log.error("%s", exc)  # one line that stands by itself before vLLM's traceback
            raise

    def on_new_request(self, request: Any) -> None:
        if request.lora_request is not None:
            manager = self._spec.get_manager()
            assert isinstance(manager, SelectiveManager), "made where LoRA is enabled"
            manager.uses_adapter(request.request_id, request.lora_request)
        super().on_new_request(request)

    def get_handshake_metadata(self) -> RankHandshake | None:
        """In a rank: what the scheduler must know of its rows."""
        report = self._spec.rank_report
        return None if report is None else RankHandshake(*report)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """In the scheduler: what every rank said, once, before the first request."""
        reports = [m.report for m in metadata.values() if isinstance(m, RankHandshake)]
        self._spec.ranks_reported(reports)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        try:
            _settings(vllm_config)
        except StorageError as exc:
            log.error("%s", exc)
            raise
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """vLLM asks the spec class that the configuration names for our metrics; name it."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        for key, value in _SPEC.items():
            extra.setdefault(key, value)
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


def _settings(vllm_config: Any) -> Config:
    """Refuse bad settings, and models that they can't serve, before anything is made.  Raises
    `ConfigError`."""
    refuse_unreusable(vllm_config)
    raw = vllm_config.kv_transfer_config.kv_connector_extra_config
    parallel = vllm_config.parallel_config
    config = Config.parse(raw, dp_rank=parallel.data_parallel_index)
    # An engine whose model has no experts is told of no other, but it knows its place on this node.
    refuse_shared_root(raw, 1 + (parallel.data_parallel_rank_local or 0))
    return config
