"""The root's budget and the states of its disk.  Pure: told what happened, asked what may happen.

Growth asks first: the state, the budget, the free space less a reserve; then `posix_fallocate` has
the last word.  What is charged is a promise that can't be broken later: a segment with everything
that the file system may still add to it (extent blocks), a namespace with its metadata.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from storage.device import SpaceStat
from storage.errors import DeviceError

# ext4 keeps four extents in the inode and counts further ones, in 4 KiB blocks of 340, in
# st_blocks.  Writing into unwritten extents splits them, so a segment may still grow by a few.
SEGMENT_OVERHEAD_BYTES = 32 << 10
# Two small zarr.json files, each for a moment beside its successor, and three directories.
NAMESPACE_OVERHEAD_BYTES = 64 << 10
# The zarr.json of the root and of its status, each for a moment beside its successor; a directory.
ROOT_OVERHEAD_BYTES = 96 << 10

_RESERVE_FRACTION = 100  # 1/100 of the file system stays free ...
_RESERVE_BYTES_MAX = 1 << 30  # ... but no more than this

DEGRADED_AFTER = 8  # consecutive failed reads or writes; a stray one is no finding

_BACKOFF_S_MIN = 1.0
_BACKOFF_S_MAX = 60.0


def default_reserve(total_bytes: int) -> int:
    """Free space to leave on a file system of that size, if nothing else is asked for."""
    return min(total_bytes // _RESERVE_FRACTION, _RESERVE_BYTES_MAX)


class DiskState(Enum):
    """How the disk takes writes.  Reads go on in every state."""

    GROWING = "growing"
    """New segments may be made."""
    FULL = "full"
    """The budget or the disk is used up: slots are reused, nothing grows."""
    READ_ONLY = "read-only"
    """EROFS, EACCES, EPERM: no writes until a probe succeeds."""
    SUSPENDED = "suspended"
    """EIO and the like: no writes until a probe succeeds."""


class Limit(Enum):
    """What keeps a store from growing."""

    NONE = ""
    BUDGET = "budget"
    SPACE = "space"
    """Of the file system, less the reserve."""
    QUOTA = "quota"
    """A limit that the file system does not show: EDQUOT."""
    FILE_SIZE = "file size"
    """Of one file, by the file system or by this process's own limit: EFBIG."""
    INODES = "inodes"
    DESCRIPTORS = "descriptors"
    """Open files of this process or of the machine: EMFILE, ENFILE."""
    NAMES = "names"
    """ENOSPC for a new name although there are bytes and inodes: a directory's own limit."""
    DEVICE = "device"
    """New files fail for another reason, such as EIO or EACCES."""


_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG})
_READ_ONLY_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def is_full(code: int) -> bool:
    """Whether an errno says that something is used up: space, quota, files, size."""
    return code in _FULL_ERRNOS


_NAMING_OPS = frozenset({"open", "make_directory", "rename", "write_file"})
_INODES_OF_A_SEGMENT = 2  # a directory and a file


def limit_of(error: DeviceError, stat: SpaceStat | None, size_bytes: int) -> Limit:
    """What was short when making a file of `size_bytes` failed; `stat` was taken after that."""
    match error.errno:
        case errno.EDQUOT:
            return Limit.QUOTA
        case errno.EMFILE | errno.ENFILE:
            return Limit.DESCRIPTORS
        case errno.EFBIG:
            return Limit.FILE_SIZE
        case errno.ENOSPC:
            if stat is None:
                return Limit.SPACE
            if stat.total_inodes and stat.available_inodes < _INODES_OF_A_SEGMENT:
                return Limit.INODES
            has_room = stat.available_bytes >= size_bytes
            return Limit.NAMES if has_room and error.op in _NAMING_OPS else Limit.SPACE
        case _:
            return Limit.DEVICE


