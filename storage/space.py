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

# ext4 keeps four extents in the inode and counts further ones, in 4 KiB blocks of 340, in
# st_blocks.  Writing into unwritten extents splits them, so a segment may still grow by a few.
SEGMENT_OVERHEAD_BYTES = 32 << 10
# Two small zarr.json files, each for a moment beside its successor, and three directories.
NAMESPACE_OVERHEAD_BYTES = 64 << 10
ROOT_OVERHEAD_BYTES = 32 << 10  # the root's zarr.json and its successor

_BACKOFF_S_MIN = 1.0
_BACKOFF_S_MAX = 60.0


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


_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EFBIG})
_READ_ONLY_ERRNOS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def is_full(code: int) -> bool:
    """Whether an errno says that something is used up: space, quota, files, size."""
    return code in _FULL_ERRNOS


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
    _probe_at: float = field(default=0.0, init=False)
    _backoff_s: float = field(default=_BACKOFF_S_MIN, init=False)

    def can_charge(self, size_bytes: int, available_bytes: int) -> bool:
        """Whether `size_bytes` fit the budget and, less the reserve, the free space."""
        within_budget = self.charged_bytes + size_bytes <= self.budget_bytes
        return within_budget and size_bytes + self.reserve_bytes <= available_bytes

    def charge(self, size_bytes: int) -> None:
        self.charged_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.charged_bytes -= size_bytes
        assert self.charged_bytes >= 0, "more released than charged"

    def may_grow(self) -> bool:
        """Whether growing is worth a try now: not on a full disk until its next probe.

        Only who `may_write` asks, so that in the other states growing is part of a probe.
        """
        return self.state is not DiskState.FULL or self.now() >= self._probe_at

    def may_write(self) -> bool:
        """Whether a write may be tried: always, but read-only or suspended only as a probe."""
        if self.state in (DiskState.GROWING, DiskState.FULL):
            return True
        if self.now() < self._probe_at:
            return False
        self._probe_at = self.now() + self._backoff_s  # one probe at a time
        return True

    def growth_refused(self, reason: str) -> None:
        """The budget or the file system has no more room: reuse slots, probe again later."""
        if self.state in (DiskState.GROWING, DiskState.FULL):
            self._enter(DiskState.FULL, reason)

    def growth_failed(self, code: int, reason: str, *, can_reuse: bool) -> bool:
        """Making a segment ended with errno `code`.  Whether to go on and reuse slots.

        What fails on new files need not fail on those that are there (`can_reuse`: there are
        some), so the next write decides; only a read-only file system is read-only throughout.
        """
        if can_reuse and code != errno.EROFS and not is_full(code):
            self.growth_refused(reason)
        else:
            self.write_failed(code, reason)
        return code != errno.EROFS

    def growth_succeeded(self) -> None:
        if self.state is not DiskState.GROWING:
            self._enter(DiskState.GROWING, "there is room again")

    def write_failed(self, code: int, reason: str) -> None:
        """A write ended with errno `code`."""
        if is_full(code):
            self._enter(DiskState.FULL, reason)
        elif code in _READ_ONLY_ERRNOS:
            self._enter(DiskState.READ_ONLY, reason)
        else:
            self._enter(DiskState.SUSPENDED, reason)

    def write_succeeded(self) -> None:
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
            self.on_state(state, reason)
