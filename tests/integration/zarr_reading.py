"""Reads a store with zarr-python, with tensorstore and with our own code, and compares."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tensorstore
import zarr

from storage.codec import NO_CODEC, Codec, RowCodec
from storage.device import LocalDevice, aligned_buffer
from storage.namespace import METADATA, ROWS, Identity, read_geometry
from storage.record import ReadRow
from storage.root import segment_numbers
from storage.segment import Segment, segment_path
from storage.types import RowKey


def assert_zarr_equals_store(
    root: Path, identity_or_dir: Identity | str
) -> dict[RowKey, npt.NDArray[np.uint8]]:
    """Every row of a namespace of the closed store `root`: what zarr and tensorstore read at the
    row's place is what our reader reads and verifies, and slots without a row read as zeros.

    Returns the rows, so that the caller can compare them with what was stored.
    """
    name = identity_or_dir if isinstance(identity_or_dir, str) else identity_or_dir.directory
    directory = root / name / ROWS
    metadata = directory / METADATA
    attributes = json.loads((root / name / METADATA).read_bytes())["attributes"]["kvtier"]
    codec = Codec.of(attributes.get("codec", NO_CODEC), attributes.get("element_bytes", 1))
    geometry, segment_count = read_geometry(metadata.read_bytes(), str(metadata), codec)
    classes = {c.segment_bytes: c for c in (geometry.size_classes() if codec else (geometry,))}
    row_codec = RowCodec(codec, tuple(classes.values()), always=True) if codec else None
    group = zarr.open_group(str(root), mode="r")
    namespace = group[name]
    assert isinstance(namespace, zarr.Group)
    array = namespace[ROWS]
    assert isinstance(array, zarr.Array)
    assert array.dtype == np.uint8
    assert array.shape == (segment_count * geometry.slots_per_segment, geometry.row_bytes)
    other = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(directory)}}, read=True
    ).result()
    assert other.shape == array.shape
    device, lock = LocalDevice(), threading.Lock()
    rows: dict[RowKey, npt.NDArray[np.uint8]] = {}
    places = set()
    for number in segment_numbers(directory, device):
        assert number < segment_count, "zarr must know every segment"
        segment = Segment.open(
            device,
            directory,
            number,
            classes[segment_path(directory, number).stat().st_size],
            bytes.fromhex(name[-32:]),
            direct=False,
            codec=row_codec,
        )
        try:
            for slot, key, _ in segment.rows():
                buffer = aligned_buffer(geometry.row_bytes)
                record = segment.record(slot)
                assert segment.read_rows([ReadRow(slot, record, buffer)]) == [None]
                place = number * geometry.slots_per_segment + slot
                ours = np.frombuffer(buffer, np.uint8)
                np.testing.assert_array_equal(array[place], ours)
                np.testing.assert_array_equal(other[place].read().result(), ours)
                assert RowKey(key) not in rows, "a key has one row"
                rows[RowKey(key)] = ours
                places.add(place)
            with lock:
                assert segment.version == 0, "a closed store needs no repair"
        finally:
            segment.close()
    for place in range(array.shape[0]):
        if place not in places:
            assert not np.any(array[place])
            assert not np.any(other[place].read().result())
    return rows
