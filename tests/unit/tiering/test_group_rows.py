"""Rows of several KV-cache groups: each dense, of what its group uses, and of nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.types import round_up
from tiering.region import Region
from tiering.rows import GroupLayer, RowLayout, row_identity
from tiering.topology import KvHeads, LayerFacts, Parallelism
from tiering.worker import BlockRun, CopyWorker, LayerPages

BLOCKS = 16
SLOTS = 8
Groups = dict[int, list[GroupLayer]]


@dataclass(frozen=True)
class Shape:
    """Groups over tensors of `pages` bytes per block, on `tp` ranks."""

    groups: Groups
    pages: tuple[int, ...]
    tp: int
    blocks_per_chunk: int

    @property
    def layout(self) -> RowLayout:
        parallel = Parallelism(tp=self.tp, world_size=self.tp)
        return RowLayout.of_groups(self.groups, parallel, self.blocks_per_chunk)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Groups of unlike layer counts, page widths, shards and heads, numbered with gaps."""
    tp = draw(st.sampled_from([1, 2, 4]))
    pages = tuple(draw(st.lists(st.integers(1, 6).map(lambda n: 96 * n), min_size=1, max_size=4)))
    numbers = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
    groups = {}
    for number in sorted(numbers):
        used = draw(st.lists(st.sampled_from(range(len(pages))), min_size=1, unique=True))
        groups[number] = [
            GroupLayer(draw(facts(f"{number}.{t}", pages[t])), t, pages[t]) for t in sorted(used)
        ]
    return Shape(groups, pages, tp, draw(st.integers(1, 3)))


