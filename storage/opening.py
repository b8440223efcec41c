"""Opening a namespace: which segments it has or will have, and its rows as they stand on disk."""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path
from typing import NamedTuple

from storage.codec import Codec, RowCodec
from storage.device import replace_file
from storage.errors import ConfigError, CorruptRecord, DeviceError, LayoutMismatch, RootUnusable
from storage.facts import RowFacts
from storage.header import SegmentGeometry
from storage.index import ROWS_MAX
from storage.namespace import (
    METADATA,
    ROWS,
    WantedRows,
    facts_in,
    namespace_metadata,
    read_geometry,
)
from storage.options import StoreOptions
from storage.pool import Owner, charge_of
from storage.root import StaleNamespace
from storage.rowstore import RowStore
from storage.segment import Segment, segment_path
from storage.sizes import format_size
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)

log = logging.getLogger("kvtier.storage")


class NamespacePlan(NamedTuple):
    """What a namespace consists of, before anything is made or changed."""

    wanted: WantedRows
    directory: Path
    """Of its array."""
    geometry: SegmentGeometry
    """Without a codec."""
    codec: RowCodec | None
    largest: SegmentGeometry
    """Of its size classes."""
    segment_count: int
    """As its array says."""


def plan_namespace(
    owner: Owner,
    wanted: WantedRows,
    stale: StaleNamespace | None,
    share_bytes: int,
    others_bytes: int,
) -> NamespacePlan:
    """A new namespace chooses its segments for a budget of `share_bytes`; beside it the least of
    others, `others_bytes`, must fit.

    Raises `ConfigError` if a segment does not fit, `LayoutMismatch` if the namespace exists with
    another row, `RootUnusable` if its files can't be read.
    """
    directory = owner.root / wanted.identity.directory / ROWS
    codec = wanted.identity.row_codec
    geometry, segment_count = _read_geometry(
        owner, directory, wanted.row_bytes, codec, stale, share_bytes
    )
    row_codec, largest = None, geometry
    if codec is not None:
        classes = geometry.size_classes()
        row_codec = RowCodec(codec, classes, always=owner.options.codec_always)
        largest = classes[-1]
    _check_one_segment_fits(owner, largest, others_bytes)
    return NamespacePlan(wanted, directory, geometry, row_codec, largest, segment_count)


def open_namespace(owner: Owner, plan: NamespacePlan, stale: StaleNamespace | None) -> RowStore:
    """The rows of a planned namespace: those of `stale`, which is what was found of it, or none."""
    identity, _, facts = plan.wanted
    directory = plan.directory
    rows = RowStore(owner, directory, identity, plan.geometry, plan.codec, is_new=stale is None)
    rows.pool.metadata_was_read(plan.segment_count)
    rows.pool.facts = facts
    if stale is None:
        return rows
    rows.pool.facts = facts or _facts_of(owner, directory.parent / METADATA)
    try:
        owner.device.make_directory(directory / "c")
        # Also the note of when it was last opened.
        metadata = namespace_metadata(identity, rows.pool.facts)
        replace_file(owner.device, directory.parent / METADATA, metadata)
    except DeviceError as exc:  # a full disk can still be read
        log.warning("namespace not brought up to date: %s", exc)
    rows.adopt(_open_segments(owner, rows, plan.codec, stale))
    highest = max((number + 1 for number in rows.pool.numbers), default=0)
    if highest > plan.segment_count:
        try:
            rows.pool.write_metadata(highest)
        except DeviceError as exc:
            log.warning("zarr can't see all segments: %s", exc)
    rows.flush(recency=False)
    return rows


def _facts_of(owner: Owner, metadata: Path) -> RowFacts | None:
    with contextlib.suppress(DeviceError):
        return facts_in(owner.device.read_file(metadata), str(metadata))
    return None


def _read_geometry(
    owner: Owner,
    directory: Path,
    row_bytes: int,
    codec: Codec | None,
    stale: StaleNamespace | None,
    share_bytes: int,
) -> tuple[SegmentGeometry, int]:
    """(geometry without a codec, segment count) of a namespace: what its array says, or the size of
    its segments if that is lost, or as chosen for a new one of `share_bytes`."""
    metadata = directory / METADATA
    try:
        raw = owner.device.read_file(metadata)
        geometry, count = read_geometry(raw, str(metadata), codec)
    except CorruptRecord as exc:
        log.warning("%s: made anew", exc)
    except DeviceError as exc:
        if exc.errno != errno.ENOENT:
            raise RootUnusable(f"namespace {directory.parent.name}: {exc}") from exc
    else:
        if geometry.row_bytes != row_bytes:
            raise LayoutMismatch(f"{metadata}: row_bytes", row_bytes, geometry.row_bytes)
        return geometry, count
    for number in stale.segments if stale is not None else ():
        with contextlib.suppress(DeviceError):
            size = owner.device.stat(segment_path(directory, number)).size_bytes
            found = SegmentGeometry.of_segment(row_bytes, size, is_coded=codec is not None)
            if found is not None:
                return found, 0
    return _choose_geometry(owner, row_bytes, share_bytes), 0


