"""DiskTierManager: our disk as a tier of vLLM's own `TieringOffloadingSpec`.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
     "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184,
     "secondary_tiers": [{"type": "disk", "root": "/var/lib/kvtier", "budget": "500GB"}]}}

Region, rows, lookups in memory and promotions are vLLM's; the store is ours, in a process of its
own, with its checksums, budget and eviction.  Rows are vLLM's: the pages of one rank after another.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from storage.errors import ConfigError, LayoutMismatch, StorageError
from storage.facts import RowFacts
from storage.namespace import Identity, Json
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from storage.sizes import format_size
from storage.types import PAGE_BYTES, RowKey, round_up
from tiering.metrics import OF_STORE, Increments, StoreFigures, collect_store
from tiering.pace import ReportPace
from tiering.region import is_mapping_of
from tiering.tier import DiskTier
from tiering.tier_config import check_tiers
from tiering.vllm.events import EventStream
from tiering.vllm.facts import refuse_unreusable
from tiering.vllm.identity import display_name, identity_of_rows
from tiering.vllm.plugin import configure_logging
from tiering.vllm.scheduler import has_window
from tiering.vllm.stats import connector_stats, metric_definitions

log = logging.getLogger("kvtier.vllm")

ROW_FORMAT = "vllm 1"  # of vLLM's rows; raised if the bytes of a row come to mean something else

_CONNECT_TIMEOUT_S = 60.0  # for the headers of a large store; then the engine goes on without
_LATE_S = 10.0  # how late on a busy machine a store may be with what its deadlines promise


class DiskTierManager(SecondaryTierManager):  # type: ignore[misc]
    """Made by vLLM in the scheduler's process, after the region.  Translates, decides nothing."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of `DiskSettings`.  Raises `StorageError`."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        configure_logging()
        try:
            options = _options(offloading_spec, tier_type, settings)
            self._client = _connect(offloading_spec, primary_kv_view, options)
        except StorageError as exc:
            log.error("%s", exc)  # one line that stands by itself before vLLM's traceback
            raise
        self._tier = DiskTier(self._client)
        # Half of it for the store to end its jobs, half for the end of a store that does not.
        longest_s = max(options.read_timeout_s, options.write_timeout_s)
        self._drain_timeout_s = 2 * (longest_s + _LATE_S)
        self._increments = Increments()
        self._pace = ReportPace()
        self._events = EventStream()
        if offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events.add_disk(tier_type, self._client)

    # -- requests -------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        self._tier.begin(req_context.req_id)
        return RequestOffloadingContext()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._tier.use(req_context.req_id, [RowKey(key) for key in keys])

    def on_request_finished(self, req_context: Any) -> None:
        self._tier.finish(req_context.req_id)

    def lookup(self, key: bytes, req_context: Any) -> Any:  # noqa: ARG002
        """From memory.  Never RETRY: what is not known here is a miss."""
        return LookupResult.HIT if RowKey(key) in self._tier else LookupResult.MISS

    # -- transfers ------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        keys, slots = _in_order(job_metadata)
        self._tier.use(job_metadata.req_context.req_id, keys)
        self._tier.save(job_metadata.job_id, keys, slots)

    def submit_load(self, job_metadata: Any) -> None:
        keys, slots = _in_order(job_metadata)
        self._tier.use(job_metadata.req_context.req_id, keys)
        self._tier.load(job_metadata.job_id, keys, slots)

    def get_finished_jobs(self) -> Iterable[Any]:
        return [
            JobResult(
                job.job_id,
                job.is_complete,
                successful_keys=None if job.is_complete else tuple(job.done) or None,
                transfer_time=job.seconds,
                transfer_bytes=job.bytes_moved,
            )
            for job in self._tier.poll()
        ]

    def has_pending_work(self) -> bool:
        return self._tier.pending_jobs > 0 or self._events.is_pending

    def take_events(self) -> Iterable[Any]:
        return self._events.take()

    def drain_jobs(self) -> None:
        """Called when vLLM resets its cache, as it does for new weights.

        The namespace is that of the weights which this engine started with, and nobody says which
        it has now.  So rows stand in one of their own from here on, which no later engine finds.
        As in vLLM's own tiers what is on disk stays; a restart, which establishes the weights anew,
        finds it.

        Raises `RuntimeError` if a hung disk does not let go of the region.
        """
        self._tier.retire()
        if not self._tier.drain(self._drain_timeout_s):
            raise RuntimeError("kvtier: the cache is not reset: the disk hangs; try again")
        log.warning("the cache was reset: the disk tier goes on without the rows it had")
        self._tier.start_again()

    # -- figures and end ------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG003
        return metric_definitions(OF_STORE)

    def get_stats(self) -> Any:
        figures = StoreFigures(self._client.usage, self._client.is_up, self._client.restarts)
        if not self._pace.is_due(is_busy=self._tier.pending_jobs > 0, figures=figures):
            return None
        return connector_stats(collect_store(figures), self._increments)

    def shutdown(self) -> None:
        self._tier.close()


