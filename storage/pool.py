"""The segments of one namespace: which slots are free, and how one more segment is made.

Under a codec there are segments of several size classes; a class is named by its geometry.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

from storage.admission import WriteBudget
from storage.codec import RowCodec
from storage.device import Device, exists, replace_file
from storage.engine import IoEngine
from storage.errors import DeviceError
from storage.facts import RowFacts
from storage.header import SegmentGeometry, key_of
from storage.namespace import METADATA, Identity, namespace_metadata, rows_metadata
from storage.options import StoreOptions
from storage.quarantine import Quarantine
from storage.segment import Segment, partial_path
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
    Limit,
    Space,
    limit_of,
)
from storage.types import Location, SegmentId

log = logging.getLogger("kvtier.storage")


class Owner(Protocol):
    """What a `RowStore` needs of the store that it belongs to."""

    root: Path
    options: StoreOptions
    device: Device
    lock: threading.RLock
    space: Space
    write_budget: WriteBudget | None
    engine: IoEngine
    quarantine: Quarantine
    direct: bool

    def next_use(self) -> int:
        """What the next use of a row is called, under the lock: more than of any before it."""
        ...

    def note_use(self, last_use: int) -> None:
        """A row that was found was last used then, under the lock."""
        ...

    def may_grow(self, pool: SegmentPool) -> bool:
        """Whether one more segment is worth a try now, under the lock."""
        ...

    def make_room(self, size_bytes: int, asker: SegmentPool | None = None) -> bool:
        """Charge `size_bytes` once others gave up what they must; False if refused."""
        ...

    def has_root(self) -> bool:
        """Whether the directory that is locked is still there."""
        ...

    def note_external_removals(self, count: int) -> None:
        """Somebody removed the files of so many segments."""
        ...


def charge_of(geometry: SegmentGeometry) -> int:
    """What a segment costs the budget."""
    return geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES


class Growth(Enum):
    """What came of the wish for one more segment."""

    MADE = "made"
    """By this thread or another: there are free slots, unless somebody was quicker."""
    REFUSED = "refused"
    """No room, or not now: reuse slots."""
    FAILED = "failed"
    """A read-only disk, or one that has room and makes no file: evicting would not help."""


class SegmentPool:
    """Free slots are taken and given back under the owner's lock; `grow` is called without it."""

    def __init__(
        self,
        owner: Owner,
        directory: Path,
        identity: Identity,
        geometry: SegmentGeometry,
        codec: RowCodec | None,
        *,
        is_new: bool,
    ) -> None:
        """`geometry` is the one without a codec."""
        self.directory = directory
        self.identity = identity
        self.geometry = geometry
        self.classes = codec.classes if codec is not None else (geometry,)
        self.facts: RowFacts | None = None
        """For the metadata of the namespace, if they are known."""
        self._codec = codec
        self._owner = owner
        self._segments: dict[SegmentId, Segment] = {}
        # Those that have free slots, by class.
        self._with_free: dict[SegmentGeometry, dict[SegmentId, Segment]] = {
            size_class: {} for size_class in self.classes
        }
        self._going: set[SegmentId] = set()  # no slot of theirs is given out any more
        self._slots_per_segment = geometry.slots_per_segment
        self._claimed: set[SegmentId] = set()  # of these, those that somebody removes now
        self._left_alone: set[SegmentId] = set()  # there, charged, and not usable
        self._metadata_count = 0  # of segments, as the array's metadata says
        self._growth = threading.RLock()
        self._replacing_failed = False  # the last time
        self._is_new = is_new
        self._charged_ahead = 0  # bytes charged for a segment that failed and could not be undone

    def __getitem__(self, number: SegmentId) -> Segment:
        return self._segments[number]

    def __contains__(self, number: object) -> bool:
        return number in self._segments

    def key(self, number: int) -> bytes:
        """Which row the tables have in a slot that is named, by its number in zarr's array."""
        segment, slot = divmod(number, self._slots_per_segment)
        key = key_of(self._segments[SegmentId(segment)].entries, slot)
        assert key is not None, f"segment {segment} slot {slot} has no row"
        return key

    @property
    def numbers(self) -> list[SegmentId]:
        return sorted(self._segments)

    @property
    def charge_bytes(self) -> int:
        """What one segment costs the budget; under a codec, one of the largest class."""
        return charge_of(self.classes[-1])

    def others(self, size_class: SegmentGeometry) -> list[Segment]:
        """The segments of other classes, but those that are going.  Under the owner's lock."""
        return [
            segment
            for number, segment in self._segments.items()
            if segment.geometry != size_class and number not in self._going
        ]

    def hold(self, number: SegmentId) -> Segment:
        """A segment that is not removed until `let_go`.  Under the owner's lock."""
        segment = self._segments[number]
        segment.user_count += 1
        return segment

    def let_go(self, segments: Iterable[Segment]) -> None:
        with self._owner.lock:
            for segment in segments:
                segment.user_count -= 1

    @contextlib.contextmanager
    def using(self, number: SegmentId) -> Iterator[Segment]:
        """`hold` and `let_go`, taking the owner's lock for each."""
        with self._owner.lock:
            segment = self.hold(number)
        try:
            yield segment
        finally:
            self.let_go([segment])

    # -- opening and shrinking ------------------------------------------------------------------

    def adopt(self, segment: Segment) -> None:
        """Take over a segment that was found on disk."""
        self._segments[segment.id] = segment
        if segment.has_free:
            self._with_free[segment.geometry][segment.id] = segment

    def leave_alone(self, number: SegmentId) -> None:
        """A segment that can't be opened or removed keeps its number and its charge."""
        self._left_alone.add(number)

    def metadata_was_read(self, segment_count: int) -> None:
        """The array's metadata says so many segments."""
        self._metadata_count = segment_count

    def retire(self, number: SegmentId) -> None:
        """Give out no more slots of a segment, under the lock: `remove` follows once it is idle."""
        self._going.add(number)
        self._with_free[self._segments[number].geometry].pop(number, None)

    def is_going(self, number: SegmentId) -> bool:
        return number in self._going

    @property
    def going(self) -> list[SegmentId]:
        """Retired, and nobody has claimed them for removal yet.  Under the owner's lock."""
        return sorted(self._going - self._claimed)

    @property
    def has_going(self) -> bool:
        return len(self._going) > len(self._claimed)

    def claim(self, number: SegmentId) -> None:
        """The caller removes a retired segment, and nobody else.  Under the owner's lock."""
        self._claimed.add(number)

    def count_free(self, size_class: SegmentGeometry) -> int:
        """Slots of a class that `take_free` could give.  Under the owner's lock."""
        return sum(segment.takeable_count for segment in self._with_free[size_class].values())

    def distrust(self, places: Iterable[Location]) -> None:
        """Writes to these slots have failed, others not.  Under the owner's lock."""
        for place in places:
            segment = self._segments[place.segment]
            segment.distrust(place.slot)
            if not segment.has_free:
                self._with_free[segment.geometry].pop(place.segment, None)

    def trust_again(self) -> None:
        """Give slots that failed once another chance.  Under the owner's lock."""
        for number, segment in self._segments.items():
            segment.trust_again()
            if segment.has_free and number not in self._going:
                self._with_free[segment.geometry][number] = segment

    def remove(self, number: SegmentId, *, keep_charge: bool = False) -> None:
        """Give a retired segment without rows or I/O back to the file system, and its charge; or
        keep the charge for the next segment to be made.

        Raises `DeviceError`; then its file stays, and stays charged.
        """
        with self._owner.lock:
            segment = self._segments.pop(number)
            self._going.discard(number)
            self._claimed.discard(number)
            self._left_alone.add(number)  # nobody makes a new one of that name meanwhile
        segment.remove()
        with self._owner.lock:
            self._left_alone.discard(number)
            if keep_charge:
                self._charged_ahead += charge_of(segment.geometry)
            else:
                self._owner.space.release(charge_of(segment.geometry))

    # -- slots, under the owner's lock ----------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return len(self._segments) * self.geometry.slots_per_segment

    @property
    def free_count(self) -> int:
        """Slots that hold no row and are nobody's."""
        return sum(
            segment.free_count
            for with_free in self._with_free.values()
            for segment in with_free.values()
        )

    def take_free(self, size_class: SegmentGeometry, count: int) -> list[Location]:
        """Up to `count` free slots, by segment and in order; nobody else gets them."""
        with_free = self._with_free[size_class]
        places: list[Location] = []
        while with_free and len(places) < count:
            number, segment = next(iter(with_free.items()))
            places += [Location(number, slot) for slot in segment.take_free(count - len(places))]
            if not segment.has_free:
                del with_free[number]
        return places

    def withdraw(self, place: Location, *, free: bool) -> None:
        """Take what stands in a slot out of the table; the slot is free, or the caller's."""
        segment = self._segments[place.segment]
        segment.withdraw(place.slot, free=free)
        if segment.has_free and place.segment not in self._going:
            self._with_free[segment.geometry][place.segment] = segment

    # -- growing --------------------------------------------------------------------------------

    def grow(self, size_class: SegmentGeometry) -> Growth:
        """Make one more segment of a class, unless another thread just did."""
        owner = self._owner
        with self._growth:
            with owner.lock:
                if self._with_free[size_class]:
                    return Growth.MADE
                if not owner.may_grow(self):
                    return Growth.REFUSED
            charge = self._charge_of_next(size_class)
            if self._charged_ahead < charge:
                if not owner.make_room(charge - self._charged_ahead, self):
                    return Growth.REFUSED
                self._charged_ahead = charge
            growth = self._make(size_class)
            if growth is Growth.MADE:
                self._release_ahead()
                with owner.lock:
                    owner.space.growth_succeeded()
            return growth

    def replace(
        self,
        size_class: SegmentGeometry,
        give_up: Callable[[int], Sequence[SegmentId]],
    ) -> bool:
        """Make segments of a class in the place of others, unless another thread just did.
        Whether there are free slots, unless somebody is quicker.

        `give_up`, called under the owner's lock with the bytes that are needed, takes the rows out
        of segments of at least that size and names them, or names none.  What earlier
        replacements left over is used first, whether or not growing is due to be tried.
        """
        with self._growth:
            available = self._available()
            with self._owner.lock:
                if self._with_free[size_class]:
                    return True
                if self._replacing_failed and not self._owner.space.may_grow():
                    return False  # else each write would cost a segment and make none
                needed = self._charge_of_next(size_class) - self._charged_ahead
                needed -= self._owner.space.room(available)
                leaving = give_up(needed) if needed > 0 else ()
                for number in leaving:
                    self.retire(number)
                    self.claim(number)
            if needed > 0 and not leaving:
                return False
            for number in leaving:
                try:
                    self.remove(number, keep_charge=True)
                except DeviceError as exc:
                    log.warning("segment %d stays: %s", number, exc)
            self._charge_ahead(self._charge_of_next(size_class))
            has_made = False
            while self._charged_ahead >= self._charge_of_next(size_class):
                self._replacing_failed = self._make(size_class) is not Growth.MADE
                if self._replacing_failed:
                    return has_made
                has_made = True
            self._release_ahead()
            return has_made

    def _charge_ahead(self, charge: int) -> None:
        """Charge what a segment lacks, if there is room for it."""
        available = self._available()
        with self._owner.lock:
            missing = charge - self._charged_ahead
            if missing > 0 and self._owner.space.can_charge(missing, available):
                self._owner.space.charge(missing)
                self._charged_ahead = charge

    def _available(self) -> int:
        """Free bytes of the file system; 0 if it does not say."""
        try:
            return self._owner.device.space(self._owner.root).available_bytes
        except DeviceError:
            return 0

    def _charge_of_next(self, size_class: SegmentGeometry) -> int:
        return charge_of(size_class) + (NAMESPACE_OVERHEAD_BYTES if self._is_new else 0)

    def _make(self, size_class: SegmentGeometry) -> Growth:
        """Make the segment that was charged ahead.  Holding the lock of growth."""
        owner = self._owner
        with owner.lock:
            taken = self._segments.keys() | self._left_alone
        number = SegmentId(next(i for i in range(len(taken) + 1) if i not in taken))
        try:
            if not owner.has_root():
                raise DeviceError("find", owner.root, errno.ENOENT)
            if self._is_new:
                self._make_namespace()
            if number >= self._metadata_count:  # zarr must know a shard before it is there
                self.write_metadata(number + 1)
            segment = Segment.create(
                owner.device,
                self.directory,
                number,
                size_class,
                self.identity.namespace,
                direct=owner.direct,
                codec=self._codec,
            )
        except DeviceError as exc:
            return self._undo_growth(number, exc)
        self._charged_ahead -= charge_of(size_class)
        with owner.lock:
            self._segments[number] = segment
            self._with_free[size_class][number] = segment
        return Growth.MADE

    def _release_ahead(self) -> None:
        with self._owner.lock:
            self._owner.space.release(self._charged_ahead)
            self._charged_ahead = 0

    def _make_namespace(self) -> None:
        """Make the namespace's directories and group, which its first segment was charged for."""
        device = self._owner.device
        device.make_directory(self.directory / "c")
        metadata = namespace_metadata(self.identity, self.facts)
        replace_file(device, self.directory.parent / METADATA, metadata)
        self._is_new = False
        self._charged_ahead -= NAMESPACE_OVERHEAD_BYTES

    def _undo_growth(self, number: SegmentId, error: DeviceError) -> Growth:
        """Release what the failed segment was charged, unless its file is still there."""
        owner = self._owner
        is_left = exists(owner.device, partial_path(self.directory, number))
        try:
            stat = owner.device.space(owner.root)
        except DeviceError:
            stat = None
        limit = limit_of(error, stat, self.charge_bytes)
        with owner.lock:
            if not is_left:
                self._release_ahead()
            reason = str(error) if limit is Limit.DEVICE else f"{error}; short of {limit.value}"
            owner.space.growth_failed(limit, error.errno, reason, can_reuse=bool(self._segments))
        is_hopeless = error.errno == errno.EROFS or limit is Limit.NAMES
        return Growth.FAILED if is_hopeless else Growth.REFUSED

    def write_metadata(self, segment_count: int) -> None:
        """Say in the array's metadata how many segments there are.  Raises `DeviceError`."""
        codec = self._codec.codec if self._codec is not None else None
        data = rows_metadata(self.classes[-1], segment_count, codec)
        replace_file(self._owner.device, self.directory / METADATA, data)
        self._metadata_count = segment_count
