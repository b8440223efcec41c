"""Copies, dedup: every rank's pages go out and come back into other blocks of every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiering import worker as worker_module
from tiering.region import Region
from tiering.rows import GroupLayer, RowLayout
from tiering.runs import Pages, runs_of
from tiering.topology import KvHeads, LayerFacts, Parallelism
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
                shard = layer.shard_of(rank)
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
    LayerFacts("heads", 192, heads=KvHeads(4, 3)),
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


def test_dedup_halves_what_two_ranks_of_deepseek_v2_lite_store(directory: Path) -> None:
    """25 blocks of 27 latent layers: 24.8832 MB device to host without dedup, 12.4416 MB with it,
    and twice as many of them in the same region."""
    layers = [LayerFacts(f"latent{i}", 18_432, max_tp_shards=1) for i in range(27)]
    moved, rows = [], []
    for dedup in (False, True):
        where = directory / str(dedup)
        where.mkdir()
        layout = RowLayout.of(layers, Parallelism(tp=2, world_size=2, dedup=dedup), 1)
        region = Region.create("e", layout, 32 << 20, directory=where)
        rows.append(region.row_count)
        moved.append(0)
        for rank in range(2):
            mine = Region.attach("e", rank=rank, directory=where)
            tensors = [torch.zeros((25, 18_432), dtype=torch.int8) for _ in layers]
            worker = CopyWorker(mine, rank, tensors, [[LayerPages(i, 18_432) for i in range(27)]])
            moved[-1] += worker.store([run(range(25), range(25))]).bytes_moved
            worker.close()
        region.close()
    assert moved == [24_883_200, 12_441_600]
    assert rows == [33, 67]


def test_stages_of_a_pipeline_each_find_their_own_layers(directory: Path) -> None:
    stages = [[LayerFacts("a", 300, 1), LayerFacts("b", 200, 1)], [LayerFacts("c", 100, 1)]]
    by_rank = [
        {0: [GroupLayer(facts, i, facts.page_bytes) for i, facts in enumerate(stage)]}
        for stage in stages
    ]
    layout = RowLayout.of_unlike_ranks(by_rank, 2)
    region = Region.create("e", layout, 16 * layout.row_bytes, directory=directory)
    random = np.random.default_rng(5)
    for rank, stage in enumerate(stages):
        mine = Region.attach("e", rank=rank, directory=directory)
        tensors = [
            torch.from_numpy(random.integers(-128, 128, (BLOCKS, f.page_bytes), dtype=np.int8))
            for f in stage
        ]
        before = [tensor.clone() for tensor in tensors]
        group = [LayerPages(i, facts.page_bytes) for i, facts in enumerate(stage)]
        worker = CopyWorker(mine, rank, tensors, [group])
        worker.store([run(range(4), [7, 2])])
        for tensor in tensors:
            tensor[:] = -1
        worker.load([run([9, 8, 7, 6], [7, 2])])
        for tensor, content in zip(tensors, before, strict=True):
            assert torch.equal(tensor[[9, 8, 7, 6]], content[:4])
        worker.close()
    region.close()


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


def head_pages(whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """What `rank` of `tp` holds of int8[blocks, stretches, heads, head_bytes]: its pages."""
    heads = whole.shape[2]
    shards = min(tp, heads)
    own = heads // shards
    first = rank // (tp // shards) * own
    return whole[:, :, first : first + own].reshape(len(whole), -1)


@pytest.mark.parametrize(("wrote", "reads"), [(8, 4), (8, 1), (1, 8), (4, 16), (2, 4), (16, 2)])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_dedup_rows_in_head_order_carry_over_to_other_tp(
    directory: Path, wrote: int, reads: int, blocks_per_chunk: int
) -> None:
    """Written by `wrote` ranks and read by `reads`: every rank gets its own heads, and the rows
    are those that a single rank would have written, byte for byte."""
    random = np.random.default_rng(11)
    shapes = {"split": (6, 4, 32), "whole": (1, 8, 20), "single": (4, 1, 48)}
    content = {
        name: torch.from_numpy(random.integers(-128, 128, (BLOCKS, *shape), dtype=np.int8))
        for name, shape in shapes.items()
    }

    def ranks_of(tp: int, where: Path) -> Ranks:
        where.mkdir()
        layers = []
        for name, (stretches, heads, head_bytes) in shapes.items():
            page_bytes = stretches * heads * head_bytes // min(tp, heads)
            layers.append(LayerFacts(name, page_bytes, heads=KvHeads(heads, stretches)))
        made = Ranks(where, layers, tp, blocks_per_chunk)
        for rank, tensors in enumerate(made.tensors):
            for whole, tensor in zip(content.values(), tensors, strict=True):
                tensor[:] = head_pages(whole, tp, rank)
        return made

    writers, readers = ranks_of(wrote, directory / "w"), ranks_of(reads, directory / "r")
    single = ranks_of(1, directory / "1")
    source, slots = list(range(2 * blocks_per_chunk)), [5, 9]
    target = list(range(BLOCKS - len(source), BLOCKS))
    for engine in (writers, single):
        for worker in engine.workers:
            worker.store([run(source, slots)])
    assert writers.layout.row_bytes == readers.layout.row_bytes == single.layout.row_bytes
    readers.wipe()
    for slot in slots:
        assert writers.region.row(slot) == single.region.row(slot)
        readers.region.row(slot)[:] = writers.region.row(slot)
    for rank, (worker, tensors) in enumerate(zip(readers.workers, readers.tensors, strict=True)):
        worker.load([run(target, slots)])
        for whole, tensor in zip(content.values(), tensors, strict=True):
            assert torch.equal(tensor[target], head_pages(whole, reads, rank)[source])
    for engine in (writers, readers, single):
        engine.close()


# -- patterns of blocks, and how tensors stand in memory -------------------------------------------

SLOTS = 6


class Job(NamedTuple):
    blocks_per_chunk: int
    run: BlockRun


@st.composite
def block_jobs(draw: st.DrawFn) -> Job:
    """Blocks and slots that go up, down, in steps or in no order; a chunk entered anywhere."""
    blocks_per_chunk = draw(st.integers(1, BLOCKS // SLOTS))
    slots = draw(evenly_or_not(SLOTS))
    first = draw(st.integers(0, 2 * blocks_per_chunk))
    room = len(slots) * blocks_per_chunk - first % blocks_per_chunk
    count = draw(st.integers(max(1, room - blocks_per_chunk + 1), room))
    ids = draw(evenly_or_not(BLOCKS, count))
    return Job(
        blocks_per_chunk,
        run(ids, slots[: -(-(first % blocks_per_chunk + count) // blocks_per_chunk)], first),
    )


@st.composite
def evenly_or_not(draw: st.DrawFn, of: int, count: int | None = None) -> list[int]:
    """Different integers below `of`."""
    if count is None:
        count = draw(st.integers(1, of))
    if draw(st.booleans()):
        return draw(st.permutations(range(of)))[:count]
    step = draw(st.sampled_from([step for step in range(-of, of) if math.gcd(step, of) == 1]))
    start = draw(st.integers(0, of - 1))
    return [(start + i * step) % of for i in range(count)]


def placed(pages: Sequence[int], how: str) -> list[torch.Tensor]:
    """int8[BLOCKS, page] per layer, filled: as vLLM places them in memory, or apart."""
    block, size = sum(pages), sum(pages) * BLOCKS
    random = np.random.default_rng(7)
    memory = torch.from_numpy(random.integers(-128, 128, size, dtype=np.int8))
    tensors = []
    for i, page in enumerate(pages):
        before = sum(pages[:i])
        if how == "layer by layer":
            tensors.append(memory[before * BLOCKS :][: page * BLOCKS].view(BLOCKS, page))
        elif how == "block by block":
            tensors.append(memory.as_strided((BLOCKS, page), (block, 1), before))
        else:
            tensors.append(memory.as_strided((BLOCKS, page), (block, 1), before).clone())
    return tensors


@pytest.mark.parametrize(
    "limits",
    [{}, {"_RUN_BYTES_MIN": 1}, {"_RUN_BYTES_MIN": 1, "_ODD_BYTES_MIN": 1}],
    ids=["gathered", "in runs", "in runs, odd"],
)
@given(
    block_jobs(),
    st.sampled_from(["layer by layer", "block by block", "apart"]),
    st.sampled_from([1, 2, 4]),
    st.lists(st.sampled_from(range(len(MIXED))), min_size=1, max_size=6),
)
def test_any_pattern_of_blocks_moves_as_page_by_page(
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, int],
    job: Job,
    how: str,
    tp: int,
    kinds: list[int],
) -> None:
    for name, value in {"_RUN_BYTES_MIN": 1 << 30, **limits}.items():
        monkeypatch.setattr(worker_module, name, value)
    layers = [msgspec.structs.replace(MIXED[k], name=f"{i}") for i, k in enumerate(kinds)]
    layout = RowLayout.of(layers, Parallelism(tp=tp, world_size=tp), job.blocks_per_chunk)
    region = Region.create("e", layout, 4096 + SLOTS * layout.row_bytes, directory=memory_path)
    region.unlink()
    assert region.row_count >= SLOTS
    rank = tp - 1
    tensors = placed([layer.page_bytes for layer in layers], how)
    pages = [LayerPages(i, layer.page_bytes) for i, layer in enumerate(layers)]
    worker = CopyWorker(region, rank, tensors, [pages])
    expected = [bytearray(region.row(slot)) for slot in range(SLOTS)]
    places = []  # (layer, its tensor, block id, slot, block)
    for i, block_id in enumerate(job.run.block_ids):
        chunk, block = divmod(job.run.first_block % job.blocks_per_chunk + i, job.blocks_per_chunk)
        slot = int(job.run.slots[chunk])
        places += [
            (*pair, block_id, slot, block) for pair in zip(layout.layers, tensors, strict=True)
        ]
    moved = 0
    for layer, tensor, block_id, slot, block in places:
        if layout.is_writer(layer, rank, slot, block):
            page = tensor[block_id].numpy().tobytes()
            moved += len(page)
            for i, piece in enumerate(layer.pieces(block, layer.shard_of(rank))):
                content = page[i * layer.piece_bytes : (i + 1) * layer.piece_bytes]
                expected[slot][piece.start : piece.stop] = content
    assert worker.store([job.run]).bytes_moved == moved
    assert [bytes(region.row(slot)) for slot in range(SLOTS)] == expected

    for slot in range(SLOTS):
        region.row(slot)[:] = np.random.default_rng(slot).bytes(layout.row_bytes)
    wanted = [tensor.clone() for tensor in tensors]
    for layer, tensor, block_id, slot, block in places:
        row = region.row(slot)
        pieces = layer.pieces(block, layer.shard_of(rank))
        page = b"".join(row[piece.start : piece.stop] for piece in pieces)
        at = [t is tensor for t in tensors].index(True)
        wanted[at][block_id] = torch.from_numpy(np.frombuffer(page, np.int8).copy())
    worker.load([job.run])
    for tensor, want in zip(tensors, wanted, strict=True):
        assert torch.equal(tensor, want)
    worker.close()


@pytest.mark.parametrize("how", ["layer by layer", "block by block"])
def test_all_layers_of_blocks_in_order_move_in_one_copy(
    directory: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM allocates them: no loop over blocks, nor over layers."""
    layers = [LayerFacts(f"{i}", 512, max_tp_shards=1) for i in range(30)]
    layout = RowLayout.of(layers, Parallelism(), 1)
    region = Region.create("e", layout, 32 * layout.row_bytes, directory=directory)
    tensors = placed([512] * 30, how)
    worker = CopyWorker(region, 0, tensors, [[LayerPages(i, 512) for i in range(30)]])
    copies = []
    copy = np.copyto
    monkeypatch.setattr(np, "copyto", lambda to, of: copies.append(of.size) or copy(to, of))
    for ids, slots in ((range(24), range(24)), (range(23, -1, -1), range(24))):
        worker.store([run(ids, slots)])
        worker.load([run(ids, slots)])
    assert copies == [24 * 30 * 512] * 4
    worker.close()


