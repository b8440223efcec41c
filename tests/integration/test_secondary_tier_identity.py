"""What our tier of vLLM's spec knows before it moves a byte: whose rows they are, and where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.config import OffloadingCacheConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from storage.errors import ConfigError, LayoutMismatch, StorageError
from storage.namespace import Identity
from storage.service.client import StoreRefused
from tests.integration.vllm_tiers import ROW_BYTES, Engine, known_identity, offloading_config
from tiering.vllm import tier

__all__ = ["known_identity"]


class SeenConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """As much of a connector as a tier looks for."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self._vllm_config = vllm_config
        self._role = role


SeenConnector.__abstractmethods__ = frozenset()  # none of them is called


def config_with(extra: dict[str, Any]) -> Any:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra))


def test_identity_is_of_the_connector_that_holds_the_same_settings() -> None:
    extra = {"a": 1}
    mine, other = config_with(extra), config_with({"a": 1})
    made = [
        SeenConnector(other, KVConnectorRole.SCHEDULER),
        SeenConnector(mine, KVConnectorRole.SCHEDULER),
        SeenConnector(config_with(extra), KVConnectorRole.WORKER),
        SeenConnector(SimpleNamespace(kv_transfer_config=None), KVConnectorRole.SCHEDULER),
    ]
    assert tier._engine_config(SimpleNamespace(extra_config=extra)) is mine
    del made


@pytest.mark.parametrize("count", [0, 2])
def test_identity_that_cannot_be_established_is_refused(count: int) -> None:
    extra = {"a": 1}
    made = [SeenConnector(config_with(extra), KVConnectorRole.SCHEDULER) for _ in range(count)]
    with pytest.raises(ConfigError, match=f"^kv_connector: .*, got '{count} configurations'$"):
        tier._engine_config(SimpleNamespace(extra_config=extra))
    del made


def test_identity_of_adapters_is_not_known_to_a_tier() -> None:
    tier.refuse_adapters(SimpleNamespace(lora_config=None))
    with pytest.raises(ConfigError, match=r"--enable-lora: expected none, or .*KvtierConnector"):
        tier.refuse_adapters(SimpleNamespace(lora_config=object()))


def test_chunks_of_several_blocks_are_refused_where_a_window_leaves_some() -> None:
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = KVCacheGroupSpec(["a"], FullAttentionSpec(**shape))
    window = KVCacheGroupSpec(["b"], SlidingWindowSpec(**shape, sliding_window=32))
    tier.refuse_windows(SimpleNamespace(kv_cache_groups=[full]), 2)
    with pytest.raises(ConfigError, match=r"blocks_per_chunk: expected none or 1, .* got 2$"):
        tier.refuse_windows(SimpleNamespace(kv_cache_groups=[full, window]), 2)


class OtherSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Its worker may place pages elsewhere."""


def _identity(monkeypatch: pytest.MonkeyPatch, kind: Any = TieringOffloadingSpec, **of: Any) -> str:
    """The fingerprint that the fields of a tier's own come to."""
    monkeypatch.setattr(tier, "identity_of_rows", lambda _v, _c, rows: Identity("m", dict(rows)))
    config = offloading_config(4, [])
    parallel = {k: v for k, v in of.items() if hasattr(config.parallel, k)}
    others = {k: v for k, v in of.items() if k not in parallel}
    changed = type(config.parallel)(**{**vars(config.parallel), **parallel})
    fields = {**vars(config), "parallel": changed, **others}
    fingerprint: str = tier.tier_identity(kind(type(config)(**fields)), None).fingerprint
    return fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 2, "tp_size": 2},
        {"tp_size": 2},
        {"pp_size": 2},
        {"pcp_size": 2},
        {"dcp_size": 2},
        {"worker_kv_bytes_per_block": ROW_BYTES - 512},
        {"cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2)},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"kind": OtherSpec},
    ],
    ids=lambda change: "-".join(change),
)
def test_identity_of_vllms_rows_tells_layouts_apart(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    assert _identity(monkeypatch) == _identity(monkeypatch)
    assert _identity(monkeypatch, **change) != _identity(monkeypatch)


@pytest.fixture
def spec() -> Iterator[TieringOffloadingSpec]:
    made = TieringOffloadingSpec(offloading_config(4, []))
    manager = made.get_manager()
    yield made
    manager.shutdown()


def _view(spec: Any) -> memoryview:
    view: memoryview = spec.get_manager().primary_tier.get_kv_memoryview()
    return view


def test_rows_stand_where_vllm_sees_them(spec: TieringOffloadingSpec) -> None:
    rows = tier.region_rows(spec, _view(spec))
    assert (rows.rows_offset, rows.row_bytes, rows.row_count) == (0, ROW_BYTES, 4)
    _view(spec)[2, 7] = 99
    assert os.pread(rows.fd, 1, 2 * ROW_BYTES + 7) == bytes([99])


def test_a_region_that_is_another_file_is_refused(
    spec: TieringOffloadingSpec, tmp_path: Path
) -> None:
    """The store would move rows where vLLM never looks."""
    other = tmp_path / "other"
    other.write_bytes(bytes(4 * ROW_BYTES))
    with other.open("rb") as file:
        stranger = SimpleNamespace(_scheduler_mmap=SimpleNamespace(fd=file.fileno()))
        with pytest.raises(LayoutMismatch, match="a view of the start of its file"):
            tier.region_rows(stranger, _view(spec))


def test_a_region_of_several_files_is_refused(spec: TieringOffloadingSpec, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.write_bytes(bytes(ROW_BYTES))
    with first.open("rb") as file:
        several = SimpleNamespace(_scheduler_mmap=SimpleNamespace(fd=file.fileno()))
        with pytest.raises(LayoutMismatch, match=f"one file of {4 * ROW_BYTES} bytes"):
            tier.region_rows(several, _view(spec))


@pytest.mark.parametrize(
    "view",
    [np.zeros((4, 2 * ROW_BYTES), np.int8)[:, ::2].data, np.zeros(8192, np.int8).data],
    ids=["strided", "flat"],
)
def test_rows_with_gaps_are_refused(spec: TieringOffloadingSpec, view: memoryview) -> None:
    with pytest.raises(LayoutMismatch, match="without gaps"):
        tier.region_rows(spec, view)


def test_a_region_without_a_file_is_refused(spec: TieringOffloadingSpec) -> None:
    with pytest.raises(LayoutMismatch, match="a SharedOffloadRegion with a file"):
        tier.region_rows(SimpleNamespace(_scheduler_mmap=None), _view(spec))


@pytest.mark.usefixtures("known_identity")
def test_a_second_engine_on_one_root_is_told_who_has_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As replicas of a data-parallel engine are: one line, and nothing of the second is left."""
    parse = tier.check_tiers
    hurry = {"lock_timeout_s": 0.2}
    monkeypatch.setattr(tier, "check_tiers", lambda *a: replace(parse(*a), **hurry))
    settings = {"type": "disk", "root": str(tmp_path / "store"), "budget": "8MB"}
    with closing(Engine(4, settings)) as engine:
        owner = f"store belongs to process {engine.client.store_pid} "
        with pytest.raises(StoreRefused, match=owner):
            Engine(4, settings)
    records = [r for r in caplog.records if r.name == "kvtier.vllm" and r.levelname == "ERROR"]
    assert [owner in record.getMessage() for record in records] == [True]


@pytest.mark.usefixtures("known_identity")
@pytest.mark.parametrize(
    ("settings", "field"),
    [({"buget": 1}, r"\[1\].buget"), ({"root": 3}, r"\[1\].root"), ({}, r"\[1\].root")],
)
def test_bad_settings_are_refused_by_the_tier_itself(
    tmp_path: Path, settings: dict[str, Any], field: str
) -> None:
    fs = {"type": "fs", "root_dir": str(tmp_path)}
    with pytest.raises(StorageError, match=f"secondary_tiers{field}: expected"):
        Engine(4, fs, {"type": "disk", **settings})
