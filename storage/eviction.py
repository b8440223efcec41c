"""Which rows go first.  Pure bookkeeping: no bytes, files, clocks or locks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Generic, TypeVar

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

    def touch_chain(self, names: Iterable[Name]) -> None:
        """Touch the chunks of one request, given first to last, leaf first."""
        for name in reversed(list(names)):
            self.touch(name)

    def remove(self, name: Name) -> None:
        del self._order[name]

    def victims(self, count: int, is_pinned: Callable[[Name], bool]) -> list[Name]:
        """Up to `count` names that may go, least recent first.  They stay until removed."""
        return list(islice((name for name in self._order if not is_pinned(name)), count))

    def oldest_first(self) -> list[Name]:
        return list(self._order)
