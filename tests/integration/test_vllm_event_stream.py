"""The events that vLLM is given in a step: one per medium and direction, in bounded pieces."""

from __future__ import annotations

from typing import Any

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingKVEventsConfig

from storage.changes import ChangeLog, Changes
from storage.types import RowKey
from tiering.manager import TieringManager
from tiering.primary import ChunkState, PrimaryTier
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism
from tiering.vllm.events import EventStream
from tiering.vllm.manager import VllmManager

GROUP = (3).to_bytes(4, "big")
PER_STEP = 512


def keys(*numbers: int) -> list[RowKey]:
    return [RowKey(number.to_bytes(32, "big") + GROUP) for number in numbers]


class Tier:
    """A set of keys that changes when the test says so."""

    def __init__(self, found: list[RowKey]) -> None:
        self.log = ChangeLog(found)

    def follow(self) -> None: ...

    @property
    def change_count(self) -> int:
        return len(self.log)

    def take_changes(self, limit: int) -> Changes:
        return self.log.take(limit)


def told(events: list[Any]) -> list[tuple[Medium, bool, int]]:
    return [(event.medium, event.removed, len(event.keys)) for event in events]


def test_events_come_in_pieces_and_news_before_what_was_found() -> None:
    disk, region = Tier(keys(*range(1100))), Tier([])
    stream = EventStream()
    stream.add_region(region)
    stream.add_disk("nvme", disk)
    assert told(stream.take()) == [(Medium.STORAGE, False, PER_STEP)]
    region.log.note_stored(keys(1, 2))
    disk.log.note_stored(keys(2000, 2001))
    disk.log.note_removed(keys(*range(300)))  # of which some were told
    events = stream.take()
    assert sum(len(event.keys) for event in events if event.medium is Medium.STORAGE) == PER_STEP
    assert told(events)[0] == (Medium.CPU, False, 2)
    removed, stored = (event for event in events if event.medium is Medium.STORAGE)
    assert (removed.removed, stored.removed) == (True, False)
    assert stored.keys[:2] == keys(2000, 2001)
    assert {(e.locality, e.ownership) for e in (removed, stored)} == {(Locality.LOCAL, "nvme")}
    assert (events[0].locality, events[0].ownership) == (None, None)
    while stream.is_pending:
        stream.take()
    assert stream.take() == []


def test_events_of_vllm_name_block_and_group() -> None:
    """Through vLLM's own translation, without tokens: what a store found at start can tell."""
    disk = Tier(keys(7))
    stream = EventStream()
    stream.add_disk("disk", disk)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
    [stored] = tracker.take_events(stream.take())
    assert (stored.medium, stored.locality, stored.ownership) == ("STORAGE", "LOCAL", "disk")
    assert (len(stored.block_hashes), stored.group_idx) == (1, 3)
    disk.log.note_removed(keys(7))
    [removed] = tracker.take_events(stream.take())
    assert removed.block_hashes == stored.block_hashes
    assert (removed.medium, removed.group_idx) == ("STORAGE", 3)


def _store(manager: VllmManager, primary: PrimaryTier) -> None:
    primary.allocate(keys(1), ChunkState.STORING, lambda _key: False)
    manager._manager.complete_store(keys(1))


def test_events_keep_an_engine_stepping_until_they_are_told_and_cost_nothing_when_off() -> None:
    for announces in (True, False):
        primary = PrimaryTier(4)
        manager = VllmManager(TieringManager(primary), announces=announces)
        _store(manager, primary)
        assert manager.has_pending_work() == announces
        assert told(list(manager.take_events())) == [(Medium.CPU, False, 1)] * announces
        assert not manager.has_pending_work()
        assert primary.change_count == 0


def test_events_of_private_rows_come_from_the_region_that_is_used() -> None:
    manager = VllmManager(TieringManager(PrimaryTier(0)), announces=True)
    layout = RowLayout.of([LayerFacts("a", 4096, 1)], Parallelism(), 1)
    manager.use_private_rows(layout, 4)
    _store(manager, manager._manager.primary)
    assert told(list(manager.take_events())) == [(Medium.CPU, False, 1)]
