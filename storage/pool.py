"""The segments of one namespace: which slots are free, and how one more segment is made."""

from __future__ import annotations

import threading
from enum import Enum
from pathlib import Path
from typing import Protocol

from storage.device import Device, exists, replace_file
from storage.engine import IoEngine
from storage.errors import DeviceError
from storage.header import SegmentGeometry
from storage.namespace import METADATA, Identity, namespace_metadata, rows_metadata
from storage.segment import Segment, partial_path
from storage.space import NAMESPACE_OVERHEAD_BYTES, SEGMENT_OVERHEAD_BYTES, Space
from storage.types import Location, SegmentId


class Owner(Protocol):
    """What a `RowStore` needs of the store that it belongs to."""

    device: Device
    lock: threading.RLock
    space: Space
    engine: IoEngine
    direct: bool

    def make_room(self, size_bytes: int) -> bool:
        """Charge `size_bytes`, once stale namespaces gave up what they must; False if refused."""
        ...


class Growth(Enum):
    """What came of the wish for one more segment."""

    MADE = "made"
    """By this thread or another: there are free slots, unless somebody was quicker."""
    REFUSED = "refused"
    """No room, or not now: reuse slots."""
    READ_ONLY = "read-only"
    """Nothing can be written at all: do not evict for it."""


class SegmentPool:
    """Free slots are taken and given back under the owner's lock; `grow` is called without it."""

    def __init__(
        self,
        owner: Owner,
        directory: Path,
        identity: Identity,
        geometry: SegmentGeometry,
        *,
        is_new: bool,
    ) -> None:
        self.directory = directory
        self.identity = identity
        self.geometry = geometry
        self._owner = owner
        self._segments: dict[SegmentId, Segment] = {}
        self._with_free: dict[SegmentId, Segment] = {}  # those that have free slots
        self._left_alone: set[SegmentId] = set()  # there, charged, and not usable
        self._metadata_count = 0  # of segments, as the array's metadata says
        self._growth = threading.Lock()
        self._is_new = is_new
        self._charged_ahead = 0  # bytes charged for a segment that failed and could not be undone

    def __getitem__(self, number: SegmentId) -> Segment:
        return self._segments[number]

    def __contains__(self, number: object) -> bool:
        return number in self._segments

    @property
    def numbers(self) -> list[SegmentId]:
        return sorted(self._segments)

    @property
    def charge_bytes(self) -> int:
        """What one segment costs the budget."""
        return self.geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES

    # -- opening and shrinking ------------------------------------------------------------------

    def adopt(self, segment: Segment) -> None:
        """Take over a segment that was found on disk."""
        self._segments[segment.id] = segment
        if segment.free_count:
            self._with_free[segment.id] = segment

    def leave_alone(self, number: SegmentId) -> None:
        """A segment that can't be opened or removed keeps its number and its charge."""
        self._left_alone.add(number)

    def metadata_was_read(self, segment_count: int) -> None:
        """The array's metadata says so many segments."""
        self._metadata_count = segment_count

    def coldest(self) -> SegmentId | None:
        """The segment whose most recent row was used longest ago; None if there is none."""
        if not self._segments:
            return None
        return min(self._segments, key=lambda number: (self._segments[number].last_use, number))

    def remove(self, number: SegmentId) -> None:
        """Give a segment without I/O back to the file system, and what it was charged.

        Raises `DeviceError`; then its file stays, and stays charged.
        """
        with self._owner.lock:
            segment = self._segments.pop(number)
            self._with_free.pop(number, None)
        try:
            segment.remove()
        except DeviceError:
            self.leave_alone(number)
            raise
        with self._owner.lock:
            self._owner.space.release(self.charge_bytes)

    # -- slots, under the owner's lock ----------------------------------------------------------

    def take_free(self, count: int) -> list[Location]:
        """Up to `count` free slots, by segment and in order; nobody else gets them."""
        places: list[Location] = []
        while self._with_free and len(places) < count:
            number, segment = next(iter(self._with_free.items()))
            places += [Location(number, slot) for slot in segment.take_free(count - len(places))]
            if not segment.free_count:
                del self._with_free[number]
        return places

    def withdraw(self, place: Location, *, free: bool) -> None:
        """Take what stands in a slot out of the table; the slot is free, or the caller's."""
        segment = self._segments[place.segment]
        segment.withdraw(place.slot, free=free)
        if free:
            self._with_free[place.segment] = segment

    # -- growing --------------------------------------------------------------------------------

    def grow(self) -> Growth:
        """Make one more segment, unless another thread just did."""
        owner = self._owner
        with self._growth:
            with owner.lock:
                if self._with_free:
                    return Growth.MADE
                if not owner.space.may_grow():
                    return Growth.REFUSED
            charge = self.charge_bytes + (NAMESPACE_OVERHEAD_BYTES if self._is_new else 0)
            if self._charged_ahead < charge:
                if not owner.make_room(charge - self._charged_ahead):
                    return Growth.REFUSED
                self._charged_ahead = charge
            taken = self._segments.keys() | self._left_alone
            number = SegmentId(next(i for i in range(len(taken) + 1) if i not in taken))
            try:
                if self._is_new:
                    self._make_namespace()
                if number >= self._metadata_count:  # zarr must know a shard before it is there
                    self.write_metadata(number + 1)
                segment = Segment.create(
                    owner.device,
                    self.directory,
                    number,
                    self.geometry,
                    self.identity.namespace,
                    direct=owner.direct,
                )
            except DeviceError as exc:
                return self._undo_growth(number, exc)
            self._charged_ahead = 0
            with owner.lock:
                self._segments[number] = segment
                self._with_free[number] = segment
                owner.space.growth_succeeded()
            return Growth.MADE

    def _make_namespace(self) -> None:
        """Make the namespace's directories and group, which its first segment was charged for."""
        device = self._owner.device
        device.make_directory(self.directory / "c")
        replace_file(device, self.directory.parent / METADATA, namespace_metadata(self.identity))
        self._is_new = False
        self._charged_ahead -= NAMESPACE_OVERHEAD_BYTES

    def _undo_growth(self, number: SegmentId, error: DeviceError) -> Growth:
        """Release what the failed segment was charged, unless its file is still there."""
        owner = self._owner
        is_left = exists(owner.device, partial_path(self.directory, number))
        with owner.lock:
            if not is_left:
                owner.space.release(self._charged_ahead)
                self._charged_ahead = 0
            can_reuse = bool(self._segments)
            go_on = owner.space.growth_failed(error.errno, str(error), can_reuse=can_reuse)
        return Growth.REFUSED if go_on else Growth.READ_ONLY

    def write_metadata(self, segment_count: int) -> None:
        """Say in the array's metadata how many segments there are.  Raises `DeviceError`."""
        data = rows_metadata(self.geometry, segment_count)
        replace_file(self._owner.device, self.directory / METADATA, data)
        self._metadata_count = segment_count
