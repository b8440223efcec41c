"""replica, dedup, row_layout: ranks as processes on the real shared region, and the real store.

What a rank holds follows from content that knows nothing of rows: of each layer a whole page per
block, as a single rank with all the heads would have it, of which each rank gets its part.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.store import DiskStore
from storage.types import RowKey, RowOutcome
from tiering.region import Region
from tiering.rows import RowLayout, row_identity
from tiering.topology import KvHeads, LayerFacts, Parallelism
from tiering.worker import BlockRun, CopyWorker, LayerPages

BLOCKS = 16
PADDING = 96  # bytes of a padded page that are no content
RANK_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Layer:
    """`shards` distinct parts; of `stretches` x `shards` pieces of `piece` bytes.  `kind` says what
    the engine tells of it."""

    name: str
    kind: str  # "latent", "heads" or "silent"
    shards: int
    stretches: int
    piece: int
    padding: int = 0

    def facts(self, tp: int) -> LayerFacts:
        per_rank = max(1, self.shards // tp) if self.kind == "heads" else 1
        page_bytes = self.stretches * per_rank * self.piece + self.padding
        if self.kind == "heads":
            return LayerFacts(self.name, page_bytes, heads=KvHeads(self.shards, self.stretches))
        return LayerFacts(self.name, page_bytes, 1 if self.kind == "latent" else None)

    def pages(self, tp: int, rank: int) -> torch.Tensor:
        """What `rank` holds of blocks 0 to BLOCKS - 1: int8[BLOCKS, page without padding]."""
        shards = tp if self.kind == "silent" else self.shards
        random = np.random.default_rng([len(self.name), self.shards, self.piece])
        shape = (BLOCKS, self.stretches, shards, self.piece)
        whole = torch.from_numpy(random.integers(-128, 128, shape, dtype=np.int8))
        own = max(1, shards // tp)
        first = rank * shards // tp
        return whole[:, :, first : first + own].reshape(BLOCKS, -1)


MIXED = [
    Layer("latent", "latent", 1, 1, 1152, padding=PADDING),
    Layer("indexer", "latent", 1, 1, 132),
    Layer("eight heads", "heads", 8, 6, 32),
    Layer("two heads", "heads", 2, 1, 512),
    Layer("silent", "silent", 1, 1, 200),
]
PORTABLE = [layer for layer in MIXED if layer.kind != "silent"]


class Rank:
    """In a process of its own: strided tensors, and the worker over the shared region."""

    def __init__(self, name: str, where: Path, layers: Sequence[Layer], tp: int, rank: int) -> None:
        torch.set_num_threads(1)
        self.content = [layer.pages(tp, rank) for layer in layers]
        self.tensors = []
        for layer, content in zip(layers, self.content, strict=True):
            page_bytes = content.shape[1] + layer.padding
            tensor = torch.full((BLOCKS, page_bytes + 64), -1, dtype=torch.int8)[:, :page_bytes]
            tensor[:, : content.shape[1]] = content
            self.tensors.append(tensor)
        group = [LayerPages(i, content.shape[1]) for i, content in enumerate(self.content)]
        region = Region.attach(name, rank=rank, directory=where)
        self.worker = CopyWorker(region, rank, self.tensors, [group])

    def store(self, blocks: Sequence[int], slots: Sequence[int], first: int = 0) -> None:
        self.worker.store([BlockRun(np.array(blocks), np.array(slots), first)])

    def load(self, blocks: Sequence[int], slots: Sequence[int], first: int = 0) -> None:
        for tensor in self.tensors:
            tensor[:] = -1
        self.worker.load([BlockRun(np.array(blocks), np.array(slots), first)])

    def assert_loaded(self, target: Sequence[int], source: Sequence[int]) -> None:
        """Blocks `target` hold what blocks `source` held, and no other byte was touched."""
        others = sorted(set(range(BLOCKS)) - set(target))
        for tensor, content in zip(self.tensors, self.content, strict=True):
            assert torch.equal(tensor[list(target), : content.shape[1]], content[list(source)])
            assert (tensor[:, content.shape[1] :] == -1).all()
            assert (tensor[others] == -1).all()


class Engine:
    """A region and a way to run its ranks."""

    def __init__(
        self, where: Path, name: str, layers: Sequence[Layer], tp: int, blocks_per_chunk: int
    ) -> None:
        facts = [layer.facts(tp) for layer in layers]
        parallel = Parallelism(tp=tp, world_size=tp)
        self.layout = RowLayout.of(facts, parallel, blocks_per_chunk)
        self.name, self.where, self.layers, self.tp = name, where, layers, tp
        size = 10 * self.layout.row_bytes
        self.region = Region.create(name, self.layout, size, directory=where)

    def run(self, job: Callable[[Rank, Any], None]) -> None:
        """Run `job` in a process per rank, with a barrier among them, and see all succeed."""
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(self.tp)

        def main(rank: int) -> None:
            try:
                job(Rank(self.name, self.where, self.layers, self.tp, rank), barrier)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

        processes = [context.Process(target=main, args=(rank,)) for rank in range(self.tp)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(RANK_TIMEOUT_S)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * self.tp

    def close(self) -> None:
        self.region.unlink()
        self.region.close()


@pytest.fixture
def make_engine(memory_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(layers: Sequence[Layer], tp: int, blocks_per_chunk: int) -> Engine:
        engine = Engine(memory_path, f"e{len(made)}", layers, tp, blocks_per_chunk)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_replicas_in_processes_store_once_and_all_load(
    make_engine: Callable[..., Engine], tp: int, blocks_per_chunk: int
) -> None:
    engine = make_engine(MIXED, tp, blocks_per_chunk)
    source = list(range(2 * blocks_per_chunk))
    target = [BLOCKS - 1 - block for block in source]
    middle = blocks_per_chunk - 1  # where the first chunk is entered the second time

    def job(rank: Rank, barrier: Any) -> None:
        rank.store(source, [7, 2])
        barrier.wait(RANK_TIMEOUT_S)
        rank.load(target, [7, 2])
        rank.assert_loaded(target, source)
        rank.load(target[middle:], [7, 2], first=middle)
        rank.assert_loaded(target[middle:], source[middle:])

    engine.run(job)


@pytest.mark.parametrize(("wrote", "reads"), [(8, 4), (8, 1), (4, 8), (1, 2)])
def test_replica_rows_carry_over_the_disk_to_another_tp(
    make_engine: Callable[..., Engine], tmp_path: Path, wrote: int, reads: int
) -> None:
    """Ranks store, the store writes; other ranks of another TP find the rows under the same
    identity, and each loads its heads into other blocks."""
    writers, readers = make_engine(PORTABLE, wrote, 2), make_engine(PORTABLE, reads, 2)
    assert row_identity(writers.layout) == row_identity(readers.layout)
    assert writers.layout.row_bytes == readers.layout.row_bytes
    keys = [RowKey(bytes([i]) * 36) for i in range(3)]
    writers.run(lambda rank, _: rank.store(range(6), [4, 1, 8]))
    identity = Identity("m", row_identity(writers.layout))
    with DiskStore.open(StoreOptions(tmp_path / "store", 64 << 20)) as store:
        rows = store.open_rows(identity, writers.layout.row_bytes)
        result = rows.write(keys, [writers.region.row(slot) for slot in (4, 1, 8)])
        assert result.outcomes == [RowOutcome.OK] * 3
    with DiskStore.open(StoreOptions(tmp_path / "store", 64 << 20)) as store:
        rows = store.open_rows(identity, readers.layout.row_bytes)
        result = rows.read(keys, [readers.region.row(slot) for slot in (0, 5, 2)])
        assert result.outcomes == [RowOutcome.OK] * 3
    target = [15, 3, 9, 8, 1, 12]

    def job(rank: Rank, _: Any) -> None:
        rank.load(target, [0, 5, 2])
        rank.assert_loaded(target, range(6))

    readers.run(job)


def test_rows_that_depend_on_tp_are_another_namespace_at_another_tp(
    make_engine: Callable[..., Engine],
) -> None:
    two, four = make_engine(MIXED, 2, 1), make_engine(MIXED, 4, 1)
    assert row_identity(two.layout) != row_identity(four.layout)
