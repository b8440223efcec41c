"""The requests that a manager serves: what they hold, how long they have waited, whose turn it is.

Pure; one thread; `now` in seconds.

Holds.  Between the first lookup of a request and its load, the chunks found for it must not be
evicted for others, or two requests could take each other's chunks for ever.  A request holds what
it found; only requests that arrived before it may evict that.

Turns.  A request for which the region had no slot waits in the order of arrival.  While it does,
no slot goes to a request that arrived later, not to its lookups and not to its stores, or a slot
that becomes free would be gone before the one that waits asks again.  Who has not asked for a while
neither holds nor waits.

Time.  A request waits for disk reads, slots and the stores of others.  All that counts, from one
lookup that left it waiting to the next, over its whole life: being preempted earns no new budget.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from storage.types import RowKey

HOLD_S = 5.0  # after its last lookup a request that neither loads nor ends loses holds and turn
_HOLD_STEPS = 3  # but not before it could have asked in so many steps, however long these are


@dataclass(slots=True, eq=False)
class Request:
    """One request.  `order` counts arrivals; `source` names a secondary tier, "" the region."""

    order: int
    asked_at: float = 0.0
    asked_step: int = -1
    waited_s: float = 0.0
    is_pending: bool = False
    """Whether its last lookup of that time left it waiting."""
    held: set[RowKey] = field(default_factory=set)
    found: set[RowKey] = field(default_factory=set)
    """Of those held, the ones that a lookup called HIT: they are READY as long as they are held."""
    is_queued: bool = False
    """Whether it waits for a slot."""
    promoting: dict[str, list[RowKey]] = field(default_factory=dict)
    """By tier: chunks that have a slot and whose read is not submitted yet."""
    sources: dict[RowKey, str] = field(default_factory=dict)
    counted: set[RowKey] = field(default_factory=set)
    chain: list[RowKey] = field(default_factory=list)
    """What it loaded and stored, in order; some of it more than once."""
    is_out_of_time: bool = False


class Requests:
    """By id.  Every chunk that is held is in the region; `forget` is called when one leaves it."""

    def __init__(self) -> None:
        self.by_id: dict[str, Request] = {}
        self.step = 0
        self._arrivals = 0
        self._holders: dict[RowKey, set[Request]] = {}  # once `_register` was called
        self._latest: Request | None = None
        self._fresh: set[RowKey] = set()  # held by the latest, and not in `_holders` for it
        self._queue: list[int] = []  # orders of those that wait for a slot
        self._queued: dict[int, Request] = {}  # by order

    def __bool__(self) -> bool:
        return bool(self.by_id)

    def get(self, request_id: str | None) -> Request | None:
        return self.by_id.get(request_id) if request_id is not None else None

    def begin(self, request_id: str) -> Request:
        """The request, new or known."""
        request = self.by_id.get(request_id)
        if request is None:
            self._arrivals += 1
            request = self.by_id[request_id] = Request(self._arrivals)
        return request

    def finish(self, request: Request, request_id: str) -> None:
        self.settle(request)
        del self.by_id[request_id]

    def end_step(self) -> None:
        self.step += 1

    # -- time -----------------------------------------------------------------------------------

    def note_asking(self, request: Request, now: float) -> None:
        """It looks a chunk up.  The first time in a step counts what it has waited, and renews
        its claims."""
        if request.asked_step == self.step:
            return
        if request.is_pending:
            # Of a longer silence the rest is the engine's: it had nothing for this request.
            request.waited_s += min(now - request.asked_at, HOLD_S)
            request.is_pending = False
        request.asked_at, request.asked_step = now, self.step
        self._leave_queue(request)

    def _is_there(self, request: Request, now: float) -> bool:
        return request.asked_at >= now - HOLD_S or request.asked_step >= self.step - _HOLD_STEPS + 1

    # -- holds ----------------------------------------------------------------------------------

    def hold(self, key: RowKey, request: Request) -> None:
        """Most requests load what they hold before anybody else asks for anything: only then who
        holds a chunk is entered by chunk."""
        if key not in request.held:
            if request is not self._latest:
                self._register()
                self._latest = request
            request.held.add(key)
            self._fresh.add(key)

    def _register(self) -> None:
        """Enter what the latest holds into `_holders`."""
        if self._fresh and self._latest is not None:
            for key in self._fresh:
                holders = self._holders.get(key)
                if holders is None:
                    self._holders[key] = {self._latest}
                else:
                    holders.add(self._latest)
            self._fresh.clear()

    def settle(self, request: Request) -> None:
        """It has what it waited for, or gave it up: it holds nothing and waits for nothing."""
        if request is self._latest and len(self._fresh) == len(request.held):
            self._fresh.clear()
        elif request.held:
            self._register()
            for key in request.held:
                holders = self._holders[key]
                holders.discard(request)
                if not holders:
                    del self._holders[key]
        request.held.clear()
        request.found.clear()
        request.is_pending = False
        self._leave_queue(request)

    def settle_all(self) -> None:
        for request in self.by_id.values():
            self.settle(request)

    def forget(self, keys: Iterable[RowKey]) -> None:
        """Chunks left the region: who held them holds them no more."""
        latest, fresh = self._latest, self._fresh
        if not fresh and not self._holders:
            return
        for key in keys:
            if latest is not None and key in fresh:
                fresh.remove(key)
                latest.held.discard(key)
                latest.found.discard(key)
            for holder in self._holders.pop(key, ()):
                holder.held.discard(key)
                holder.found.discard(key)

    def protection(
        self, now: float, order: float = float("inf")
    ) -> Callable[[RowKey], bool] | None:
        """Tells whether a request that arrived at `order` or before holds a chunk, for use at once;
        None if nobody holds any."""
        latest, fresh, holders_of = self._latest, self._fresh, self._holders.get
        if not fresh and not self._holders:
            return None

        def is_claimed(holder: Request) -> bool:
            return holder.order <= order and self._is_there(holder, now)

        def is_held(key: RowKey) -> bool:
            if latest is not None and key in fresh and is_claimed(latest):
                return True
            holders = holders_of(key)
            return holders is not None and any(map(is_claimed, holders))

        return is_held

    @property
    def held_count(self) -> int:
        """Chunks that somebody holds: 0 when idle."""
        self._register()
        return len(self._holders)

    # -- turns ----------------------------------------------------------------------------------

    def queue(self, request: Request) -> None:
        """The region has no slot for it now."""
        if not request.is_queued:
            request.is_queued = True
            insort(self._queue, request.order)
            self._queued[request.order] = request

    def _leave_queue(self, request: Request) -> None:
        if request.is_queued:
            request.is_queued = False
            del self._queue[bisect_left(self._queue, request.order)]
            del self._queued[request.order]

    def somebody_waits(self, now: float, before: float = float("inf")) -> bool:
        """Whether a request that arrived before `before` waits for a slot."""
        while self._queue and self._queue[0] < before:
            first = self._queued[self._queue[0]]
            if self._is_there(first, now):
                return True
            self._leave_queue(first)
        return False
