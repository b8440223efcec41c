"""Histories: what the metrics say of a manager, beside what it answered and its tier was asked."""

from __future__ import annotations

from pathlib import Path

from storage.types import RowOutcome
from tests.unit.tiering.fakes import HIT, MISS, PENDING, FakeTier, keys, lookups, make, store
from tests.unit.tiering.metrics_truth import History, Observation, by_label, of_disk
from tiering import metrics
from tiering.backpressure import STALL_S
from tiering.manager import TieringManager
from tiering.metrics import Sample, collect
from tiering.primary import PrimaryTier
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism

LATENT, HEADS = LayerFacts("mla", 8192, 1), LayerFacts("draft", 4096, 8)
LAYOUT = RowLayout.of([LATENT, HEADS], Parallelism(tp=2, world_size=2), 1)
REGION = ("region",)


def samples_of(manager: TieringManager) -> list[Sample]:
    return list(collect(manager, LAYOUT, {}))


def lookups_by_outcome(path: Path) -> Observation:  # noqa: ARG001
    """Each chunk counts once per request, however often it is looked up, where it was found."""
    manager, tier, _ = make(8, 20, 21, 22)
    store(manager, 1, 2)
    tier.finish_all()
    manager.end_step()
    for _ in range(2):
        assert lookups(manager, "a", 1, 2, 9, 20) == [HIT, HIT, MISS, PENDING]
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    for _ in range(2):
        assert lookups(manager, "a", 1, 2, 9, 20) == [HIT, HIT, MISS, HIT]
    assert lookups(manager, "b", 1, 20, 21) == [HIT, HIT, PENDING]
    manager.end_step()
    tier.finish_all(RowOutcome.CORRUPT)
    manager.end_step()
    assert lookups(manager, "b", 1, 20, 21) == [HIT, HIT, MISS]
    for _ in range(2):
        assert manager.lookup(keys(22)[0], "c", below=False) is MISS
    return Observation(
        samples_of(manager),
        {
            # a: 1, 2; b: 1, 20.   a: 20.   a: 9; b: 21; c: 22, which was not to be sought on disk.
            (metrics.CHUNK_HITS, REGION): 4,
            of_disk(metrics.CHUNK_HITS): 1,
            (metrics.CHUNK_MISSES, ()): 3,
            (metrics.CHUNK_QUERIES, REGION): 4 + 1 + 3,
            of_disk(metrics.CHUNK_QUERIES): 1 + 3 - 1,
            of_disk(metrics.PROMOTIONS_FAILED): 1,
            (metrics.CHUNKS_STORED, ()): 2,
        },
    )


def two_tiers_asked_in_turn(path: Path) -> Observation:  # noqa: ARG001
    fast, large = FakeTier(1), FakeTier(1, 2)
    manager = TieringManager(PrimaryTier(8), {"fast": fast, "disk": large})
    lookups(manager, "a", 1, 2, 3)
    manager.end_step()
    fast.finish_all()
    large.finish_all()
    manager.end_step()
    assert lookups(manager, "a", 1, 2, 3) == [HIT, HIT, MISS]
    return Observation(
        samples_of(manager),
        {
            (metrics.CHUNK_QUERIES, REGION): 3,
            (metrics.CHUNK_QUERIES, ("fast",)): 3,
            of_disk(metrics.CHUNK_QUERIES): 2,
            (metrics.CHUNK_HITS, ("fast",)): 1,
            of_disk(metrics.CHUNK_HITS): 1,
            (metrics.CHUNK_MISSES, ()): 1,
        },
    )


