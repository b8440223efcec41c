"""SelectiveManager: what an engine leaves out, and the chunks of LoRA adapters.

Of its own, so that an engine that does everything, without adapters, pays for neither.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from storage.types import RowKey
from tiering.vllm.adapters import Adapters, Salt
from tiering.vllm.manager import VllmManager


class Role(NamedTuple):
    """Of `kv_role`: a producer only stores, a consumer only loads."""

    stores: bool = True
    loads: bool = True

    @classmethod
    def of(cls, kv_transfer_config: Any) -> Role:
        return cls(kv_transfer_config.is_kv_producer, kv_transfer_config.is_kv_consumer)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """Kept with a request by vLLM, until its last transfer is over."""

    salt: Future[Salt | None]

    def salt_now(self) -> Salt | None:
        return self.salt.result() if self.salt.done() else None


class SelectiveManager(VllmManager):
    """Until the files of a request's adapter are read, its lookups are to be tried again; if they
    can't be read, it shares nothing."""

    def __init__(self, role: Role, adapters: Adapters, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._role = role
        self._adapters = adapters
        self._expected: dict[str, _Adapter] = {}
        # Name of an adapter's chunk -> vLLM's key of it, for events, while the chunk is somewhere.
        self._vllm_keys: dict[bytes, bytes] = {}
        self._removed: set[bytes] = set()  # of these, told as gone from some tier lately

    def uses_adapter(self, request_id: str, lora_request: Any) -> None:
        """Comes before `on_new_request` of that request."""
        self._expected[request_id] = _Adapter(self._adapters.salt_of(lora_request))

    def on_new_request(self, req_context: Any) -> Any:
        adapter = self._expected.pop(req_context.req_id, None)
        if adapter is not None:
            req_context.set_state(adapter)
        return super().on_new_request(req_context)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        if not self._role.loads:
            return LookupResult.MISS
        adapter = req_context.get_state(_Adapter)
        if adapter is None:
            return super().lookup(key, req_context)
        if not adapter.salt.done():
            return LookupResult.RETRY
        salt = adapter.salt_now()
        if salt is None:
            return LookupResult.MISS
        return super().lookup(salt.apply(key), req_context)

    def get_load_source(self, key: bytes, req_context: Any) -> Any:
        [name] = self._named([key], req_context)
        return super().get_load_source(name, req_context)

    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> Any:
        return super().prepare_load(self._named(keys, req_context), req_context)

    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        super().complete_load(self._named(keys, req_context), req_context)

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> Any:
        named = self._named(keys, req_context) if self._role.stores else []
        if not named:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if self._announces and named is not keys:
            for name, key in zip(named, keys, strict=True):
                # What a disk had at start was told by its name, and must be taken back by it.
                if not self._is_somewhere(RowKey(name)):
                    self._vllm_keys[name] = key
        output = super().prepare_store(named, req_context)
        if output is not None:
            output.keys_to_store = self._named(output.keys_to_store, req_context)  # and back
        return output

    def complete_store(
        self, keys: Collection[bytes], req_context: Any, success: bool = True
    ) -> None:
        super().complete_store(self._named(keys, req_context), req_context, success)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        super().touch(self._named(keys, req_context), req_context)

    def take_events(self) -> Iterable[Any]:
        events = list(super().take_events())
        for event in events if self._vllm_keys else ():
            if event.removed:
                self._removed.update(self._vllm_keys.keys() & set(event.keys))
            event.keys = [self._vllm_keys.get(name, name) for name in event.keys]
        if self._removed and not self._events.is_pending:  # else one is still to be told as gone
            for name in self._removed:
                if not self._is_somewhere(RowKey(name)):
                    del self._vllm_keys[name]
            self._removed.clear()
        return events

    def _is_somewhere(self, name: RowKey) -> bool:
        return self._manager.primary.state(name) is not None or any(
            name in client for client in self._clients.values()
        )

    def shutdown(self) -> None:
        self._adapters.close()
        super().shutdown()

    def _named(self, keys: Collection[bytes], req_context: Any) -> Collection[bytes]:
        """The names of a request's chunks; none while its adapter can't be told from others."""
        adapter = req_context.get_state(_Adapter)
        if adapter is None:
            return keys
        salt = adapter.salt_now()
        return [salt.apply(key) for key in keys] if salt is not None else []