@dataclass
class Space:
    """One root's ledger.  The caller holds its lock around every call.

    `now` is a monotonic clock in seconds.  Nothing is charged beyond `budget_bytes` except, at the
    start, what is there already.
    """

    budget_bytes: int
    reserve_bytes: int
    now: Callable[[], float]
    on_state: Callable[[DiskState, str], None] = lambda _state, _reason: None
    charged_bytes: int = 0
    state: DiskState = DiskState.GROWING
    state_reason: str = ""
    limit: Limit = Limit.NONE
    """What the last refused growth lacked; NONE again once it succeeded."""
    state_changes: dict[DiskState, int] = field(default_factory=dict)
    """How often each state was entered."""
    enospc: int = 0
    """Calls that ended with ENOSPC or EDQUOT for want of space, inodes or quota."""
    enospc_other: int = 0
    """Calls that ended with ENOSPC though there was room: `Limit.NAMES`."""
    failures: int = 0
    """Reads and writes that failed since the last one that succeeded."""
    last_errno: int = 0
    """Of the last failure."""
    _refused_bytes: int = field(default=0, init=False)
    _probe_at: float = field(default=0.0, init=False)
    _backoff_s: float = field(default=_BACKOFF_S_MIN, init=False)

    def can_charge(self, size_bytes: int, available_bytes: int) -> bool:
        """Whether `size_bytes` fit the budget and, less the reserve, the free space."""
        return size_bytes <= self.room(available_bytes)

    def room(self, available_bytes: int) -> int:
        """How much could be charged with so much free space."""
        within_budget = self.budget_bytes - self.charged_bytes
        return max(0, min(within_budget, available_bytes - self.reserve_bytes))

    def charge(self, size_bytes: int) -> None:
        self.charged_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.charged_bytes -= size_bytes
        if size_bytes and self.state is DiskState.FULL and self.limit is Limit.BUDGET:
            self._probe_at = self.now()  # what was lacking is there again
        assert self.charged_bytes >= 0, "more released than charged"

    @property
    def effective_bytes(self) -> int:
        """What the root may hold as far as is known: less than the budget once the disk said so."""
        is_short = self.limit not in (Limit.NONE, Limit.BUDGET)
        return min(self.charged_bytes, self.budget_bytes) if is_short else self.budget_bytes

    @property
    def is_degraded(self) -> bool:
        """Whether the disk takes no writes, or has failed `DEGRADED_AFTER` times in a row."""
        return not self.takes_writes or self.failures >= DEGRADED_AFTER

    @property
    def takes_writes(self) -> bool:
        """Whether the disk has taken what was written last."""
        return self.state in (DiskState.GROWING, DiskState.FULL)

    def may_grow(self) -> bool:
        """Whether growing is worth a try now: not on a full disk until its next probe.

        Only who `may_write` asks, so that in the other states growing is part of a probe.
        """
        return self.state is not DiskState.FULL or self.now() >= self._probe_at

    def is_writable(self) -> bool:
        """What `may_write` would say, without spending the probe."""
        return self.takes_writes or self.now() >= self._probe_at

    def may_write(self) -> bool:
        """Whether a write may be tried: always, but read-only or suspended only as a probe."""
        if self.takes_writes:
            return True
        if self.now() < self._probe_at:
            return False
        self._probe_at = self.now() + self._backoff_s  # one probe at a time
        return True

    def growth_refused(self, limit: Limit, reason: str, size_bytes: int = 0) -> None:
        """The budget or the file system has no more room for `size_bytes`: reuse slots, probe
        again later."""
        self.limit = limit
        self._refused_bytes = size_bytes
        if self.state in (DiskState.GROWING, DiskState.FULL):
            self._enter(DiskState.FULL, reason)

    def growth_failed(self, limit: Limit, code: int, reason: str, *, can_reuse: bool) -> None:
        """Making a segment ended with errno `code`.

        What fails on new files need not fail on those that are there (`can_reuse`: there are
        some), so the next write decides; only a read-only file system is read-only throughout.
        """
        self.limit = limit
        if limit is Limit.NAMES:
            self.enospc_other += 1
        elif code in (errno.ENOSPC, errno.EDQUOT):
            self.enospc += 1
        if is_full(code) or (can_reuse and code != errno.EROFS):
            self.growth_refused(limit, reason)
        else:
            self._fail(code, reason)

    def growth_succeeded(self) -> None:
        """A segment was made; in the place of another, if the budget is still used up."""
        is_used_up = self.charged_bytes + self._refused_bytes > self.budget_bytes
        if self.limit is Limit.BUDGET and is_used_up:
            return
        self.limit = Limit.NONE
        if self.state is not DiskState.GROWING:
            self._enter(DiskState.GROWING, "there is room again")

    def write_failed(self, code: int, reason: str) -> None:
        """A write to a slot ended with errno `code`."""
        if code in (errno.ENOSPC, errno.EDQUOT):
            self.enospc += 1
            self.limit = Limit.QUOTA if code == errno.EDQUOT else Limit.SPACE
        self._fail(code, reason)

    def place_failed(self, code: int) -> None:
        """A read ended with errno `code`, or a write to one place of a disk that takes others:
        that says nothing about further writes."""
        self.failures += 1
        self.last_errno = code

    def read_succeeded(self) -> None:
        self.failures = 0

    def _fail(self, code: int, reason: str) -> None:
        self.failures += 1
        self.last_errno = code
        if is_full(code):
            self._enter(DiskState.FULL, reason)
        elif code in _READ_ONLY_ERRNOS:
            self._enter(DiskState.READ_ONLY, reason)
        else:
            self._enter(DiskState.SUSPENDED, reason)

    def write_succeeded(self) -> None:
        self.failures = 0
        if self.state in (DiskState.READ_ONLY, DiskState.SUSPENDED):
            self._enter(DiskState.GROWING, "writes succeed again")

    def _enter(self, state: DiskState, reason: str) -> None:
        if state is DiskState.GROWING:
            self._backoff_s = _BACKOFF_S_MIN
        else:
            self._probe_at = self.now() + self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S_MAX)
        changed = state is not self.state
        self.state, self.state_reason = state, reason
        if changed:
            self.state_changes[state] = self.state_changes.get(state, 0) + 1
            self.on_state(state, reason)
