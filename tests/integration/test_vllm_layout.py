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
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
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
from storage.types import round_up
from tiering.region import Region
from tiering.rows import GroupLayer, RowLayout, row_identity
from tiering.summary import replicas_by_group
from tiering.topology import (
    KvHeads,
    LayerFacts,
    Parallelism,
    kv_tp_replicas,
    replicated_layout,
)
from tiering.vllm.facts import EngineFacts, group_layers, parallelism
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


def packed_caches(block_bytes: int, groups: int) -> CanonicalKVCaches:
    tensors = [CanonicalKVCacheTensor(torch.zeros((4, block_bytes), dtype=torch.int8), block_bytes)]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, block_bytes)]] * groups)


def test_layers_that_share_pages_are_replicated_only_if_they_are() -> None:
    """Of two groups each by itself; of one that vLLM copies as whole blocks, all its layers."""
    layers = {name: LayerFacts(name, 512, 1) for name in "abc"}
    layers["b"] = LayerFacts("b", 512, None)
    parallel = Parallelism(tp=2, world_size=2)
    shared = EngineFacts(parallel, layers, (("a",), ("b",)))
    found = group_layers(shared, packed_caches(512, 2), 0)
    assert [group[0].facts.max_tp_shards for group in found.values()] == [1, None]
    packed = EngineFacts(parallel, layers, (("a", "c"), ("a", "b")))
    one, other = group_layers(packed, packed_caches(1024, 2), 0).values()
    assert (one[0].facts.name, one[0].facts.page_bytes) == ("a c", 1024)
    assert (one[0].facts.max_tp_shards, other[0].facts.max_tp_shards) == (1, None)


def test_of_packed_blocks_each_group_stores_the_part_that_its_layers_take() -> None:
    """As of DeepSeek-V4: all layers of a group side by side, blocks as wide as the widest group."""
    layers = {name: LayerFacts(name, 512, 1) for name in "abc"} | {"d": LayerFacts("d", 640, 1)}
    groups = (("a", "b", "c"), ("d",))
    facts = EngineFacts(
        Parallelism(), layers, groups, group_numbers=(0, 2), packed_bytes=(1536, 640)
    )
    kv_caches = packed_caches(1536, 2)
    layout = row_layout(facts, kv_caches)
    assert [layer.page_bytes for layer in layout.layers] == [1536, 640]
    mapped = with_row_layout(kv_caches, layout, 0)
    assert [tensor.page_size_bytes for tensor in mapped.tensors] == [1536, 640]
    assert [group[0].page_size_bytes for group in mapped.group_data_refs] == [1536, 640]


def test_blocks_that_do_not_hold_the_layers_that_vllm_would_copy_are_refused() -> None:
    layers = {name: LayerFacts(name, 512, 1) for name in "ab"}
    facts = EngineFacts(Parallelism(), layers, (("a", "b"),), packed_bytes=(4 * 512,))
    with pytest.raises(ConfigError, match=r"VLLM_KV_CACHE_LAYOUT: expected .* 1024 bytes"):
        group_layers(facts, packed_caches(1024, 1), 0)


PAGES = [300, 256, 128, 192]
FACTS = [
    LayerFacts("mla", 300, 1),
    LayerFacts("gqa", 256, 2),
    LayerFacts("any", 128),
    LayerFacts("heads", 192, heads=KvHeads(2, 6)),
]
WINDOW = {0: LayerFacts("window", 200, 1), 3: LayerFacts("window heads", 96, heads=KvHeads(2, 6))}
"""Of a second group: two of the tensors, and less of each page."""


