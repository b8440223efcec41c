from __future__ import annotations

import pytest

from storage.index import RowIndex
from storage.types import Location, RowKey, SegmentId, SlotId

A, B = RowKey(b"a"), RowKey(b"b")
PLACE = Location(SegmentId(1), SlotId(2))


def test_publish_and_withdraw() -> None:
    index = RowIndex()
    index.publish(A, PLACE)
    assert A in index
    assert index.get(A) == PLACE
    assert index.get(B) is None
    assert list(index) == [A]
    with pytest.raises(AssertionError):
        index.publish(A, PLACE)
    assert index.withdraw(A) == PLACE
    assert len(index) == 0


def test_a_place_is_pinned_until_every_reader_is_done() -> None:
    index = RowIndex()
    index.publish(A, PLACE)
    index.pin(PLACE)
    index.pin(PLACE)
    assert index.pin_count == 2
    index.unpin(PLACE)
    assert index.is_pinned(A)
    index.unpin(PLACE)
    assert not index.is_pinned(A)
    assert not index.place_is_pinned(PLACE)
    assert index.pin_count == 0
    with pytest.raises(KeyError):
        index.unpin(PLACE)
