"""LoRA adapters: what tells their KV apart, beyond the name and path that vLLM hashes.

An adapter that is trained again and saved under its old name would, after a restart, be taken for
the one before.  So the names of its chunks carry a fingerprint of its files.
"""

from __future__ import annotations

import hashlib
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.utils import get_adapter_absolute_path

from storage.errors import StorageError
from tiering.vllm.identity import plain_value
from tiering.weights import CONTENT, weights_fingerprint

log = logging.getLogger("kvtier.vllm")

_HASH_BYTES = 32  # of a block hash, with which an offload key begins; any group index follows
# Of vLLM's settings for LoRA, those that change what an adapter computes.
LORA_FIELDS = ("lora_dtype", "target_modules", "enable_tower_connector_lora")


class Salt:
    """Turns vLLM's offload key into the name of an adapter's chunk, and back."""

    def __init__(self, fingerprint: str) -> None:
        self._mask = int.from_bytes(hashlib.sha256(fingerprint.encode()).digest())

    def apply(self, key: bytes) -> bytes:
        """Its own inverse.  A hash that is masked is as good as the hash."""
        masked = int.from_bytes(key[:_HASH_BYTES]) ^ self._mask
        return masked.to_bytes(_HASH_BYTES) + key[_HASH_BYTES:]


class Adapters:
    """The salts of LoRA adapters.  For the scheduler's thread; files are read on another."""

    def __init__(self, lora_config: Any) -> None:
        self._settings = msgspec.json.encode(
            [plain_value(getattr(lora_config, name)) for name in LORA_FIELDS] if lora_config else []
        )
        self._thread = ThreadPoolExecutor(1, "kvtier-adapters")
        self._salts: dict[tuple[str, str, int], Future[Salt | None]] = {}

    def salt_of(self, lora_request: Any) -> Future[Salt | None]:
        """The result is None for an adapter whose files can't be read: it shares nothing."""
        known_as = (lora_request.lora_name, lora_request.lora_path, lora_request.lora_int_id)
        if lora_request.load_inplace:  # vLLM loads it anew, whatever it had
            self._salts.pop(known_as, None)
        if known_as not in self._salts:
            self._salts[known_as] = self._thread.submit(self._read, lora_request)
        return self._salts[known_as]

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, lora_request: Any) -> Salt | None:
        try:
            directory = Path(get_adapter_absolute_path(lora_request.lora_path))
            weights = weights_fingerprint(directory, CONTENT)
            config = (directory / "adapter_config.json").read_bytes()
        except (OSError, ValueError, StorageError) as exc:
            log.warning("LoRA %s: its KV is not kept: %s", lora_request.lora_name, exc)
            return None
        config += self._settings
        return Salt(f"{weights} {hashlib.sha256(config).hexdigest()}")