def _in_order(job: Any) -> tuple[list[RowKey], list[int]]:
    """Keys and slots of a job, as they follow each other in its request.  `keys` may be a set:
    `chunk_ids` is in the order in which it iterates."""
    position = job.req_context.get_offload_key_position
    end = float("inf")  # of a key whose place nobody knows
    places = [end if (at := position(key)) is None else at for key in job.keys]
    pairs = sorted(zip(places, job.keys, job.chunk_ids.tolist(), strict=True), key=_place)
    return [RowKey(key) for _, key, _ in pairs], [slot for _, _, slot in pairs]


def _place(pair: tuple[float, bytes, int]) -> float:
    return pair[0]


def _options(spec: Any, tier_type: str, settings: dict[str, Any]) -> StoreOptions:
    """Checked with the other tiers of the configuration, where there is one."""
    where = "kv_connector_extra_config.secondary_tiers"
    tiers = spec.extra_config.get("secondary_tiers") or []
    dp_rank = spec.config.parallel.data_parallel_index
    options = check_tiers(tiers, where, dp_rank)
    if options is None:
        options = check_tiers([{"type": tier_type, **settings}], where, dp_rank)
    if options is None:
        raise ConfigError(f"{where}.type", "'disk'", tier_type)
    return options


def _connect(spec: Any, view: memoryview, options: StoreOptions) -> StoreClient:
    rows = region_rows(spec, view)
    vllm_config = _engine_config(spec)
    refuse_unreusable(vllm_config)
    refuse_adapters(vllm_config)
    if spec.blocks_per_chunk > 1:
        refuse_windows(_connector(spec)._kv_cache_config, spec.blocks_per_chunk)
    name = tier_identity(spec, vllm_config)
    config = spec.config
    ranks = config.parallel.world_size
    chunk_bytes = config.worker_kv_bytes_per_block * spec.blocks_per_chunk
    facts = RowFacts(
        tokens_per_row=tuple(g.tokens_per_block * spec.blocks_per_chunk for g in config.groups),
        ranks=ranks,
        replicas=ranks if spec.replicated_layout else 1,
        row_bytes_without_dedup=round_up(chunk_bytes * ranks, PAGE_BYTES),
        model_name=display_name(vllm_config.model_config),
    )
    client = StoreClient(options, name, rows, facts=facts, stages_reads=True)
    client.connect(_CONNECT_TIMEOUT_S)
    log.info(
        "disk tier %s: budget %s (%d bytes) for the whole root, namespace %s, %d rows found; "
        "rows of %d bytes, %d in the region",
        options.root,
        format_size(options.budget_bytes),
        options.budget_bytes,
        name.directory,
        len(client),
        rows.row_bytes,
        rows.row_count,
    )
    return client


