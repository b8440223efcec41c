"""What a look at a root finds: what should not be as it is, and what weighs how much."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from storage.device import FileStat


class Trouble(Enum):
    """What a finding is about."""

    TORN_HEADER = "torn header"
    """No copy of a key table is what was written: the segment has no rows any more."""
    CUT_SHORT = "cut short"
    WRONG_SIZE = "wrong size"
    UNREADABLE = "unreadable"
    HALF_DELETED = "half deleted"
    """A namespace without its metadata: a removal, or a making, that did not end."""
    BAD_METADATA = "bad metadata"
    NEWER_FORMAT = "newer format"
    NAMED_TWICE = "named twice"
    """A key in two slots: the more recent one counts when the root is opened."""
    LEFTOVER = "leftover"
    """A file that a crash left half-made; the next opening removes it."""
    FOREIGN = "foreign"
    """Not of kvtier's making; it counts against the budget."""


class Finding(NamedTuple):
    """Something in a root that should not be as it is."""

    trouble: Trouble
    path: Path
    text: str

    def __str__(self) -> str:
        return f"{self.trouble.value}: {self.path}: {self.text}"


@dataclass
class Weight:
    """Of files: apparent bytes, allocated bytes (`st_blocks`), and how many they are."""

    apparent_bytes: int = 0
    allocated_bytes: int = 0
    files: int = 0

    def add(self, stat: FileStat) -> None:
        self.apparent_bytes += stat.size_bytes
        self.allocated_bytes += stat.allocated_bytes
        self.files += 1

    def __iadd__(self, other: Weight) -> Weight:
        self.apparent_bytes += other.apparent_bytes
        self.allocated_bytes += other.allocated_bytes
        self.files += other.files
        return self
