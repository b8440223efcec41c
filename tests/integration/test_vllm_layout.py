"""row_layout and replica facts against vLLM's own classes, without a server."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.core.kv_cache_utils import kv_cache_groups_tp_replicas
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import _build_copy_plan, _canonical_block_sizes

from storage.errors import ConfigError
from tiering.region import Region
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism, kv_tp_replicas
from tiering.vllm.facts import EngineFacts, identity, parallelism, row_layers
from tiering.vllm.spec import _refuse_what_cannot_share
from tiering.vllm.worker import CpuWorker, RegionView, with_row_layout


def mla(page_tokens: int = 16, head: int = 48, shards: int | None = 1) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=page_tokens,
        num_kv_heads=1,
        head_size=head,
        dtype=torch.float32,
        max_tp_shards=shards,
    )


def gqa(heads: int = 2, shards: int | None = None) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=16, num_kv_heads=heads, head_size=32, dtype=torch.float32, max_tp_shards=shards
    )


def vllm_config(tp: int, dcp: int = 1, backend: str = "mp") -> Any:
    parallel = types.SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=1,
        world_size=tp,
        decode_context_parallel_size=dcp,
        prefill_context_parallel_size=1,
        nnodes_within_dp=1,
        distributed_executor_backend=backend,
    )
    return types.SimpleNamespace(parallel_config=parallel)


@given(
    st.lists(
        st.one_of(
            st.sampled_from([None, 1, 2, 3, 4, 8]).map(lambda s: mla(shards=s)),
            st.sampled_from([None, 1, 2, 4]).map(lambda s: gqa(shards=s)),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    st.sampled_from([1, 2]),
)
def test_kv_tp_replicas_is_vllms_own(specs: list[Any], tp: int, dcp: int) -> None:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    facts = EngineFacts.of(vllm_config(tp, dcp), config)
    ours = kv_tp_replicas(list(facts.layers.values()), facts.parallel)
    assert ours == kv_cache_groups_tp_replicas(groups, tp, dcp)


def test_layers_of_a_uniform_group_keep_their_own_facts() -> None:
    specs = {"latent": mla(), "indexer": mla(head=8), "draft": mla(head=8, shards=None)}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(specs), uniform)],
    )
    facts = EngineFacts.of(vllm_config(2), config)
    assert [facts.layers[n].page_bytes for n in specs] == [3072, 512, 512]
    assert [facts.layers[n].max_tp_shards for n in specs] == [1, 1, None]


@pytest.mark.parametrize(("backend", "shares"), [("mp", True), ("uni", True), ("ray", False)])
def test_executors_whose_ranks_may_be_elsewhere_fail_closed(backend: str, shares: bool) -> None:
    assert parallelism(vllm_config(2, backend=backend).parallel_config).shares_region is shares


def caches(pages: list[int], blocks: int, groups: list[list[int]]) -> CanonicalKVCaches:
    random = np.random.default_rng(7)
    tensors = [
        torch.from_numpy(random.integers(-128, 128, (blocks, page), dtype=np.int8))
        for page in pages
    ]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)],
        group_data_refs=[[CanonicalKVCacheRef(i, pages[i]) for i in group] for group in groups],
    )


def test_packed_and_shared_tensors_are_replicated_only_if_all_their_layers_are() -> None:
    parallel = Parallelism(tp=2, world_size=2)
    layers = {"a": LayerFacts("a", 512, 1), "b": LayerFacts("b", 512, None)}
    shared = EngineFacts(parallel, layers, (("a",), ("b",)))
    refs = [[CanonicalKVCacheRef(0, 512)], [CanonicalKVCacheRef(0, 512)]]
    tensors = [CanonicalKVCacheTensor(torch.zeros((4, 512), dtype=torch.int8), 512)]
    [merged] = row_layers(shared, CanonicalKVCaches(tensors, refs))
    assert merged.max_tp_shards is None
    packed = EngineFacts(parallel, {**layers, "c": LayerFacts("c", 512, 1)}, (("a", "c"),))
    big = [CanonicalKVCacheTensor(torch.zeros((4, 1024), dtype=torch.int8), 1024)]
    [whole] = row_layers(packed, CanonicalKVCaches(big, [[CanonicalKVCacheRef(0, 1024)]]))
    assert (whole.page_bytes, whole.max_tp_shards) == (1024, 1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_vllms_copy_kernels_place_every_page_where_ours_do(
    memory_path: Path, tp: int, blocks_per_chunk: int
) -> None:
    """The CUDA path, without CUDA: vLLM's copy plans over `RegionView`, executed with numpy."""
    pages = [300, 256, 128]
    facts = [LayerFacts("mla", 300, 1), LayerFacts("gqa", 256, 2), LayerFacts("any", 128)]
    layout = RowLayout.of(facts, Parallelism(tp=tp, world_size=tp), blocks_per_chunk)
    kv_caches = caches(pages, 12, [[0, 1, 2]])
    block_ids, slots = list(range(2 * blocks_per_chunk)), [3, 1]
    images = []
    for name, copy in (("ours", _store_with_ours), ("vllm", _store_with_vllms_plan)):
        region = Region.create(name, layout, 5 * layout.row_bytes, directory=memory_path)
        for rank in range(tp):
            mine = Region.attach(name, rank=rank, directory=memory_path)
            copy(mine, rank, kv_caches, block_ids, slots)
        images.append([bytes(region.row(slot)) for slot in range(region.row_count)])
        region.unlink()
        region.close()
    assert images[0] == images[1]
    assert any(any(row) for row in images[0])


