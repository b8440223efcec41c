"""IndexReplica: which rows the store has, as far as an engine knows.  Pure; one thread.

The store process tells every change; nobody is asked.  What the replica holds may be older than
the store by what is still on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from storage.changes import ChangeLog, Changes
from storage.types import RowKey


class IndexReplica:
    """The keys that were published and not withdrawn.  While it is hidden, lookups find none."""

    def __init__(self) -> None:
        self._keys: set[RowKey] = set()
        self.found: set[RowKey] = self._keys
        """What lookups find: all keys, or nothing."""
        self._changes: ChangeLog | None = None
        self.is_hidden = False

    def __len__(self) -> int:
        """All keys, hidden or not."""
        return len(self._keys)

    def missing(self, keys: Iterable[RowKey]) -> list[RowKey]:
        """Those of `keys` that lookups don't find."""
        found = self.found
        return [key for key in keys if key not in found]

    # -- what the store says --------------------------------------------------------------------

    def publish(self, keys: Sequence[RowKey], *, were_there: bool) -> None:
        """The store has `keys`.  Those that it had before it served this engine can wait to be
        told to who follows."""
        if self._changes is not None:
            new = [key for key in dict.fromkeys(keys) if key not in self._keys]
            if were_there:
                self._changes.note_found(new)
            else:
                self._changes.note_stored(new)
        self._keys.update(keys)

    def withdraw(self, keys: Sequence[RowKey]) -> None:
        """The store has `keys` no more."""
        if self._changes is not None:
            self._changes.note_removed(self._keys.intersection(keys))
        self._keys.difference_update(keys)

    # -- whether it says anything ---------------------------------------------------------------

    def hide(self) -> None:
        """The store does not answer: nothing is found until `show`."""
        self.is_hidden, self.found = True, set()
        if self._changes is not None:
            self._changes.note_lost(set(self._keys))

    def show(self) -> None:
        """Undo `hide`."""
        self.is_hidden, self.found = False, self._keys
        if self._changes is not None:
            self._changes.note_all_found(self._keys)

    def forget(self) -> None:
        """The store is gone, and with it every key."""
        if self._changes is not None and not self.is_hidden:
            self._changes.note_lost(self._keys)
        self._keys = self.found = set()
        self.is_hidden = False

    # -- who wants to know ----------------------------------------------------------------------

    def follow(self) -> None:
        """From here on `take_changes` tells how `found` changes, from all of it on."""
        self._changes = ChangeLog(self.found)

    @property
    def change_count(self) -> int:
        """Changes to take; 0 if nobody follows."""
        return 0 if self._changes is None else len(self._changes)

    def take_changes(self, limit: int) -> Changes:
        """The next keys, `limit` at most, that are found no more, and that are found now.  Only
        after `follow`."""
        assert self._changes is not None, "nobody follows"
        return self._changes.take(limit)
