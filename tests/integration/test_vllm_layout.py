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

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
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
from tiering.rows import RowLayout, row_identity
from tiering.summary import replicas_by_group
from tiering.topology import (
    KvHeads,
    LayerFacts,
    Parallelism,
    kv_tp_replicas,
    replicated_layout,
)
from tiering.vllm.facts import EngineFacts, parallelism, row_layers
from tiering.vllm.identity import element_bytes
from tiering.vllm.spec import _refuse_disk_without_region
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


def vllm_config(
    tp: int,
    dcp: int = 1,
    backend: str = "mp",
    *,
    heads: int = 8,
    rank: int = 0,
    config: dict[str, Any] | None = None,
    draft: Any = None,
    overrides: Any = None,
    **parallel: Any,
) -> Any:
    """Of vLLM's configuration what is asked for layouts; `heads` are the model's KV heads."""
    parallel_config = types.SimpleNamespace(
        **{
            "rank": rank,
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": 1,
            "world_size": tp,
            "decode_context_parallel_size": dcp,
            "prefill_context_parallel_size": 1,
            "nnodes_within_dp": 1,
            "distributed_executor_backend": backend,
            "cp_kv_cache_interleave_size": 1,
            **parallel,
        }
    )
    speculative = draft and types.SimpleNamespace(draft_model_config=draft)
    return types.SimpleNamespace(
        parallel_config=parallel_config,
        model_config=model_config(heads, config, overrides),
        speculative_config=speculative,
    )


def model_config(heads: int, config: dict[str, Any] | None = None, overrides: Any = None) -> Any:
    values = {"num_key_value_heads": heads} if config is None else config
    return types.SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        model_arch_config=types.SimpleNamespace(per_layer_overrides=overrides),
        hf_text_config=types.SimpleNamespace(to_dict=lambda: values),
    )


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
    [merged] = row_layers(shared, CanonicalKVCaches(tensors, refs), 0)
    assert merged.max_tp_shards is None
    packed = EngineFacts(parallel, {**layers, "c": LayerFacts("c", 512, 1)}, (("a", "c"),))
    big = [CanonicalKVCacheTensor(torch.zeros((4, 1024), dtype=torch.int8), 1024)]
    [whole] = row_layers(packed, CanonicalKVCaches(big, [[CanonicalKVCacheRef(0, 1024)]]), 0)
    assert (whole.page_bytes, whole.max_tp_shards) == (1024, 1)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_vllms_copy_kernels_place_every_page_where_ours_do(
    memory_path: Path, tp: int, blocks_per_chunk: int
) -> None:
    """The CUDA path, without CUDA: vLLM's copy plans over `RegionView`, executed with numpy."""
    pages = [300, 256, 128, 192]
    facts = [LayerFacts("mla", 300, 1), LayerFacts("gqa", 256, 2), LayerFacts("any", 128)]
    facts.append(LayerFacts("heads", 192, heads=KvHeads(2, 6)))
    layout = RowLayout.of(facts, Parallelism(tp=tp, world_size=tp), blocks_per_chunk)
    kv_caches = caches(pages, 12, [[0, 1, 2, 3]])
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


@pytest.mark.parametrize(
    "parallel",
    [Parallelism(tp=8, world_size=8, shares_region=False)],
)
def test_a_disk_below_ranks_that_share_no_region_is_refused_by_name(parallel: Parallelism) -> None:
    _refuse_disk_without_region(Parallelism(tp=8, world_size=8))
    _refuse_disk_without_region(Parallelism(tp=2, pp=2, world_size=4))
    with pytest.raises(ConfigError, match=r"extra_config.disk: expected none, or all ranks"):
        _refuse_disk_without_region(parallel)


# -- heads, as vLLM lays them out in memory --------------------------------------------------------

TOKENS, HEAD, BLOCKS = 16, 8, 6
Whole = torch.Tensor
"""float32[blocks, K and V, heads, tokens, head size]"""


def rank_cache(whole: Whole, tp: int, rank: int, order: str) -> torch.Tensor:
    """The KV cache of one layer on a rank, shaped and strided as vLLM's backends do."""
    heads = whole.shape[2]
    own = max(1, heads // tp)
    first = rank * heads // tp
    mine = whole[:, :, first : first + own].clone()
    if order == "packed NHD":  # logical [block, head, token, K and V]
        packed = mine.permute(0, 3, 2, 1, 4).reshape(BLOCKS, TOKENS, own, 2 * HEAD)
        return packed.contiguous().permute(0, 2, 1, 3)
    if order == "packed HND":
        return mine.permute(0, 2, 3, 1, 4).reshape(BLOCKS, own, TOKENS, 2 * HEAD).contiguous()
    if order == "split NHD":  # logical [block, K or V, token, head, size]
        return mine.permute(0, 1, 3, 2, 4).contiguous()
    assert order == "split HND"
    return mine.contiguous().permute(0, 1, 3, 2, 4)


def registered(
    specs: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    config: Any,
    groups: Any = None,
    layout: str | None = "LBHNC",
) -> tuple[EngineFacts, CanonicalKVCaches]:
    """What vLLM's own connector makes of a rank's tensors, and our facts of them."""
    made: list[CanonicalKVCaches] = []
    kv_cache_config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=groups or [KVCacheGroupSpec([n], spec) for n, spec in specs.items()],
        kv_cache_layout=layout,
    )
    rank = config.parallel_config.rank
    spec = types.SimpleNamespace(
        replicated_layout=False,
        config=types.SimpleNamespace(
            canonical_layout=False, parallel=types.SimpleNamespace(rank=rank)
        ),
        get_worker=made.append,
    )
    OffloadingConnectorWorker(spec, config, kv_cache_config).register_kv_caches(tensors)  # type: ignore[arg-type]
    return EngineFacts.of(config, kv_cache_config), made[0]


