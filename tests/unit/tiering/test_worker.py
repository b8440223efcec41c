"""Copies, dedup: every rank's pages go out and come back into other blocks of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tiering.region import Region
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism
from tiering.worker import BlockRun, CopyWorker, LayerPages

BLOCKS = 24


class Ranks:
    """All ranks of one engine in one process, on one real region."""

    def __init__(
        self,
        directory: Path,
        layers: Sequence[LayerFacts],
        tp: int,
        blocks_per_chunk: int,
        *,
        padding: int = 0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.layout = RowLayout.of(layers, Parallelism(tp=tp, world_size=tp), blocks_per_chunk)
        self.padding = padding
        size = 16 * self.layout.row_bytes
        region = Region.create("e", self.layout, size, directory=directory)
        self.region = region
        self.groups = groups or [range(len(layers))]
        self.tensors: list[list[torch.Tensor]] = []
        self.workers = []
        for rank in range(tp):
            mine = region if rank == 0 else Region.attach("e", rank=rank, directory=directory)
            # Strided: pages stand apart, as in a tensor that holds more than one layer.
            tensors = [
                torch.zeros((BLOCKS, layer.page_bytes + 64), dtype=torch.int8)[
                    :, : layer.page_bytes
                ]
                for layer in layers
            ]
            pages = [
                [LayerPages(i, layers[i].page_bytes - padding) for i in group]
                for group in self.groups
            ]
            self.tensors.append(tensors)
            self.workers.append(CopyWorker(mine, rank, tensors, pages))

    def fill(self, seed: int) -> None:
        """Each shard's content is its own; replicas hold the same."""
        for rank, tensors in enumerate(self.tensors):
            for index, (layer, tensor) in enumerate(zip(self.layout.layers, tensors, strict=True)):
                shard = self.layout.shard_of(layer, rank)
                random = np.random.default_rng([seed, index, shard])
                shape = tuple(tensor.shape)
                tensor[:] = torch.from_numpy(random.integers(-128, 128, shape, dtype=np.int8))

    def copy(self) -> list[list[torch.Tensor]]:
        return [[tensor.clone() for tensor in tensors] for tensors in self.tensors]

    def wipe(self) -> None:
        for tensors in self.tensors:
            for tensor in tensors:
                tensor[:] = -1

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def run(block_ids: Sequence[int], slots: Sequence[int], first_block: int = 0) -> BlockRun:
    return BlockRun(np.array(block_ids, np.int64), np.array(slots, np.int32), first_block)


MIXED = [
    LayerFacts("mla", 300, max_tp_shards=1),
    LayerFacts("gqa", 256, max_tp_shards=2),
    LayerFacts("unknown", 128),
]


@pytest.fixture
def directory(memory_path: Path) -> Path:
    return memory_path


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3, 4])
def test_replicas_store_once_and_load_everywhere(
    directory: Path, tp: int, blocks_per_chunk: int
) -> None:
    ranks = Ranks(directory, MIXED, tp, blocks_per_chunk)
    ranks.fill(1)
    before = ranks.copy()
    count = 3 * blocks_per_chunk
    source, slots = list(range(count)), [7, 2, 11]
    moved = [worker.store([run(source, slots)]).bytes_moved for worker in ranks.workers]
    page_copies = sum(layer.shards * layer.page_bytes for layer in ranks.layout.layers)
    assert sum(moved) == count * page_copies, "every distinct byte once"
    ranks.wipe()
    target = list(reversed(range(BLOCKS - count, BLOCKS)))
    for worker in ranks.workers:
        worker.load([run(target, slots)])
    for rank, tensors in enumerate(ranks.tensors):
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor[target], before[rank][index][source])
            untouched = sorted(set(range(BLOCKS)) - set(target))
            assert (tensor[untouched] == -1).all()
    ranks.close()


def test_all_mla_stores_exactly_one_tp_th(directory: Path) -> None:
    layers = [LayerFacts(f"mla{i}", 512, max_tp_shards=1) for i in range(4)]
    ranks = Ranks(directory, layers, 4, 1)
    ranks.fill(1)
    slots = list(range(8))
    moved = [worker.store([run(slots, slots)]).bytes_moved for worker in ranks.workers]
    assert moved == [8 * 4 * 512 // 4] * 4, "in turns, evenly"
    ranks.close()


def test_the_first_chunk_may_be_entered_in_its_middle(directory: Path) -> None:
    ranks = Ranks(directory, MIXED, 2, 4)
    ranks.fill(1)
    before = ranks.copy()
    for worker in ranks.workers:
        worker.store([run(range(8), [3, 9])])
    ranks.wipe()
    for worker in ranks.workers:
        worker.load([run([20, 21, 22], [3, 9], first_block=2)])  # blocks 2, 3 and 4
    for rank, tensors in enumerate(ranks.tensors):
        for index, tensor in enumerate(tensors):
            assert torch.equal(tensor[[20, 21, 22]], before[rank][index][[2, 3, 4]])
            assert (tensor[:20] == -1).all()
    ranks.close()


def test_padding_of_pages_is_not_copied(directory: Path) -> None:
    ranks = Ranks(directory, [LayerFacts("mla", 300, max_tp_shards=1)], 1, 1, padding=44)
    ranks.fill(1)
    before = ranks.copy()
    assert ranks.workers[0].store([run([1], [0])]).bytes_moved == 256
    ranks.wipe()
    ranks.workers[0].load([run([2], [0])])
    assert torch.equal(ranks.tensors[0][0][2, :256], before[0][0][1, :256])
    assert (ranks.tensors[0][0][2, 256:] == -1).all()
    ranks.close()


def test_a_chunk_of_one_group_leaves_the_other_groups_layers_alone(directory: Path) -> None:
    layers = [LayerFacts("full", 256, 1), LayerFacts("window", 256, 1)]
    ranks = Ranks(directory, layers, 2, 1, groups=[[0], [1]])
    ranks.fill(1)
    before = ranks.copy()
    for worker in ranks.workers:
        worker.store([run([1, 2], [4, 5]), run([3], [6])])
    ranks.wipe()
    for worker in ranks.workers:
        worker.load([run([8], [5]), run([9], [6])])
    for rank, (full, window) in enumerate(ranks.tensors):
        assert torch.equal(full[8], before[rank][0][2])
        assert torch.equal(window[9], before[rank][1][3])
        assert (window[8] == -1).all()
        assert (full[9] == -1).all()
    ranks.close()


def test_tensors_that_are_not_the_layouts_are_refused(directory: Path) -> None:
    layout = RowLayout.of([LayerFacts("mla", 256, 1)], Parallelism(), 1)
    region = Region.create("e", layout, 1 << 16, directory=directory)
    with pytest.raises(ValueError, match=r"mla: expected int8\[num_blocks, 256\]"):
        CopyWorker(region, 0, [torch.zeros((4, 128), dtype=torch.int8)], [[LayerPages(0, 128)]])
    region.close()
