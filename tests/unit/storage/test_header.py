from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import header
from storage.header import ENTRY, MAX_SLOTS, SegmentGeometry
from storage.types import MAX_KEY_BYTES, PAGE_BYTES, SlotId

NAMESPACE = bytes(range(16))
geometries = st.builds(
    SegmentGeometry,
    st.sampled_from([4096, 8192, 499_712, 40_103_936]),
    st.sampled_from([1, 2, 7, 61, 62, 127, 128, 255, 256]),
)


def table_of(geometry: SegmentGeometry, seed: int) -> header.Entries:
    """A table with about half of its slots named."""
    rng = random.Random(seed)
    entries = header.new_entries(geometry)
    for slot in range(geometry.slots_per_segment):
        if rng.random() < 0.5:
            key = rng.randbytes(rng.randint(1, MAX_KEY_BYTES))
            use = rng.getrandbits(64)
            header.set_entry(geometry, entries, SlotId(slot), key, rng.getrandbits(32), use)
    return entries


def header_of(geometry: SegmentGeometry, *tables: tuple[int, header.Entries]) -> bytearray:
    """A header that was written with each (generation, table) in turn."""
    raw = bytearray(geometry.header_bytes)
    for generation, entries in tables:
        start = geometry.table_offset(generation)
        table = header.encode_table(geometry, entries, generation, NAMESPACE)
        raw[start : start + geometry.table_bytes] = table
        index = header.encode_index(geometry, entries)
        raw[: len(index)] = index
    return raw


def decode(geometry: SegmentGeometry, raw: bytes | bytearray) -> header.DecodedHeader:
    return header.decode_header(geometry, bytes(raw), NAMESPACE)


@given(geometries | st.just(SegmentGeometry(4096, MAX_SLOTS)))
def test_every_part_is_on_a_page_and_none_overlap(geometry: SegmentGeometry) -> None:
    starts = [0, geometry.table_offset(0), geometry.table_offset(1), geometry.row_offset(0)]
    assert all(start % PAGE_BYTES == 0 for start in starts)
    assert geometry.index_bytes <= starts[1]
    assert starts[1] + geometry.table_bytes == starts[2]
    assert starts[2] + geometry.table_bytes == starts[3] == geometry.header_bytes
    assert geometry.row_offset(geometry.slots_per_segment) == geometry.segment_bytes
    assert geometry.stride >= geometry.record_bytes


@settings(max_examples=40)
@given(geometries, st.integers(0, 2**32), st.integers(0, 2**63))
def test_a_header_reads_back(geometry: SegmentGeometry, seed: int, generation: int) -> None:
    older, newer = table_of(geometry, seed), table_of(geometry, seed + 1)
    decoded = decode(geometry, header_of(geometry, (generation, older), (generation + 1, newer)))
    assert decoded.generation == generation + 1
    assert decoded.entries.tobytes() == newer.tobytes()
    assert decoded.whole


@given(st.integers(0, 2**32), st.data())
def test_a_torn_newer_table_falls_back_to_the_older(seed: int, data: st.DataObject) -> None:
    geometry = SegmentGeometry(4096, 33)
    older, newer = table_of(geometry, seed), table_of(geometry, seed + 1)
    before = header_of(geometry, (6, table_of(geometry, seed + 2)), (7, older))
    after = header_of(geometry, (6, table_of(geometry, seed + 2)), (7, older), (8, newer))
    start = geometry.table_offset(8)
    used = 48 + ENTRY.itemsize * geometry.slots_per_segment
    torn_at = data.draw(st.integers(0, used))
    torn = bytearray(before)
    torn[start : start + torn_at] = after[start : start + torn_at]
    decoded = decode(geometry, torn)
    if torn == after or torn[start : start + used] == after[start : start + used]:
        assert decoded.generation == 8
    else:
        assert decoded.generation == 7
        assert decoded.entries.tobytes() == older.tobytes()
    assert decoded.whole == (torn == before)


@given(st.integers(0, 2**32), st.data())
def test_no_flipped_bit_changes_what_a_header_says(seed: int, data: st.DataObject) -> None:
    """It costs an update at most: the decoded table is one that was written."""
    geometry = SegmentGeometry(4096, 33)
    older, newer = table_of(geometry, seed), table_of(geometry, seed + 1)
    raw = header_of(geometry, (2, older), (3, newer))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decoded = decode(geometry, raw)
    assert decoded.entries.tobytes() in (older.tobytes(), newer.tobytes())
    if decoded.generation == 2:
        assert not decoded.whole