def _store_with_ours(
    region: Region, rank: int, kv_caches: Any, block_ids: list[int], slots: list[int]
) -> None:
    worker = CpuWorker(region, rank, kv_caches)
    source = GPULoadStoreSpec(block_ids, [len(block_ids)], [0])
    assert worker.submit_store(1, source, CPULoadStoreSpec(slots))
    [result] = worker.get_finished()
    assert (result.job_id, result.success) == (1, True)
    worker.shutdown()


def _store_with_vllms_plan(
    region: Region, rank: int, kv_caches: Any, block_ids: list[int], slots: list[int]
) -> None:
    layout = region.layout
    mapped = with_row_layout(kv_caches, layout, rank)
    view = RegionView(region, rank)
    sizes = _canonical_block_sizes(mapped.group_data_refs, len(mapped.tensors))
    targets = [view.create_next_canonical_view(s * layout.blocks_per_chunk) for s in sizes]
    for ref in mapped.group_data_refs[0]:
        plan = _build_copy_plan(ref, True)
        for position, block_id in enumerate(block_ids):
            slot = slots[position // layout.blocks_per_chunk]
            block = position % layout.blocks_per_chunk
            if not ref.mapping.is_writer(slot * layout.blocks_per_chunk + block):
                continue
            base = block * sizes[ref.tensor_idx]
            for start, stop, size in zip(
                plan.frag_offsets_src, plan.frag_offsets_dst, plan.frag_sizes, strict=True
            ):
                source = mapped.tensors[ref.tensor_idx].tensor[block_id]
                target = targets[ref.tensor_idx][slot]
                at = base + int(stop)
                target[at : at + int(size)] = source[int(start) : int(start) + int(size)]
    targets.clear()
    view.cleanup()


class HfConfig:
    """Of transformers only what identity asks."""

    _commit_hash: str | None = None

    def __init__(self, **values: Any) -> None:
        self.values = {"rope_theta": 10000.0, "id2label": {0: "a"}, **values}

    def to_dict(self) -> dict[str, Any]:
        return {**self.values, "_name_or_path": "anywhere", "transformers_version": "5"}


def engine_identity(model: Path, tp: int = 1, **changes: Any) -> str:
    """The fingerprint of an engine that differs from the plain one in `changes`."""
    values = {
        "dtype": torch.bfloat16,
        "quantization": None,
        "kv_dtype": "bfloat16",
        "layout": "LBHNC",
        "v2": False,
        "hash": "sha256",
        "tokens": 16,
        "rope_theta": 10000.0,
        "backend": None,
        **changes,
    }
    vllm_config: Any = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=values["dtype"],
            quantization=values["quantization"],
            hf_config=HfConfig(rope_theta=values["rope_theta"]),
        ),
        cache_config=types.SimpleNamespace(prefix_caching_hash_algo=values["hash"]),
        attention_config=types.SimpleNamespace(backend=values["backend"]),
        use_v2_model_runner=values["v2"],
    )
    offloading: Any = types.SimpleNamespace(
        model=types.SimpleNamespace(dtype=values["kv_dtype"]),
        kv_cache_layout=values["layout"],
        cache=types.SimpleNamespace(tokens_per_hash=values["tokens"]),
        groups=[types.SimpleNamespace(tokens_per_block=values["tokens"], layer_names=("a", "b"))],
    )
    facts = [LayerFacts("a", 512, values.get("shards", 1)), LayerFacts("b", 512, 1)]
    layout = RowLayout.of(
        facts, Parallelism(tp=tp, world_size=tp), values.get("blocks_per_chunk", 1)
    )
    return identity(vllm_config, offloading, layout).fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.bin").write_bytes(bytes(1000))
    return directory


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"kv_dtype": "fp8_e4m3"},
        {"layout": "LBNHC"},
        {"v2": True},
        {"hash": "sha256_cbor"},
        {"tokens": 32},
        {"rope_theta": 1e6},
        {"blocks_per_chunk": 2},
        {"backend": "FLASH_ATTN"},
        {"tp": 2, "shards": 2},
    ],
    ids=str,
)
def test_identity_tells_apart_what_shapes_the_bytes(model: Path, change: dict[str, Any]) -> None:
    assert engine_identity(model, **change) != engine_identity(model)


def test_identity_follows_the_weights_and_not_the_path(model: Path, tmp_path: Path) -> None:
    before = engine_identity(model)
    moved = tmp_path / "elsewhere" / "model"
    moved.parent.mkdir()
    model.rename(moved)
    assert engine_identity(moved) == before
    (moved / "model.bin").write_bytes(b"\1" + bytes(999))
    assert engine_identity(moved) != before


def test_identity_of_single_copies_is_the_same_at_every_tp(model: Path) -> None:
    assert engine_identity(model, tp=2) == engine_identity(model, tp=1)
    assert engine_identity(model, tp=2, shards=None) != engine_identity(model, tp=1, shards=None)


def test_identity_refuses_what_it_cannot_establish(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match="PYTHONHASHSEED"):
        engine_identity(model, hash="xxhash")
    with pytest.raises(ConfigError, match="--revision: expected a commit"):
        engine_identity(Path("org/model"))


def test_ranks_that_cannot_share_one_region_are_refused_at_once() -> None:
    _refuse_what_cannot_share(Parallelism(tp=8, world_size=8))
    with pytest.raises(ConfigError, match="--distributed-executor-backend"):
        _refuse_what_cannot_share(Parallelism(tp=8, world_size=8, shares_region=False))
    with pytest.raises(ConfigError, match="--pipeline-parallel-size: expected 1"):
        _refuse_what_cannot_share(Parallelism(tp=2, pp=2, world_size=4))