def copy_layout(tp: int, blocks_per_chunk: int, groups: int) -> tuple[RowLayout, CanonicalKVCaches]:
    own = {0: [GroupLayer(facts, i, PAGES[i]) for i, facts in enumerate(FACTS)]}
    refs = [[CanonicalKVCacheRef(i, page) for i, page in enumerate(PAGES)]]
    if groups == 2:
        own[1] = [GroupLayer(facts, tensor, PAGES[tensor]) for tensor, facts in WINDOW.items()]
        refs.append([CanonicalKVCacheRef(t, facts.page_bytes) for t, facts in WINDOW.items()])
    layout = RowLayout.of_groups(own, Parallelism(tp=tp, world_size=tp), blocks_per_chunk)
    kv_caches = caches(PAGES, 12, [[]])
    return layout, CanonicalKVCaches(kv_caches.tensors, refs)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_vllms_copy_kernels_place_every_page_where_ours_do(
    memory_path: Path, tp: int, blocks_per_chunk: int, groups: int
) -> None:
    """The CUDA path, without CUDA: vLLM's copy plans over `RegionView`, executed with numpy; of
    every group two chunks, stored by one and loaded by the other."""
    images, loaded = [], []
    for name, copy in (("ours", _copy_with_ours), ("vllm", _copy_with_vllms_plan)):
        layout, kv_caches = copy_layout(tp, blocks_per_chunk, groups)
        region = Region.create(name, layout, 6 * layout.row_bytes, directory=memory_path)
        for group in range(groups):
            block_ids, slots = list(range(2 * blocks_per_chunk)), [3 - group, 4 + group]
            for rank in range(tp):
                mine = Region.attach(name, rank=rank, directory=memory_path)
                copy(mine, rank, kv_caches, group, block_ids, slots, is_store=True)
        images.append([bytes(region.row(slot)) for slot in range(region.row_count)])
        loaded.append([])
        for group in range(groups):
            block_ids, slots = list(range(6, 6 + 2 * blocks_per_chunk)), [3 - group, 4 + group]
            for rank in range(tp):
                _, target = copy_layout(tp, blocks_per_chunk, groups)
                mine = Region.attach(name, rank=rank, directory=memory_path)
                copy(mine, rank, target, group, block_ids, slots, is_store=False)
                loaded[-1].append([t.tensor.numpy().tobytes() for t in target.tensors])
        region.unlink()
        region.close()
    assert images[0] == images[1]
    assert loaded[0] == loaded[1]
    written = [3, 4] if groups == 1 else [3, 4, 2, 5]
    assert [any(row) for row in images[0]] == [slot in written for slot in range(6)]
    if groups == 2:
        small = layout.groups[1].row_bytes
        assert small < layout.row_bytes or layout.row_bytes == 4096
        assert not any(images[0][5][small:])


def _spec_of_one_group(kv_caches: Any, group: int, block_ids: list[int]) -> GPULoadStoreSpec:
    sizes = [0] * len(kv_caches.group_data_refs)
    sizes[group] = len(block_ids)
    return GPULoadStoreSpec(block_ids, sizes, [0] * len(sizes))


def _copy_with_ours(
    region: Region,
    rank: int,
    kv_caches: Any,
    group: int,
    block_ids: list[int],
    slots: list[int],
    *,
    is_store: bool,
) -> None:
    worker = CpuWorker(region, rank, kv_caches)
    device, rows = _spec_of_one_group(kv_caches, group, block_ids), CPULoadStoreSpec(slots)
    if is_store:
        assert worker.submit_store(1, device, rows)
    else:
        assert worker.submit_load(1, rows, device)
    worker.wait({1})
    [result] = worker.get_finished()
    assert (result.job_id, result.success) == (1, True)
    worker.shutdown()