def test_a_torn_index_is_made_anew_from_the_table() -> None:
    geometry = SegmentGeometry(4096, 8)
    entries = table_of(geometry, 1)
    raw = header_of(geometry, (2, entries), (3, entries))
    raw[5] ^= 1
    decoded = decode(geometry, raw)
    assert not decoded.whole
    assert decoded.entries.tobytes() == entries.tobytes()


def test_two_torn_tables_are_an_empty_segment() -> None:
    geometry = SegmentGeometry(4096, 8)
    for raw in (bytes(geometry.header_bytes), bytes([0xFF]) * geometry.header_bytes):
        decoded = decode(geometry, raw)
        assert not decoded.whole
        assert not decoded.entries["key_bytes"].any()


def test_a_table_of_another_namespace_or_geometry_is_none() -> None:
    geometry = SegmentGeometry(4096, 8)
    raw = bytes(header_of(geometry, (2, table_of(geometry, 1)), (3, table_of(geometry, 1))))
    assert decode(geometry, raw).entries["key_bytes"].any()
    foreign = header.decode_header(geometry, raw, bytes(16))
    assert not foreign.entries["key_bytes"].any()
    other = SegmentGeometry(4096, 9)
    assert not decode(other, raw.ljust(other.header_bytes, b"\0")).entries["key_bytes"].any()


def test_a_copy_in_the_other_copys_place_does_not_count() -> None:
    geometry = SegmentGeometry(4096, 8)
    raw = header_of(geometry, (2, table_of(geometry, 1)))
    a, b = geometry.table_offset(0), geometry.table_offset(1)
    raw[b : b + geometry.table_bytes] = raw[a : a + geometry.table_bytes]
    raw[a : a + geometry.table_bytes] = bytes(geometry.table_bytes)
    assert not decode(geometry, raw).entries["key_bytes"].any()


@pytest.mark.parametrize("field", ["offset", "length", "key_bytes"])
def test_an_entry_that_points_elsewhere_is_dropped(field: str) -> None:
    geometry = SegmentGeometry(4096, 4)
    entries = header.new_entries(geometry)
    for slot in range(4):
        header.set_entry(geometry, entries, SlotId(slot), b"key%d" % slot, 7, slot)
    entries[field][2] += 4096
    decoded = decode(geometry, header_of(geometry, (2, entries), (3, entries)))
    assert [header.key_of(decoded.entries, slot) for slot in range(4)] == [
        b"key0", b"key1", None, b"key3",
    ]  # fmt: skip
    assert not decoded.whole


def test_keys_end_where_they_end() -> None:
    geometry = SegmentGeometry(4096, 3)
    entries = header.new_entries(geometry)
    keys = [b"\0", b"a\0\0", b"\0" * MAX_KEY_BYTES]
    for slot, key in enumerate(keys):
        header.set_entry(geometry, entries, SlotId(slot), key, 0, 0)
    assert [header.key_of(entries, slot) for slot in range(3)] == keys
    header.clear_entry(entries, SlotId(1))
    assert header.key_of(entries, 1) is None


@given(
    st.sampled_from([4096, 65536, 499_712, 40_103_936]),
    st.integers(1, 2**44),
    st.none() | st.integers(1, 2**40),
)
def test_a_chosen_segment_is_a_small_part_of_the_budget(
    row_bytes: int, budget: int, segment_bytes: int | None
) -> None:
    geometry = SegmentGeometry.choose(row_bytes, budget, segment_bytes)
    if geometry.slots_per_segment > 1:
        # Padding of the header aside.
        assert geometry.segment_bytes <= budget / 4 + 3 * PAGE_BYTES
        if segment_bytes is None:
            assert geometry.segment_bytes <= (1 << 30) + 3 * PAGE_BYTES


@given(geometries)
def test_a_geometry_is_found_again_from_a_segments_size(geometry: SegmentGeometry) -> None:
    size = geometry.segment_bytes
    assert SegmentGeometry.of_segment(geometry.row_bytes, size) == geometry
    for wrong in (0, size - 1, size + 1):
        assert SegmentGeometry.of_segment(geometry.row_bytes, wrong) is None