def test_ids_that_are_out_of_range_are_an_error(directory: Path) -> None:
    ranks = Ranks(directory, MIXED, 1, 1)
    for bad in (run([BLOCKS], [0]), run([-1], [0]), run([0], [16]), run([0], [-1])):
        with pytest.raises(IndexError, match=r"block id|slot"):
            ranks.workers[0].store([bad])
    ranks.close()


@given(block_jobs(), st.booleans())
def test_runs_are_the_pages_in_order(job: Job, uneven: bool) -> None:
    positions = job.run.first_block % job.blocks_per_chunk + np.arange(len(job.run.block_ids))
    chunks, blocks = np.divmod(positions, job.blocks_per_chunk)
    pages = Pages(job.run.block_ids, job.run.slots[chunks].astype(np.int64), blocks)
    device, rows = np.arange(BLOCKS), np.arange(SLOTS * 4).reshape(SLOTS, 4)
    runs = runs_of(pages, len(blocks), uneven=uneven)
    assert runs is not None, "one a page is enough"
    found = [
        place
        for part in runs
        for place in zip(device[part.block_ids], rows[part.slots, part.blocks], strict=True)
    ]
    assert found == list(zip(pages.block_ids, rows[pages.slots, pages.blocks], strict=True))
    assert uneven or all(isinstance(part.block_ids, slice) for part in runs)
    assert str(runs_of(pages, len(runs), uneven=uneven)) == str(runs)
    assert runs_of(pages, len(runs) - 1, uneven=uneven) is None


