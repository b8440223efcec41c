"""Key -> place, in memory.  Pure: it says what the headers say, and who is reading."""

from __future__ import annotations

from collections.abc import Iterator

from storage.types import Location, RowKey


class RowIndex:
    """The published rows of a namespace, and the pins of reads under way.

    The caller serialises calls.  A pinned row is not evicted and its slot not overwritten.
    """

    def __init__(self) -> None:
        self._places: dict[RowKey, Location] = {}
        self._pins: dict[Location, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[RowKey]:
        return iter(self._places)

    def get(self, key: RowKey) -> Location | None:
        return self._places.get(key)

    def publish(self, key: RowKey, place: Location) -> None:
        assert key not in self._places, f"{key.hex()} is published already"
        self._places[key] = place

    def withdraw(self, key: RowKey) -> Location:
        return self._places.pop(key)

    def pin(self, place: Location) -> None:
        self._pins[place] = self._pins.get(place, 0) + 1

    def unpin(self, place: Location) -> None:
        count = self._pins[place] - 1
        assert count >= 0
        if count:
            self._pins[place] = count
        else:
            del self._pins[place]

    def is_pinned(self, key: RowKey) -> bool:
        return self._places[key] in self._pins

    def place_is_pinned(self, place: Location) -> bool:
        return place in self._pins

    @property
    def pin_count(self) -> int:
        return sum(self._pins.values())