def slots_and_pins(path: Path) -> Observation:  # noqa: ARG001
    """Two requests load the same chunk while it is written, another is stored, one is read."""
    manager, tier, _ = make(10, 20)
    store(manager, 1)
    tier.finish_all()
    manager.end_step()
    store(manager, 2)  # written: a pin
    for request in ("a", "b"):  # two pins each
        assert lookups(manager, request, 1, 2) == [HIT, HIT]
        manager.prepare_load(keys(1, 2), request)
    assert manager.prepare_store(keys(3, 4)) is not None  # no pins, but busy
    lookups(manager, "c", 20)  # likewise
    return Observation(
        samples_of(manager),
        {
            (metrics.REGION_SLOTS, ("total",)): 10,
            (metrics.REGION_SLOTS, ("occupied",)): 5,
            (metrics.REGION_SLOTS, ("busy",)): 5,
            (metrics.REGION_PINS, ()): 1 + 2 * 2,
            of_disk(metrics.CASCADES_UNDER_WAY): 1,
        },
    )


def idle_again(path: Path) -> Observation:  # noqa: ARG001
    """Of a read and a write that hung, too, nothing stays."""
    manager, tier, _ = make(10, 20)
    store(manager, 1)
    lookups(manager, "a", 20)
    manager.end_step()
    tier.finish_all(RowOutcome.HUNG)
    manager.end_step()
    held = Observation(
        samples_of(manager),
        {
            (metrics.REGION_SLOTS, ("total",)): 10,
            (metrics.REGION_SLOTS, ("occupied",)): 2,
            (metrics.REGION_SLOTS, ("busy",)): 2,
            (metrics.REGION_PINS, ()): 1,
        },
    )
    assert held.lies() == []
    tier.released += [(1, 0), (2, 0)]
    manager.end_step()
    return Observation(
        samples_of(manager),
        {
            (metrics.REGION_SLOTS, ("total",)): 10,
            (metrics.REGION_SLOTS, ("occupied",)): 1,
            (metrics.REGION_PINS, ()): 0,
            of_disk(metrics.PROMOTIONS_FAILED): 1,
            of_disk(metrics.WRITES_NOT_STORED): 1,
            of_disk(metrics.CASCADES_UNDER_WAY): 0,
        },
    )


def a_region_that_is_too_small(path: Path) -> Observation:  # noqa: ARG001
    """Evictions, chunks without a slot, writes that the disk did not take."""
    manager, tier, clock = make(4)
    store(manager, 1, 2, 3, 4)
    tier.finish_all()
    manager.end_step()
    tier.finish_all(RowOutcome.DECLINED)  # those that waited for the first two
    manager.end_step()
    refused = 4 - len(tier.present)
    store(manager, 5, 6)
    lookups(manager, "a", 5, 6)
    assert lookups(manager, "a", 3, 4) == [HIT, HIT]
    assert manager.prepare_store(keys(7)) is None, "all are held or written"
    assert manager.prepare_store(keys(*range(10, 16))) is None
    clock.now += 60.0
    return Observation(
        samples_of(manager),
        {
            (metrics.CHUNKS_STORED, ()): 6,
            (metrics.CHUNKS_EVICTED, REGION): 2,
            (metrics.STORES_DECLINED, ()): 1 + 6,
            of_disk(metrics.WRITES_NOT_STORED): refused,
        },
    )


def reads_that_stand_still(path: Path) -> Observation:  # noqa: ARG001
    """One request waits in vain; then nobody waits any more."""
    manager, tier, clock = make(8, 1, 2, 3, 4)
    manager.tiers["disk"].breaker = type(manager.tiers["disk"].breaker)(stall_s=11.0)
    assert lookups(manager, "a", 1) == [PENDING]
    manager.end_step()
    for _ in range(6):
        clock.now += 2.0
        last = lookups(manager, "a", 1)
        manager.end_step()
    assert last == [MISS]
    refused = lookups(manager, "b", 2, 3)
    assert refused == [MISS, MISS]
    assert [kind for kind, _ in tier.jobs.values()] == ["read"]
    return Observation(
        samples_of(manager),
        {
            (metrics.PROMOTIONS_TIMED_OUT, ()): 1,
            of_disk(metrics.READS_SUSPENDED): 1,
            of_disk(metrics.READ_SUSPENSIONS): 1,
            of_disk(metrics.LOOKUPS_REFUSED): len(refused),
        },
    )


