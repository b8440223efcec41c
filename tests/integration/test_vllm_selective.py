"""kv_role and LoRA adapters, before the manager: vLLM's own requests, no server."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext

from storage.changes import ChangeLog, Changes
from storage.types import RowKey
from tiering.manager import TieringManager
from tiering.primary import PrimaryTier
from tiering.vllm import adapters as adapters_module
from tiering.vllm.adapters import Adapters, Salt
from tiering.vllm.selective import Role, SelectiveManager

KEYS = [bytes([n]) * 32 + bytes(4) for n in range(3)]
DEADLINE_S = 20.0


@pytest.fixture
def managers() -> Iterator[list[SelectiveManager]]:
    made: list[SelectiveManager] = []
    yield made
    for manager in made:
        manager.shutdown()


def make(
    managers: list[SelectiveManager],
    role: Role | None = None,
    primary: PrimaryTier | None = None,
    **options: Any,
) -> SelectiveManager:
    tiers = TieringManager(primary or PrimaryTier(8), None)
    manager = SelectiveManager(role or Role(), Adapters(LoRAConfig()), tiers, **options)
    managers.append(manager)
    return manager


def write_adapter(directory: Path, weights: bytes = b"0" * 100, rank: int = 8) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_model.bin").write_bytes(weights)
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return directory


def lora(path: Path, number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest("mine", number, str(path), **more)


def begin(manager: SelectiveManager, name: str, adapter: LoRARequest | None = None) -> ReqContext:
    context = ReqContext(name)
    if adapter is not None:
        manager.uses_adapter(name, adapter)
    manager.on_new_request(context)
    return context


def lookup(manager: SelectiveManager, key: bytes, context: ReqContext) -> LookupResult:
    deadline = time.monotonic() + DEADLINE_S
    while (result := manager.lookup(key, context)) is LookupResult.RETRY:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    found: LookupResult = result
    return found


def store(manager: SelectiveManager, keys: list[bytes], context: ReqContext) -> list[bytes]:
    output = manager.prepare_store(keys, context)
    stored = list(output.keys_to_store)
    assert len(output.store_spec.block_ids) == len(stored)
    if stored:
        manager.complete_store(stored, context)
    return stored


def found(manager: SelectiveManager, context: ReqContext) -> list[bool]:
    return [lookup(manager, key, context) is LookupResult.HIT for key in KEYS]


@pytest.mark.parametrize("name", ["kv_both", "kv_producer", "kv_consumer"])
def test_spec_roles(managers: list[SelectiveManager], name: str) -> None:
    """A producer stores and never loads, a consumer loads and never stores."""
    role = Role.of(KVTransferConfig(kv_connector="KvtierConnector", kv_role=name))  # type: ignore[arg-type]
    stores, loads = name != "kv_consumer", name != "kv_producer"
    assert role == Role(stores, loads)
    primary = PrimaryTier(8)
    full = make(managers, primary=primary)
    assert store(full, KEYS[:1], begin(full, "other")) == KEYS[:1]
    manager = make(managers, role, primary)
    context = begin(manager, "request")
    assert lookup(manager, KEYS[0], context) is (LookupResult.HIT if loads else LookupResult.MISS)
    assert store(manager, KEYS[1:], context) == (KEYS[1:] if stores else [])
    if loads:
        assert len(manager.prepare_load(KEYS[:1], context).block_ids) == 1
        manager.complete_load(KEYS[:1], context)


def test_identity_of_an_adapter_is_its_files(
    managers: list[SelectiveManager], tmp_path: Path
) -> None:
    """vLLM's hash has its name and path; other files there are another adapter."""
    manager = make(managers)
    path = write_adapter(tmp_path / "adapter")
    first = begin(manager, "first", lora(path))
    assert found(manager, first) == [False] * 3
    assert store(manager, KEYS, first) == KEYS, "vLLM sees its own keys"
    assert found(manager, first) == [True] * 3
    assert len(manager.prepare_load(KEYS, first).block_ids) == 3
    manager.complete_load(KEYS, first)
    assert found(manager, begin(manager, "plain")) == [False] * 3, "without an adapter"
    assert found(manager, begin(manager, "again", lora(path))) == [True] * 3

    write_adapter(path, b"1" * 100)
    restarted = make(managers, primary=manager._manager.primary)
    assert found(restarted, begin(restarted, "trained", lora(path))) == [False] * 3
    write_adapter(path)
    restarted = make(managers, primary=manager._manager.primary)
    assert found(restarted, begin(restarted, "as before", lora(path))) == [True] * 3
    write_adapter(path, rank=16)
    reloaded = begin(restarted, "reloaded", lora(path, load_inplace=True))
    assert found(restarted, reloaded) == [False] * 3, "the scale is in the configuration"


def test_identity_of_an_adapter_is_the_same_where_its_files_are(
    managers: list[SelectiveManager], tmp_path: Path
) -> None:
    """As far as kvtier goes: vLLM's own hash has the path."""
    manager = make(managers)
    path = write_adapter(tmp_path / "adapter")
    store(manager, KEYS, _settled(manager, begin(manager, "first", lora(path))))
    shutil.copytree(path, tmp_path / "copy")
    context = begin(manager, "second", lora(tmp_path / "copy", 2))
    assert found(manager, context) == [True] * 3


