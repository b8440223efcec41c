"""Every metric that kvtier exports: name, kind, labels and where its value comes from.

Engine-neutral.  Counters are totals since start; an exporter that wants increments subtracts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from storage.service.messages import RootUsage, Usage
from storage.space import DiskState, Limit
from tiering.config import DISK_TIER
from tiering.manager import TieringManager
from tiering.primary import REGION
from tiering.rows import RowLayout
from tiering.summary import reasons
from tiering.transfers import TierTransfers


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


class Sample(NamedTuple):
    metric: Metric
    labels: tuple[str, ...]
    value: float


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvtier:{name}", Kind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"kvtier:{name}", Kind.GAUGE, text, labels)


CHUNK_QUERIES = _counter(
    "chunk_queries", "Chunks asked for that no tier before had, once per request and chunk.", "tier"
)
CHUNK_HITS = _counter("chunk_hits", "Chunks found, once per request and chunk.", "tier")
CHUNK_MISSES = _counter("chunk_misses", "Chunks found in no tier, once per request and chunk.")
CHUNKS_STORED = _counter("chunks_stored", "Chunks copied from the device to the region.")
CHUNKS_EVICTED = _counter("chunks_evicted", "Chunks evicted to make room.", "tier")
STORES_DECLINED = _counter("stores_declined", "Chunks offered for which the region had no slot.")
PROMOTIONS_FAILED = _counter("promotions_failed", "Rows whose read did not succeed.", "tier")
PROMOTIONS_TIMED_OUT = _counter("promotions_timed_out", "Requests that stopped waiting for disk.")
LOOKUPS_REFUSED = _counter(
    "lookups_refused",
    "Lookups that missed since nobody waits for a tier that stands still.",
    "tier",
)
READS_SUSPENDED = _gauge("reads_suspended", "1 while nobody waits for a tier's reads.", "tier")
READ_SUSPENSIONS = _counter("read_suspensions", "Times that began.", "tier")
WRITES_NOT_STORED = _counter(
    "writes_not_stored", "Rows that the store declined or failed to write.", "tier"
)
CASCADES_HELD_BACK = _counter(
    "cascades_held_back", "Chunks not offered to a tier at once, by reason.", "tier", "reason"
)
CASCADES_LOST = _counter(
    "cascades_lost", "Chunks held back that left the region before they were offered.", "tier"
)
CASCADES_WAITING = _gauge("cascades_waiting", "Chunks held back now.", "tier")
CASCADES_UNDER_WAY = _gauge("cascades_under_way", "Chunks being written to a tier now.", "tier")
READ_BYTES = _counter("read_bytes", "Bytes read into the region and verified.", "tier")
WRITE_BYTES = _counter("write_bytes", "Bytes written from the region and published.", "tier")
READ_SECONDS = _counter("read_seconds", "Thread time spent reading.", "tier")
WRITE_SECONDS = _counter("write_seconds", "Thread time spent writing.", "tier")
ROWS_READ = _counter("rows_read", "Rows read, by outcome.", "tier", "outcome")
ROWS_WRITTEN = _counter("rows_written", "Rows offered for writing, by outcome.", "tier", "outcome")
CODEC_ROWS = _counter("codec_rows", "Rows that passed the codec, encoded or raw.", "tier", "form")
CODEC_BYTES = _counter("codec_bytes", "Bytes of encoded rows, before and after.", "tier", "side")
CODEC_SECONDS = _counter("codec_seconds", "Thread time spent in the codec.", "tier", "direction")
ROWS_GIVEN_UP = _counter(
    "rows_given_up",
    "Rows lost with segments: smaller budget, other namespace, removed file.",
    "tier",
)
ROWS_MOVED = _counter("rows_moved", "Rows moved out of segments that were given back.", "tier")
ROWS_SCRUBBED = _counter(
    "rows_scrubbed", "Rows verified by the scrubber, by outcome.", "tier", "outcome"
)
SCRUB_PASSES = _counter("scrub_passes", "Times the scrubber has seen every row.", "tier")
DISK_USED = _gauge("disk_used_bytes", "Bytes of the root charged against its budget.", "tier")
DISK_BUDGET = _gauge("disk_budget_bytes", "Bytes that everything under the root may use.", "tier")
DISK_ROWS = _gauge("disk_rows", "Rows of this engine's namespace on disk.", "tier")
DISK_STATE = _gauge("disk_state", "1 for the state that the disk is in.", "tier", "state")
DISK_STATE_CHANGES = _counter(
    "disk_state_changes", "Times the disk entered a state.", "tier", "state"
)
ROOT_USED = _gauge(
    "root_used_bytes", "Bytes of one root charged against its budget.", "tier", "root"
)
ROOT_BUDGET = _gauge(
    "root_budget_bytes", "Bytes that everything under one root may use.", "tier", "root"
)
ROOT_STATE = _gauge("root_state", "1 for the state that one root is in.", "tier", "root", "state")
DISK_LIMIT = _gauge(
    "disk_limit", "1 for what keeps the store from growing, if anything.", "tier", "limit"
)
DISK_EFFECTIVE = _gauge(
    "disk_effective_bytes", "Bytes that the root may hold, as far as the disk has shown.", "tier"
)
DISK_DEGRADED = _gauge(
    "disk_degraded", "1 while the disk takes no writes, or after 8 failures in a row.", "tier"
)
DISK_NO_SPACE = _counter(
    "disk_no_space",
    "Calls that ended with ENOSPC or EDQUOT; other: though there was room.",
    "tier",
    "kind",
)
EXTERNAL_REMOVALS = _counter(
    "disk_external_removals", "Segments whose file somebody else removed.", "tier"
)
DISK_UP = _gauge("disk_up", "1 while the store process serves.", "tier")
STORE_RESTARTS = _counter(
    "store_restarts", "Times the store process had to be started again.", "tier"
)
REGION_SLOTS = _gauge("region_slots", "Slots of the region.", "use")
REGION_PINS = _gauge("region_pins", "Loads and writes under way, counted once per chunk of each.")
ROW_BYTES = _gauge("row_bytes", "Bytes of the largest row, as stored and without dedup.", "dedup")
DEDUP_RATIO = _gauge(
    "dedup_ratio", "Bytes of the largest row without dedup by those that are stored."
)
REPLICATION_INFO = _gauge(
    "replication_info",
    "1; the labels say which copies the ranks share, and why some are not.",
    "ranks",
    "kv_tp_replicas",
    "replicated_layout",
    "not_deduplicated",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """What the client of the store knows of it."""

    usage: Usage
    is_up: bool
    restarts: int


def collect(
    manager: TieringManager, layout: RowLayout, stores: Mapping[str, StoreFigures]
) -> Iterator[Sample]:
    """The present value of every metric that applies.  `stores` by the names of their tiers."""
    counters, primary = manager.counters, manager.primary
    queries = (
        counters.region_hits
        + counters.misses
        + sum(transfers.counters.hits for transfers in manager.tiers.values())
    )
    yield Sample(CHUNK_QUERIES, (REGION,), queries)
    yield Sample(CHUNK_HITS, (REGION,), counters.region_hits)
    yield Sample(CHUNK_MISSES, (), counters.misses)
    yield Sample(CHUNKS_STORED, (), counters.chunks_stored)
    yield Sample(CHUNKS_EVICTED, (REGION,), primary.evictions)
    yield Sample(STORES_DECLINED, (), counters.stores_declined)
    yield Sample(REGION_SLOTS, ("total",), primary.slot_count)
    yield Sample(REGION_SLOTS, ("occupied",), primary.used_count)
    yield Sample(REGION_SLOTS, ("busy",), primary.busy_count)
    yield Sample(REGION_PINS, (), primary.pin_count)
    yield Sample(ROW_BYTES, ("on",), layout.row_bytes)
    yield Sample(ROW_BYTES, ("off",), layout.row_bytes_without_dedup)
    yield Sample(DEDUP_RATIO, (), layout.row_bytes_without_dedup / layout.row_bytes)
    info = (str(layout.ranks), str(layout.kv_tp_replicas), str(layout.replicated_layout).lower())
    yield Sample(REPLICATION_INFO, (*info, reasons(layout) if layout.ranks > 1 else ""), 1.0)
    if manager.tiers:
        yield Sample(PROMOTIONS_TIMED_OUT, (), counters.promotions_timed_out)
    queries -= counters.region_hits + counters.misses_above
    for name, transfers in manager.tiers.items():
        yield Sample(CHUNK_QUERIES, (name,), queries)
        yield from _collect_transfers(name, transfers)
        queries -= transfers.counters.hits
    for name, store in stores.items():
        yield from collect_store(store, name)


def _collect_transfers(name: str, transfers: TierTransfers) -> Iterator[Sample]:
    counters = transfers.counters
    yield Sample(CHUNK_HITS, (name,), counters.hits)
    yield Sample(PROMOTIONS_FAILED, (name,), counters.promotions_failed)
    yield Sample(LOOKUPS_REFUSED, (name,), counters.lookups_refused)
    yield Sample(READS_SUSPENDED, (name,), float(transfers.breaker.is_open))
    yield Sample(READ_SUSPENSIONS, (name,), transfers.breaker.times_opened)
    yield Sample(WRITES_NOT_STORED, (name,), counters.writes_not_stored)
    for reason, count in counters.held_back.items():
        yield Sample(CASCADES_HELD_BACK, (name, reason.value), count)
    yield Sample(CASCADES_LOST, (name,), counters.lost)
    yield Sample(CASCADES_WAITING, (name,), transfers.backlog_count)
    yield Sample(CASCADES_UNDER_WAY, (name,), transfers.gate.rows_under_way)


def collect_store(store: StoreFigures, tier: str = DISK_TIER) -> Iterator[Sample]:
    """The part of `collect` that the store of one tier alone tells."""
    usage = store.usage
    yield Sample(CHUNKS_EVICTED, (tier,), usage.rows_evicted)
    yield Sample(READ_BYTES, (tier,), usage.bytes_read)
    yield Sample(WRITE_BYTES, (tier,), usage.bytes_written)
    yield Sample(READ_SECONDS, (tier,), usage.read_seconds)
    yield Sample(WRITE_SECONDS, (tier,), usage.write_seconds)
    for outcome, count in (
        ("ok", usage.rows_read),
        ("missing", usage.rows_missing),
        ("corrupt", usage.rows_corrupt),
        ("failed", usage.reads_failed),
        ("hung", usage.reads_hung),
        ("expired", usage.reads_expired),
    ):
        yield Sample(ROWS_READ, (tier, outcome), count)
    for outcome, count in (
        ("ok", usage.rows_written),
        ("already stored", usage.rows_already_stored),
        ("declined full", usage.declined_full),
        ("declined busy", usage.declined_busy),
        ("declined disk", usage.declined_disk),
        ("declined twice", usage.declined_twice),
        ("not admitted", usage.declined_admission),
        ("declined write budget", usage.declined_write_budget),
        ("failed", usage.writes_failed),
        ("hung", usage.writes_hung),
    ):
        yield Sample(ROWS_WRITTEN, (tier, outcome), count)
    yield Sample(CODEC_ROWS, (tier, "encoded"), usage.rows_encoded)
    yield Sample(CODEC_ROWS, (tier, "raw"), usage.rows_raw)
    yield Sample(CODEC_BYTES, (tier, "before"), usage.bytes_before_codec)
    yield Sample(CODEC_BYTES, (tier, "after"), usage.bytes_after_codec)
    yield Sample(CODEC_SECONDS, (tier, "encode"), usage.encode_seconds)
    yield Sample(CODEC_SECONDS, (tier, "decode"), usage.decode_seconds)
    yield Sample(ROWS_SCRUBBED, (tier, "ok"), usage.rows_scrubbed - usage.rows_scrubbed_corrupt)
    yield Sample(ROWS_SCRUBBED, (tier, "corrupt"), usage.rows_scrubbed_corrupt)
    yield Sample(ROWS_GIVEN_UP, (tier,), usage.rows_given_up)
    yield Sample(ROWS_MOVED, (tier,), usage.rows_moved)
    yield Sample(SCRUB_PASSES, (tier,), usage.scrub_passes)
    yield Sample(DISK_USED, (tier,), usage.used_bytes)
    yield Sample(DISK_BUDGET, (tier,), usage.budget_bytes)
    yield Sample(DISK_ROWS, (tier,), usage.rows)
    yield Sample(DISK_UP, (tier,), float(store.is_up))
    yield Sample(STORE_RESTARTS, (tier,), store.restarts)
    for root, of in usage.roots.items():
        yield Sample(ROOT_USED, (tier, root), of.used_bytes)
        yield Sample(ROOT_BUDGET, (tier, root), of.budget_bytes)
        for state in DiskState:
            yield Sample(ROOT_STATE, (tier, root, state.value), float(of.state == state.value))
    yield Sample(DISK_EFFECTIVE, (tier,), usage.effective_bytes)
    yield Sample(DISK_DEGRADED, (tier,), float(usage.health == "degraded"))
    yield Sample(DISK_NO_SPACE, (tier, "space"), usage.enospc)
    yield Sample(DISK_NO_SPACE, (tier, "other"), usage.enospc_other)
    yield Sample(EXTERNAL_REMOVALS, (tier,), usage.external_removals)
    for state in DiskState:
        yield Sample(DISK_STATE, (tier, state.value), float(usage.state == state.value))
        yield Sample(
            DISK_STATE_CHANGES, (tier, state.value), usage.state_changes.get(state.value, 0)
        )
    for limit in Limit:
        if limit is not Limit.NONE:
            yield Sample(DISK_LIMIT, (tier, limit.value), float(usage.limit == limit.value))


_STORE = StoreFigures(Usage(roots={"": RootUsage(0, 0, "")}), True, 0)
OF_STORE = tuple(dict.fromkeys(sample.metric for sample in collect_store(_STORE)))
"""What `collect_store` yields."""


class Increments:
    """Turns totals into what was added since the last call; a restarted store begins at 0 again."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, tuple[str, ...]], float] = {}

    def of(self, sample: Sample) -> float | None:
        """None if nothing was added; but the first time 0, so that the series is there from the
        start: who waits for an increase never sees that of a series which begins at 1."""
        key = (sample.metric.name, sample.labels)
        is_first = key not in self._last
        last = self._last.get(key, 0.0)
        self._last[key] = sample.value
        increment = sample.value - last if sample.value >= last else sample.value
        return increment if increment or is_first else None
