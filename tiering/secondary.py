"""What the manager asks of a tier below the region, such as `StoreClient`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from storage.service.client import FinishedJob
from storage.types import RowKey


class SecondaryTier(Protocol):
    """A store of rows that reads into and writes from the region, never a device.

    Thread: all calls come from the scheduler's thread, and none may block or do I/O.
    Slots: from `read` or `write` until the job is polled, its slots belong to the tier; those of
    rows whose outcome is HUNG until `take_released` names them, as (job id, position).  A read
    may leave anything in the slot of a row whose outcome is not OK; a write changes nothing.
    Results: every job is polled exactly once, with one outcome per key in the order given.  A
    failed write leaves no row behind; a failed read says so, and the key may be asked again.
    `clear` makes one outcome: OK once no row is left, also after a crash; what is written then is
    found by this engine alone, and only until it ends.
    `touch` ignores keys that the tier has not.
    `in` is answered from memory and may be stale: the read then reports MISSING.
    """

    @property
    def takes_writes(self) -> bool:
        """Whether a write is worth offering now, as far as is known: else only as a probe."""
        ...

    @property
    def write_rows_max(self) -> int:
        """Rows that may wait to be written; more are declined."""
        ...

    def __contains__(self, key: bytes) -> bool: ...

    def missing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """Those of `keys` that are not `in` it."""
        ...

    def read(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int: ...

    def write(self, keys: Sequence[RowKey], slots: Sequence[int]) -> int: ...

    def touch(self, keys: Iterable[RowKey]) -> None: ...

    def clear(self) -> int: ...

    def poll(self) -> list[FinishedJob]: ...

    def take_released(self) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...
