"""How to open a root."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from storage.admission import ADMISSION
from storage.codec import NO_CODEC
from storage.eviction import EVICTION


@dataclass(frozen=True, slots=True)
class DriveOptions:
    """One more root of the same store, on a drive of its own."""

    root: Path
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How to open a root.  Build it from settings with `tiering.config`, which checks them."""

    root: Path
    budget_bytes: int
    segment_bytes: int | None = None
    """About how large a new namespace's segments are; None: chosen from the budget."""
    io_threads: int = 8  # 3 to 4 saturate a drive; the others check and publish meanwhile
    write_threads: int | None = None
    """Of the I/O threads, how many may write at once; None: all but one."""
    reserve_bytes: int | None = None
    """Free space to leave on the file system; None: 1 % of it, at most 1 GiB."""
    codec: str = NO_CODEC
    """How rows are stored: one of `storage.codec.CODEC_NAMES`.  Another codec is another
    namespace: what was stored under the old setting is found again only under that one."""
    codec_always: bool = False
    """Encode also where the drive is faster than the codec: for room rather than speed."""
    eviction: str = next(iter(EVICTION))
    """Which rows go first: one of `storage.eviction.EVICTION`."""
    admission: str = next(iter(ADMISSION))
    """Which rows are worth a write once the disk is full: one of `storage.admission.ADMISSION`."""
    write_bytes_per_day: int | None = None
    """Bytes of rows, as they are before a codec, that the drive is given in any 24 hours."""
    lock_timeout_s: float = 10.0  # a predecessor that was just killed may still end its I/O
    read_timeout_s: float = 10.0  # from submission; a prefill is quicker than that
    write_timeout_s: float = 30.0  # from submission; the region pins its rows meanwhile
    quarantine_rows: int = 0
    """Rows found corrupt that are kept aside for a person, at most; charged to the budget."""
    scrub_bytes_per_s: int = 0
    """How fast rows that nobody asks for are verified; 0: not at all."""
    more_drives: tuple[DriveOptions, ...] = ()
    """Further roots, over which rows are spread: see `storage.drives`."""
    write_queue_bytes: int = 4 << 30
    """Rows that may wait to be written; more are declined.  Some seconds' work for a drive."""

    @property
    def roots(self) -> tuple[Path, ...]:
        """One per drive."""
        return (self.root, *(drive.root for drive in self.more_drives))
