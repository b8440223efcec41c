"""vLLM's tiering manager with its region, its tiers and ours, without a model or a server."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from storage.namespace import Identity
from storage.service import server
from storage.service.client import StoreClient
from tiering.vllm import plugin, tier

ROW_BYTES = 8192
SETTLE_TIMEOUT_S = 30.0  # for a test that hangs
_engines = itertools.count()


def offloading_config(slots: int, tiers: Sequence[dict[str, Any]], **changes: Any) -> Any:
    """Of one rank with rows of `ROW_BYTES`; `changes` replace fields."""
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("layer",), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": slots * ROW_BYTES, "secondary_tiers": list(tiers)},
        "engine_id": f"kvtier-test-{time.monotonic_ns()}-{next(_engines)}",
        "model": OffloadingModelConfig("model", "bfloat16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        "parallel": parallel,
    }
    return OffloadingConfig(**{**fields, **changes})


def key_of(number: int) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def number_of(key: OffloadKey) -> int:
    return int.from_bytes(key[:32], "big")


def row_of(number: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """int8[ROW_BYTES]: what the chunk `number` holds, and no other."""
    return np.random.default_rng(number).integers(-128, 128, ROW_BYTES, np.int8)


class ThreadedStore:
    """The store process's end of the socket, served by a thread of this one."""

    pid = 4711

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection.dup()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._connection:
            server.serve(self._connection)

    @classmethod
    def spawn(cls, connection: socket.socket) -> subprocess.Popen[bytes]:
        return cast("subprocess.Popen[bytes]", cls(connection))

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("store", timeout)
        return 0

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)


class Engine:
    """What vLLM's connector does with its manager, request by request."""

    def __init__(
        self,
        slots: int,
        *tiers: dict[str, Any],
        **changes: Any,
    ) -> None:
        plugin.register()
        self.config = offloading_config(slots, tiers, **changes)
        self.spec = TieringOffloadingSpec(self.config)
        self.manager = self.spec.get_manager()
        self._view = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self._requests = itertools.count()
        self.events: list[OffloadingEvent] = []

    @property
    def disk(self) -> Any:
        """Our tier."""
        [own] = [t for t in self.manager.secondary_tiers if isinstance(t, tier.DiskTierManager)]
        return own

    @property
    def client(self) -> StoreClient:
        client: StoreClient = self.disk._client
        return client

    def step(self) -> None:
        """The end of one, as vLLM's connector has it."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.events += self.manager.take_events()

    @contextlib.contextmanager
    def request(self) -> Iterator[ReqContext]:
        context = ReqContext(req_id=f"r{next(self._requests)}")
        self.manager.on_new_request(context)
        yield context
        self.manager.on_request_finished(context)

    def store(self, numbers: Sequence[int]) -> bool:
        """Store chunks as a worker does; False if vLLM's region had no room."""
        with self.request() as context:
            for place, number in enumerate(numbers):
                context.set_offload_key_position(key_of(number), 16 * (place + 1))
            plan = self.manager.prepare_store([key_of(n) for n in numbers], context)
            if plan is None:
                return False
            numbers_of = {key_of(n): n for n in numbers}
            for key, slot in zip(plan.keys_to_store, plan.store_spec.chunk_ids, strict=True):
                self._view[slot, :ROW_BYTES] = row_of(numbers_of[key])
            if plan.keys_to_store:
                self.manager.complete_store(set(plan.keys_to_store), context)
        self.step()
        return True

    def load(self, number: int, is_patient: Callable[[], bool]) -> bool:
        """Whether the chunk was found; then its bytes were right.  Steps while it is pending."""
        with self.request() as context:
            while True:
                result = self.manager.lookup(key_of(number), context)
                if result is LookupResult.HIT:
                    break
                if result is LookupResult.MISS:
                    return False
                self.step()
                if not is_patient():
                    return False
                time.sleep(0.001)
            [slot] = self.manager.prepare_load([key_of(number)], context).chunk_ids
            assert np.array_equal(self._view[slot, :ROW_BYTES], row_of(number)), "wrong bytes"
            self.manager.complete_load({key_of(number)}, context)
        self.step()
        return True

    def settle(self) -> None:
        """Step until no transfer is under way."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "a job was never reported"
            self.step()
            time.sleep(0.001)

    def close(self) -> None:
        del self._view  # of a mapping that ends
        self.manager.shutdown()


def patience() -> Callable[[], bool]:
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    return lambda: time.monotonic() < deadline


@pytest.fixture
def known_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no connector, whose configuration a tier's identity is made of."""
    model = SimpleNamespace(model="model", is_prefix_caching_supported=True)
    config = SimpleNamespace(model_config=model, lora_config=None)
    caches = SimpleNamespace(kv_cache_groups=[])
    connector = SimpleNamespace(_vllm_config=config, _kv_cache_config=caches)
    monkeypatch.setattr(tier, "_connector", lambda _spec: connector)
    monkeypatch.setattr(tier, "tier_identity", lambda _spec, _config: Identity("model", {}))


@pytest.fixture
def threaded_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is served in this process: quicker to start, and its device can be a faulty one."""
    made = functools.partial(StoreClient, spawn=ThreadedStore.spawn)
    monkeypatch.setattr(tier, "StoreClient", made)