def _open_segments(
    owner: Owner, rows: RowStore, codec: RowCodec | None, stale: StaleNamespace
) -> list[Segment]:
    """The segments that can be opened, each charged what a segment of its geometry costs.

    One that the device refuses keeps its place and its charge.  One that was cut short and has no
    room to be whole again is removed.
    """
    segments = []
    for number, charged in sorted(stale.segments.items()):
        if (number + 1) * rows.geometry.slots_per_segment > ROWS_MAX:
            log.warning("segment left out: %d of %s is no number of ours", number, rows.directory)
            rows.pool.leave_alone(number)
            continue
        try:
            size = owner.device.stat(segment_path(rows.directory, number)).size_bytes
            # Of a segment that was cut short the table may not be of this class: then its rows
            # are lost.
            geometry = next(
                (c for c in rows.pool.classes if c.segment_bytes >= size), rows.pool.classes[-1]
            )
            missing = charge_of(geometry) - charged
            if missing > 0 and not owner.make_room(missing):
                log.warning("segment %d of %s: cut short, removed", number, rows.directory)
                owner.device.remove(segment_path(rows.directory, number))
                with owner.lock:
                    owner.space.release(charged)
                continue
            segment = Segment.open(
                owner.device,
                rows.directory,
                number,
                geometry,
                rows.identity.namespace,
                direct=owner.direct,
                codec=codec,
            )
        except DeviceError as exc:
            log.warning("segment left out: %s", exc)
            rows.pool.leave_alone(number)
            continue
        segments.append(segment)
        if missing < 0:
            with owner.lock:
                owner.space.release(-missing)
    return segments


def _choose_geometry(owner: Owner, row_bytes: int, share_bytes: int) -> SegmentGeometry:
    geometry = SegmentGeometry.choose(row_bytes, share_bytes, owner.options.segment_bytes)
    if least_bytes(geometry) + ROOT_OVERHEAD_BYTES > share_bytes:
        geometry = SegmentGeometry(row_bytes, 1)
    return geometry


def _check_one_segment_fits(owner: Owner, geometry: SegmentGeometry, others_bytes: int) -> None:
    least = least_bytes(geometry) + others_bytes + ROOT_OVERHEAD_BYTES
    least += owner.quarantine.most_bytes(geometry.stride)
    if owner.options.budget_bytes < least:
        raise ConfigError(
            "budget",
            f"at least {least} bytes ({format_size(least)}), one segment of "
            f"{geometry.slots_per_segment} rows of {geometry.row_bytes} bytes",
            owner.options.budget_bytes,
        )
    try:
        stat = owner.device.space(owner.root)
    except DeviceError as exc:
        log.warning("size of the file system unknown: %s", exc)
        return
    total = stat.total_bytes
    if total < least:
        raise ConfigError(
            "root",
            f"a file system of at least {least} bytes ({format_size(least)}), one segment; "
            "use a larger one",
            f"{owner.root} with {total} bytes",
        )
    reserve = owner.options.reserve_bytes
    if reserve is not None and total < least + reserve:
        raise ConfigError(
            "reserve",
            f"at most {total - least} bytes ({format_size(total - least)}): {owner.root} has "
            f"{format_size(total)}, and one segment takes {format_size(least)}",
            reserve,
        )


def rows_that_fit(options: StoreOptions, row_bytes: int) -> int:
    """About how many rows of `row_bytes` the whole budget holds."""
    geometry = SegmentGeometry.choose(row_bytes, options.budget_bytes, options.segment_bytes)
    room = options.budget_bytes - NAMESPACE_OVERHEAD_BYTES - ROOT_OVERHEAD_BYTES
    segments = room // (geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES)
    return max(0, segments) * geometry.slots_per_segment


def least_bytes(geometry: SegmentGeometry) -> int:
    """What a namespace of one such segment takes of the budget."""
    return geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES
