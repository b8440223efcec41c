"""What a rank's worker does, whatever its device: subclassed for CPU tensors, for vLLM's own worker
with its device emulated, and in `tests/gpu` for a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tiering.region import Region
from tiering.rows import GroupLayer, RowLayout
from tiering.topology import KvHeads, LayerFacts, Parallelism
from tiering.vllm.worker import make_worker

BLOCKS, SLOTS = 24, 8

MLA = [LayerFacts(f"latent{i}", 1152, max_tp_shards=1) for i in range(5)]
HEADS = [LayerFacts(f"heads{i}", 768, heads=KvHeads(4, 6)) for i in range(3)]  # at TP 2: 2 a rank
UNKNOWN = [LayerFacts(f"unknown{i}", 640) for i in range(2)]
MIXED = [*MLA[:2], *HEADS[:2], *UNKNOWN, MLA[2]]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Rank:
    """One rank: device pages in one allocation, as vLLM makes it, and a worker over them."""

    def __init__(
        self,
        region: Region,
        rank: int,
        device: str,
        *,
        by_block: bool = False,
        groups: Sequence[Sequence[int]] | None = None,
        tensor_type: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
    ) -> None:
        pages = [layer.page_bytes for layer in region.layout.layers_of(rank)]
        self.memory = torch.zeros(BLOCKS * sum(pages), dtype=torch.int8, device=device)
        self.tensors = []
        for i, page in enumerate(pages):
            step, start = (
                (sum(pages), sum(pages[:i])) if by_block else (page, sum(pages[:i]) * BLOCKS)
            )
            self.tensors.append(self.memory.as_strided((BLOCKS, page), (step, 1), start))
        self.worker = make_worker(
            region,
            rank,
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(tensor_type(t), t.shape[1]) for t in self.tensors],
                [
                    [CanonicalKVCacheRef(i, pages[i]) for i in group]
                    for group in groups or [range(len(pages))]
                ],
            ),
        )

    def contents(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in self.tensors]


class Ranks:
    """All ranks of an engine, in this process, on one region."""

    def __init__(
        self, directory: Path, facts: Sequence[LayerFacts], tp: int, per_chunk: int, **rank: Any
    ) -> None:
        parallel = Parallelism(tp=tp, world_size=tp)
        groups = {
            number: [GroupLayer(facts[i], i, facts[i].page_bytes) for i in group]
            for number, group in enumerate(rank.get("groups") or [range(len(facts))])
        }
        self.layout = RowLayout.of_groups(groups, parallel, per_chunk)
        size = SLOTS * self.layout.row_bytes + 8192
        self.region = Region.create("e", self.layout, size, directory=directory)
        self.ranks = [
            Rank(Region.attach("e", rank=number, directory=directory), number, **rank)
            for number in range(tp)
        ]
        self.region.unlink()

    def fill(self) -> None:
        """Replicas hold the same, shards do not."""
        for number, rank in enumerate(self.ranks):
            for i, (layer, tensor) in enumerate(zip(self.layout.layers, rank.tensors, strict=True)):
                seed = torch.Generator().manual_seed(100 * i + layer.shard_of(number))
                page = torch.empty(tensor.shape, dtype=torch.int8).random_(
                    -128, 128, generator=seed
                )
                tensor.copy_(page)

    def submit(self, kind: str, job_id: int, ids: list[int], slots: list[int], first: int) -> None:
        device, host = GPULoadStoreSpec(ids, [len(ids)], [first]), CPULoadStoreSpec(slots)
        for rank in self.ranks:
            if kind == "store":
                assert rank.worker.submit_store(job_id, device, host)
            else:
                assert rank.worker.submit_load(job_id, host, device)
        for rank in self.ranks:
            rank.worker.wait({job_id})
            [result] = rank.worker.get_finished()
            assert (result.job_id, result.success) == (job_id, True)

    def rows(self) -> list[bytes]:
        return [bytes(self.region.row(slot)) for slot in range(SLOTS)]

    def close(self) -> None:
        for rank in self.ranks:
            rank.worker.shutdown()
        self.region.close()


class WorkerContract:
    """A subclass gives `device`, and what else a rank of it is made with."""

    device = "cpu"
    rank_options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def ranks(self, memory_path: Path) -> Iterator[Callable[..., Ranks]]:
        made: list[Ranks] = []

        def make(
            facts: Sequence[LayerFacts], tp: int, per_chunk: int, *, name: str = "a", **rank: Any
        ) -> Ranks:
            directory = memory_path / name
            directory.mkdir()
            options = {"device": self.device, **self.rank_options, **rank}
            made.append(Ranks(directory, facts, tp, per_chunk, **options))
            return made[-1]

        yield make
        for engine in made:
            engine.close()

    @pytest.mark.parametrize("facts", [MLA, HEADS, MIXED], ids=["replicated", "heads", "mixed"])
    @pytest.mark.parametrize("tp", [1, 2])
    @pytest.mark.parametrize(("per_chunk", "by_block"), [(1, False), (4, False), (1, True)])
    def test_what_is_stored_is_loaded_into_other_blocks(
        self,
        ranks: Callable[..., Ranks],
        facts: Sequence[LayerFacts],
        tp: int,
        per_chunk: int,
        by_block: bool,
    ) -> None:
        """Rows as CPU workers write them; pages back as they were; no other page touched."""
        engine = ranks(facts, tp, per_chunk, by_block=by_block)
        engine.fill()
        before = [rank.contents() for rank in engine.ranks]
        source, slots = [9, 2, 3, 4, 17, 16, 15, 0], [6, 1, 2, 3, 0, 7, 5, 4][: 8 // per_chunk]
        engine.submit("store", 1, source, slots, 0)
        like = ranks(facts, tp, per_chunk, name="cpu", device="cpu", tensor_type=as_it_is)
        like.fill()
        like.submit("store", 1, source, slots, 0)
        assert engine.rows() == like.rows()

        for rank in engine.ranks:
            rank.memory.fill_(-1)
        first = per_chunk // 2  # the first chunk is entered in its middle
        target = [23, 22, 21, 5, 8, 11, 14, 20][first:]
        engine.submit("load", 2, target, slots, first)
        for rank, contents in zip(engine.ranks, before, strict=True):
            for found, was in zip(rank.contents(), contents, strict=True):
                assert torch.equal(found[target], was[source[first:]])
                assert (found[sorted(set(range(BLOCKS)) - set(target))] == -1).all()

    def test_each_distinct_byte_is_stored_by_one_rank(self, ranks: Callable[..., Ranks]) -> None:
        engine = ranks(MLA, 2, 1)
        engine.fill()
        device, host = GPULoadStoreSpec(list(range(8)), [8], [0]), CPULoadStoreSpec(list(range(8)))
        moved = []
        for rank in engine.ranks:
            rank.worker.submit_store(1, device, host)
            rank.worker.wait({1})
            [result] = rank.worker.get_finished()
            moved.append(result.transfer_size)
        assert moved == [4 * 5 * 1152] * 2

    def test_groups_move_their_own_layers(self, ranks: Callable[..., Ranks]) -> None:
        engine = ranks(MLA[:3], 1, 1, groups=[[0, 1], [2]])
        engine.fill()
        [rank] = engine.ranks
        before = rank.contents()
        device, host = GPULoadStoreSpec([3, 4, 7], [2, 1], [0, 0]), CPULoadStoreSpec([1, 5, 2])
        rank.worker.submit_store(1, device, host)
        rank.worker.wait({1})
        rank.memory.fill_(-1)
        device = GPULoadStoreSpec([10, 11, 12], [2, 1], [0, 0])
        rank.worker.submit_load(2, host, device)
        rank.worker.wait({2})
        assert {result.job_id for result in rank.worker.get_finished()} == {1, 2}
        found = rank.contents()
        for layer in (0, 1):
            assert torch.equal(found[layer][[10, 11]], before[layer][[3, 4]])
        assert torch.equal(found[2][12], before[2][7])
        assert (found[2][:12] == -1).all()
        assert (found[0][12] == -1).all()

    def test_jobs_are_told_once_and_the_end_waits_for_them(
        self, ranks: Callable[..., Ranks]
    ) -> None:
        engine = ranks(MLA, 1, 1)
        engine.fill()
        [rank] = engine.ranks
        for job in range(8):
            device, host = GPULoadStoreSpec([job], [1], [0]), CPULoadStoreSpec([job])
            assert rank.worker.submit_store(job, device, host)
        rank.worker.wait(set(range(8)))
        assert [result.job_id for result in rank.worker.get_finished()] == list(range(8))
        assert rank.worker.get_finished() == []
        rank.worker.wait({3, 99})  # long since done, and of no job
        pages = torch.cat([tensor.cpu() for tensor in rank.tensors], dim=1)
        assert engine.rows()[:8] == [
            bytes(page.numpy().tobytes()).ljust(engine.layout.row_bytes, b"\0")
            for page in pages[:8]
        ]
