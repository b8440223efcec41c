"""Rows that shrink to different sizes, and a store of them under a codec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from storage.device import Device
from storage.header import SLOT_HEADER_BYTES, SegmentGeometry
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.pool import charge_of
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)
from storage.testing.contract import StoreHarness
from storage.testing.rows import bytes_on_disk, key_of, row_of
from storage.types import RowKey, RowOutcome

OK = RowOutcome.OK
ROW_BYTES = 32768
SLOTS = 4


def mixed_row_of(key: RowKey, row_bytes: int = ROW_BYTES) -> bytes:
    """Noise, and behind it as many zeros as the key says: 0, 1/4, 1/2 or 3/4 of the row."""
    noise = row_bytes * (4 - kind_of(key)) // 4
    return row_of(key, noise).ljust(row_bytes, b"\0")


def kind_of(key: RowKey) -> int:
    return key[0] % 4


def keys_of(kind: int, count: int, first: int = 0) -> list[RowKey]:
    """`count` keys whose rows shrink by `kind` quarters."""
    found = (key for key in map(key_of, range(first, first + 40 * count)) if kind_of(key) == kind)
    return [next(found) for _ in range(count)]


class MixedHarness(StoreHarness):
    """A store of rows that shrink to different sizes, with room for `segments` of raw ones, that
    writes what it is offered."""

    def __init__(
        self,
        root: Path,
        codec: str = "zstd",
        segments: int = 5,
        device: Callable[[], Device] | None = None,
    ) -> None:
        self.row_bytes = ROW_BYTES
        self.identity = Identity("test/model", {"layout": "plain"}, 2, codec)
        self._row_of = mixed_row_of
        self._device = device
        self.stored: set[RowKey] = set()
        plain = SegmentGeometry(ROW_BYTES, SLOTS)
        raw = plain.size_classes()[-1]
        overhead = NAMESPACE_OVERHEAD_BYTES + ROOT_OVERHEAD_BYTES
        self.options = StoreOptions(
            root,
            segments * charge_of(raw) + overhead,
            segment_bytes=(plain.stride + SLOT_HEADER_BYTES) * SLOTS,
            admission="always",
            reserve_bytes=0,
            codec=codec,
            codec_always=True,
            lock_timeout_s=0.2,
        )
        self.open()

    def open_on(self, device: Device | None, *args: Callable[[], float]) -> None:
        super().open_on(device, *args)
        self.rows.on_change = self._changed

    def _changed(self, published: Sequence[RowKey], withdrawn: Sequence[RowKey]) -> None:
        self.stored.update(published)
        self.stored.difference_update(withdrawn)

    @property
    def segments_by_class(self) -> Counter[SegmentGeometry]:
        return Counter(self.rows.pool[number].geometry for number in self.rows.pool.numbers)

    def check_rows(self) -> None:
        keys = self.rows.keys()
        for key, (outcome, row) in zip(keys, self.read(keys), strict=True):
            assert outcome is OK
            assert row == mixed_row_of(key)

    def check(self) -> None:
        """Every row is right; the ledger says what is there, and the disk holds no more."""
        self.check_rows()
        keys = self.rows.keys()
        pool = self.rows.pool
        segments = [pool[number] for number in pool.numbers]
        assert sum(segment.free_count for segment in segments) + len(keys) == SLOTS * len(segments)
        usage = self.store.usage()
        made = NAMESPACE_OVERHEAD_BYTES if self.rows.directory.exists() else 0
        files = list((self.rows.directory / "c").glob("*/0"))  # one that can't be removed counts
        charges = sum(file.stat().st_size + SEGMENT_OVERHEAD_BYTES for file in files)
        assert usage.used_bytes == ROOT_OVERHEAD_BYTES + made + charges
        assert bytes_on_disk(self.options.root) <= usage.used_bytes <= usage.budget_bytes
        for segment in segments:
            assert segment.user_count == 0
            assert segment.path.stat().st_size == segment.geometry.segment_bytes
