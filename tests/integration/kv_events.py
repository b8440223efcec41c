"""A subscriber of vLLM's KV events, as a router has one: ZMQ, msgspec, and a set of blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

_POLL_MS = 50
_REPLAY_TIMEOUT_MS = 10_000

Place = tuple[str, str | None, str | None]
"""Medium, locality and ownership."""

REGION: Place = ("CPU", None, None)
DISK: Place = ("STORAGE", "LOCAL", "disk")


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Of the device."""


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


_decoder = msgspec.msgpack.Decoder(Batch)


@dataclass
class Known:
    """What a follower of the events knows: offload keys, by place."""

    keys: dict[Place, set[bytes]] = field(default_factory=dict)
    stored: list[BlockStored] = field(default_factory=list)
    """Of region and disk."""
    complaints: list[str] = field(default_factory=list)
    times_emptied: dict[Place, int] = field(default_factory=dict)
    next_batch: int = 0

    def apply(self, number: int, payload: bytes) -> None:
        if number != self.next_batch:
            self.complaints.append(f"batch {number} instead of {self.next_batch}")
        self.next_batch = number + 1
        for event in _decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                continue
            place = (event.medium or "", event.locality, event.ownership)
            if place[0] == "GPU":
                continue
            group = (event.group_idx or 0).to_bytes(4, "big")
            self._apply(event, place, [block + group for block in event.block_hashes])

    def _apply(
        self, event: BlockStored | BlockRemoved, place: Place, named: Iterable[bytes]
    ) -> None:
        known = self.keys.setdefault(place, set())
        if isinstance(event, BlockStored):
            self.stored.append(event)
            twice = known.intersection(named)
            self.complaints += [f"{place}: {key.hex()} stored twice" for key in twice]
            known.update(named)
            return
        strange = set(named) - known
        self.complaints += [f"{place}: {key.hex()} removed, never stored" for key in strange]
        known.difference_update(named)
        if not known:
            self.times_emptied[place] = self.times_emptied.get(place, 0) + 1


class Subscriber:
    """Listens from before the server is there until `close`; a context manager."""

    def __init__(self, directory: Path) -> None:
        """Sockets are made below `directory`, whose name must be short."""
        self.known = Known()
        self._endpoints = f"ipc://{directory}/pub", f"ipc://{directory}/replay"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self._socket.connect(self._endpoints[0])
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def server_config(self) -> dict[str, Any]:
        """`--kv-events-config`."""
        publish, replay = self._endpoints
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publish,
            "replay_endpoint": replay,
        }

    def keys(self, place: Place) -> set[bytes]:
        """What is there, as far as was heard."""
        with self._lock:
            return set(self.known.keys.get(place, ()))

    def replayed(self) -> Known:
        """What a late follower learns from the replay endpoint, from the first batch on."""
        known = Known()
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.RCVTIMEO, _REPLAY_TIMEOUT_MS)
            socket.connect(self._endpoints[1])
            socket.send_multipart((b"", (0).to_bytes(8, "big")))
            while True:
                *_, number, payload = socket.recv_multipart()
                if not payload:
                    return known
                known.apply(int.from_bytes(number, "big"), payload)

    def _listen(self) -> None:
        while not self._end.is_set():
            if self._socket.poll(_POLL_MS):
                _, number, payload = self._socket.recv_multipart()
                with self._lock:
                    self.known.apply(int.from_bytes(number, "big"), payload)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._socket.close(linger=0)
        self._context.term()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