def rank_layout(
    whole: Whole, tp: int, rank: int, order: str, **config: Any
) -> tuple[RowLayout, CanonicalKVCaches]:
    heads = whole.shape[2]
    spec = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=max(1, heads // tp), head_size=HEAD, dtype=torch.float32
    )
    tensor = rank_cache(whole, tp, rank, order)
    layout = config.pop("layout", "LBNHC" if order.endswith("NHD") else "LBHNC")
    settings = vllm_config(tp, heads=heads, rank=rank, **config)
    facts, kv_caches = registered({"a": spec}, {"a": tensor}, settings, layout=layout)
    layers = row_layers(facts, kv_caches, rank)
    return RowLayout.of(layers, facts.parallel, 1, list(facts.layers.values())), kv_caches


ORDERS = ["packed NHD", "packed HND", "split NHD", "split HND"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "tp"), [(8, 2), (8, 8), (2, 4), (1, 2), (4, 1)])
def test_replicas_of_kv_heads_are_found_in_every_memory_layout(
    memory_path: Path, order: str, heads: int, tp: int
) -> None:
    """All ranks come to one layout; its rows are those of one rank with all the heads, whatever
    the number of ranks; and every rank gets its heads back into other blocks."""
    random = np.random.default_rng(3)
    shape = (BLOCKS, 2, heads, TOKENS, HEAD)
    whole = torch.from_numpy(random.random(shape, dtype=np.float32))
    layouts = [rank_layout(whole, tp, rank, order)[0] for rank in range(tp)]
    assert all(layout == layouts[0] for layout in layouts)
    single, _ = rank_layout(whole, 1, 0, order)
    assert layouts[0].row_bytes == single.row_bytes
    assert row_identity(layouts[0]) == row_identity(single)
    rows = {}
    for name, layout, ranks in (("one", single, 1), ("many", layouts[0], tp)):
        region = Region.create(name, layout, 5 * layout.row_bytes, directory=memory_path)
        workers = []
        for rank in range(ranks):
            _, kv_caches = rank_layout(whole, ranks, rank, order)
            mine = Region.attach(name, rank=rank, directory=memory_path)
            workers.append((CpuWorker(mine, rank, kv_caches), kv_caches.tensors[0].tensor))
        for worker, _ in workers:
            worker.submit_store(1, GPULoadStoreSpec([0, 1], [2], [0]), CPULoadStoreSpec([3, 1]))
        rows[name] = [bytes(region.row(slot)) for slot in (3, 1)]
        for worker, tensor in workers:
            before = tensor.clone()
            tensor[:] = 0
            worker.submit_load(2, CPULoadStoreSpec([3, 1]), GPULoadStoreSpec([5, 4], [2], [0]))
            assert torch.equal(tensor[[5, 4]], before[[0, 1]])
            assert not tensor[:4].any()
            worker.shutdown()
        region.unlink()
        region.close()
    assert rows["many"] == rows["one"]


DRAFT_OF_OTHER_HEADS = model_config(2)


@pytest.mark.parametrize(
    "facts",
    [
        {"config": {"num_key_value_heads": 8, "num_global_key_value_heads": 4}},
        {"config": {"num_key_value_heads": [8, 8, 4]}},
        {"config": {"num_key_value_heads": 8, "block_configs": [{"n": 1}]}},
        {"config": {"attn_config": {"kv_n_heads": 1}}},
        {"draft": DRAFT_OF_OTHER_HEADS},
        {"overrides": [{"total_num_kv_heads": 4}]},
        {"dcp": 2},
        {"nnodes_within_dp": 2},
        {"backend": "ray"},
        {"layout": None},
        {"layout": "LHBNC"},
    ],
    ids=str,
)
def test_replicas_are_not_guessed_where_heads_may_differ(facts: dict[str, Any]) -> None:
    """vLLM takes the model's heads for each layer's, so one number must hold for all of them."""
    whole = torch.zeros((BLOCKS, 2, 8, TOKENS, HEAD))
    layout, _ = rank_layout(whole, 8, 0, "packed HND", **facts)
    [layer] = layout.layers
    assert (layer.shards, layer.replicas, layer.head_order) == (8, 1, False)
    assert layout.depends_on_ranks
    assert layout.copies


