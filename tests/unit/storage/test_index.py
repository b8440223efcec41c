from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import index as index_module
from storage.index import RowIndex, hashes_of
from storage.types import MAX_KEY_BYTES, Location, RowKey, SegmentId, SlotId

SLOTS = 4
A, B = RowKey(b"a"), RowKey(b"b")
PLACE = Location(SegmentId(1), SlotId(2))


class Tables(dict[Location, RowKey]):
    """What the segments' tables say."""

    def index(self) -> RowIndex:
        return RowIndex(SLOTS, lambda n: self[Location(SegmentId(n // SLOTS), SlotId(n % SLOTS))])


def test_publish_and_withdraw() -> None:
    index = Tables({PLACE: A}).index()
    index.publish(A, PLACE)
    assert A in index
    assert index.get(A) == PLACE
    assert index.get(B) is None
    assert list(index) == [A]
    with pytest.raises(AssertionError):
        index.publish(A, PLACE)
    with pytest.raises(KeyError):
        index.withdraw(B)
    for key, number in ((B, 6), (A, 5)):
        with pytest.raises(KeyError):
            index.withdraw_row(key, number)
    assert index.withdraw(A) == PLACE
    assert len(index) == 0


def test_a_place_is_pinned_until_every_reader_is_done() -> None:
    index = Tables({PLACE: A}).index()
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


def test_a_number_is_zarrs_row_index() -> None:
    index = Tables().index()
    assert index.number(PLACE) == 6
    assert index.place(6) == PLACE


@pytest.mark.parametrize("hash_bits", [1, 3, 32])
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=120),
    loaded=st.integers(0, 30),
)
def test_any_history_matches_a_dict(
    hash_bits: int, steps: list[tuple[bool, int]], loaded: int
) -> None:
    """With few hash bits every probe runs over others, around the table's end too."""
    mask = 2**hash_bits - 1
    with pytest.MonkeyPatch.context() as patch:
        plain = index_module.hash_of
        patch.setattr(index_module, "hash_of", lambda key: plain(key) | (2**32 - 1 - mask))
        keys = [RowKey(bytes([n]) * (n % MAX_KEY_BYTES + 1)) for n in range(41)]
        tables = Tables()
        index = tables.index()
        model: dict[RowKey, Location] = {}
        for number in range(loaded):
            tables[index.place(number)] = keys[number]
            model[keys[number]] = index.place(number)
        hashes = np.array([index_module.hash_of(key) for key in keys[:loaded]], np.uint64)
        index.load(hashes, np.arange(loaded))
        for is_publish, number in steps:
            key, place = keys[number], index.place(number)
            if is_publish and key not in model:
                tables[place] = key
                index.publish(key, place)
                model[key] = place
            elif not is_publish and key in model:
                if number % 2:
                    assert index.withdraw(key) == model.pop(key)
                else:
                    index.withdraw_row(key, index.number(model.pop(key)))
                del tables[place]
            assert len(index) == len(model)
        for key in keys:
            assert index.get(key) == model.get(key)
            assert (key in index) == (key in model)
        assert sorted(index) == sorted(model)


def test_hashes_of_many_are_those_of_each() -> None:
    keys = [b"", b"a", b"a\0", bytes(range(72)), b"b" * 36]
    padded = [key.ljust(MAX_KEY_BYTES, b"\0") for key in keys]
    low = hashes_of(padded) & np.uint64(2**32 - 1)
    assert low.tolist() == [index_module.hash_of(key) for key in keys]
