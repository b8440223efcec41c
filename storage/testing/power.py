"""A model of power loss: of what was written and not synced, any page may be lost.

The device below has taken every write, but a disk keeps what it likes of those after the last sync
of a file, page by page and in any order.  `PowerLossDevice` remembers each page's contents since
then; after the store was abandoned, `lose` puts older contents back into the pages that a test or
a seed chooses.  File sizes, names and `write_file` (which syncs) are taken as kept: a journal
orders those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from storage.device import LocalDevice
from storage.types import PAGE_BYTES


class PowerLossDevice(LocalDevice):
    """A local device that remembers.  For small stores in tests: it keeps every unsynced page."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[int, Path] = {}
        self._versions: dict[Path, dict[int, list[bytes]]] = {}  # file -> page -> oldest first

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:  # noqa: ARG002
        fd = super().open(path, create=create, direct=False)
        self._files[fd] = path
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self._files[fd]
        pages = self._versions.setdefault(path, {})
        size = sum(buffer.nbytes for buffer in buffers)
        numbers = range(offset // PAGE_BYTES, -(-(offset + size) // PAGE_BYTES))
        before = {number: _page(path, number) for number in numbers}
        count = super().pwritev(fd, buffers, offset)
        for number in numbers:
            pages.setdefault(number, []).append(before[number])
        return count

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._versions.pop(self._files[fd], None)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source in self._versions:
            self._versions[target] = self._versions.pop(source)
        self._files = {fd: target if p == source else p for fd, p in self._files.items()}

    def lose(self, rng: random.Random, share: float) -> int:
        """Put one of its older contents back into about `share` of the unsynced pages; how many.

        The store must have been abandoned.  Repeatable for a given `rng`.
        """
        lost = 0
        for path in sorted(self._versions):
            if not path.exists():
                continue
            with path.open("r+b") as file:
                for number, versions in sorted(self._versions[path].items()):
                    if rng.random() < share:
                        file.seek(number * PAGE_BYTES)
                        file.write(rng.choice(versions))
                        lost += 1
        self._versions.clear()
        return lost


def _page(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        file.seek(number * PAGE_BYTES)
        return file.read(PAGE_BYTES).ljust(PAGE_BYTES, b"\0")
