"""Which rows go first.  Pure bookkeeping: no bytes, files, clocks or locks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import filterfalse, islice
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Name = TypeVar("Name", bound=Hashable)


class LeastRecentlyUsed(Generic[Name]):
    """Names in the order of their last use.  The caller serialises calls.

    A request's names are touched last first, so that its first chunk is the most recent: a chunk
    whose prefix is gone can't be hit (`touch_chain`).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Name, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: object) -> bool:
        return name in self._order

    def add(self, name: Name) -> None:
        """`name` is new and the most recent."""
        assert name not in self._order, f"{name!r} is there already"
        self._order[name] = None

    def touch(self, name: Name) -> None:
        """`name`, if known, becomes the most recent."""
        if name in self._order:
            self._order.move_to_end(name)

    def add_chain(self, names: Sequence[Name]) -> None:
        """The chunks of one request, given first to last, are new; the first is the most recent."""
        order, count = self._order, len(self._order)
        for name in reversed(names):
            order[name] = None
        assert len(order) == count + len(names), "one of them was there already"

    def touch_chain(self, names: Iterable[Name]) -> None:
        """Touch the chunks of one request, given first to last, leaf first."""
        order, move_to_end = self._order, self._order.move_to_end
        for name in reversed(list(names)):
            if name in order:
                move_to_end(name)

    def remove(self, name: Name) -> None:
        del self._order[name]

    def remove_all(self, names: Iterable[Name]) -> None:
        order = self._order
        for name in names:
            del order[name]

    def victims(self, count: int, is_pinned: Callable[[Name], bool] | None) -> list[Name]:
        """Up to `count` names that may go, least recent first.  They stay until removed."""
        free = self._order if is_pinned is None else filterfalse(is_pinned, self._order)
        return list(islice(free, count))

    def oldest_first(self) -> list[Name]:
        return list(self._order)


class RowLinks:
    """Which row was used next, and before: 8 bytes per row number up to the highest ever added.

    Orders that share no row may share links.
    """

    def __init__(self) -> None:
        self.newer = array("i")  # of a row in some order; _END behind the last; _ABSENT: in none
        self.older = array("i")

    def __contains__(self, row: int) -> bool:
        return row < len(self.newer) and self.newer[row] != _ABSENT

    def grow(self, rows: int) -> None:
        """Make room for numbers below `rows`."""
        more = array("i", [_ABSENT]) * (rows - len(self.newer))
        self.newer.extend(more)
        self.older.extend(more)


_END = -1
_ABSENT = -2


class EvictionPolicy(Protocol):
    """An order of row numbers, the next victim first.  The caller serialises calls."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The next victim first."""
        ...

    def add(self, row: int) -> None:
        """`row` is new and goes last."""
        ...

    def load(self, rows: npt.NDArray[np.int64]) -> None:
        """Add many rows at once, the next victim first, to an order without any."""
        ...

    def touch(self, row: int) -> bool:
        """`row` was used.  Whether its place in the order follows from that."""
        ...

    def remove(self, row: int) -> None: ...

    def replace(self, row: int, other: int) -> None:
        """`row` has the number `other` from now on; its place in the order stays."""
        ...

    def victims(self, count: int, is_pinned: Callable[[int], bool]) -> list[int]:
        """Up to `count` rows that may go, the first to go first.  They stay until removed."""
        ...


class LeastRecentlyUsedRows:
    """`LeastRecentlyUsed` of row numbers, in no more memory than its links.

    A row is in one of the orders that share links; only that one is asked about it.
    """

    def __init__(self, links: RowLinks | None = None) -> None:
        self._links = links or RowLinks()
        self._oldest = self._newest = _END
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, row: int) -> bool:
        return row in self._links

    def __iter__(self) -> Iterator[int]:
        """Least recent first."""
        newer = self._links.newer
        row = self._oldest
        while row != _END:
            yield row
            row = newer[row]

    def add(self, row: int) -> None:
        """`row` is new and the most recent."""
        assert row not in self._links, f"{row} is there already"
        self._links.grow(row + 1)
        self._append(row)
        self._count += 1

    def load(self, rows: npt.NDArray[np.int64]) -> None:
        """Add many rows at once, least recent first, to an order without any."""
        assert not self._count
        if not len(rows):
            return
        self._links.grow(int(rows.max()) + 1)
        chain = np.concatenate(([_END], rows, [_END])).astype(np.intc)
        np.frombuffer(self._links.newer, np.intc)[chain[1:-1]] = chain[2:]
        np.frombuffer(self._links.older, np.intc)[chain[1:-1]] = chain[:-2]
        self._oldest, self._newest = int(rows[0]), int(rows[-1])
        self._count = len(rows)

    def touch(self, row: int) -> bool:
        """`row`, if known, becomes the most recent."""
        if row not in self._links:
            return False
        if row != self._newest:
            self._cut(row)
            self._append(row)
        return True

    def touch_chain(self, rows: Iterable[int]) -> None:
        """Touch the chunks of one request, given first to last, leaf first."""
        for row in reversed(list(rows)):
            self.touch(row)

    def remove(self, row: int) -> None:
        """Raises `KeyError` for a row that is not there."""
        if row not in self._links:
            raise KeyError(row)
        self._cut(row)
        self._links.newer[row] = _ABSENT
        self._count -= 1

    def replace(self, row: int, other: int) -> None:
        """`row` has the number `other` from now on, and is as recent as it was."""
        assert other not in self._links, f"{other} is there already"
        links = self._links
        links.grow(other + 1)
        newer, older = links.newer[row], links.older[row]
        links.newer[other], links.older[other] = newer, older
        if older == _END:
            self._oldest = other
        else:
            links.newer[older] = other
        if newer == _END:
            self._newest = other
        else:
            links.older[newer] = other
        links.newer[row] = _ABSENT

    def victims(self, count: int, is_pinned: Callable[[int], bool]) -> list[int]:
        """Up to `count` rows that may go, least recent first.  They stay until removed."""
        return list(islice((row for row in self if not is_pinned(row)), count))

    def oldest_first(self) -> list[int]:
        return list(self)

    def _append(self, row: int) -> None:
        links = self._links
        links.newer[row] = _END
        links.older[row] = self._newest
        if self._newest == _END:
            self._oldest = row
        else:
            links.newer[self._newest] = row
        self._newest = row

    def _cut(self, row: int) -> None:
        newer, older = self._links.newer[row], self._links.older[row]
        if older == _END:
            self._oldest = newer
        else:
            self._links.newer[older] = newer
        if newer == _END:
            self._newest = older
        else:
            self._links.older[newer] = older


class FirstInFirstOutRows(LeastRecentlyUsedRows):
    """Rows in the order in which they came: up to 4 points fewer hits, and no header that is
    written for recency alone."""

    def touch(self, row: int) -> bool:  # noqa: ARG002
        return False


EVICTION: dict[str, Callable[[RowLinks], EvictionPolicy]] = {
    "lru": LeastRecentlyUsedRows,
    "fifo": FirstInFirstOutRows,
}
"""By the names that the settings use; the first is the default."""


_FAR = 1.5  # so that classes of like age do not take segments from each other in turns


def is_colder_by_far(now: int, use: float, other_use: float) -> bool:
    """Whether a use is much longer ago than another; `now` is the count of uses."""
    return now - use > _FAR * (now - other_use)
