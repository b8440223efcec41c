"""Which keys came and went since somebody last asked, for who follows a set of keys.  Pure.

What is kept is the difference between the set as it is and as the follower knows it, not a history:
a key that comes and goes in between is not told, and what is kept never grows beyond the keys that
are there and those that were told.  So a follower that applies everything it takes, in whatever
pieces, has exactly the set once `ChangeLog` is empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from storage.types import RowKey


class Changes(NamedTuple):
    """No key is in both.  `stored` is in the order in which the keys came, but for those that were
    there from the start."""

    removed: list[RowKey]
    stored: list[RowKey]


class ChangeLog:
    """The changes of a set of keys that a follower has not taken yet.

    The owner of the set reports each key that comes, once, and each that goes, once.
    """

    def __init__(self, found: Iterable[RowKey] = ()) -> None:
        """`found` are in the set already, and to be told."""
        self._stored: dict[RowKey, None] = {}
        self._found = set(found)  # told when nothing else is: there may be a million of them
        self._removed: set[RowKey] = set()

    def __len__(self) -> int:
        """Changes not taken yet."""
        return len(self._removed) + len(self._stored) + len(self._found)

    def note_stored(self, keys: Iterable[RowKey]) -> None:
        for key in keys:
            if key in self._removed:
                self._removed.remove(key)
            else:
                self._stored[key] = None

    def note_found(self, keys: Iterable[RowKey]) -> None:
        """As `note_stored`, of keys that can wait."""
        for key in keys:
            if key in self._removed:
                self._removed.remove(key)
            else:
                self._found.add(key)

    def note_removed(self, keys: Iterable[RowKey]) -> None:
        for key in keys:
            if key in self._stored:
                del self._stored[key]
            elif key in self._found:
                self._found.remove(key)
            else:
                self._removed.add(key)

    def note_lost(self, keys: set[RowKey]) -> None:
        """The whole set is gone; `keys` were in it and are the log's from now on.  Costs what was
        not taken yet, not the size of the set."""
        keys.difference_update(self._stored, self._found)
        keys.update(self._removed)
        self._removed, self._stored, self._found = keys, {}, set()

    def note_all_found(self, keys: set[RowKey]) -> None:
        """A set that was empty consists of `keys` now, which can wait."""
        self._found = keys - self._removed
        self._removed -= keys

    def take(self, limit: int) -> Changes:
        """The next changes, `limit` at most: first what is gone, last what was found."""
        removed = _pop(self._removed, limit)
        stored = list(islice(self._stored, limit - len(removed)))
        for key in stored:
            del self._stored[key]
        return Changes(removed, stored + _pop(self._found, limit - len(removed) - len(stored)))


def _pop(keys: set[RowKey], limit: int) -> list[RowKey]:
    return [keys.pop() for _ in range(min(limit, len(keys)))]
