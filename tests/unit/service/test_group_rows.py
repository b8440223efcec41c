"""StoreClient and the real store process with rows of several sizes: one index, one root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.facts import RowFacts
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import StoreClient, StoreRefused
from storage.service.messages import SmallerRows
from storage.store import DiskStore
from storage.types import RowKey, RowOutcome
from tests.unit.service.test_client import (
    IDENTITY,
    ROW_BYTES,
    SLOTS,
    TIMEOUT_S,
    FakeRegion,
    content,
    wait,
)

OK = RowOutcome.OK
SMALL = 4096
FIELDS = {"dtype": "bfloat16", "row_of_groups": [1, 2]}
SMALLER = SmallerRows((1, 2), FIELDS, SMALL, RowFacts(groups=(1, 2), largest_row_bytes=ROW_BYTES))


def key(group: int, number: int) -> RowKey:
    return RowKey(bytes([number]) * 32 + group.to_bytes(4, "big"))


KEYS = [key(group, number) for number in range(6) for group in range(3)]


def bytes_of(name: RowKey) -> int:
    return ROW_BYTES if name[-1] == 0 else SMALL


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    return StoreOptions(tmp_path / "store", 4_000_000, segment_bytes=200_000, admission="always")


@pytest.fixture
def region() -> FakeRegion:
    return FakeRegion()


@pytest.fixture
def client(options: StoreOptions, region: FakeRegion) -> Iterator[StoreClient]:
    made = connected(options, region)
    yield made
    made.close()


def connected(options: StoreOptions, region: FakeRegion) -> StoreClient:
    client = StoreClient(options, IDENTITY, region.description, smaller=[SMALLER])
    client.connect(TIMEOUT_S)
    return client


def read_all(client: StoreClient, region: FakeRegion) -> None:
    """Into other slots than they were written from; behind a small row nothing changes."""
    region.rows[:] = 0x55
    slots = [SLOTS - 1 - position for position in range(len(KEYS))]
    client.read(KEYS, slots)
    assert wait(client)[0].outcomes == [OK] * len(KEYS)
    for position, (name, slot) in enumerate(zip(KEYS, slots, strict=True)):
        size = bytes_of(name)
        assert (region.rows[slot][:size] == content(position)[:size]).all()
        assert (region.rows[slot][size:] == 0x55).all()


def test_groups_rows_come_back_also_after_a_restart_and_weigh_their_own_bytes(
    client: StoreClient, region: FakeRegion, options: StoreOptions
) -> None:
    for slot in range(len(KEYS)):
        region.rows[slot] = content(slot)
    client.write(KEYS, range(len(KEYS)))
    assert wait(client)[0].outcomes == [OK] * len(KEYS)
    assert client.usage.bytes_written == sum(map(bytes_of, KEYS))
    assert all(name in client for name in KEYS)
    read_all(client, region)
    client.close()
    again = connected(options, region)
    assert len(again) == len(KEYS)
    read_all(again, region)
    again.clear()
    assert wait(again)[0].outcomes == [OK]
    again.poll()
    assert len(again) == 0
    again.close()
    with DiskStore.open(options) as store:
        assert len(store.open_rows(IDENTITY, ROW_BYTES)) == 0
        assert len(store.open_rows(Identity("model", FIELDS), SMALL)) == 0


def test_rows_larger_than_a_slot_are_refused(options: StoreOptions, region: FakeRegion) -> None:
    larger = SmallerRows((1,), FIELDS, 2 * ROW_BYTES)
    refused = StoreClient(options, IDENTITY, region.description, smaller=[larger])
    with pytest.raises(StoreRefused, match=f"rows of {2 * ROW_BYTES} bytes: slots have"):
        refused.connect(TIMEOUT_S)
