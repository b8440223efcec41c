from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import header
from storage.header import ENTRY, FRAME_HEAD_BYTES, MAX_SLOTS, Record, SegmentGeometry
from storage.namespace import Identity, namespace_metadata, rows_metadata
from storage.types import MAX_KEY_BYTES, PAGE_BYTES, SlotId

NAMESPACE = bytes(range(16))
plain_geometries = st.builds(
    SegmentGeometry,
    st.sampled_from([4096, 8192, 499_712, 40_103_936]),
    st.sampled_from([1, 2, 7, 61, 62, 127, 128, 255, 256]),
)
geometries = plain_geometries | plain_geometries.flatmap(
    lambda plain: st.sampled_from(plain.size_classes())
)


def table_of(geometry: SegmentGeometry, seed: int) -> header.Entries:
    """A table with about half of its slots named."""
    rng = random.Random(seed)
    entries = header.new_entries(geometry)
    for slot in range(geometry.slots_per_segment):
        if rng.random() < 0.5:
            key = rng.randbytes(rng.randint(1, MAX_KEY_BYTES))
            use = rng.getrandbits(64)
            length = geometry.record_bytes
            if geometry.is_packed:
                length = rng.randint(21, length)
            record = Record(length, rng.getrandbits(32))
            header.set_entry(geometry, entries, SlotId(slot), key, record, use)
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
    record = Record(geometry.record_bytes, 7)
    for slot in range(4):
        header.set_entry(geometry, entries, SlotId(slot), b"key%d" % slot, record, slot)
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
        record = Record(geometry.record_bytes, 0)
        header.set_entry(geometry, entries, SlotId(slot), key, record, 0)
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


@given(plain_geometries)
def test_a_geometry_is_found_again_from_a_segments_size(geometry: SegmentGeometry) -> None:
    size = geometry.segment_bytes
    assert SegmentGeometry.of_segment(geometry.row_bytes, size) == geometry
    for wrong in (0, size - 1, size + 1):
        assert SegmentGeometry.of_segment(geometry.row_bytes, wrong) is None


def test_without_a_codec_the_format_is_what_it_always_was() -> None:
    geometry = SegmentGeometry(8192, 5)
    entries = header.new_entries(geometry)
    for slot in (0, 3):
        record = Record(8196, 0xABCD0123 + slot)
        header.set_entry(geometry, entries, SlotId(slot), b"key%d" % slot, record, 77 + slot)
    identity = Identity("org/m", {"a": [1, "x"]}, element_bytes=2)
    raw = header.encode_index(geometry, entries)
    raw += header.encode_table(geometry, entries, 9, identity.namespace)
    raw += rows_metadata(geometry, 3) + namespace_metadata(identity)
    digest = "b4b58d8ea1417c9e39fd7f7e1bdc003ef3c199a1ccd449a5952ac2fe02781e04"
    assert hashlib.sha256(raw).hexdigest() == digest
    assert identity.directory == "org-m-cdf3d251af3158c7586181d61ae887ba"
    assert (geometry.segment_bytes, geometry.row_offset(1)) == (73728, 24576)


@given(plain_geometries)
def test_size_classes_are_distinct_files_of_equal_headers(plain: SegmentGeometry) -> None:
    classes = plain.size_classes()
    assert list(classes) == sorted(classes, key=lambda c: c.stride)
    assert len({c.segment_bytes for c in classes}) == len(classes)
    assert {c.header_bytes for c in classes} == {plain.header_bytes}
    *packed, raw = classes
    assert all(c.is_packed and c.stride < plain.row_bytes for c in packed)
    assert not raw.is_packed
    assert not plain.is_packed
    assert (raw.lead_bytes + FRAME_HEAD_BYTES) % PAGE_BYTES == 0, "a raw row begins on a page"
    assert raw.lead_bytes + raw.record_bytes <= raw.stride
    assert plain.lead_bytes == 0


@given(st.sampled_from([65536, 499_712, 3_452_928, 40_103_936]), st.floats(0.26, 0.96))
def test_a_row_loses_little_to_its_class(row_bytes: int, share: float) -> None:
    frame = int(row_bytes * share)
    classes = SegmentGeometry(row_bytes, 4).size_classes()
    size_class = next((c for c in classes if c.takes(frame)), classes[-1])
    assert size_class.stride - frame <= row_bytes / 32 + 4 * PAGE_BYTES


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_table_of_another_class_is_none(one: int, two: int) -> None:
    classes = SegmentGeometry(499_712, 8).size_classes()
    mine, other = classes[one % len(classes)], classes[two % len(classes)]
    raw = header_of(mine, (2, table_of(mine, 1)), (3, table_of(mine, 1)))
    assert decode(other, raw).entries["key_bytes"].any() == (mine == other)


def test_a_frame_that_does_not_fit_its_slot_is_dropped() -> None:
    geometry = SegmentGeometry(499_712, 4).size_classes()[3]
    entries = table_of(geometry, 3)
    slots = np.flatnonzero(entries["key_bytes"])
    assert len(slots) >= 2
    entries["length"][slots[0]] = geometry.stride + 1
    entries["length"][slots[1]] = 20  # a frame's head and a trailer: no row
    decoded = decode(geometry, header_of(geometry, (2, entries), (3, entries)))
    assert list(np.flatnonzero(decoded.entries["key_bytes"])) == list(slots[2:])
