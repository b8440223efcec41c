"""TieringManager: which chunks live where, and when they move.  Engine-neutral; touches no bytes.

The way of a chunk: `prepare_store` gives it a slot, workers copy it there, `complete_store`
publishes it and cascades it to each secondary tier.  Later `lookup` finds it in the region (HIT),
or in the first tier that has it: then it gets a slot, is promoted (HIT_PENDING) and found at a
later lookup.  `prepare_load` pins it while workers copy it to the device, `complete_load` lets it
go.  A chunk of the region that a tier declined, or has evicted, is offered again when a request has
loaded it, at most once a second; one that a tier was not offered, since it was slow or refused
writes, when it takes writes again.

A request holds what it found until it loads it, and waits its turn for slots: see `requests.py`.
So the oldest request always gets through, and one that wants more than the region has loads the
part that fits.

Nothing waits for ever.  A request for which disk reads, slots or the stores of others do not come
within `promotion_timeout_s`, all its waits together, finds misses from then on.  A tier whose reads
stand still for half of that, or fail time after time, is a miss for everybody until one succeeds,
and so is a chunk whose store takes as long.  The slot of a row whose read or write hangs stays the
tier's until the disk lets go.  The slots of a store that some rank never acknowledges stay lost:
the rank may be writing.

One thread, the scheduler's, makes all calls.  None blocks, except `reset` and `close`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from storage.types import RowKey
from tiering.backpressure import WriteGate
from tiering.primary import READING, READY, REGION, STORING, ChunkState, PrimaryTier
from tiering.requests import Request, Requests
from tiering.secondary import SecondaryTier
from tiering.transfers import TierTransfers

_PINNED_SHARE = 2  # cascades pin at most 1/2 of the region: stores and promotions need slots too
_STALL_SHARE = 2  # reads that stand still for 1/2 of the time that a request may wait are a stall
_LOOK_AGAIN_S = 0.1  # for a slot in a region that was full: who holds one may have forgotten it
_RESET_TIMEOUT_S = 60.0  # for transfers under way; longer than any queue's deadline


class LookupResult(Enum):
    """Where a chunk is, for one request."""

    HIT = "hit"
    """In the region, complete."""
    HIT_PENDING = "hit pending"
    """On its way into the region; ask again in a later step."""
    RETRY = "retry"
    """On disk, and the request waits for a slot; ask again in a later step."""
    MISS = "miss"


_HIT, _HIT_PENDING, _RETRY, _MISS = LookupResult  # names are quicker to read than members


class Tier(Enum):
    """Where the bytes of a hit came from; DISK is any secondary tier."""

    REGION = "region"
    DISK = "disk"


class StorePlan(NamedTuple):
    """`slots[i]` is for `keys[i]`; `evicted` left the region."""

    keys: list[RowKey]
    slots: list[int]
    evicted: list[RowKey]


@dataclass
class ManagerCounters:
    """Since start; those of one secondary tier are `TierCounters`.

    A key counts as hit or miss once per request, when its lookup first ends.
    """

    region_hits: int = 0
    misses: int = 0
    misses_above: int = 0  # of these, where no secondary tier was to be asked
    promotions_timed_out: int = 0  # requests that stopped waiting
    stores_declined: int = 0  # chunks for which the region had no slot
    chunks_stored: int = 0


class _Full(NamedTuple):
    """The region had no slot for a request of this `order`, nor has it for later ones as long as
    as much is `in_use`; not walked over again, chunk by chunk, before `until`."""

    order: float
    in_use: tuple[int, int]
    until: float

    def still_is(self, order: float, in_use: tuple[int, int], now: float) -> bool:
        return order >= self.order and in_use == self.in_use and now < self.until


class TieringManager:
    """One engine's chunks, in a region of `primary.slot_count` slots and on secondary tiers."""

    def __init__(
        self,
        primary: PrimaryTier,
        secondaries: Mapping[str, SecondaryTier] | None = None,
        *,
        promotion_timeout_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secondaries` by name, the one to be asked first first."""
        self.primary = primary
        self.counters = ManagerCounters()
        self.tiers: dict[str, TierTransfers] = {}
        self._promotion_timeout_s = promotion_timeout_s
        self._now = now
        self._requests = Requests()
        self._promoting: list[Request] = []  # those with reads to submit
        self._stall_s = promotion_timeout_s / _STALL_SHARE
        self._begun: deque[tuple[float, int]] = deque()  # when stores began -> number of a chunk
        self._overdue = -1  # stores of chunks up to this number should have ended
        self._full: _Full | None = None
        for name, tier in (secondaries or {}).items():
            assert name != REGION, name
            share = primary.slot_count // _PINNED_SHARE // len(secondaries or {})
            gate = WriteGate(max(1, min(share, tier.write_rows_max)))
            self.tiers[name] = TierTransfers(name, tier, primary, gate, self._stall_s)

    # -- requests -------------------------------------------------------------------------------

    def use_slots(self, slot_count: int) -> None:
        """Start with a region of so many slots instead.  Before the first request, and without a
        secondary tier, only."""
        assert not self._requests, "requests are there already"
        assert not self.tiers, "tiers know the region already"
        self.primary = PrimaryTier(slot_count)

    def begin(self, request_id: str) -> None:
        """A request arrives.  Its place in the order decides who waits for whom."""
        self._requests.begin(request_id)

    def finish(self, request_id: str) -> None:
        """The request makes no more calls but `complete_load` and `complete_store`.

        Its chunks came in parts, a prefix before what follows it; now they are touched as one
        chain, so that the leaf ages first.
        """
        request = self._requests.get(request_id)
        if request is not None:
            chain = dict.fromkeys(request.chain)
            self.primary.touch(chain)
            self._touch_below(chain)
            self._submit_reads(request, self._now())  # others may wait for them
            self._requests.finish(request, request_id)

    def _touch_below(self, keys: Collection[RowKey]) -> None:
        for transfers in self.tiers.values():
            transfers.tier.touch(keys)

    # -- lookup and promotion -------------------------------------------------------------------

    def lookup(self, key: RowKey, request_id: str, *, below: bool = True) -> LookupResult:
        """Find one chunk for a request; if a tier has it, begin to promote it.  Not `below`: the
        region alone counts.

        An engine asks for all chunks of a request that waits in every step: what was found before
        is answered first, in few instructions.
        """
        request = self._requests.by_id.get(request_id)
        if request is None:
            request = self._requests.begin(request_id)
        if request.asked_step != self._requests.step:
            self._requests.note_asking(request, self._now())
        if key in request.found:
            return _HIT
        source = request.sources.get(key)
        if source is not None and self._still_comes(key, request, self.tiers[source]):
            request.is_pending = True
            return _HIT_PENDING
        state = self.primary.state(key)
        if state is READY:
            self._requests.hold(key, request)
            request.found.add(key)
            if key not in request.counted:
                self._count(key, request, REGION if source is None else source)
            return _HIT
        result = self._lookup(key, state, request, below=below)
        if result is _MISS:
            request.sources.pop(key, None)
            if not below:
                self.counters.misses_above += key not in request.counted
            self._count(key, request, None)
        else:
            request.is_pending = True
        return result

    def _lookup(
        self, key: RowKey, state: ChunkState | None, request: Request, *, below: bool
    ) -> LookupResult:
        """Of a chunk that is not READY.  All lookups of a request in one step are of one time."""
        now = request.asked_at
        if request.waited_s >= self._promotion_timeout_s or request.is_out_of_time:
            self._give_up_waiting(request)
            return _MISS
        if state is STORING:
            return _MISS if self.primary.number(key) <= self._overdue else _HIT_PENDING
        if state is READING:
            return self._join_promotion(key, request)
        if below:
            for transfers in self.tiers.values():
                if transfers.has(key, now):
                    if not transfers.breaker.is_open:
                        return self._promote(key, transfers, request, now)
                    transfers.counters.lookups_refused += 1
                    if transfers.breaker.may_probe(now):
                        return self._probe(key, transfers, request, now)
        return _MISS

    def _still_comes(self, key: RowKey, request: Request, transfers: TierTransfers) -> bool:
        """Whether a lookup of this request that found the chunk READING would do so again."""
        return (
            key in transfers.promoting
            and key in request.held
            and request.waited_s < self._promotion_timeout_s
            and not transfers.breaker.is_open
        )

    def _join_promotion(self, key: RowKey, request: Request) -> LookupResult:
        transfers = next(t for t in self.tiers.values() if key in t.promoting)
        if transfers.breaker.is_open:
            transfers.counters.lookups_refused += 1
            return _MISS
        self._requests.hold(key, request)
        request.sources[key] = transfers.name
        return _HIT_PENDING

    def _promote(
        self, key: RowKey, transfers: TierTransfers, request: Request, now: float
    ) -> LookupResult:
        if request.is_queued or self._requests.somebody_waits(now, before=request.order):
            self._requests.queue(request)
            return _RETRY
        if not self._begin_read(key, transfers, request, now, request.order):
            # Waiting helps only if somebody else has what this request lacks, and will let it go.
            stuck = sum(t.stuck_count for t in self.tiers.values())
            if self.primary.used_count - stuck <= len(request.held):
                return _MISS
            self._requests.queue(request)
            return _RETRY
        request.sources[key] = transfers.name
        self._requests.hold(key, request)
        return _HIT_PENDING

    def _probe(
        self, key: RowKey, transfers: TierTransfers, request: Request, now: float
    ) -> LookupResult:
        """Read a chunk of a tier whose breaker is open, without waiting for it."""
        is_turn = not self._requests.somebody_waits(now)
        if is_turn and self._begin_read(key, transfers, request, now, math.inf):
            transfers.breaker.probe()
        return _MISS

    def _begin_read(
        self, key: RowKey, transfers: TierTransfers, request: Request, now: float, order: float
    ) -> bool:
        """Give the chunk a slot, for a read at the end of the step; False if there is none.

        What requests that arrived at `order` or before hold is not evicted for it.
        """
        full = self._full
        if full is not None and full.still_is(order, self._in_use, now):
            return False
        is_protected = None if self.primary.free_count else self._requests.protection(now, order)
        evicted = self.primary.allocate_one(key, READING, is_protected)
        if evicted is None:
            self._full = _Full(order, self._in_use, now + _LOOK_AGAIN_S)
            return False
        self._full = None
        if evicted:
            self._note_evicted(evicted)
        transfers.begin_promotion(key)
        if not request.promoting:
            self._promoting.append(request)
        request.promoting.setdefault(transfers.name, []).append(key)
        return True

    @property
    def _in_use(self) -> tuple[int, int]:
        return self.primary.busy_count, self._requests.held_count

    def source(self, key: RowKey, request_id: str) -> Tier:
        """The kind of tier that a chunk found for this request came from."""
        request = self._requests.get(request_id)
        name = request.sources.get(key, REGION) if request else REGION
        return Tier.REGION if name == REGION else Tier.DISK

    def _give_up_waiting(self, request: Request) -> None:
        """For the rest of its life."""
        self.counters.promotions_timed_out += not request.is_out_of_time
        request.is_out_of_time = True

    def _count(self, key: RowKey, request: Request, source: str | None) -> None:
        if key in request.counted:
            return
        request.counted.add(key)
        if source is None:
            self.counters.misses += 1
        elif source == REGION:
            self.counters.region_hits += 1
        else:
            self.tiers[source].counters.hits += 1

    # -- device transfers -----------------------------------------------------------------------

    def prepare_load(self, keys: Sequence[RowKey], request_id: str) -> list[int]:
        """Pin chunks that `lookup` called HIT in this step, first to last; their slots."""
        slots = self.primary.pin(keys)
        request = self._requests.get(request_id)
        if request is not None:
            self._requests.settle(request)
            request.chain += keys
        self._touch_below(keys)
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

        None if the region has no room for all of them now, or a request that arrived earlier waits
        for it.  Of more chunks than the region has slots, the first ones that fit.
        """
        now = self._now()
        new = self.primary.missing(keys)
        is_protected = self._requests.protection(now)
        if len(new) < len(keys):
            is_protected = _either(set(keys).__contains__, is_protected)
        request = self._requests.get(request_id)
        order = math.inf if request is None else request.order
        if new and self._requests.somebody_waits(now, before=order):
            self.counters.stores_declined += len(new)
            return None
        if len(new) > self.primary.slot_count:
            offered = len(new)
            new = new[: self.primary.room(is_protected, offered)]
            self.counters.stores_declined += offered - len(new)
            if not new:
                return None
        evicted = self.primary.allocate(new, STORING, is_protected)
        if evicted is None:
            self.counters.stores_declined += len(new)
            return None
        self._note_evicted(evicted)
        if new:
            self._begun.append((now, self.primary.number(new[-1])))
        if len(new) < len(keys):
            self.primary.touch(keys)
        if request is not None:
            request.chain += keys
        return StorePlan(new, self.primary.slots(new), evicted)

    def complete_store(self, keys: Collection[RowKey], *, success: bool = True) -> None:
        """The workers have copied the chunks of one `prepare_store`, or failed to.

        A chunk that is complete is loadable, and cascades to the tiers that lack it.
        """
        ordered = self.primary.in_order(self.primary.storing(keys))
        if not success:
            self.primary.abandon(ordered)
            return
        self.primary.publish(ordered)
        self.counters.chunks_stored += len(ordered)
        self._cascade(ordered)

    def _cascade(self, chunks: list[RowKey]) -> None:
        now = self._now()
        for transfers in self.tiers.values():
            transfers.offer(chunks, now)

    # -- steps ----------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End of a scheduler step: take results in, send off the promotions of each request."""
        now = self._now()
        self._take_results(now)
        if self._promoting:
            promoting, self._promoting = self._promoting, []
            for request in promoting:
                self._submit_reads(request, now)
        while self._begun and self._begun[0][0] <= now - self._stall_s:
            self._overdue = self._begun.popleft()[1]
        self._requests.end_step()

    def poll(self) -> None:
        """Take in what the tiers have finished."""
        self._take_results(self._now())

    def _take_results(self, now: float) -> None:
        for transfers in self.tiers.values():
            if failed := transfers.poll(now):
                self._requests.forget(failed)

    def _submit_reads(self, request: Request, now: float) -> None:
        for name, keys in request.promoting.items():
            self.tiers[name].read(keys, now)
        request.promoting.clear()

    def _note_evicted(self, keys: list[RowKey]) -> None:
        self._requests.forget(keys)
        for transfers in self.tiers.values():
            transfers.note_evicted(keys)

    @property
    def held_count(self) -> int:
        """Chunks that requests hold: 0 when idle."""
        return self._requests.held_count

    @property
    def pending_reads(self) -> int:
        """Promotions under way, in jobs."""
        return sum(transfers.read_jobs for transfers in self.tiers.values())

    @property
    def pending_writes(self) -> int:
        """Cascades under way, in jobs."""
        return sum(transfers.write_jobs for transfers in self.tiers.values())

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping for results to be taken in."""
        if self._promoting:
            return True
        for transfers in self.tiers.values():  # noqa: SIM110  # asked in every step
            if transfers.has_jobs:
                return True
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a request is there, or work is pending: more steps follow."""
        return bool(self._requests) or self.has_pending_work()

    # -- reset and end --------------------------------------------------------------------------

    def reset(self) -> bool:
        """Forget every chunk, in the region and below: for new weights, old KV is wrong KV.

        Waits for the tiers' transfers; those of workers are the engine's to end or disown.  False
        if they do not end in time, or if a tier does not say that its rows are gone, as when
        the store process is down: then chunks are still found, nothing more is written below, and
        the caller must try again.

        Nobody says which weights the engine has from here on.  So what it writes below is for its
        own life: a restart, which establishes them anew, finds none of it.
        """
        now, tiers = self._now(), self.tiers.values()
        for transfers in tiers:
            transfers.stop_offering()
        for request in self._promoting:
            for name, keys in request.promoting.items():
                self.tiers[name].drop(keys, now)
                self._requests.forget(keys)
            request.promoting.clear()
        self._promoting.clear()
        if not self._drain():
            return False
        for transfers in tiers:
            transfers.clear()
        if not self._drain() or not all(transfers.is_cleared for transfers in tiers):
            return False
        self.primary.clear()
        self._requests.settle_all()
        for transfers in tiers:
            transfers.start_again()
        return True

    def _drain(self) -> bool:
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while any(transfers.is_moving for transfers in self.tiers.values()):
            if time.monotonic() > deadline:
                return False
            self.poll()
            time.sleep(0.001)
        return True

    def close(self) -> None:
        """End the tiers, which first write what they lack of the region.  It is idle then."""
        now = self._now()
        for transfers in self.tiers.values():
            transfers.offer_rest(now)
        for transfers in self.tiers.values():
            transfers.tier.close()


def _either(
    first: Callable[[RowKey], bool], second: Callable[[RowKey], bool] | None
) -> Callable[[RowKey], bool]:
    return first if second is None else lambda key: first(key) or second(key)