def _copy_with_vllms_plan(
    region: Region,
    rank: int,
    kv_caches: Any,
    group: int,
    block_ids: list[int],
    slots: list[int],
    *,
    is_store: bool,
) -> None:
    layout = region.layout
    mapped = with_row_layout(kv_caches, layout, rank)
    view = RegionView(region, rank)
    sizes = _canonical_block_sizes(mapped.group_data_refs, len(mapped.tensors))
    rows = [view.create_next_canonical_view(s * layout.blocks_per_chunk) for s in sizes]
    for ref in mapped.group_data_refs[group]:
        plan = _build_copy_plan(ref, is_store)
        pages = mapped.tensors[ref.tensor_idx]
        # As `CPUOffloadingWorker` takes it.
        device = pages.tensor.view(torch.int8).view((-1, pages.page_size_bytes))
        for position, block_id in enumerate(block_ids):
            slot = slots[position // layout.blocks_per_chunk]
            block = position % layout.blocks_per_chunk
            if is_store and not ref.mapping.is_writer(slot * layout.blocks_per_chunk + block):
                continue
            row = rows[ref.tensor_idx][slot][block * sizes[ref.tensor_idx] :]
            source, target = (device[block_id], row) if is_store else (row, device[block_id])
            for start, stop, size in zip(
                plan.frag_offsets_src, plan.frag_offsets_dst, plan.frag_sizes, strict=True
            ):
                part = source[int(start) : int(start) + int(size)]
                target[int(stop) : int(stop) + int(size)] = part
    rows.clear()
    view.cleanup()


@pytest.mark.parametrize(
    "parallel",
    [Parallelism(tp=8, world_size=8, shares_region=False)],
)
def test_a_disk_below_ranks_that_share_no_region_is_refused_by_name(parallel: Parallelism) -> None:
    _refuse_disk_without_region(Parallelism(tp=8, world_size=8), "disk")
    _refuse_disk_without_region(Parallelism(tp=2, pp=2, world_size=4), "disk")
    with pytest.raises(ConfigError, match=r"extra_config.disk: expected none, or all ranks"):
        _refuse_disk_without_region(parallel, "disk")


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
    return row_layout(facts, kv_caches, rank), kv_caches


def row_layout(facts: EngineFacts, kv_caches: CanonicalKVCaches, rank: int = 0) -> RowLayout:
    groups = group_layers(facts, kv_caches, rank)
    return RowLayout.of_groups(groups, facts.parallel, 1, list(facts.layers.values()))


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
            worker.wait({1})
        rows[name] = [bytes(region.row(slot)) for slot in (3, 1)]
        for worker, tensor in workers:
            before = tensor.clone()
            tensor[:] = 0
            worker.submit_load(2, CPULoadStoreSpec([3, 1]), GPULoadStoreSpec([5, 4], [2], [0]))
            worker.wait({2})
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
    layout = row_layout(facts, kv_caches)
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
    layout = row_layout(facts, kv_caches)
    assert [(layer.name, layer.replicas) for layer in layout.layers] == [
        ("latent", 2),
        ("indexer", 2),
        ("draft", 1),
    ]
    assert layout.kv_tp_replicas == kv_cache_groups_tp_replicas(groups, 2) == 1
    target, own = layout.groups
    assert target.row_bytes == round_up(latent.page_size_bytes + indexer.page_size_bytes, 4096)
    assert own.row_bytes == round_up(2 * draft.page_size_bytes, 4096)
    assert replicas_by_group(layout, facts.group_layers) == [{2: 2}, {1: 1}]


def window(heads: int, padded: int | None = None) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=TOKENS,
        num_kv_heads=heads,
        head_size=HEAD,
        dtype=torch.float32,
        sliding_window=32,
        page_size_padded=padded,
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_groups_that_take_turns_in_the_same_memory_have_rows_of_what_they_use(tp: int) -> None:
    """As Gemma-3 has it: layers in groups of two, of one kind an odd number, so that a group is
    left with one; heads are shared among ranks and keep their order in each."""
    full = FullAttentionSpec(
        block_size=TOKENS, num_kv_heads=4 // tp, head_size=HEAD, dtype=torch.float32
    )
    groups = [
        KVCacheGroupSpec(["full0", "full1"], full),
        KVCacheGroupSpec(["window0", "window1"], window(4 // tp)),
        KVCacheGroupSpec(["window2"], window(4 // tp)),
    ]
    memory = [torch.zeros((BLOCKS, 4 // tp, TOKENS, 2 * HEAD)) for _ in range(2)]
    owners = {"full0": 0, "full1": 1, "window0": 0, "window1": 1, "window2": 0}
    tensors = {name: memory[place] for name, place in owners.items()}
    facts, kv_caches = registered({}, tensors, vllm_config(tp, heads=4), groups)
    assert len(kv_caches.tensors) == 2
    layout = row_layout(facts, kv_caches)
    page = 4 * TOKENS * 2 * HEAD * 4
    assert [group.row_bytes for group in layout.groups] == [2 * page, 2 * page, page]
    assert all(layer.head_order for layer in layout.layers)
    [large, small] = layout.kinds()
    assert (large.numbers, small.numbers) == ((0, 1), (2,))
    assert row_identity(layout, small)["layers"] == [["window2", page]]
    assert replicas_by_group(layout, facts.group_layers) == [{1: 2}, {1: 2}, {1: 1}]


def test_pages_that_are_padded_to_a_common_size_are_stored_without_the_padding() -> None:
    """As beside recurrent state, or with other heads in windows."""
    full = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=HEAD, dtype=torch.float32)
    narrow = window(3, padded=full.page_size_bytes)
    groups = [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["narrow"], narrow)]
    memory = torch.zeros(BLOCKS * full.page_size_bytes // 4)
    tensors = {
        "full": memory.view(BLOCKS, 4, TOKENS, 2 * HEAD),
        "narrow": memory.view(BLOCKS, 4, TOKENS, 2 * HEAD)[:, :3],
    }
    facts, kv_caches = registered({}, tensors, vllm_config(1, heads=4), groups)
    layout = row_layout(facts, kv_caches)
    assert [layer.page_bytes for layer in layout.layers] == [
        full.page_size_bytes,
        narrow.unpadded_page_size_bytes,
    ]
    assert not layout.is_shared


def test_a_recurrent_state_is_stored_without_the_padding_of_its_page(memory_path: Path) -> None:
    """In pages as large as those of attention: a group of two layers of it, and one of one."""
    full = FullAttentionSpec(block_size=TOKENS, num_kv_heads=4, head_size=HEAD, dtype=torch.float32)
    page = full.page_size_bytes
    state = MambaSpec(
        block_size=TOKENS, shapes=((3, 8), (4, 16)), dtypes=(torch.float32,) * 2,
        page_size_padded=page, mamba_cache_mode="align",
    )  # fmt: skip
    state_bytes = (3 * 8 + 4 * 16) * 4
    memory = [torch.randint(0, 99, (BLOCKS, page // 4)).float() for _ in range(2)]
    before = [tensor.clone() for tensor in memory]
    names = {"full0": 0, "full1": 1, "state0": 0, "state1": 1, "state2": 0}
    shape = (BLOCKS, 4, TOKENS, 2 * HEAD)
    tensors = {name: memory[place].view(shape) for name, place in names.items()}
    groups = [
        KVCacheGroupSpec(["full0", "full1"], full),
        KVCacheGroupSpec(["state0", "state1"], state),
        KVCacheGroupSpec(["state2"], state),
    ]
    facts, kv_caches = registered({}, tensors, vllm_config(1, heads=4), groups)
    layout = row_layout(facts, kv_caches)
    assert [layer.page_bytes for layer in layout.layers] == [page] * 2 + [state_bytes] * 3
    assert [group.row_bytes for group in layout.groups] == [8192, 4096, 4096]
    region = Region.create("e", layout, 4 * layout.row_bytes, directory=memory_path)
    worker = CpuWorker(region, 0, kv_caches)
    device = GPULoadStoreSpec([2], [0, 1, 0], [0, 5, 0])
    worker.submit_store(1, device, CPULoadStoreSpec([3]))
    worker.wait({1})
    assert not any(region.row(3)[2 * state_bytes :])
    for tensor in memory:
        tensor[:] = -1
    worker.submit_load(2, CPULoadStoreSpec([3]), GPULoadStoreSpec([4], [0, 1, 0], [0, 5, 0]))
    worker.wait({2})
    for tensor, old in zip(memory, before, strict=True):
        assert torch.equal(tensor[4, : state_bytes // 4], old[2, : state_bytes // 4])
        assert (tensor[4, state_bytes // 4 :] == -1).all()
        assert (tensor[:4] == -1).all()
    region.unlink()
    worker.shutdown()


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
