"""Rows whose bytes follow from their key, buffers for them, and a watch on the bytes on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from storage.device import aligned_buffer
from storage.types import RowKey


def key_of(number: int) -> RowKey:
    """A key as long as vLLM's: a sha256 and a group index."""
    return RowKey(hashlib.sha256(b"%d" % number).digest() + bytes(4))


def row_of(key: RowKey, row_bytes: int) -> bytes:
    """The row that belongs to `key`: a pure function, so that any process can check any row."""
    return hashlib.shake_128(key).digest(row_bytes)


def soft_row_of(key: RowKey, row_bytes: int) -> bytes:
    """Like `row_of`, but with 6 of 8 bits drawn: a codec makes about 3/4 of it."""
    mask = int.from_bytes(b"\x3f" * row_bytes, "little")
    return (int.from_bytes(row_of(key, row_bytes), "little") & mask).to_bytes(row_bytes, "little")


def aligned_rows(count: int, row_bytes: int, fill: int = 0) -> list[memoryview]:
    """`count` page-aligned buffers of one mapping, every byte `fill`."""
    mapping = aligned_buffer(count * row_bytes)
    if fill:
        mapping[:] = bytes([fill]) * len(mapping)
    return [mapping[i * row_bytes : (i + 1) * row_bytes] for i in range(count)]


def filled_rows(
    keys: Sequence[RowKey], row_bytes: int, of: Callable[[RowKey, int], bytes] = row_of
) -> list[memoryview]:
    """The rows of `keys`, in page-aligned buffers."""
    rows = aligned_rows(len(keys), row_bytes)
    for key, row in zip(keys, rows, strict=True):
        row[:] = of(key, row_bytes)
    return rows


def bytes_on_disk(root: Path) -> int:
    """Allocated bytes of all regular files under `root`: what a budget is about."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # replaced while we look
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return total


def files_under(root: Path) -> list[str]:
    """Relative names of all regular files, sorted."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


class BudgetWatch:
    """Samples `bytes_on_disk` in a thread of its own; `highest` is the most it saw."""

    def __init__(self, root: Path, every_s: float = 0.005) -> None:
        self.highest = 0
        self.samples = 0
        self._root = root
        self._every_s = every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while True:
            self.highest = max(self.highest, bytes_on_disk(self._root))
            self.samples += 1
            if self._end.wait(self._every_s):
                return

    def __enter__(self) -> BudgetWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self.highest = max(self.highest, bytes_on_disk(self._root))
