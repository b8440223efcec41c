"""What every store of rows does, as a test class, compared with a dict as the model.

Subclass `RowStoreContract`, give it a `harness` fixture, and run it with pytest.  A harness drives
one store through whatever stands before it: a `RowStore` itself, or a client of the service.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from storage.codec import NO_CODEC
from storage.device import Device
from storage.header import SLOT_HEADER_BYTES, SegmentGeometry
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.rowstore import RowStore
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)
from storage.store import DiskStore
from storage.testing.rows import aligned_rows, filled_rows, key_of, row_of
from storage.types import STORED, RowKey, RowOutcome

MARK = 0xA5  # what buffers hold before a read


class Harness(Protocol):
    """One store with room for `capacity_rows`, driven synchronously.

    `write` writes the rows of `row`; `read` reads into buffers full of `MARK` and returns the
    buffers' contents; both give one outcome per key.
    """

    row_bytes: int
    capacity_rows: int

    def row(self, key: RowKey) -> bytes: ...

    def write(self, keys: Sequence[RowKey]) -> list[RowOutcome]: ...

    def read(self, keys: Sequence[RowKey]) -> list[tuple[RowOutcome, bytes]]: ...

    def touch(self, keys: Sequence[RowKey]) -> None: ...

    def keys(self) -> set[RowKey]: ...

    def reopen(self) -> None:
        """Stop in good order and start again on the same root."""
        ...


class StoreHarness:
    """Drives a `RowStore` on any device."""

    def __init__(
        self,
        root: Path,
        row_bytes: int = 8192,
        capacity_rows: int = 16,
        device: Callable[[], Device] | None = None,
        *,
        codec: str = NO_CODEC,
        row_of: Callable[[RowKey, int], bytes] = row_of,
        options: StoreOptions | None = None,
    ) -> None:
        """`capacity_rows` of those that `row_of` makes fit, all being of one size class; unless
        `options` say otherwise."""
        self.row_bytes = row_bytes
        self.capacity_rows = capacity_rows
        self.identity = Identity("test/model", {"layout": "plain"}, element_bytes=2, codec=codec)
        self.options = options or options_for(root, row_bytes, capacity_rows)
        if self.identity.row_codec is not None:
            frame = self.identity.row_codec.encode(memoryview(row_of(key_of(0), row_bytes)))
            classes = SegmentGeometry(row_bytes, 4).size_classes()
            size_class = next((c for c in classes if c.takes(frame.nbytes)), classes[-1])
            self.options = replace(
                options_for(root, row_bytes, capacity_rows, size_class=size_class),
                codec=codec,
                codec_always=True,
            )
        self._row_of = row_of
        self._device = device
        self.store: DiskStore
        self.rows: RowStore
        self.open()

    def open(self) -> None:
        self.open_on(self._device() if self._device else None)

    def open_on(self, device: Device | None, now: Callable[[], float] = time.monotonic) -> None:
        self.store = DiskStore.open(self.options, device, now)
        try:
            self.rows = self.store.open_rows(self.identity, self.row_bytes)
        except BaseException:
            self.store.close()
            raise

    def close(self) -> None:
        assert self.store.close().is_ended

    def reopen(self) -> None:
        self.close()
        self.open()

    def row(self, key: RowKey) -> bytes:
        return self._row_of(key, self.row_bytes)

    def write(self, keys: Sequence[RowKey]) -> list[RowOutcome]:
        return self.rows.write(keys, filled_rows(keys, self.row_bytes, self._row_of)).outcomes

    def read(self, keys: Sequence[RowKey]) -> list[tuple[RowOutcome, bytes]]:
        buffers = aligned_rows(len(keys), self.row_bytes, fill=MARK)
        outcomes = self.rows.read(keys, buffers).outcomes
        return [(o, bytes(b)) for o, b in zip(outcomes, buffers, strict=True)]

    def touch(self, keys: Sequence[RowKey]) -> None:
        self.rows.touch(keys)

    def keys(self) -> set[RowKey]:
        return set(self.rows.keys())


def options_for(
    root: Path,
    row_bytes: int,
    capacity_rows: int,
    slots_per_segment: int = 4,
    size_class: SegmentGeometry | None = None,
) -> StoreOptions:
    """Options of a root with room for exactly `capacity_rows`, a multiple of the slots; under a
    codec, of rows that are all of one class.  What is offered is written, whatever it is worth."""
    plain = SegmentGeometry(row_bytes, slots_per_segment)
    geometry = size_class or plain
    segments, rest = divmod(capacity_rows, slots_per_segment)
    assert segments >= 4, "the store takes no more than 1/4 of the budget for a segment"
    assert rest == 0
    budget = segments * (geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES)
    budget += NAMESPACE_OVERHEAD_BYTES + ROOT_OVERHEAD_BYTES
    return StoreOptions(
        root,
        budget,
        segment_bytes=(plain.stride + SLOT_HEADER_BYTES) * slots_per_segment,
        admission="always",
        reserve_bytes=0,
        lock_timeout_s=0.2,
    )


class RowStoreContract:
    """Each test gets a fresh `harness`."""

    def check(self, harness: Harness, model: set[RowKey]) -> None:
        """Every row of `model` reads as written, and nothing else is there."""
        assert harness.keys() == model
        keys = sorted(model)
        for key, (outcome, row) in zip(keys, harness.read(keys), strict=True):
            assert outcome is RowOutcome.OK
            assert row == harness.row(key)

    def test_rows_read_back_into_other_buffers(self, harness: Harness) -> None:
        keys = [key_of(i) for i in range(harness.capacity_rows)]
        assert harness.write(keys) == [RowOutcome.OK] * len(keys)
        for key, (outcome, row) in zip(keys[::-1], harness.read(keys[::-1]), strict=True):
            assert outcome is RowOutcome.OK
            assert row == harness.row(key)

    def test_a_missing_row_is_a_result_and_leaves_the_buffer(self, harness: Harness) -> None:
        harness.write([key_of(0), key_of(1)])
        results = harness.read([key_of(0), key_of(9), key_of(1)])
        assert [outcome for outcome, _ in results] == [
            RowOutcome.OK,
            RowOutcome.MISSING,
            RowOutcome.OK,
        ]
        assert results[1][1] == bytes([MARK]) * harness.row_bytes

    def test_a_resident_row_is_not_written_again(self, harness: Harness) -> None:
        harness.write([key_of(0)])
        assert harness.write([key_of(0), key_of(1)]) == [RowOutcome.ALREADY_STORED, RowOutcome.OK]

    def test_rows_survive_reopening(self, harness: Harness) -> None:
        keys = [key_of(i) for i in range(5)]
        harness.write(keys)
        harness.reopen()
        self.check(harness, set(keys))

    def test_keys_that_agree_in_part_are_different_rows(self, harness: Harness) -> None:
        half = key_of(0)[:32]
        keys = [RowKey(k) for k in (half, half + half, half + b"\0", b"\0" + half, half[:8], b"\0")]
        assert harness.write(keys) == [RowOutcome.OK] * len(keys)
        self.check(harness, set(keys))

    def test_the_least_recently_used_row_goes_first(self, harness: Harness) -> None:
        keys = [key_of(i) for i in range(harness.capacity_rows)]
        for key in keys:
            harness.write([key])
        harness.touch([keys[0]])
        harness.read([keys[2]])
        assert harness.write([key_of(1000), key_of(1001)]) == [RowOutcome.OK] * 2
        left = {keys[0], keys[2], *keys[4:], key_of(1000), key_of(1001)}
        self.check(harness, left)

    def test_recency_survives_reopening(self, harness: Harness) -> None:
        keys = [key_of(i) for i in range(harness.capacity_rows)]
        for key in keys:
            harness.write([key])
        harness.read([keys[0]])
        harness.reopen()
        harness.write([key_of(1000)])
        self.check(harness, {keys[0], *keys[2:], key_of(1000)})

    @pytest.mark.parametrize("seed", range(3))
    def test_random_histories_match_a_dict(self, harness: Harness, seed: int) -> None:
        """Rows come and go as in a least-recently-used dict of the same capacity."""
        rng = random.Random(seed)
        model: OrderedDict[RowKey, None] = OrderedDict()
        for step in range(60):
            chain = [key_of(rng.randrange(40)) for _ in range(rng.randrange(1, 4))]
            chain = list(dict.fromkeys(chain))
            what = rng.choice(("write", "write", "read", "touch", "reopen"))
            place = f"seed {seed} step {step}: {what}"
            if what == "write":
                outcomes = harness.write(chain)
                assert all(outcome in STORED for outcome in outcomes), place
                for key in reversed(chain):
                    model[key] = None
                    model.move_to_end(key)
                while len(model) > harness.capacity_rows:
                    model.popitem(last=False)
            elif what == "read":
                for key, (outcome, row) in zip(chain, harness.read(chain), strict=True):
                    assert (outcome is RowOutcome.OK) == (key in model), place
                    if key in model:
                        assert row == harness.row(key), place
            elif what == "touch":
                harness.touch(chain)
            else:
                harness.reopen()
            if what in ("read", "touch"):
                for key in reversed(chain):
                    if key in model:
                        model.move_to_end(key)
            assert harness.keys() == set(model), place
        self.check(harness, set(model))