def reads_that_go_on(path: Path) -> Observation:  # noqa: ARG001
    """The probe of a tier that was left alone brings it back."""
    manager, tier, clock = make(8, 1, 2)
    lookups(manager, "a", 1)
    manager.end_step()
    clock.now += 6.0
    manager.end_step()
    tier.finish_all()
    manager.end_step()
    return Observation(
        samples_of(manager),
        {of_disk(metrics.READS_SUSPENDED): 0, of_disk(metrics.READ_SUSPENSIONS): 1},
    )


def held_back(path: Path, reason: str) -> Observation:  # noqa: ARG001
    """Of 10 chunks and then 6 more, those that the tier was not asked to write at once."""
    manager, tier, clock = make(20 if reason == "region share" else 100)
    if reason == "slow":
        store(manager, 90)
        tier.finish(1, seconds=0.5)
        manager.end_step()
    elif reason == "stalled":
        store(manager, 90)
        clock.now += STALL_S
    elif reason == "failing":
        for number in (90, 91, 92):
            store(manager, number)
            tier.finish_all(RowOutcome.FAILED)
            manager.end_step()
    elif reason == "disk state":
        tier.takes_writes = False
    offered_before = {name for _, names in tier.jobs.values() for name in names}
    store(manager, *range(10))
    store(manager, *range(10, 16))
    offered = {name for _, names in tier.jobs.values() for name in names} - offered_before
    # The failure that made it known was the disk's: its chunk waits with the others.
    waiting = 16 - len(offered) + (reason == "failing")
    assert offered != set(keys(*range(16)))
    return Observation(
        samples_of(manager),
        {
            **by_label(metrics.CASCADES_HELD_BACK, {reason: 16 - len(offered)}),
            of_disk(metrics.CASCADES_WAITING): waiting,
            of_disk(metrics.CASCADES_UNDER_WAY): len(offered | offered_before),
            of_disk(metrics.WRITES_NOT_STORED): 3 if reason == "failing" else 0,
        },
    )


def held_back_for(reason: str) -> History:
    return lambda path: held_back(path, reason)


def held_back_until_it_was_too_late(path: Path) -> Observation:  # noqa: ARG001
    manager, tier, _ = make(4)
    tier.takes_writes = False
    store(manager, 1, 2, 3, 4)
    store(manager, 5, 6)
    gone = [number for number in range(1, 7) if manager.primary.state(keys(number)[0]) is None]
    return Observation(
        samples_of(manager),
        {
            **by_label(metrics.CASCADES_HELD_BACK, {"disk state": 6}),
            of_disk(metrics.CASCADES_LOST): len(gone),
            of_disk(metrics.CASCADES_WAITING): 6 - len(gone),
            (metrics.CHUNKS_EVICTED, REGION): len(gone),
        },
    )


def rows_with_dedup(path: Path) -> Observation:  # noqa: ARG001
    """One copy of the latent layer, both halves of the heads, on two ranks."""
    manager, _, _ = make(4)
    on, off = 8192 + 2 * 4096, 2 * (8192 + 4096)
    why = next(iter(LAYOUT.copies), "")
    label = f"1 layer(s): {why}" if why else ""
    return Observation(
        samples_of(manager),
        {
            (metrics.ROW_BYTES, ("on",)): on,
            (metrics.ROW_BYTES, ("off",)): off,
            (metrics.DEDUP_RATIO, ()): off / on,
            (metrics.REPLICATION_INFO, ("2", "1", "false", label)): 1,
        },
    )


HISTORIES: dict[str, History] = {
    history.__name__: history
    for history in (
        lookups_by_outcome,
        two_tiers_asked_in_turn,
        slots_and_pins,
        idle_again,
        a_region_that_is_too_small,
        reads_that_stand_still,
        reads_that_go_on,
        held_back_until_it_was_too_late,
        rows_with_dedup,
    )
} | {
    reason: held_back_for(reason)
    for reason in ("region share", "slow", "stalled", "failing", "disk state")
}