def region_rows(spec: Any, view: memoryview) -> RegionRows:
    """Where the rows of `view`, int8[chunks, row bytes], stand in the file of vLLM's region.

    Raises `LayoutMismatch` for a region that is not one file of rows one after the other: the store
    moves rows in that file, and must meet those that vLLM sees.
    """
    region = getattr(spec, "_scheduler_mmap", None)
    fd = getattr(region, "fd", None)
    if fd is None:
        raise LayoutMismatch("vLLM's region", "a SharedOffloadRegion with a file", region)
    shape = view.shape or ()
    if len(shape) != 2 or not view.c_contiguous or view.itemsize != 1:
        raise LayoutMismatch("vLLM's region", "bytes[chunks, row] without gaps", shape)
    row_count, row_bytes = shape
    if row_bytes % PAGE_BYTES:
        raise LayoutMismatch("vLLM's row", f"a multiple of {PAGE_BYTES} bytes", row_bytes)
    if (size := os.fstat(fd).st_size) < view.nbytes:
        raise LayoutMismatch("vLLM's region", f"one file of {view.nbytes} bytes", size)
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    if not is_mapping_of(address, fd):
        raise LayoutMismatch("vLLM's region", "a view of the start of its file", hex(address))
    return RegionRows(fd, 0, row_bytes, row_count)


def refuse_adapters(vllm_config: Any) -> None:
    """vLLM's keys have an adapter's name and path, not its files, and a tier sees keys alone: what
    it keeps over a restart may be of an adapter that was trained again.  Raises `ConfigError`."""
    if vllm_config.lora_config is not None:
        raise ConfigError(
            "--enable-lora",
            'none, or "kv_connector": "KvtierConnector", which tells adapters apart by their files',
            "LoRA above a disk tier of vLLM's own spec",
        )


def refuse_windows(kv_cache_config: Any, blocks_per_chunk: int) -> None:
    """Of a chunk that a window has left in part, vLLM stores the rest under the name of the whole.
    Raises `ConfigError`."""
    for group in kv_cache_config.kv_cache_groups:
        if has_window(group.kv_cache_spec):
            raise ConfigError(
                "kv_connector_extra_config.blocks_per_chunk",
                'none or 1, or "kv_connector": "KvtierConnector", for a model whose layers have '
                "windows",
                blocks_per_chunk,
            )


def tier_identity(spec: Any, vllm_config: Any) -> Identity:
    """What shapes the bytes of vLLM's rows.  Raises `ConfigError` for what can't be established.

    Which worker copies a page where follows from the class of the spec, whether rows hold one copy
    or each rank's, and the layers, whose pages are those of the model, its dtypes and its layout.
    """
    config, parallel = spec.config, spec.config.parallel
    rows: dict[str, Json] = {
        "row_format": ROW_FORMAT,
        "spec": f"{type(spec).__module__}.{type(spec).__qualname__}",
        "blocks_per_chunk": spec.blocks_per_chunk,
        "row_bytes": spec.kv_bytes_per_chunk,
        "rank_bytes": spec.cpu_page_size_per_worker,
        "worker_kv_bytes_per_block": config.worker_kv_bytes_per_block,
        "replicated_layout": spec.replicated_layout,
        "canonical_layout": config.canonical_layout,
        "world_size": parallel.world_size,
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
    }
    return identity_of_rows(vllm_config, config, rows)


def _engine_config(spec: Any) -> Any:
    """The `VllmConfig` of the engine that builds `spec`."""
    return _connector(spec)._vllm_config


def _connector(spec: Any) -> Any:
    """A connector that builds `spec` and has the configuration of its engine.

    vLLM shows a tier a model's name and no more: neither weights nor revision, RoPE, overrides or
    quantisation, and rows of two models under one path would be one another's.  The connector that
    builds the spec has all of it.  It is there while it does, and it is known by the settings that
    both hold, the same dict.  No public name leads to it; the garbage collector does.  Where it
    does not, the tier is refused.
    """
    settings = spec.extra_config
    found: dict[int, Any] = {}
    for candidate in gc.get_objects():
        if KVConnectorBase_V1 not in type(candidate).__mro__:
            continue
        vllm_config = getattr(candidate, "_vllm_config", None)
        if vllm_config is None or candidate.role is not KVConnectorRole.SCHEDULER:
            continue
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector_extra_config is settings:
            found[id(vllm_config)] = candidate
    if len(found) != 1:
        raise ConfigError(
            "kv_connector",
            '"OffloadingConnector", whose model\'s configuration can be seen from a tier '
            '(or "KvtierConnector" with the same settings as `disk`)',
            f"{len(found)} configurations",
        )
    [connector] = found.values()
    return connector