def _settled(manager: SelectiveManager, context: ReqContext) -> ReqContext:
    lookup(manager, KEYS[0], context)
    return context


def test_identity_of_an_adapter_that_cannot_be_read_shares_nothing(
    managers: list[SelectiveManager], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make(managers)
    context = begin(manager, "request", lora(tmp_path / "nowhere"))
    with caplog.at_level("WARNING"):
        assert found(manager, context) == [False] * 3
    assert "LoRA mine: its KV is not kept: model: expected weights" in caplog.text
    assert store(manager, KEYS, context) == []
    manager.touch(KEYS, context)
    manager.on_request_finished(context)


def test_identity_of_an_adapter_is_awaited_without_blocking(
    managers: list[SelectiveManager], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files may lie on a slow disk: lookups are tried again, stores are left out."""
    may_read = threading.Event()
    read = adapters_module.weights_fingerprint

    def slow(*arguments: Any) -> str:
        assert may_read.wait(DEADLINE_S)
        return read(*arguments)

    monkeypatch.setattr(adapters_module, "weights_fingerprint", slow)
    manager = make(managers)
    context = begin(manager, "request", lora(write_adapter(tmp_path / "adapter")))
    assert manager.lookup(KEYS[0], context) is LookupResult.RETRY
    assert store(manager, KEYS, context) == []
    may_read.set()
    assert lookup(manager, KEYS[0], context) is LookupResult.MISS
    assert store(manager, KEYS, context) == KEYS


def test_events_of_an_adapters_chunks_have_vllms_keys(
    managers: list[SelectiveManager], tmp_path: Path
) -> None:
    manager = make(managers, primary=PrimaryTier(2), announces=True)
    context = begin(manager, "request", lora(write_adapter(tmp_path / "adapter")))
    store(manager, KEYS[:2], _settled(manager, context))
    assert [(e.removed, sorted(e.keys)) for e in manager.take_events()] == [(False, KEYS[:2])]
    manager.on_request_finished(context)
    store(manager, KEYS[2:], begin(manager, "plain"))
    told = {e.removed: e.keys for e in manager.take_events()}
    assert told[False] == KEYS[2:]
    assert set(told[True]) < set(KEYS[:2])
    assert len(manager._vllm_keys) == 1, "what is gone is forgotten"


class Disk:
    """A store client, as far as events go."""

    def __init__(self, *found: bytes) -> None:
        self.keys = set(map(RowKey, found))
        self.log = ChangeLog(self.keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self.keys

    def follow(self) -> None: ...

    @property
    def change_count(self) -> int:
        return len(self.log)

    def take_changes(self, limit: int) -> Changes:
        return self.log.take(limit)

    def gain(self, key: bytes) -> None:
        self.keys.add(RowKey(key))
        self.log.note_stored([RowKey(key)])

    def lose_all(self) -> None:
        self.log.note_lost(self.keys)
        self.keys = set()


def test_events_of_an_adapters_chunks_are_taken_back_by_the_keys_that_were_told(
    managers: list[SelectiveManager], tmp_path: Path
) -> None:
    """Also of those that were found at start, whose keys nobody knows any more."""
    manager = make(managers, announces=True)
    adapter = lora(write_adapter(tmp_path / "adapter"))
    context = _settled(manager, begin(manager, "request", adapter))
    names = manager._named(KEYS, context)
    disk = Disk(names[2])
    manager._clients = {"disk": disk}  # type: ignore[dict-item]
    manager._events.add_disk("disk", disk)
    known: dict[Medium, set[bytes]] = {Medium.CPU: set(), Medium.STORAGE: set()}

    def take() -> None:
        for event in manager.take_events():
            if event.removed:
                assert known[event.medium].issuperset(event.keys)
                known[event.medium].difference_update(event.keys)
            else:
                known[event.medium].update(event.keys)

    store(manager, KEYS, context)
    disk.gain(names[0])
    take()
    assert known == {Medium.CPU: {*KEYS[:2], names[2]}, Medium.STORAGE: {KEYS[0], names[2]}}
    disk.lose_all()
    manager.reset_cache()
    take()
    assert known == {Medium.CPU: set(), Medium.STORAGE: set()}
    assert manager._vllm_keys == {}


def test_a_salt_is_its_own_inverse_and_keeps_the_group() -> None:
    salts = [Salt("a"), Salt("b")]
    key = bytes(range(32)) + b"\0\0\0\7"
    masked = [salt.apply(key) for salt in salts]
    assert len({key, *masked}) == 3
    assert all(name[32:] == key[32:] and len(name) == 36 for name in masked)
    assert [salt.apply(name) for salt, name in zip(salts, masked, strict=True)] == [key, key]


def test_identity_of_an_adapter_covers_how_it_is_served(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "adapter")
    names = set()
    for settings in (None, LoRAConfig(), LoRAConfig(target_modules=["q_proj"])):
        adapters = Adapters(settings)
        salt = adapters.salt_of(lora(path)).result()
        assert salt is not None
        names.add(salt.apply(KEYS[0]))
        adapters.close()
    assert len(names) == 3
