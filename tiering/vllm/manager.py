"""VllmManager: vLLM's `OffloadingManager` before `TieringManager`.  Translates, decides nothing.

vLLM's offload keys are row keys as they are: bytes, of hash and group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from vllm.v1.kv_offload.base import (
    Locality,
    Medium,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TierFilter,
)
from vllm.v1.kv_offload.base import (
    LookupResult as VllmLookupResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from storage.service.client import StoreClient
from tiering.manager import LookupResult, Tier, TieringManager
from tiering.metrics import Increments, StoreFigures, collect
from tiering.pace import ReportPace
from tiering.region import Region
from tiering.rows import RowLayout
from tiering.vllm.events import EventStream
from tiering.vllm.stats import connector_stats

_HIT, _MISS = VllmLookupResult.HIT, VllmLookupResult.MISS
_HIT_PENDING, _RETRY = VllmLookupResult.HIT_PENDING, VllmLookupResult.RETRY
_OUR_HIT, _OUR_HIT_PENDING, _, _OUR_MISS = LookupResult  # names are quicker to read than members
_ALL_TIERS = TierFilter.ALL
_BY_CHUNK = RequestOffloadingContext()  # one for all requests: vLLM reads it
NO_CLIENTS: Mapping[str, StoreClient] = MappingProxyType({})
_SOURCES = {Tier.REGION: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


class VllmManager(OffloadingManager):  # type: ignore[misc]
    """Owns region, store clients and manager of one engine, in its scheduler.

    Ranks with private rows have no region that the scheduler sees: their layout and slots come
    with `use_private_rows`.
    """

    def __init__(
        self,
        manager: TieringManager,
        layout: RowLayout | None = None,
        region: Region | None = None,
        clients: Mapping[str, StoreClient] = NO_CLIENTS,
        *,
        announces: bool = False,
    ) -> None:
        """`clients`, by name, are the disks among the manager's tiers.  `announces`: somebody wants
        KV events, and takes them in each step."""
        self._manager = manager
        self._layout = layout
        self._region = region
        self._clients = clients
        self._increments = Increments()
        self._pace = ReportPace()
        self._announces = announces
        self._events = EventStream()
        if announces:
            self._events.add_region(manager.primary)
            for name, client in clients.items():
                self._events.add_disk(name, client)

    def use_private_rows(self, layout: RowLayout, row_count: int) -> None:
        """The ranks have `row_count` slots each.  Comes once, before the first request."""
        assert self._region is None, "the ranks share a region"
        self._layout = layout
        self._manager.use_slots(row_count)
        if self._announces:
            self._events = EventStream()
            self._events.add_region(self._manager.primary)

    def on_new_request(self, req_context: Any) -> Any:
        self._manager.begin(req_context.req_id)
        return _BY_CHUNK

    def on_request_finished(self, req_context: Any) -> None:
        self._manager.finish(req_context.req_id)

    def lookup(self, key: Any, req_context: Any) -> Any:
        """For each chunk of each request that waits, in each step: few instructions count here."""
        tiers = req_context.load_tier_filter
        below = tiers is _ALL_TIERS or tiers.allows(Medium.STORAGE, Locality.LOCAL)
        result = self._manager.lookup(key, req_context.req_id, below=below)
        if result is _OUR_HIT:
            return _HIT
        if result is _OUR_MISS:
            return _MISS
        return _HIT_PENDING if result is _OUR_HIT_PENDING else _RETRY

    def get_load_source(self, key: Any, req_context: Any) -> Any:
        return _SOURCES[self._manager.source(key, req_context.req_id)]

    def prepare_load(self, keys: Any, req_context: Any) -> Any:
        return CPULoadStoreSpec(self._manager.prepare_load(keys, req_context.req_id))

    def complete_load(self, keys: Any, req_context: Any) -> None:  # noqa: ARG002
        self._manager.complete_load(keys)
        self._pace.note()

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        plan = self._manager.prepare_store(keys, req_context.req_id)
        if plan is None:
            return None
        return PrepareStoreOutput(
            keys_to_store=plan.keys,
            store_spec=CPULoadStoreSpec(plan.slots),
            evicted_keys=plan.evicted,
        )

    def complete_store(
        self,
        keys: Any,
        req_context: Any,  # noqa: ARG002
        success: bool = True,
    ) -> None:
        self._manager.complete_store(keys, success=success)
        self._pace.note()

    def touch(self, keys: Any, req_context: Any) -> None:  # noqa: ARG002
        self._manager.primary.touch(keys)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002
        self._manager.end_step()

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work() or self._events.is_pending

    def take_events(self) -> Iterable[Any]:
        return self._events.take()

    def reset_cache(self) -> None:
        self._pace.note()
        if not self._manager.reset():
            raise RuntimeError(
                "kvtier: the cache is not reset: transfers to disk did not end, or the store "
                "process is down; try again"
            )

    def get_stats(self) -> Any:
        figures = {
            name: StoreFigures(client.usage, client.is_up, client.restarts)
            for name, client in self._clients.items()
        }
        if self._layout is None or not self._pace.is_due(
            is_busy=self._manager.is_busy, figures=figures
        ):
            return None
        return connector_stats(collect(self._manager, self._layout, figures), self._increments)

    def shutdown(self) -> None:
        self._manager.close()
        if self._region is not None:
            self._region.close()