@st.composite
def facts(draw: st.DrawFn, name: str, page_bytes: int) -> LayerFacts:
    """A layer that uses a page, or the first part of it."""
    kind = draw(st.sampled_from(["unknown", "latent", "shards", "heads"]))
    stretches = draw(st.sampled_from([1, 2, 4]))
    width = draw(st.sampled_from([page_bytes, page_bytes // 2, 48]))
    if kind == "heads":
        return LayerFacts(name, width, heads=KvHeads(draw(st.sampled_from([2, 4])), stretches))
    shards = {"unknown": None, "latent": 1, "shards": 2}[kind]
    return LayerFacts(name, width, shards)


@given(shapes(), st.integers(0, 100))
def test_a_row_holds_what_its_group_uses_densely_and_each_byte_has_one_writer(
    shape: Shape, slot: int
) -> None:
    layout = shape.layout
    for position, group in enumerate(layout.groups):
        layers = [layout.layers[index] for index in group.layers]
        content = shape.blocks_per_chunk * sum(layer.block_bytes for layer in layers)
        assert group.row_bytes == round_up(content, 4096)
        painted = np.zeros(layout.row_bytes, int)
        for rank in range(layout.ranks):
            for start, stop in layout.written_ranges(rank, slot, position):
                painted[start:stop] += 1
        assert (painted[:content] == 1).all()
        assert (painted[content:] == 0).all()
    assert layout.row_bytes == max(group.row_bytes for group in layout.groups)


@given(shapes())
def test_kinds_are_the_sizes_and_every_group_is_of_one(shape: Shape) -> None:
    layout = shape.layout
    kinds = layout.kinds()
    assert [kind.row_bytes for kind in kinds] == sorted(
        {group.row_bytes for group in layout.groups}, reverse=True
    )
    assert sorted(n for kind in kinds for n in kind.numbers) == sorted(shape.groups)
    for group in layout.groups:
        [kind] = [kind for kind in kinds if group.number in kind.numbers]
        assert kind.row_bytes == group.row_bytes
        assert {layout.layers[i].name for i in group.layers} <= {
            layer.name for layer in kind.layers
        }
    assert len({str(row_identity(layout, kind)) for kind in kinds}) == len(kinds)


@given(shapes())
def test_a_layout_of_groups_travels_as_json(shape: Shape) -> None:
    layout = shape.layout
    assert msgspec.json.decode(msgspec.json.encode(layout), type=RowLayout) == layout


class Ranks:
    """All ranks of one engine: tensors that the groups take turns in, and one region."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        self.shape, self.layout = shape, shape.layout
        size = SLOTS * self.layout.row_bytes
        self.region = Region.create("e", self.layout, size, directory=directory)
        self.tensors: list[list[torch.Tensor]] = []
        self.workers = []
        for rank in range(shape.tp):
            tensors = [torch.full((BLOCKS, page), -1, dtype=torch.int8) for page in shape.pages]
            self.tensors.append(tensors)
            mine = self.region if rank == 0 else Region.attach("e", rank=rank, directory=directory)
            self.workers.append(self._worker(mine, rank, tensors))

    def _worker(self, region: Region, rank: int, tensors: list[torch.Tensor]) -> CopyWorker:
        """A view of each tensor for each layer of the layout that stands in it."""
        views: dict[int, torch.Tensor] = {}
        groups = []
        for group, layers in zip(self.layout.groups, self.shape.groups.values(), strict=True):
            for index, layer in zip(group.layers, layers, strict=True):
                views[index] = tensors[layer.tensor][:, : self.layout.layers[index].page_bytes]
            widths = [layer.facts.page_bytes for layer in layers]
            groups.append([LayerPages(i, w) for i, w in zip(group.layers, widths, strict=True)])
        return CopyWorker(region, rank, [views[i] for i in range(len(views))], groups)

    def fill(self, position: int, blocks: Sequence[int], seed: int) -> None:
        """Content of one group in `blocks`: each shard's its own, that of replicas the same."""
        group = self.layout.groups[position]
        layers = list(self.shape.groups.values())[position]
        for rank, tensors in enumerate(self.tensors):
            for index, layer in zip(group.layers, layers, strict=True):
                shard = self.layout.layers[index].shard_of(rank)
                random = np.random.default_rng([seed, position, index, shard])
                size = (len(blocks), layer.facts.page_bytes)
                pages = torch.from_numpy(random.integers(-128, 128, size, dtype=np.int8))
                tensors[layer.tensor][blocks, : layer.facts.page_bytes] = pages

    def pages(self, position: int, blocks: Sequence[int]) -> list[npt.NDArray[np.int8]]:
        """What one group has in `blocks`, per rank and layer."""
        layers = list(self.shape.groups.values())[position]
        return [
            tensors[layer.tensor][blocks, : layer.facts.page_bytes].numpy().copy()
            for tensors in self.tensors
            for layer in layers
        ]

    def close(self) -> None:
        self.region.unlink()
        for worker in self.workers:
            worker.close()
        self.region.close()


def runs(count: int, position: int, blocks: Sequence[int], slots: Sequence[int]) -> list[BlockRun]:
    """Of `count` groups, the blocks of the one at `position`."""
    empty = BlockRun(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    found = [empty] * count
    found[position] = BlockRun(np.array(blocks), np.array(slots), 0)
    return found


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=shapes(), data=st.data())
def test_chunks_come_back_from_other_slots_and_no_copy_leaves_its_row(
    memory_path: Path, shape: Shape, data: st.DataObject
) -> None:
    """Store a chunk of every group, move the bytes of its row, and no others, to another slot as a
    disk would, wipe the device, load into other blocks: every byte of content is back."""
    with contextlib.closing(Ranks(shape, memory_path)) as ranks:
        for position in range(len(shape.groups)):
            numbers = data.draw(st.permutations(range(max(BLOCKS, SLOTS))))
            check_group(ranks, position, numbers)


def check_group(ranks: Ranks, position: int, numbers: Sequence[int]) -> None:
    shape, layout, count = ranks.shape, ranks.layout, len(ranks.shape.groups)
    group, per_chunk = layout.groups[position], shape.blocks_per_chunk
    source = list(range(position * per_chunk, (position + 1) * per_chunk))
    target = list(numbers[:per_chunk])
    slot, other = [number for number in numbers if number < SLOTS][:2]
    ranks.fill(position, source, seed=7)
    before = ranks.pages(position, source)
    for number in range(SLOTS):
        ranks.region.row(number)[:] = b"\x55" * layout.row_bytes
    moved = sum(
        worker.store(runs(count, position, source, [slot])).bytes_moved for worker in ranks.workers
    )
    shards = [layout.layers[index].shards for index in group.layers]
    widths = [layer.facts.page_bytes for layer in shape.groups[group.number]]
    assert moved == per_chunk * sum(w * s for w, s in zip(widths, shards, strict=True))
    assert bytes(ranks.region.row(slot)[group.row_bytes :]).strip(b"\x55") == b""
    for number in set(range(SLOTS)) - {slot}:
        assert bytes(ranks.region.row(number)).strip(b"\x55") == b""
    ranks.region.row(other)[: group.row_bytes] = ranks.region.row(slot)[: group.row_bytes]
    ranks.region.row(slot)[:] = bytes(layout.row_bytes)
    for tensors in ranks.tensors:
        for tensor in tensors:
            tensor[:] = -1
    for worker in ranks.workers:
        worker.load(runs(count, position, target, [other]))
    for found, expected in zip(ranks.pages(position, target), before, strict=True):
        assert (found == expected).all()
    untouched = sorted(set(range(BLOCKS)) - set(target))
    assert all((t[untouched] == -1).all() for tensors in ranks.tensors for t in tensors)


# -- what stays as it was -------------------------------------------------------------------------


def alike(count: int, layers: int = 2, page_bytes: int = 512, width: int = 512) -> Groups:
    return {
        group: [
            GroupLayer(LayerFacts(f"{group}.{i}", width, 1), i, page_bytes) for i in range(layers)
        ]
        for group in range(count)
    }


@pytest.mark.parametrize("width", [512, 400])
def test_groups_that_use_the_same_bytes_share_one_row_of_whole_pages(width: int) -> None:
    """As all groups did in stores that were written before rows of their own existed."""
    layout = RowLayout.of_groups(alike(3, width=width), Parallelism(), 2)
    whole = [LayerFacts("0.0 1.0 2.0", 512, 1), LayerFacts("0.1 1.1 2.1", 512, 1)]
    assert layout == RowLayout.of(whole, Parallelism(), 2, numbers=(0, 1, 2))
    [kind] = layout.kinds()
    assert (kind.numbers, kind.row_bytes) == ((0, 1, 2), 4096)
    assert row_identity(layout) == {
        "layers": [["0.0 1.0 2.0", 512], ["0.1 1.1 2.1", 512]],
        "ranks": None,
    }


def test_a_single_group_has_whole_pages_and_the_identity_that_it_had() -> None:
    groups = alike(1, width=400)
    layout = RowLayout.of_groups(groups, Parallelism(), 2)
    assert layout == RowLayout.of(
        [LayerFacts(f"0.{i}", 512, 1) for i in range(2)], Parallelism(), 2
    )
    assert row_identity(layout) == {"layers": [["0.0", 512], ["0.1", 512]], "ranks": None}


def test_one_group_of_fewer_layers_gives_every_group_a_row_of_its_own() -> None:
    groups = alike(3, layers=20, page_bytes=4096, width=4096)
    groups[2] = groups[2][:5]
    layout = RowLayout.of_groups(groups, Parallelism(), 1)
    assert [group.row_bytes for group in layout.groups] == [81920, 81920, 20480]
    large, small = layout.kinds()
    assert (large.numbers, small.numbers) == ((0, 1), (2,))
    assert row_identity(layout, small) == {
        "layers": [[f"2.{i}", 4096] for i in range(5)],
        "ranks": None,
        "row_of_groups": [2],
    }


def test_only_the_rows_that_depend_on_the_ranks_are_named_with_them() -> None:
    """A latent group's rows carry over between TP sizes; those of recurrent state do not."""
    groups = {
        0: [GroupLayer(LayerFacts("mla", 8192, 1), 0, 8192)],
        1: [GroupLayer(LayerFacts("state", 8192), 0, 8192)],
    }
    layouts = [RowLayout.of_groups(groups, Parallelism(tp=n, world_size=n), 1) for n in (2, 4)]
    assert [[g.row_bytes for g in layout.groups] for layout in layouts] == [
        [8192, 16384],
        [8192, 32768],
    ]
    state, latent = zip(*(layout.kinds() for layout in layouts), strict=True)
    assert row_identity(layouts[0], latent[0]) == row_identity(layouts[1], latent[1])
    assert row_identity(layouts[0], latent[0])["ranks"] is None
    assert [row_identity(*pair)["ranks"] for pair in zip(layouts, state, strict=True)] == [2, 4]


def test_stages_of_a_pipeline_may_have_no_layer_of_a_group() -> None:
    """Each rank's layers follow those of the rank before it, in every group."""
    first = {0: [GroupLayer(LayerFacts("a", 5000), 0, 5000)], 1: []}
    second = {
        0: [GroupLayer(LayerFacts("b", 5000), 0, 5000)],
        1: [GroupLayer(LayerFacts("c", 600), 0, 5000)],
    }
    layout = RowLayout.of_unlike_ranks([first, second], 1)
    assert [group.row_bytes for group in layout.groups] == [12288, 4096]
    assert list(layout.read_ranges(1, 0)) == [(5000, 10000)]
    assert list(layout.read_ranges(1, 1)) == [(0, 600)]
    assert not list(layout.read_ranges(0, 1))


def test_stages_whose_groups_are_alike_share_one_row_only_if_all_are() -> None:
    like, unlike = alike(2), alike(2)
    unlike[1] = unlike[1][:1]
    assert RowLayout.of_unlike_ranks([like, like], 1).is_shared
    mixed = RowLayout.of_unlike_ranks([like, unlike], 1)
    assert not mixed.is_shared
    assert [len(group.layers) for group in mixed.groups] == [4, 3]


def test_private_rows_weigh_what_all_ranks_keep_of_each_group() -> None:
    groups = alike(2, layers=3, page_bytes=4096, width=4096)
    groups[1] = groups[1][:1]
    own = RowLayout.of_groups(groups, Parallelism(), 1)
    parallel = Parallelism(tp=2, world_size=2, shares_region=False)
    together = RowLayout.of_private_rows([own, own], parallel)
    assert together.row_bytes == 2 * 12288
    assert [kind.row_bytes for kind in together.kinds()] == [24576, 8192]
    assert together.copies == {"the ranks do not share one region": 8}
