"""What moves between the region and one secondary tier: promotions, cascades, and their failures.

Pins: a chunk that is written is pinned until its job ends, or, if its write hangs, until the tier
lets go of the slot.  A chunk that is read is READING until its job ends; if the read hangs, its
slot is nobody's until then, and the chunk may be read or stored again elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from storage.service.client import FinishedJob
from storage.types import STORED, RowKey, RowOutcome
from tiering.backpressure import HeldBack, WriteGate
from tiering.breaker import ReadBreaker
from tiering.primary import PrimaryTier
from tiering.secondary import SecondaryTier

_OFFER_AGAIN_S = 1.0  # to a tier that declined a chunk: its own back-off begins there too
_FAILED_READ_RETRY_S = 30.0  # a key whose read failed is a miss for that long
_MAX_FAILED_KEYS = 100_000

_OK, _ALREADY_STORED, _HUNG = RowOutcome.OK, RowOutcome.ALREADY_STORED, RowOutcome.HUNG
_DEVICE_FAILURES = frozenset({RowOutcome.FAILED, RowOutcome.HUNG})
_ANSWERS = frozenset({RowOutcome.OK, RowOutcome.CORRUPT})

Place = tuple[int, int]
"""(job id, position in it) of a row."""


@dataclass
class TierCounters:
    """Of one tier, since start."""

    hits: int = 0  # a key counts once per request
    promotions_failed: int = 0  # rows whose read did not succeed
    lookups_refused: int = 0  # that missed a chunk because the breaker is open
    writes_not_stored: int = 0  # rows that the store declined or failed to write
    held_back: dict[HeldBack, int] = field(default_factory=lambda: dict.fromkeys(HeldBack, 0))
    """Chunks that were not offered as soon as they might have been."""
    lost: int = 0  # of these, chunks that left the region before they were offered


class _Write(NamedTuple):
    keys: list[RowKey]
    ahead: int  # rows under way when it was submitted, these included


class TierTransfers:
    """Jobs of one tier, by the manager's thread."""

    def __init__(
        self, name: str, tier: SecondaryTier, primary: PrimaryTier, gate: WriteGate, stall_s: float
    ) -> None:
        self.name = name
        self.tier = tier
        self.gate = gate
        self.breaker = ReadBreaker(stall_s)
        self.counters = TierCounters()
        self.is_offering = True
        """False: nothing is written, until `start_again`."""
        self._primary = primary
        self.promoting: set[RowKey] = set()
        """Chunks that are READING, for this tier's bytes."""
        self._reads: dict[int, list[RowKey]] = {}
        self._writes: dict[int, _Write] = {}
        self._hung_reads: dict[Place, int] = {}  # -> slot that is nobody's
        self._hung_writes: dict[Place, RowKey] = {}  # -> pinned chunk
        self._failed_reads: dict[RowKey, float] = {}  # key -> when to try again
        self._offer_at: dict[RowKey, float] = {}  # chunks of the region that wait or are written
        self._backlog: dict[RowKey, int] = {}  # chunks held back, in order -> of which offer
        self._offers = 0
        self._clearing: int | None = None  # job id
        self._is_cleared = False

    # -- asking ---------------------------------------------------------------------------------

    def has(self, key: RowKey, now: float) -> bool:
        """Whether the tier has the chunk, and a read of it has not failed lately."""
        if key not in self.tier:
            return False
        retry_at = self._failed_reads.get(key)
        if retry_at is None:
            return True
        if now < retry_at:
            return False
        del self._failed_reads[key]
        return True

    @property
    def read_jobs(self) -> int:
        return len(self._reads)

    @property
    def write_jobs(self) -> int:
        return len(self._writes)

    @property
    def has_jobs(self) -> bool:
        return bool(self._reads or self._writes)

    @property
    def backlog_count(self) -> int:
        """Chunks of the region that wait to be offered."""
        return len(self._backlog)

    @property
    def stuck_count(self) -> int:
        """Slots of the region that a hanging read or write keeps."""
        return len(self._hung_reads) + len(self._hung_writes)

    @property
    def is_moving(self) -> bool:
        """Whether the tier may use any slot of the region, or is being cleared."""
        return bool(self._reads or self._writes or self._hung_reads or self._hung_writes) or (
            self._clearing is not None
        )

    # -- doing ----------------------------------------------------------------------------------

    def begin_promotion(self, key: RowKey) -> None:
        """The chunk has a slot and is READING; `read` or `drop` follows."""
        self.promoting.add(key)

    def drop(self, keys: list[RowKey], now: float) -> None:
        """These are not read after all."""
        self._primary.abandon(keys)
        self.promoting.difference_update(keys)
        if self.breaker.is_open:
            self.breaker.cancel_probe(now)

    def read(self, keys: list[RowKey], now: float) -> None:
        """Submit promotions that have begun."""
        self._reads[self.tier.read(keys, self._primary.slots(keys))] = keys
        self.breaker.started(now)

    def offer(self, chunks: Iterable[RowKey], now: float) -> None:
        """Cascade what the tier lacks of READY chunks, of one request first to last, unless it was
        asked lately: at once, or when the tier takes rows again."""
        wanted = self.tier.missing(chunks)
        if self._backlog or self._offer_at:
            wanted = [
                key
                for key in wanted
                if key not in self._backlog and self._offer_at.get(key, now) <= now
            ]
        if not wanted or not self.is_offering:
            return
        self._offers += 1
        if self._backlog:
            self._backlog.update(dict.fromkeys(wanted, self._offers))
            reason = self._offer_backlog(now)
        else:
            granted, reason = self.gate.grant(len(wanted), now, takes_writes=self.tier.takes_writes)
            if granted:
                self._write(wanted[:granted], now)
            self._backlog.update(dict.fromkeys(wanted[granted:], self._offers))
        if reason is not None:
            self.counters.held_back[reason] += min(len(self._backlog), len(wanted))

    def _offer_backlog(self, now: float) -> HeldBack | None:
        """Write as much of the backlog as the tier may be offered; why no more, if so."""
        granted, reason = self.gate.grant(
            len(self._backlog), now, takes_writes=self.tier.takes_writes
        )
        batch = list(islice(self._backlog.items(), granted))
        for key, _ in batch:
            del self._backlog[key]
        for _, of_one_offer in groupby(batch, itemgetter(1)):
            self._write([key for key, _ in of_one_offer], now)
        return reason

    def _write(self, keys: list[RowKey], now: float) -> None:
        job_id = self.tier.write(keys, self._primary.pin(keys))
        self._writes[job_id] = _Write(keys, self.gate.started(len(keys), now))
        self._offer_at.update(dict.fromkeys(keys, math.inf))

    def offer_rest(self, now: float) -> None:
        """The engine ends, and the region is nobody else's: write what waits, unless the tier takes
        no writes."""
        if self.is_offering and self.gate.closed is None and self.tier.takes_writes:
            batch, self._backlog = self._backlog, {}
            for _, of_one_offer in groupby(batch.items(), itemgetter(1)):
                self._write([key for key, _ in of_one_offer], now)

    def note_evicted(self, keys: Iterable[RowKey]) -> None:
        """Chunks left the region."""
        if not self._offer_at and not self._backlog:
            return
        for key in keys:
            self._offer_at.pop(key, None)
            if self._backlog.pop(key, None) is not None:
                self.counters.lost += 1

    # -- results --------------------------------------------------------------------------------

    def poll(self, now: float) -> list[RowKey]:
        """Take results in and go on with the backlog.  The chunks whose read failed: they left the
        region."""
        failed: list[RowKey] = []
        for job in self.tier.poll():
            if (keys := self._reads.pop(job.job_id, None)) is not None:
                failed += self._finish_read(job, keys, now)
            elif (write := self._writes.pop(job.job_id, None)) is not None:
                self._finish_write(job, write, now)
            elif job.job_id == self._clearing:
                self._clearing = None
                self._is_cleared = job.outcomes == [_OK]
        for place in self.tier.take_released():
            self._release(place)
        self.breaker.check(now)
        if self._backlog and self.is_offering:
            self._offer_backlog(now)
        return failed

    def _finish_read(self, job: FinishedJob, keys: Sequence[RowKey], now: float) -> list[RowKey]:
        self.promoting.difference_update(keys)
        if job.outcomes.count(_OK) == len(keys):
            self._primary.publish(keys)
            self._note_reads(now, answered=len(keys), failed=0)
            return []
        outcomes = list(zip(keys, job.outcomes, strict=True))
        self._primary.publish(key for key, outcome in outcomes if outcome is _OK)
        failed = [key for key, outcome in outcomes if outcome is not _OK]
        for position, (key, outcome) in enumerate(outcomes):
            if outcome is _HUNG:
                self._hung_reads[job.job_id, position] = self._primary.disown(key)
            elif outcome is not _OK:
                self._primary.abandon([key])
        self.counters.promotions_failed += len(failed)
        self._note_reads(
            now,
            answered=sum(outcome in _ANSWERS for outcome in job.outcomes),
            failed=sum(outcome in _DEVICE_FAILURES for outcome in job.outcomes),
        )
        if len(self._failed_reads) > _MAX_FAILED_KEYS:
            self._failed_reads.clear()
        self._failed_reads.update(dict.fromkeys(failed, now + _FAILED_READ_RETRY_S))
        return failed

    def _note_reads(self, now: float, *, answered: int, failed: int) -> None:
        was_open = self.breaker.is_open
        self.breaker.finished(now, answered=answered, failed=failed)
        if was_open and not self.breaker.is_open:
            self._failed_reads.clear()  # it was the disk, and not these rows

    def _finish_write(self, job: FinishedJob, write: _Write, now: float) -> None:
        written = job.outcomes.count(_OK)
        stored = written
        if written < len(write.keys):
            stored += job.outcomes.count(_ALREADY_STORED)
        refused: list[RowKey] = []
        free = write.keys
        failed = 0
        if stored < len(write.keys):
            free, refused = self._part_write(job, write, now)
            failed = sum(outcome in _DEVICE_FAILURES for outcome in job.outcomes)
        else:
            for key in write.keys:
                del self._offer_at[key]
        if self._failed_reads:
            for key, outcome in zip(write.keys, job.outcomes, strict=True):
                if outcome in STORED:
                    self._failed_reads.pop(key, None)
        self._primary.unpin(free)
        self.counters.writes_not_stored += len(write.keys) - stored
        self.gate.finished(
            len(write.keys),
            write.ahead,
            now,
            stored=written,
            failed=failed,
            seconds=job.seconds,
        )
        is_refused = self.gate.closed is not None or not self.tier.takes_writes
        if is_refused and self.is_offering:
            # The disk's fault and not theirs: they are offered again when it is back.
            self._offers += 1
            self._backlog.update(dict.fromkeys(refused, self._offers))

    def _part_write(
        self, job: FinishedJob, write: _Write, now: float
    ) -> tuple[list[RowKey], list[RowKey]]:
        """Of a write that did not store all: the chunks that are to be unpinned, and of these the
        ones that the tier did not take."""
        free: list[RowKey] = []
        refused: list[RowKey] = []
        for position, (key, outcome) in enumerate(zip(write.keys, job.outcomes, strict=True)):
            if outcome in STORED:
                del self._offer_at[key]
            else:
                self._offer_at[key] = now + _OFFER_AGAIN_S
            if outcome is _HUNG:
                self._hung_writes[job.job_id, position] = key
                self.gate.rows_stuck += 1
                continue
            free.append(key)
            if outcome not in STORED:
                refused.append(key)
        return free, refused

    def _release(self, place: Place) -> None:
        """The tier has let go of the slot of a row that hung."""
        if (slot := self._hung_reads.pop(place, None)) is not None:
            self._primary.free(slot)
        else:
            self._primary.unpin([self._hung_writes.pop(place)])
            self.gate.rows_stuck -= 1

    # -- reset ----------------------------------------------------------------------------------

    def stop_offering(self) -> None:
        """Forget what waits to be offered, and offer nothing more."""
        self.is_offering = False
        self._backlog.clear()

    def clear(self) -> None:
        """Begin to drop every row of the tier.  Nothing is moving."""
        self._is_cleared = False
        self._clearing = self.tier.clear()

    @property
    def is_cleared(self) -> bool:
        """Whether the tier dropped them all."""
        return self._is_cleared

    def start_again(self) -> None:
        """The tier and the region are empty."""
        self._failed_reads.clear()
        self._offer_at.clear()
        self.is_offering = True
