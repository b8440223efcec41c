"""One segment: a preallocated Zarr shard of slots, its key table in memory, its header on disk.

Whoever holds the store's lock may change the table.  Files are touched without that lock; header
writes of one segment are serialised by a lock of their own, and one write serves all who wait.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from storage import header
from storage.codec import RowCodec
from storage.device import (
    PARTIAL_SUFFIX,
    Device,
    Scratch,
    read_fully,
    reserve,
    write_fully,
)
from storage.errors import CorruptRecord, DeviceError
from storage.header import Record, SegmentGeometry
from storage.record import ReadRow, slot_format
from storage.types import SegmentId, SlotId

_FAILURES_MAX = 2  # of writes to a slot
ROWS_PER_CALL = 64  # trailer pages per thread, and a bound on one system call

_scratch = Scratch()  # for parts of headers


def segment_path(directory: Path, segment: SegmentId) -> Path:
    """Where zarr looks for shard (`segment`, 0) of the array in `directory`."""
    return directory / f"c/{segment}/0"


def partial_path(directory: Path, segment: SegmentId) -> Path:
    """What a segment is called until it is whole."""
    path = segment_path(directory, segment)
    return path.with_name(path.name + PARTIAL_SUFFIX)


class Segment:
    """An open segment.  The table and the free slots are guarded by the owner's lock, which
    `flush_header` is given.  `namespace` is what every key table carries.
    """

    def __init__(
        self,
        device: Device,
        path: Path,
        segment: SegmentId,
        geometry: SegmentGeometry,
        namespace: bytes,
        fd: int,
        entries: header.Entries,
        *,
        direct: bool,
        codec: RowCodec | None = None,
    ) -> None:
        self.id = segment
        self.path = path
        self.geometry = geometry
        self.entries = entries
        """Its table, in memory: changed in place."""
        self.version = 0
        """Of the table in memory; every change that must reach the disk raises it."""
        self._named_on_disk = np.zeros(geometry.slots_per_segment, np.bool_)
        self._index_hash: int | None = None  # of the index on disk; None: not known
        self.recency_changed = False
        self.user_count = 0
        """Threads that will do I/O on it; see `SegmentPool.using`."""
        self._free: list[SlotId] = []  # a heap
        self._failures: dict[SlotId, int] = {}  # of writes, by slot
        self._distrusted: set[SlotId] = set()  # not to be taken for now
        self._aside: list[SlotId] = []  # of these, the ones that are free
        self._namespace = namespace
        self._device = device
        self._fd = fd
        self._codec = codec
        self._format = slot_format(geometry, codec, direct=direct)
        self._generation = 1
        self._table_version = 0  # of the table on disk
        self._index_version = 0  # of the index on disk, or of one equal to it
        self._header_lock = threading.Lock()

    @classmethod
    def create(
        cls,
        device: Device,
        directory: Path,
        segment: SegmentId,
        geometry: SegmentGeometry,
        namespace: bytes,
        *,
        direct: bool,
        codec: RowCodec | None = None,
    ) -> Segment:
        """Allocate and publish an empty segment.

        On `DeviceError` nothing is left behind but, if it can't be removed either, the partial
        file, which `partial_path` names and the next attempt replaces.
        """
        path = segment_path(directory, segment)
        partial = partial_path(directory, segment)
        device.make_directory(path.parent)
        with contextlib.suppress(DeviceError):
            device.remove(partial)
        fd = -1
        try:
            fd = device.open(partial, create=True, direct=direct)
            reserve(device, fd, geometry.segment_bytes)
            entries = header.new_entries(geometry)
            made = cls(
                device, path, segment, geometry, namespace, fd, entries, direct=direct, codec=codec
            )
            made._free_unnamed()
            made._write_blank_header()
            device.rename(partial, path)
        except BaseException:
            with contextlib.suppress(DeviceError):
                if fd >= 0:  # a failed allocation may keep what it got until the file is cut
                    device.truncate(fd, 0)
            with contextlib.suppress(DeviceError):
                if fd >= 0:
                    device.close(fd)
            with contextlib.suppress(DeviceError):
                device.remove(partial)
            with contextlib.suppress(DeviceError):
                device.remove_directory(path.parent)
            raise
        return made

    @classmethod
    def open(
        cls,
        device: Device,
        directory: Path,
        segment: SegmentId,
        geometry: SegmentGeometry,
        namespace: bytes,
        *,
        direct: bool,
        codec: RowCodec | None = None,
    ) -> Segment:
        """Open a segment that is there, whatever a crash or a fault left in it.

        Rows that the file is too short for are dropped and the file is made its full size again
        (cut to it, if it is longer); a torn header falls back to the older table.  The header is
        then due to be written: `flush_header` does it.  Raises `DeviceError`.
        """
        path = segment_path(directory, segment)
        size = device.stat(path).size_bytes
        fd = device.open(path, direct=direct)
        try:
            raw = _scratch.take(geometry.header_bytes)
            if size < geometry.header_bytes:
                raw[:] = bytes(len(raw))  # a short header reads as zeros from its end on
            with contextlib.suppress(CorruptRecord):
                read_fully(device, fd, [raw], 0, str(path))
            decoded = header.decode_header(geometry, raw, namespace)
            entries, whole = decoded.entries, decoded.whole
            opened = cls(
                device, path, segment, geometry, namespace, fd, entries, direct=direct, codec=codec
            )
            opened._generation = decoded.generation
            if whole:
                opened._index_hash = hash(bytes(raw[: geometry.table_offset(0)]))
            if size < geometry.segment_bytes:
                whole = False
                for slot in opened._named_slots():
                    entry = opened.entries[slot]
                    if int(entry["offset"]) + int(entry["length"]) > size:
                        header.clear_entry(opened.entries, slot)
                reserve(device, fd, geometry.segment_bytes)
            elif size > geometry.segment_bytes:
                device.truncate(fd, geometry.segment_bytes)
        except BaseException:
            with contextlib.suppress(DeviceError):
                device.close(fd)
            raise
        opened._named_on_disk = opened._named()
        opened._free_unnamed()
        opened.version = 0 if whole else 1
        return opened

    # -- table and free slots, under the owner's lock -------------------------------------------

    def _free_unnamed(self) -> None:
        self._free = [SlotId(slot) for slot in np.flatnonzero(~self._named()).tolist()]

    @property
    def free_count(self) -> int:
        return len(self._free) + len(self._aside)

    @property
    def takeable_count(self) -> int:
        """How many slots `take_free` can give."""
        return len(self._free)

    @property
    def has_free(self) -> bool:
        """Whether `take_free` finds a slot: one that has failed lately does not count."""
        return bool(self._free)

    def distrust(self, slot: SlotId) -> None:
        """A write to a slot has failed, and not for the sake of the device: it is not given out
        until `trust_again`, and never again after its second failure."""
        self._failures[slot] = self._failures.get(slot, 0) + 1
        self._distrusted.add(slot)
        if slot in self._free:
            self._free.remove(slot)
            heapq.heapify(self._free)
            self._aside.append(slot)

    def trust_again(self) -> None:
        """Give slots that failed once another chance: a run of slots fails for one of them."""
        self._distrusted = {s for s in self._distrusted if self._failures[s] >= _FAILURES_MAX}
        for slot in self._aside:
            if slot not in self._distrusted:
                heapq.heappush(self._free, slot)
        self._aside = [slot for slot in self._aside if slot in self._distrusted]

    def take_free(self, count: int) -> list[SlotId]:
        """Up to `count` free slots, lowest first; they are the caller's until `withdraw` with
        `free=True`."""
        return [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]

    def name(self, slot: SlotId, key: bytes, record: Record, last_use: int) -> None:
        """Enter a row into the table."""
        header.set_entry(self.geometry, self.entries, slot, key, record, last_use)
        self.version += 1

    def withdraw(self, slot: SlotId, *, free: bool) -> None:
        """Take a row out of the table; `free` also gives its slot back."""
        header.clear_entry(self.entries, slot)
        self.version += 1
        if free and slot in self._distrusted:
            self._aside.append(slot)
        elif free:
            heapq.heappush(self._free, slot)

    def mark_used(self, slot: SlotId, last_use: int) -> None:
        """Note a use; it reaches the disk with the next header, or by `flush_header` after
        `recency_changed` was taken into `version`."""
        self.entries["last_use"][slot] = last_use
        self.recency_changed = True

    @property
    def last_use(self) -> int:
        """Of its most recent row; -1 without rows."""
        uses = self.entries["last_use"][self._named()]
        return int(uses.max()) if len(uses) else -1

    @property
    def mean_use(self) -> float:
        """The last use of its average slot; an empty slot counts as the coldest row."""
        uses = self.entries["last_use"][self._named()]
        if not len(uses):
            return 0.0
        empty = self.geometry.slots_per_segment - len(uses)
        return float((uses.sum() + empty * uses.min()) / self.geometry.slots_per_segment)

    @property
    def is_idle(self) -> bool:
        """Whether no slot is being written and no thread counts on the segment's file."""
        named_count = int(np.count_nonzero(self._named()))
        slot_count = self.geometry.slots_per_segment
        return self.user_count == 0 and self.free_count + named_count == slot_count

    def record(self, slot: SlotId) -> Record:
        """What stands in a named slot."""
        entry = self.entries[slot]
        return Record(int(entry["length"]), int(entry["checksum"]))

    def _named(self) -> npt.NDArray[np.bool_]:
        return self.entries["key_bytes"] > 0

    def _named_slots(self) -> list[SlotId]:
        return [SlotId(int(i)) for i in np.flatnonzero(self._named())]

    def key(self, slot: SlotId) -> bytes:
        """Of a named slot."""
        key = header.key_of(self.entries, slot)
        assert key is not None, f"{self.place(slot)} has no row"
        return key

    def rows(self) -> list[tuple[SlotId, bytes, int]]:
        """(slot, key, last use) of every named slot."""
        return [
            (slot, self.key(slot), int(self.entries["last_use"][slot]))
            for slot in self._named_slots()
        ]

    def place(self, slot: SlotId) -> str:
        """Where `slot` is, for messages."""
        return f"{self.path} slot {slot}"

    # -- header ---------------------------------------------------------------------------------

    def _write_blank_header(self) -> None:
        raw = header.encode_index(self.geometry, self.entries)
        self._index_hash = hash(raw)
        for generation in (0, 1):
            raw += header.encode_table(self.geometry, self.entries, generation, self._namespace)
        self._write_header_part(raw, 0)

    def _write_header_part(self, raw: bytes, offset: int) -> None:
        part = _scratch.take(len(raw))
        part[:] = raw
        write_fully(self._device, self._fd, [part], offset)

    def may_be_named_on_disk(self, slots: Sequence[SlotId]) -> bool:
        """Whether the header on disk may name one of `slots`: `forget` them before they are
        overwritten.  Under the owner's lock."""
        return bool(self._named_on_disk[list(slots)].any())

    def forget(self, lock: threading.Lock | threading.RLock) -> None:
        """Return once no slot that the table lacks is named on disk; else as `flush_header`.

        The index may still show the slots to Zarr, until `flush_header`: what stands there is
        about to be overwritten, mostly by a row that makes the index right again.
        """
        self._flush(lock, None, with_index=False)

    def flush_header(
        self, lock: threading.Lock | threading.RLock, version: int | None = None
    ) -> None:
        """Return once a header of at least `version` (default: the present one) is on disk.

        Call without `lock`, the owner's.  Not synced: a power cut may lose it, which costs rows
        and never bytes.  Raises `DeviceError`; then the header on disk is an older one, or torn
        into one copy.
        """
        self._flush(lock, version, with_index=True)

    def _flush(
        self, lock: threading.Lock | threading.RLock, version: int | None, *, with_index: bool
    ) -> None:
        with self._header_lock:
            with lock:
                wanted = self.version if version is None else version
                table_is_due = self._table_version < wanted
                index_is_due = with_index and self._index_version < wanted
                if not table_is_due and not index_is_due:
                    return
                current = self.version
                generation = self._generation + table_is_due
                if table_is_due:
                    table = header.encode_table(
                        self.geometry, self.entries, generation, self._namespace
                    )
                    named = self._named()
                    self._named_on_disk |= named  # from here on the disk may name them
                    self.recency_changed = False
                if index_is_due:
                    index = header.encode_index(self.geometry, self.entries)
            if table_is_due:
                self._write_header_part(table, self.geometry.table_offset(generation))
                with lock:
                    self._generation = generation
                    self._table_version = current
                    self._named_on_disk = named
            if index_is_due:
                index_hash = hash(index)
                if index_hash != self._index_hash:
                    self._index_hash = None
                    self._write_header_part(index, 0)
                    self._index_hash = index_hash
                self._index_version = current

    # -- rows -----------------------------------------------------------------------------------

    def write_rows(self, first: SlotId, rows: Sequence[memoryview]) -> list[Record]:
        """Write `rows` to consecutive slots from `first`; what then stands in each.

        At most `ROWS_PER_CALL` rows of row_bytes each, or frames if slots are packed.  Raises
        `DeviceError`, and then the slots hold no defined content.  The slots must not be named on
        disk.
        """
        buffers, records = self._format.lay_out(rows)
        started = time.monotonic()
        write_fully(self._device, self._fd, buffers, self.geometry.row_offset(first))
        if self._codec is not None:
            self._codec.wrote(len(rows) * self.geometry.stride, time.monotonic() - started)
        return records

    def read_rows(self, rows: Sequence[ReadRow]) -> list[CorruptRecord | DeviceError | None]:
        """Read rows from consecutive slots; per row None, or what is wrong with it.

        At most `ROWS_PER_CALL` rows.  A fault in one row does not fail its neighbours.  A buffer
        whose result is not None holds no defined content.
        """
        try:
            return self._read_run(rows)
        except (CorruptRecord, DeviceError) as exc:
            if len(rows) == 1:
                return [exc]
        return [error for row in rows for error in self.read_rows([row])]

    def _read_run(self, rows: Sequence[ReadRow]) -> list[CorruptRecord | DeviceError | None]:
        targets = self._format.targets(rows)
        first = rows[0].slot
        offset = self.geometry.row_offset(first)
        started = time.monotonic()
        read_fully(self._device, self._fd, targets, offset, self.place(first))
        if self._codec is not None:
            self._codec.read(len(rows) * self.geometry.stride, time.monotonic() - started)
        return [
            None if reason is None else CorruptRecord(self.place(row.slot), reason)
            for row, reason in zip(rows, self._format.accept(rows, targets), strict=True)
        ]

    def read_slots(self, first: SlotId, slots: memoryview) -> None:
        """Fill `slots`, page-aligned and a multiple of the stride, with what stands on disk.

        Raises `DeviceError`, or `CorruptRecord` where the file ends early.
        """
        offset = self.geometry.row_offset(first)
        read_fully(self._device, self._fd, [slots], offset, self.place(first))

    def write_slots(self, first: SlotId, slots: memoryview) -> None:
        """Write whole slots, as `read_slots` read them elsewhere.  As `write_rows` on errors."""
        write_fully(self._device, self._fd, [slots], self.geometry.row_offset(first))

    # -- end ------------------------------------------------------------------------------------

    def is_lost(self) -> bool:
        """Whether somebody removed the file: then it will not be there after a restart.

        Raises `DeviceError` if the device does not say.
        """
        return not self._device.is_linked(self._fd)

    def close(self) -> None:
        """Close the file.  The caller has flushed the header and ended all I/O."""
        self._device.close(self._fd)

    def remove(self) -> None:
        """Give the segment back to the file system; no I/O on it is under way.

        Raises `DeviceError`; then it is closed, and its file still there.
        """
        is_lost = False
        with contextlib.suppress(DeviceError):
            is_lost = self.is_lost()
        with contextlib.suppress(DeviceError):  # of a file that nobody will read again
            self._device.close(self._fd)
        if not is_lost:  # else what has its name now is not ours
            self._device.remove(self.path)
        with contextlib.suppress(DeviceError):
            self._device.remove_directory(self.path.parent)


def runs(slots: Sequence[SlotId], longest: int = ROWS_PER_CALL) -> list[tuple[int, int]]:
    """[start, stop) positions of the stretches of `slots` that are consecutive numbers."""
    stretches: list[tuple[int, int]] = []
    start = 0
    for position in range(1, len(slots) + 1):
        is_end = position == len(slots) or slots[position] != slots[position - 1] + 1
        if is_end or position - start == longest:
            stretches.append((start, position))
            start = position
    return stretches