def test_heads_are_put_in_order_only_if_strides_and_layout_agree() -> None:
    whole = torch.zeros((BLOCKS, 2, 8, TOKENS, HEAD))
    layout, _ = rank_layout(whole, 2, 0, "packed HND", layout="LBNHC")
    assert not layout.layers[0].head_order


def test_a_draft_model_of_as_many_heads_shares_like_the_target() -> None:
    whole = torch.zeros((BLOCKS, 2, 8, TOKENS, HEAD))
    layout, _ = rank_layout(whole, 8, 0, "packed HND", draft=model_config(8))
    assert layout.layers[0].head_order


def test_an_mla_layer_that_says_nothing_is_not_replicated() -> None:
    specs = {"says": mla(head=8), "silent": mla(head=8, shards=None)}
    tensors = {name: torch.zeros((BLOCKS, 1, 16, 8)) for name in specs}
    facts, kv_caches = registered(specs, tensors, vllm_config(2, heads=1))
    layout = RowLayout.of(row_layers(facts, kv_caches, 0), facts.parallel, 1)
    assert [layer.replicas for layer in layout.layers] == [2, 1]


def test_dedup_of_mixed_layers_in_several_groups_and_one_that_is_not_offloaded() -> None:
    """MLA, a smaller indexer page, a head-sharded draft and a layer of an excluded group: each by
    itself, and `kv_tp_replicas` as vLLM has it over all of them."""
    latent, indexer, draft = mla(head=48), mla(head=8), gqa(heads=4)
    groups = [
        KVCacheGroupSpec(
            ["latent", "indexer"],
            UniformTypeKVCacheSpecs(
                block_size=16, kv_cache_specs={"latent": latent, "indexer": indexer}
            ),
        ),
        KVCacheGroupSpec(["draft"], draft),
        KVCacheGroupSpec(["scratch"], gqa(heads=4), enable_kv_transfer=False),
    ]
    tensors = {
        "latent": torch.zeros((BLOCKS, 1, 16, 48)),
        "indexer": torch.zeros((BLOCKS, 1, 16, 8)),
        "draft": torch.zeros((BLOCKS, 4, 16, 64)),
    }
    config = vllm_config(2, heads=128)
    facts, kv_caches = registered({}, tensors, config, groups)
    layout = RowLayout.of(
        row_layers(facts, kv_caches, 0), facts.parallel, 1, list(facts.layers.values())
    )
    assert [(layer.name, layer.replicas) for layer in layout.layers] == [
        ("latent", 2),
        ("indexer", 2),
        ("draft", 1),
    ]
    assert layout.kv_tp_replicas == kv_cache_groups_tp_replicas(groups, 2) == 1
    worker_bytes = latent.page_size_bytes + indexer.page_size_bytes
    expected = worker_bytes + 2 * draft.page_size_bytes
    assert layout.payload_bytes == expected
    assert replicas_by_group(layout, facts.group_layers) == [{2: 2}, {1: 1}]


@given(
    st.lists(st.sampled_from([None, 1, 2, 4]), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([{}, {"dcp": 2}, {"nnodes_within_dp": 2}, {"backend": "ray"}]),
)
def test_replicated_layout_is_vllms_own(
    shards: list[int | None], tp: int, other: dict[str, Any]
) -> None:
    groups = [KVCacheGroupSpec([f"layer{i}"], mla(shards=s)) for i, s in enumerate(shards)]
    kv_cache_config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        kv_tp_replicas=kv_cache_groups_tp_replicas(groups, tp, other.get("dcp", 1)),
    )
    config = vllm_config(tp, **other, data_parallel_index=0, data_parallel_size=1)
    config.parallel_config.data_parallel_rank_local = None
    config.model_config.use_mla = True
    config.model_config.model = "m"
    config.model_config.dtype = torch.float32
    config.use_v2_model_runner = False
    config.kv_events_config = None
    config.kv_transfer_config = types.SimpleNamespace(kv_connector_extra_config={}, engine_id="e")
    config.cache_config = types.SimpleNamespace(
        cache_dtype="auto",
        kv_cache_layout=None,
        block_size=16,
        enable_prefix_caching=True,
        prefix_match_unit=None,
        prefix_caching_hash_algo="sha256",
        hash_block_size=None,
    )
    theirs = build_offloading_config(config, kv_cache_config)
    facts = EngineFacts.of(config, kv_cache_config)
    ours = list(facts.layers.values())
    assert kv_tp_replicas(ours, facts.parallel) == kv_cache_config.kv_tp_replicas
    assert replicated_layout(ours, facts.parallel) == theirs.replicated_layout


@pytest.mark.parametrize(
    ("kv_cache_dtype", "expected"),
    [("float32", 4), ("bfloat16", 2), ("float16", 2), ("half", 2), ("fp8", 1), ("fp8_e4m3", 1),
     ("fp8_ds_mla", 1), ("int8", 1), ("no such dtype", 1)],
)  # fmt: skip
def test_the_size_of_a_number_follows_the_dtype_of_the_cache(
    kv_cache_dtype: str, expected: int
) -> None:
    assert element_bytes(kv_cache_dtype) == expected
