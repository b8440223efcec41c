"""DiskStore: the whole store as one object; one root, owner and budget for many namespaces."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from storage.admission import WriteBudget
from storage.codec import CODEC_NAMES, NO_CODEC, ROW_BYTES_MAX
from storage.device import Device, LocalDevice, supports_direct
from storage.engine import IoEngine, Queue
from storage.errors import ConfigError, DeviceError, RootUnusable
from storage.facts import RowFacts
from storage.namespace import (
    METADATA,
    ROWS,
    Identity,
    WantedRows,
    is_namespace_directory,
)
from storage.opening import least_bytes, open_namespace, plan_namespace
from storage.options import StoreOptions
from storage.pool import SegmentPool
from storage.quarantine import QUARANTINE, Quarantine
from storage.root import (
    StaleNamespace,
    allocated_bytes,
    check_root,
    record_owner,
    remove_namespace,
    remove_partials,
    survey,
    take_root,
)
from storage.rowstore import RowStore
from storage.scrubber import Scrubber
from storage.segment import segment_path
from storage.sharing import choose_donor, coldness
from storage.sizes import format_size
from storage.space import (
    ROOT_OVERHEAD_BYTES,
    DiskState,
    Limit,
    Space,
    default_reserve,
)
from storage.status import STATUS, Counters, StatusKeeper, StoreStatus
from storage.types import PAGE_BYTES

log = logging.getLogger("kvtier.storage")

_STATUS_TIMEOUT_S = 1.0  # for one that is being written; a hung disk may not hold up the end
_CLOSE_TIMEOUT_S = 30.0  # for I/O under way; longer than a slow disk needs for its queue


class StoreUsage(NamedTuple):
    """Figures of a root, taken under its lock."""

    budget_bytes: int
    effective_bytes: int
    """What the root may hold as far as is known: less than the budget on a disk that has less."""
    used_bytes: int
    """Charged against the budget: allocated bytes and what the file system may add to them."""
    state: str
    state_reason: str
    limit: str
    """What growth lacks, as a `Limit`; empty while the store may grow."""
    health: str
    """"ok" or "degraded": no writes now, or `DEGRADED_AFTER` failures in a row."""
    errno: int
    """Of the last failure, 0 if there was none."""
    enospc: int
    enospc_other: int
    external_removals: int
    """Segments whose file somebody else removed."""
    state_changes: dict[str, int]
    rows: int
    segments: int


class CloseReport(NamedTuple):
    """How a close went.  Unless `is_ended`, I/O hangs: its threads may still use their buffers, and
    the lock is kept until the process ends.  `dropped_rows` were still queued to be written when
    the time was up, and have been declined."""

    is_ended: bool
    dropped_rows: int


class DiskStore:
    """A root that this process owns.  Safe from any thread; a context manager.

    `open` raises `ConfigError` for settings that can't work, `RootInUse` or `RootUnusable` for a
    root that can't be had, and has then changed nothing but an empty directory that it made.
    """

    def __init__(
        self, options: StoreOptions, device: Device, lock_fd: int, now: Callable[[], float]
    ) -> None:
        self.options = options
        self.root = options.root
        self.device = device
        self.lock = threading.RLock()
        self.direct = supports_direct(device, options.root)
        reserve = options.reserve_bytes
        if reserve is None:
            reserve = default_reserve(device.space(options.root).total_bytes)
        self.space = Space(options.budget_bytes, reserve, now, on_state=self._log_state)
        self.write_budget = (
            WriteBudget(options.write_bytes_per_day, now()) if options.write_bytes_per_day else None
        )
        self._lock_fd = lock_fd
        self._stores: dict[str, RowStore] = {}
        self._stale: dict[str, StaleNamespace] = {}
        self._last_use = 0
        self._external_removals = 0
        self._closed: CloseReport | None = None
        self.quarantine = Quarantine(options.root, device, options.quarantine_rows)
        self._quarantine_charge = 0
        self._foreign_bytes = 0  # found at the start; what is not ours is charged all the same
        self._status = StatusKeeper(options.root, device)
        self._status_lock = threading.Lock()
        self._charge_what_is_there()
        self.engine = IoEngine(  # its threads must be ended: nothing below may fail
            options.io_threads,
            write_threads=options.write_threads,
            queued_bytes_max=options.write_queue_bytes,
        )
        self._scrubber = (
            Scrubber(self.engine, options.scrub_bytes_per_s, self._open_stores, self._now_use)
            if options.scrub_bytes_per_s
            else None
        )

    @classmethod
    def open(
        cls,
        options: StoreOptions,
        device: Device | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> DiskStore:
        """Take the root: lock it, clean up after a crash, see what is there.

        `now` is the clock in seconds of the back-off after faults of the disk.
        """
        device = device or LocalDevice()
        lock_fd = take_root(options.root, device, options.lock_timeout_s)
        try:
            check_root(options.root, device)
            remove_partials(options.root, device)
            record_owner(options.root, device)
            return cls(options, device, lock_fd, now)
        except BaseException as exc:
            with contextlib.suppress(DeviceError):
                device.close(lock_fd)
            if isinstance(exc, DeviceError):
                raise RootUnusable(f"root: {exc}") from exc
            raise

    # -- namespaces -----------------------------------------------------------------------------

    def open_rows(
        self, identity: Identity, row_bytes: int, facts: RowFacts | None = None
    ) -> RowStore:
        """`open_all` of one namespace."""
        return self.open_all([WantedRows(identity, row_bytes, facts)])[0]

    def open_all(self, wanted: Sequence[WantedRows]) -> list[RowStore]:
        """The rows of namespaces that one engine uses together, each made if it is new.

        The codec of the options becomes part of each identity.  Raises `ConfigError` if the budget
        can't hold one segment of each or the codec can't encode such rows, `LayoutMismatch` if a
        namespace exists with another row, `RootUnusable` if its files can't be used.
        """
        wanted = [self._checked(one) for one in wanted]
        names = [one.identity.directory for one in wanted]
        assert len({*names, *self._stores}) == len(names) + len(self._stores), f"open: {names}"
        with self.lock:
            stale = {name: self._stale.pop(name, None) for name in names}
        opened: list[RowStore] = []
        try:
            for name, one in zip(names, wanted, strict=True):
                share = self.options.budget_bytes // len(wanted)
                least = sum(least_bytes(rows.pool.classes[-1]) for rows in opened)
                plan = plan_namespace(self, one, stale[name], share, least)
                self._reserve_quarantine(plan.largest.stride)
                opened.append(open_namespace(self, plan, stale[name]))
                opened[-1].engine = names[0] if len(names) > 1 else ""
            self._meet_budget(opened)
            self._tell_of_foreign_files(opened)
        except BaseException:
            with self.lock:
                self._stale |= {name: found for name, found in stale.items() if found is not None}
            raise
        with self.lock:
            self._stores |= zip(names, opened, strict=True)
        return opened

    def _checked(self, wanted: WantedRows) -> WantedRows:
        """`wanted` with the codec of the options in its identity.  Raises `ConfigError`."""
        row_bytes = wanted.row_bytes
        if row_bytes <= 0 or row_bytes % PAGE_BYTES:
            raise ValueError(f"row_bytes: expected a multiple of {PAGE_BYTES}, got {row_bytes}")
        per_day = self.options.write_bytes_per_day
        if per_day is not None and per_day < WriteBudget.least(row_bytes):
            raise ConfigError(
                "write_bytes_per_day",
                f"at least {WriteBudget.least(row_bytes)}, for rows of {row_bytes} bytes",
                per_day,
            )
        identity = replace(wanted.identity, codec=self.options.codec)
        if identity.row_codec is not None and row_bytes > ROW_BYTES_MAX:
            raise ConfigError(
                "codec", f'"{NO_CODEC}" for rows of {row_bytes} bytes', self.options.codec
            )
        self._tell_of_other_codecs(identity)
        return wanted._replace(identity=identity)

    def _tell_of_other_codecs(self, identity: Identity) -> None:
        for codec in CODEC_NAMES:
            other = replace(identity, codec=codec).directory
            if codec != identity.codec and other in self._stale:
                log.warning(
                    "codec is %s now: what was stored under %s stays in %s, is not read, and gives "
                    "way first",
                    identity.codec,
                    codec,
                    other,
                )

    def _open_stores(self) -> list[RowStore]:
        with self.lock:
            return list(self._stores.values())

    # -- recency, under the lock ----------------------------------------------------------------

    def next_use(self) -> int:
        """Microseconds since 1970, raised where the clock stood still or went back: comparable
        over the namespaces of a root, and over restarts."""
        self._last_use = max(self._last_use + 1, time.time_ns() // 1000)
        return self._last_use

    def _now_use(self) -> int:
        with self.lock:
            return self.next_use()

    def note_use(self, last_use: int) -> None:
        """A row that was found was last used then."""
        self._last_use = max(self._last_use, last_use)

    # -- space ----------------------------------------------------------------------------------

    def takes_writes(self) -> bool:
        """Whether a write is worth a try now: not on a disk that refused one, until its probe."""
        with self.lock:
            return self.space.is_writable()

    def may_grow(self, pool: SegmentPool) -> bool:
        """Whether one more segment is worth a try now: the disk may have room, or a namespace that
        is open more than it should.  Under the lock."""
        return self.space.may_grow() or self._donor_for(pool) is not None

    def make_room(self, size_bytes: int, asker: SegmentPool | None = None) -> bool:
        """Charge `size_bytes`, once stale namespaces, then open ones, gave up what they must;
        False if refused.

        Never waits for another writer.  Rows of open namespaces go only for an `asker`.
        """
        while True:
            try:
                available = self.device.space(self.root).available_bytes
            except DeviceError as exc:
                with self.lock:
                    self.space.growth_refused(Limit.DEVICE, str(exc))
                return False
            with self.lock:
                if self.space.can_charge(size_bytes, available):
                    self.space.charge(size_bytes)
                    return True
            if not self._shrink_stale() and not self._take_from_others(asker):
                break
        with self.lock:
            over_budget = self.space.charged_bytes + size_bytes > self.space.budget_bytes
            self.space.growth_refused(
                Limit.BUDGET if over_budget else Limit.SPACE,
                f"budget of {format_size(self.space.budget_bytes)} used up"
                if over_budget
                else f"file system has {format_size(available)} left",
                size_bytes,
            )
        return False

    def has_root(self) -> bool:
        """Whether the root is still there, as far as the disk says.  Once somebody removed, moved
        or unmounted it nothing more is made: what stands in its place is not locked, may be
        another's, and be on another disk."""
        try:
            return self.device.leads_to(self.root, self._lock_fd)
        except DeviceError:
            return True

    def _donor_for(self, asker: SegmentPool) -> RowStore | None:
        """Which open namespace gives way to a segment of the asker.  Under the lock."""
        stores = list(self._stores.values())
        asking = next((rows for rows in stores if rows.pool is asker), None)
        if asking is None or len(stores) == 1:
            return None
        others = [rows for rows in stores if rows is not asking]
        holdings = [rows.holding() for rows in others]
        chosen = choose_donor(
            asking.holding(),
            asker.charge_bytes,
            holdings,
            self.space.budget_bytes,
            self.next_use(),
        )
        return None if chosen is None else others[chosen]

    def _take_from_others(self, asker: SegmentPool | None) -> bool:
        """Give back a segment of an open namespace, its warm rows moved; False if there is none,
        or if its rows are being read: then it follows later."""
        if asker is None:
            return False
        with self.lock:
            donor = self._donor_for(asker)
        return donor is not None and donor.mover.give_back(donor.mover.choose(1)) > 0

    def _shrink_stale(self) -> bool:
        """Give back a segment of the stale namespace opened longest ago, or what else it holds.

        False if there is none left.  What can't be removed stays charged, and isn't tried again.
        """
        with self.lock:
            if not self._stale:
                return False
            stale = min(self._stale.values(), key=lambda s: (s.opened_s, s.directory.name))
            number = max(stale.segments, default=None)
            if number is None:
                del self._stale[stale.directory.name]
                charged = stale.other_bytes
            else:
                charged = stale.segments.pop(number)
        try:
            if number is None:
                remove_namespace(stale.directory, self.device)
            else:
                self.device.remove(segment_path(stale.directory / ROWS, number))
        except DeviceError as exc:
            log.warning("stale namespace %s: %s", stale.directory.name, exc)
            return True
        with self.lock:
            self.space.release(charged)
        what = "the rest" if number is None else f"segment {number}"
        log.info("gave back %s of stale namespace %s", what, stale.directory.name)
        return True

    def _meet_budget(self, opened: Sequence[RowStore]) -> None:
        """Shrink to a budget that was lowered: stale namespaces first, then the coldest rows."""
        over = self.space.charged_bytes - self.space.budget_bytes
        if over <= 0:
            return
        log.warning(
            "%s holds %s more than its budget of %s: giving back stale namespaces, then the "
            "least recently used rows",
            self.root,
            format_size(over),
            format_size(self.space.budget_bytes),
        )
        while self._shrink_stale() and self.space.charged_bytes > self.space.budget_bytes:
            pass
        before = [rows.count() for rows in opened]
        while (over := self.space.charged_bytes - self.space.budget_bytes) > 0:
            rows = self._coldest(opened)
            numbers = rows.mover.choose(over if len(opened) == 1 else 1) if rows else []
            if rows is None or not numbers:
                break
            log.warning(
                "giving back %d segments of %s: up to %d rows, the least recently used",
                len(numbers),
                rows.identity.directory,
                len(numbers) * rows.geometry.slots_per_segment,
            )
            rows.mover.give_back(numbers)
        now = [rows.count() for rows in opened]
        log.warning(
            "budget lowered: %d rows given up, %d moved",
            sum(n.rows_given_up - b.rows_given_up for n, b in zip(now, before, strict=True)),
            sum(n.rows_moved - b.rows_moved for n, b in zip(now, before, strict=True)),
        )

    def _tell_of_foreign_files(self, opened: Sequence[RowStore]) -> None:
        least = ROOT_OVERHEAD_BYTES + sum(least_bytes(rows.pool.classes[-1]) for rows in opened)
        if self._foreign_bytes and self._foreign_bytes + least > self.options.budget_bytes:
            log.warning(
                "%s: files in it that are not kvtier's take %s of the budget of %s and leave no "
                "room for rows; use a directory of its own, or a larger budget",
                self.root,
                format_size(self._foreign_bytes),
                format_size(self.options.budget_bytes),
            )

    def _coldest(self, opened: Sequence[RowStore]) -> RowStore | None:
        """Which of these has the row that was used longest ago, of those with more than one segment
        if there are any; None if none has one."""
        with self.lock:
            holdings = [(rows.holding(), rows) for rows in opened]
        most = min(2, max(holding.segments for holding, _ in holdings))
        if most == 0:
            return None
        candidates = [pair for pair in holdings if pair[0].segments >= most]
        return min(candidates, key=lambda pair: coldness(pair[0]))[1]

    def _charge_what_is_there(self) -> None:
        """Charge all files under the root, and note every namespace as stale until it is opened."""
        self.space.charge(ROOT_OVERHEAD_BYTES)
        for name in self.device.list(self.root):
            path = self.root / name
            if is_namespace_directory(name) and self.device.stat(path).is_directory:
                self._stale[name] = survey(path, self.device)
                self.space.charge(self._stale[name].charged_bytes)
            elif name == QUARANTINE:
                self._quarantine_charge = allocated_bytes(path, self.device)
                self.space.charge(self._quarantine_charge)
            elif name == STATUS:  # charged with the root, but for what is not ours
                without = {path / METADATA}
                self.space.charge(allocated_bytes(path, self.device, without))
            elif name != METADATA:  # not ours: left alone
                self._foreign_bytes += allocated_bytes(path, self.device)
        self.space.charge(self._foreign_bytes)

    def _reserve_quarantine(self, slot_bytes: int) -> None:
        """Charge what the quarantine may take, so that keeping a row asks for no room."""
        more = self.quarantine.most_bytes(slot_bytes) - self._quarantine_charge
        if more > 0:
            with self.lock:
                self.space.charge(more)
                self._quarantine_charge += more

    def usage(self) -> StoreUsage:
        with self.lock:
            space = self.space
            return StoreUsage(
                budget_bytes=space.budget_bytes,
                effective_bytes=space.effective_bytes,
                used_bytes=space.charged_bytes,
                state=space.state.value,
                state_reason=space.state_reason,
                limit=space.limit.value,
                health="degraded" if space.is_degraded else "ok",
                errno=space.last_errno,
                enospc=space.enospc,
                enospc_other=space.enospc_other,
                external_removals=self._external_removals,
                state_changes={s.value: n for s, n in space.state_changes.items()},
                rows=sum(len(rows) for rows in self._stores.values()),
                segments=sum(len(rows.pool.numbers) for rows in self._stores.values()),
            )

    def usages(self) -> dict[str, StoreUsage]:
        """Figures of each root, by its path: of one."""
        return {str(self.root): self.usage()}

    def note_external_removals(self, count: int) -> None:
        """Somebody removed the files of so many segments."""
        with self.lock:
            self._external_removals += count

    def _log_state(self, state: DiskState, reason: str) -> None:
        level = logging.INFO if state in (DiskState.GROWING, DiskState.FULL) else logging.WARNING
        log.log(level, "%s is now %s: %s", self.root, state.value, reason)

    # -- end ------------------------------------------------------------------------------------

    def maintain(self) -> None:
        """To be called now and then: write the headers in which only the order of use changed, so
        that a crash keeps it, and notice files that somebody removed."""
        for rows in self._open_stores():
            rows.check_files()
            rows.flush(recency=True)

    def write_status(self) -> None:
        """Bring what the root remembers of its use up to date, unless it is being closed.  Waits
        for the disk."""
        with self._status_lock:
            if self._closed is None:
                self._write_status(is_open=True)

    def _write_status(self, *, is_open: bool) -> None:
        if not self.has_root():
            return
        usage = self.usage()
        counts = {name: rows.count() for name, rows in self._stores.items()}
        status = StoreStatus(
            is_open=is_open,
            budget_bytes=usage.budget_bytes,
            reserve_bytes=self.space.reserve_bytes,
            used_bytes=usage.used_bytes,
            state=usage.state,
            state_reason=usage.state_reason,
            limit=usage.limit,
            health=usage.health,
            rows=usage.rows,
            queued_reads=self.engine.queued(Queue.READ),
            queued_writes=self.engine.queued(Queue.WRITE),
            read_seconds=sum(count.read_seconds for count in counts.values()),
            write_seconds=sum(count.write_seconds for count in counts.values()),
        )
        self._status.write(
            status,
            {
                name: Counters(*(getattr(count, field) for field in Counters.__struct_fields__))
                for name, count in counts.items()
            },
        )

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> CloseReport:
        """Run what is queued, for `timeout_s` at most, write what is pending, give the root up."""
        if self._closed is not None:
            return self._closed
        if self._scrubber is not None:
            self._scrubber.close()
        declined = self._count_busy()
        is_ended = self.engine.close(timeout_s).is_ended
        self._closed = CloseReport(is_ended, self._count_busy() - declined)
        if self._closed.dropped_rows:
            log.warning("%s: %d rows not written", self.root, self._closed.dropped_rows)
        if not is_ended:
            log.error("%s: I/O still under way after %g s", self.root, timeout_s)
            return self._closed
        self._log_totals()
        for rows in self._stores.values():
            rows.close()
        if self._status_lock.acquire(timeout=_STATUS_TIMEOUT_S):
            self._write_status(is_open=False)
            self._status_lock.release()
        self._stores.clear()
        with contextlib.suppress(DeviceError):
            self.device.close(self._lock_fd)
        return self._closed

    def _log_totals(self) -> None:
        counts = [rows.count() for rows in self._stores.values()]
        written = sum(count.rows_written for count in counts)
        found = sum(count.rows_read for count in counts)
        asked = found + sum(count.rows_missing + count.rows_corrupt for count in counts)
        is_useless = written and asked and not found
        remark = ": nothing of it was ever read" if is_useless else ""
        level = logging.WARNING if is_useless else logging.INFO
        log.log(
            level, "%s: %d rows written, %d of %d found%s", self.root, written, found, asked, remark
        )

    def _count_busy(self) -> int:
        return sum(rows.count().declined_busy for rows in self._stores.values())

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
