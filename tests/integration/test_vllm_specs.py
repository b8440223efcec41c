"""dedup, replica: a whole engine's specs, ranks and scheduler, without a server or a disk.

What `KvtierSpec` builds where ranks share the region, where they are stages of a pipeline, and
where they share nothing.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
)

from storage.errors import ConfigError
from tiering import region as region_module
from tiering.topology import LayerFacts, Parallelism
from tiering.vllm.facts import EngineFacts
from tiering.vllm.spec import KvtierSpec

BLOCKS = 8
ROW = 8192


@pytest.fixture(autouse=True)
def shared_memory(memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Regions of these engines stand in a directory of their own."""
    for function in ("create", "attach"):
        method = getattr(region_module.Region, function).__func__
        monkeypatch.setitem(method.__kwdefaults__, "directory", memory_path)
    for function in ("announce_layers", "collect_layers"):
        plain = getattr(region_module, function)
        plain = getattr(plain, "__wrapped__", plain)
        monkeypatch.setitem(plain.__kwdefaults__, "directory", memory_path)
    return memory_path


class Engine:
    """Specs of all ranks and of the scheduler; `stages[r]` are the layers of rank r."""

    def __init__(
        self, parallel: Parallelism, stages: Sequence[Sequence[LayerFacts]], **settings: Any
    ) -> None:
        self.caches = [_caches(stage, seed) for seed, stage in enumerate(stages)]
        self.before = [[t.tensor.clone() for t in cache.tensors] for cache in self.caches]
        extra = {"cpu_bytes_to_use": 4 * ROW * len(stages), **settings}
        self.specs = [_spec(parallel, stage, rank, extra) for rank, stage in enumerate(stages)]
        self.scheduler = _spec(parallel, stages[0], 0, extra)
        self.workers: list[Any] = [None] * len(stages)
        errors: list[BaseException] = []

        def start(rank: int) -> None:
            try:
                self.workers[rank] = self.specs[rank].get_worker(self.caches[rank])
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=start, args=(rank,)) for rank in range(len(stages))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.manager = self.scheduler.get_manager()
        self.scheduler.ranks_reported([spec.rank_report for spec in self.specs])  # type: ignore[misc]

    def store(self, keys: list[bytes], blocks: list[int]) -> int:
        """Bytes that all ranks copied."""
        plan = self.manager.prepare_store(keys, _request("store"))
        assert plan is not None
        assert plan.keys_to_store == keys
        for worker in self.workers:
            worker.submit_store(1, GPULoadStoreSpec(blocks, [len(blocks)], [0]), plan.store_spec)
            worker.wait({1})
        results = [result for worker in self.workers for result in worker.get_finished()]
        assert len(results) == len(self.workers), "every rank acknowledges"
        self.manager.complete_store(keys, _request("store"))
        return sum(result.transfer_size for result in results)

    def load(self, keys: list[bytes], blocks: list[int]) -> None:
        request = _request("load")
        self.manager.on_new_request(request)
        assert all(self.manager.lookup(key, request).name == "HIT" for key in keys)
        source = self.manager.prepare_load(keys, request)
        for worker in self.workers:
            worker.submit_load(2, source, GPULoadStoreSpec(blocks, [len(blocks)], [0]))
            worker.wait({2})
            worker.get_finished()
        self.manager.complete_load(keys, request)
        self.manager.on_request_finished(request)

    def wipe(self) -> None:
        for cache in self.caches:
            for tensor in cache.tensors:
                tensor.tensor[:] = -1

    def assert_loaded(self, source: list[int], target: list[int]) -> None:
        for cache, before in zip(self.caches, self.before, strict=True):
            for tensor, content in zip(cache.tensors, before, strict=True):
                assert torch.equal(tensor.tensor[target], content[source])

    def metric(self, name: str) -> dict[tuple[str, ...], float]:
        """Values by labels."""
        values: dict[tuple[str, ...], float] = self.manager.get_stats()._values[f"kvtier:{name}"]
        return values

    def close(self) -> None:
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()


def _request(name: str) -> Any:
    everything = types.SimpleNamespace(allows=lambda _medium, _locality: True)
    return types.SimpleNamespace(req_id=name, load_tier_filter=everything)


def _caches(layers: Sequence[LayerFacts], seed: int) -> CanonicalKVCaches:
    random = np.random.default_rng(seed)
    tensors = [
        CanonicalKVCacheTensor(
            torch.from_numpy(random.integers(-128, 128, (BLOCKS, f.page_bytes), dtype=np.int8)),
            f.page_bytes,
        )
        for f in layers
    ]
    refs = [CanonicalKVCacheRef(i, f.page_bytes) for i, f in enumerate(layers)]
    return CanonicalKVCaches(tensors, [refs])


PLAIN_ENGINE: Any = types.SimpleNamespace(
    lora_config=None,
    kv_transfer_config=types.SimpleNamespace(is_kv_producer=True, is_kv_consumer=True),
)


def _spec(
    parallel: Parallelism, layers: Sequence[LayerFacts], rank: int, extra: dict[str, Any]
) -> KvtierSpec:
    names = tuple(layer.name for layer in layers)
    config: Any = types.SimpleNamespace(
        extra_config=extra,
        engine_id="engine",
        enable_kv_cache_events=False,
        groups=[types.SimpleNamespace(tokens_per_block=16, layer_names=names)],
        cache=types.SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=types.SimpleNamespace(rank=rank, data_parallel_index=0),
    )
    facts = EngineFacts(parallel, {layer.name: layer for layer in layers}, (names,))
    return KvtierSpec(config, facts, PLAIN_ENGINE)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


LATENT = [LayerFacts("latent", ROW, max_tp_shards=1)]
KEYS = [bytes([i]) * 36 for i in range(3)]


def test_a_region_without_a_disk_deduplicates_all_the_same(engines: list[Engine]) -> None:
    moved, slots = {}, {}
    for dedup in (False, True):
        engine = Engine(Parallelism(tp=2, world_size=2, dedup=dedup), [LATENT, LATENT])
        engines.append(engine)
        engine.caches[1].tensors[0].tensor[:] = engine.caches[0].tensors[0].tensor
        engine.before[1][0][:] = engine.before[0][0]
        moved[dedup] = engine.store(KEYS, [0, 1, 2])
        engine.wipe()
        engine.load(KEYS, [7, 5, 6])
        engine.assert_loaded([0, 1, 2], [7, 5, 6])
        report = engine.specs[0].rank_report
        assert report is not None
        slots[dedup] = report.row_count
    assert moved == {False: 2 * 3 * ROW, True: 3 * ROW}
    assert slots == {False: 4, True: 8}


@pytest.mark.parametrize(
    "parallel",
    [
        Parallelism(tp=2, world_size=2, shares_region=False),
        Parallelism(tp=1, pp=2, world_size=2, shares_region=False),
    ],
)
def test_ranks_that_share_no_region_keep_rows_of_their_own(
    engines: list[Engine], parallel: Parallelism, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        engine = Engine(parallel, [LATENT, LATENT])
    engines.append(engine)
    assert "private rows, without dedup: " in caplog.text
    assert "do not share one region" in caplog.text
    assert [spec.rank_report.row_count for spec in engine.specs] == [4, 4]  # type: ignore[union-attr]
    assert engine.store(KEYS, [0, 1, 2]) == 2 * 3 * ROW, "every rank stores its own"
    engine.wipe()
    engine.load(KEYS, [7, 5, 6])
    engine.assert_loaded([0, 1, 2], [7, 5, 6])
    [info] = engine.metric("replication_info")
    assert "do not share one region" in info[-1]


def test_ranks_of_unequal_rows_agree_on_the_fewest_slots(engines: list[Engine]) -> None:
    """Stages of a pipeline on several nodes: the scheduler never names a slot that some rank has
    not."""
    parallel = Parallelism(pp=2, world_size=2, shares_region=False)
    stages = [LATENT, [LayerFacts("more", 2 * ROW, 1)]]
    engine = Engine(parallel, stages)
    engines.append(engine)
    assert [spec.rank_report.row_count for spec in engine.specs] == [4, 2]  # type: ignore[union-attr]
    engine.store(KEYS[:2], [0, 1])
    plan = engine.manager.prepare_store([KEYS[2]], _request("third"))
    assert plan is not None
    assert plan.evicted_keys
    assert all(slot < 2 for slot in plan.store_spec.block_ids)
    engine.manager.complete_store([KEYS[2]], _request("third"), success=False)


def test_stages_of_a_pipeline_on_one_node_share_the_region(
    engines: list[Engine], shared_memory: Path
) -> None:
    stages = [LATENT, [LayerFacts("a", 4096, 1), LayerFacts("b", 300, 1)]]
    engine = Engine(Parallelism(pp=2, world_size=2), stages)
    engines.append(engine)
    assert engine.store(KEYS, [0, 1, 2]) == 3 * (ROW + 4096 + 300)
    engine.wipe()
    engine.load(KEYS, [7, 5, 6])
    engine.assert_loaded([0, 1, 2], [7, 5, 6])
    [info] = engine.metric("replication_info")
    assert info == ("2", "1", "false", "3 layer(s): the ranks are stages of a pipeline")
    assert not list(shared_memory.iterdir()), "nothing is left in shared memory"


def test_a_disk_below_ranks_without_a_region_is_refused_before_anything_is_made() -> None:
    parallel = Parallelism(tp=2, world_size=2, shares_region=False)
    disk = {"root": "/nowhere", "budget": "1GB"}
    with pytest.raises(ConfigError, match=r"extra_config\.disk: expected none, or all ranks"):
        Engine(parallel, [LATENT, LATENT], disk=disk)
    tier = {"type": "disk", "name": "nvme", **disk}
    with pytest.raises(ConfigError, match=r"extra_config\.secondary_tiers: expected none, or all"):
        Engine(parallel, [LATENT, LATENT], secondary_tiers=[tier])


def test_every_metric_that_is_sent_is_defined() -> None:
    definitions = KvtierSpec.build_metric_definitions({})
    assert "kvtier:replication_info" in definitions
    kinds = (OffloadingCounterMetadata, OffloadingGaugeMetadata)
    assert all(isinstance(definition, kinds) for definition in definitions.values())