def pages_of(ids: Sequence[int], blocks_per_chunk: int) -> Pages:
    """In slots 0, 5, 3 and so on: of two chunks in even steps, of three not."""
    chunks, blocks = np.divmod(np.arange(len(ids)), blocks_per_chunk)
    return Pages(np.array(ids), np.array([0, 5, 3, 4, 2])[chunks], blocks)


def test_two_blocks_of_two_chunks_are_no_run() -> None:
    alone = runs_of(pages_of([7, 3], 1), 2, uneven=True)
    assert alone is not None
    assert [run.slots for run in alone] == [0, 5]


def test_blocks_of_a_chunk_in_no_order_are_one_run_of_a_load_and_pairs_of_a_store() -> None:
    pages = pages_of([7, 3, 9, 1, 4, 5, 6, 7], 4)
    load, store = (runs_of(pages, 8, uneven=uneven) for uneven in (True, False))
    assert load is not None
    assert store is not None
    first, second = load
    assert isinstance(first.block_ids, np.ndarray)
    assert first.block_ids.tolist() == [7, 3, 9, 1]
    assert second.block_ids == slice(4, 8, 1)
    assert [(run.block_ids, run.blocks) for run in store] == [
        (slice(7, None, -4), slice(0, 2, 1)),
        (slice(9, None, -8), slice(2, 4, 1)),
        (slice(4, 8, 1), slice(0, 4, 1)),
    ]
