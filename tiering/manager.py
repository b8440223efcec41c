"""TieringManager: which chunks live where, and when they move.  Engine-neutral; touches no bytes.

The way of a chunk: `prepare_store` gives it a slot, workers copy it there, `complete_store`
publishes it and cascades it to disk.  Later `lookup` finds it in the region (HIT), or on disk:
then it gets a slot, is promoted (HIT_PENDING) and found at the next lookup.  `prepare_load` pins it
while workers copy it to the device, `complete_load` lets it go.  A chunk of the region that the
disk declined, or has evicted, is offered again when a request has loaded it, at most once a second.

Holds.  Between the first lookup of a request and its `prepare_load`, the chunks found for it must
not be evicted for others, or two requests could take each other's chunks for ever.  A request holds
what it found; only requests that arrived before it may evict that.  So the oldest request always
gets through, and one that wants more than the region has loads the part that fits.

Nothing waits for ever: a request for which disk reads, slots or the stores of others do not come
within `promotion_timeout_s` of its first wait finds a miss instead.  A row whose read hangs is a
miss for everybody; its slot, like that of a write that hangs, stays the store's until the disk lets
go.  The slots of a store that some rank never acknowledges stay lost: the rank may be writing.

One thread, the scheduler's, makes all calls.  None blocks, except `reset` and `close`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from storage.service.client import FinishedJob
from storage.types import STORED, RowKey, RowOutcome
from tiering.primary import ChunkState, PrimaryTier
from tiering.secondary import SecondaryTier

log = logging.getLogger("kvtier.manager")

HOLD_S = 5.0  # after its last lookup a request that neither loads nor ends loses its holds
_OFFER_AGAIN_S = 1.0  # to a disk that declined a chunk: its own back-off begins there too
_FAILED_READ_RETRY_S = 30.0  # a key whose read failed is a miss for that long
_RESET_TIMEOUT_S = 60.0  # for transfers under way; longer than any queue's deadline
_MAX_FAILED_KEYS = 100_000


class LookupResult(Enum):
    """Where a chunk is, for one request."""

    HIT = "hit"
    """In the region, complete."""
    HIT_PENDING = "hit pending"
    """On its way into the region; ask again in a later step."""
    RETRY = "retry"
    """On disk, and the request waits for a slot; ask again in a later step."""
    MISS = "miss"


class Tier(Enum):
    """Where the bytes of a hit came from."""

    REGION = "region"
    DISK = "disk"


class StorePlan(NamedTuple):
    """`slots[i]` is for `keys[i]`; `evicted` left the region."""

    keys: list[RowKey]
    slots: list[int]
    evicted: list[RowKey]


@dataclass
class ManagerCounters:
    """Since start.  A key counts once per request, when its lookup first ends."""

    region_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    promotions_failed: int = 0  # rows whose read did not succeed
    promotions_timed_out: int = 0  # requests that stopped waiting
    stores_declined: int = 0  # chunks for which the region had no slot
    chunks_stored: int = 0
    writes_not_stored: int = 0  # rows that the store declined or failed to write


@dataclass(slots=True)
class _Request:
    order: int
    looked_up_at: float = 0.0
    waiting_since: float | None = None
    held: set[RowKey] = field(default_factory=set)
    promoting: list[RowKey] = field(default_factory=list)  # allocated, read not yet submitted
    sources: dict[RowKey, Tier] = field(default_factory=dict)
    counted: set[RowKey] = field(default_factory=set)
    chain: dict[RowKey, None] = field(default_factory=dict)  # what it loaded and stored, in order


class TieringManager:
    """One engine's chunks, in a region of `primary.slot_count` slots and on `secondary`, if any."""

    def __init__(
        self,
        primary: PrimaryTier,
        secondary: SecondaryTier | None,
        *,
        promotion_timeout_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.primary = primary
        self.secondary = secondary
        self.counters = ManagerCounters()
        self._promotion_timeout_s = promotion_timeout_s
        self._now = now
        self._requests: dict[str, _Request] = {}
        self._arrivals = 0
        self._holders: dict[RowKey, set[str]] = {}
        self._reads: dict[int, list[RowKey]] = {}  # job id -> chunks READING
        self._writes: dict[int, list[RowKey]] = {}  # job id -> chunks pinned for it
        self._hung_reads: dict[tuple[int, int], RowKey] = {}  # (job id, position) -> chunk READING
        self._hung_writes: dict[tuple[int, int], RowKey] = {}  # (job id, position) -> pinned chunk
        self._offer_at: dict[RowKey, float] = {}  # chunks of the region that wait or are written
        self._was_reset = False
        self._failed_reads: dict[RowKey, float] = {}  # key -> when to try again
        self._clearing: int | None = None  # job id
        self._is_cleared = False  # what came of the last such job

    # -- requests -------------------------------------------------------------------------------

    def use_slots(self, slot_count: int) -> None:
        """Start with a region of so many slots instead.  Before the first request only."""
        assert not self._requests, "requests are there already"
        self.primary = PrimaryTier(slot_count)

    def begin(self, request_id: str) -> None:
        """A request arrives.  Its place in the order decides who waits for whom."""
        self._request(request_id)

    def finish(self, request_id: str) -> None:
        """The request makes no more calls but `complete_load` and `complete_store`.

        Its chunks came in parts, a prefix before what follows it; now they are touched as one
        chain, so that the leaf ages first.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self.primary.touch(request.chain)
            if self.secondary is not None:
                self.secondary.touch([key for key in request.chain if key in self.secondary])
            self._submit_reads(request)
            self._drop_holds(request_id)
            del self._requests[request_id]

    def _request(self, request_id: str) -> _Request:
        request = self._requests.get(request_id)
        if request is None:
            self._arrivals += 1
            request = self._requests[request_id] = _Request(self._arrivals)
        return request

    # -- lookup and promotion -------------------------------------------------------------------

    def lookup(self, key: RowKey, request_id: str, *, below: bool = True) -> LookupResult:
        """Find one chunk for a request; on disk, begin to promote it.  Not `below`: the region
        alone counts."""
        request = self._request(request_id)
        request.looked_up_at = self._now()
        result = self._lookup(key, request, request_id, below=below)
        if result is LookupResult.HIT:
            self._hold(key, request, request_id)
            self._count(key, request, request.sources.setdefault(key, Tier.REGION))
        elif result is LookupResult.MISS:
            request.sources.pop(key, None)
            self._count(key, request, None)
        elif request.waiting_since is None:
            request.waiting_since = request.looked_up_at
        return result

    def _lookup(
        self, key: RowKey, request: _Request, request_id: str, *, below: bool
    ) -> LookupResult:
        state = self.primary.state(key)
        if state is ChunkState.READY:
            return LookupResult.HIT
        if self._has_waited_enough(request):
            return LookupResult.MISS
        if state is ChunkState.STORING:
            return LookupResult.HIT_PENDING
        if state is ChunkState.READING and key in self._hung_reads.values():
            return LookupResult.MISS
        if state is ChunkState.READING:
            self._hold(key, request, request_id)
            request.sources[key] = Tier.DISK
            return LookupResult.HIT_PENDING
        if not below or self.secondary is None or key not in self.secondary:
            return LookupResult.MISS
        if self._failed_lately(key):
            return LookupResult.MISS
        return self._promote(key, request, request_id)

    def _promote(self, key: RowKey, request: _Request, request_id: str) -> LookupResult:
        evicted = self.primary.allocate(
            [key], ChunkState.READING, lambda other: self._is_held_against(other, request.order)
        )
        if evicted is None:
            # Waiting helps only if somebody else has what this request lacks.
            if self.primary.used_count <= len(request.held):
                return LookupResult.MISS
            return LookupResult.RETRY
        self._note_evicted(evicted)
        request.promoting.append(key)
        request.sources[key] = Tier.DISK
        self._hold(key, request, request_id)
        return LookupResult.HIT_PENDING

    def source(self, key: RowKey, request_id: str) -> Tier:
        """The tier that a chunk found for this request came from."""
        request = self._requests.get(request_id)
        return request.sources.get(key, Tier.REGION) if request else Tier.REGION

    def _has_waited_enough(self, request: _Request) -> bool:
        if request.waiting_since is None:
            return False
        if request.looked_up_at - request.waiting_since < self._promotion_timeout_s:
            return False
        if request.waiting_since != float("-inf"):
            self.counters.promotions_timed_out += 1
            request.waiting_since = float("-inf")  # once is enough for the rest of the request
        return True

    def _failed_lately(self, key: RowKey) -> bool:
        retry_at = self._failed_reads.get(key)
        if retry_at is None:
            return False
        if self._now() < retry_at:
            return True
        del self._failed_reads[key]
        return False

    def _hold(self, key: RowKey, request: _Request, request_id: str) -> None:
        request.held.add(key)
        self._holders.setdefault(key, set()).add(request_id)

    def _drop_holds(self, request_id: str) -> None:
        request = self._requests[request_id]
        for key in request.held:
            holders = self._holders[key]
            holders.discard(request_id)
            if not holders:
                del self._holders[key]
        request.held.clear()

    def _is_held_against(self, key: RowKey, order: float) -> bool:
        """Whether a request that arrived at `order` or before holds the chunk."""
        horizon = self._now() - HOLD_S
        return any(
            self._requests[holder].order <= order and self._requests[holder].looked_up_at >= horizon
            for holder in self._holders.get(key, ())
        )

    def _count(self, key: RowKey, request: _Request, tier: Tier | None) -> None:
        if key in request.counted:
            return
        request.counted.add(key)
        if tier is Tier.REGION:
            self.counters.region_hits += 1
        elif tier is Tier.DISK:
            self.counters.disk_hits += 1
        else:
            self.counters.misses += 1

    # -- device transfers -----------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[RowKey], request_id: str) -> list[int]:
        """Pin chunks that `lookup` called HIT in this step, first to last; their slots."""
        slots = self.primary.pin(keys)
        if request_id in self._requests:
            self._drop_holds(request_id)
            self._requests[request_id].waiting_since = None
            self._requests[request_id].chain.update(dict.fromkeys(keys))
        if self.secondary is not None:
            self.secondary.touch([key for key in keys if key in self.secondary])
        return slots

    def complete_load(self, keys: Collection[RowKey]) -> None:
        """The workers have copied the chunks of one `prepare_load`."""
        ordered = self.primary.in_order(keys)
        self.primary.unpin(ordered)
        self._cascade(ordered)

    def prepare_store(
        self, keys: Sequence[RowKey], request_id: str | None = None
    ) -> StorePlan | None:
        """Give slots to those of `keys`, first to last, that the region lacks.

        None if the region has no room for all of them now.  Of more chunks than the region has
        slots, the first ones that fit.
        """
        new = [key for key in keys if self.primary.state(key) is None]
        present = [key for key in keys if self.primary.state(key) is ChunkState.READY]
        wanted = set(present)

        def is_protected(other: RowKey) -> bool:
            return other in wanted or self._is_held_against(other, float("inf"))

        if len(new) > self.primary.slot_count:
            offered = len(new)
            new = new[: self.primary.room(is_protected, offered)]
            self.counters.stores_declined += offered - len(new)
            if not new:
                return None
        evicted = self.primary.allocate(new, ChunkState.STORING, is_protected)
        if evicted is None:
            self.counters.stores_declined += len(new)
            return None
        self._note_evicted(evicted)
        self.primary.touch(keys)
        if request_id in self._requests:
            self._requests[request_id].chain.update(dict.fromkeys(keys))
        return StorePlan(new, [self.primary.slot(key) for key in new], evicted)

    def complete_store(self, keys: Collection[RowKey], *, success: bool = True) -> None:
        """The workers have copied the chunks of one `prepare_store`, or failed to.

        A chunk that is complete is loadable, and cascades to disk unless it is there.
        """
        ordered = self.primary.in_order(
            key for key in keys if self.primary.state(key) is ChunkState.STORING
        )
        if not success:
            self.primary.abandon(ordered)
            return
        self.primary.publish(ordered)
        self.primary.touch(ordered)
        self.counters.chunks_stored += len(ordered)
        self._cascade(ordered)

    def _cascade(self, chunks: list[RowKey]) -> None:
        """Offer the disk what it lacks of these READY chunks, unless it was asked lately."""
        if self.secondary is None or self._was_reset:
            return
        now = self._now()
        keys = [
            key
            for key in chunks
            if key not in self.secondary and self._offer_at.get(key, now) <= now
        ]
        if keys:
            self._writes[self.secondary.write(keys, self.primary.pin(keys))] = keys
            self._offer_at.update(dict.fromkeys(keys, math.inf))

    # -- steps ----------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End of a scheduler step: take results in, send off the promotions of each request."""
        self.poll()
        for request in self._requests.values():
            self._submit_reads(request)

    def poll(self) -> None:
        """Take in what the store has finished."""
        if self.secondary is not None:
            for job in self.secondary.poll():
                self._finish_job(job)
            for place in self.secondary.take_released():
                self._release(place)

    def _submit_reads(self, request: _Request) -> None:
        if request.promoting and self.secondary is not None:
            keys, request.promoting = request.promoting, []
            job_id = self.secondary.read(keys, [self.primary.slot(key) for key in keys])
            self._reads[job_id] = keys

    def _finish_job(self, job: FinishedJob) -> None:
        if (keys := self._reads.pop(job.job_id, None)) is not None:
            outcomes = list(zip(keys, job.outcomes, strict=True))
            self.primary.publish(key for key, outcome in outcomes if outcome is RowOutcome.OK)
            failed = [key for key, outcome in outcomes if outcome is not RowOutcome.OK]
            hung = self._hung_rows(job, keys)
            self._hung_reads.update(hung)
            self.primary.abandon(key for key in failed if key not in hung.values())
            self._forget_holders(failed)
            self.counters.promotions_failed += len(failed)
            if len(self._failed_reads) > _MAX_FAILED_KEYS:
                self._failed_reads.clear()
            for key in failed:
                self._failed_reads[key] = self._now() + _FAILED_READ_RETRY_S
        elif (keys := self._writes.pop(job.job_id, None)) is not None:
            hung = self._hung_rows(job, keys)
            self._hung_writes.update(hung)
            self.primary.unpin([key for key in keys if key not in hung.values()])
            stored = [k for k, o in zip(keys, job.outcomes, strict=True) if o in STORED]
            for key in stored:
                self._failed_reads.pop(key, None)
                del self._offer_at[key]
            offer_at = self._now() + _OFFER_AGAIN_S
            self._offer_at.update(dict.fromkeys(set(keys).difference(stored), offer_at))
            self.counters.writes_not_stored += len(keys) - len(stored)
        elif job.job_id == self._clearing:
            self._clearing = None
            self._is_cleared = job.outcomes == [RowOutcome.OK]

    @staticmethod
    def _hung_rows(job: FinishedJob, keys: list[RowKey]) -> dict[tuple[int, int], RowKey]:
        """Whose slots are still the store's."""
        return {
            (job.job_id, position): key
            for position, (key, outcome) in enumerate(zip(keys, job.outcomes, strict=True))
            if outcome is RowOutcome.HUNG
        }

    def _release(self, place: tuple[int, int]) -> None:
        """The store has let go of the slot of a row that hung."""
        if (key := self._hung_reads.pop(place, None)) is not None:
            self.primary.abandon([key])
        else:
            self.primary.unpin([self._hung_writes.pop(place)])

    def _note_evicted(self, keys: list[RowKey]) -> None:
        self._forget_holders(keys)
        for key in keys:
            self._offer_at.pop(key, None)

    def _forget_holders(self, keys: list[RowKey]) -> None:
        """Chunks left the region: who held them holds them no more."""
        for key in keys:
            for holder in self._holders.pop(key, ()):
                self._requests[holder].held.discard(key)

    @property
    def pending_reads(self) -> int:
        """Promotions under way, in jobs."""
        return len(self._reads)

    @property
    def pending_writes(self) -> int:
        """Cascades under way, in jobs."""
        return len(self._writes)

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for results to be taken in."""
        return bool(self._reads or self._writes) or any(
            request.promoting for request in self._requests.values()
        )

    # -- reset and end --------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget every chunk, in the region and on disk: for new weights, old KV is wrong KV.

        Waits for the store's transfers; those of workers are the engine's to end or disown.  False
        if they do not end in time, or if the store does not say that its rows are gone, as when
        its process is down: then chunks are still found, and the caller must try again.

        From here on nothing is written to disk: the namespace is that of the weights which this
        engine started with, and nobody says which it has now.  A restart establishes them anew.
        """
        if self.secondary is not None and not self._was_reset:
            log.warning("the cache was reset: no more writes to disk until the engine restarts")
        self._was_reset = True
        for request in self._requests.values():
            self.primary.abandon(request.promoting)
            self._forget_holders(request.promoting)
            request.promoting.clear()
        if not self._drain(self._has_transfers):
            return False
        if self.secondary is not None:
            self._is_cleared = False
            self._clearing = self.secondary.clear()
            if not self._drain(lambda: self._clearing is not None) or not self._is_cleared:
                return False
        self.primary.clear()
        for request_id in self._requests:
            self._drop_holds(request_id)
        self._failed_reads.clear()
        self._offer_at.clear()
        return True

    def _has_transfers(self) -> bool:
        moving = self._reads or self._writes or self._hung_reads or self._hung_writes
        return bool(moving) or self._clearing is not None

    def _drain(self, is_busy: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while is_busy():
            if time.monotonic() > deadline:
                return False
            self.poll()
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """End the store process, which first writes what it was given.  The region is idle then."""
        if self.secondary is not None:
            self.secondary.close()
