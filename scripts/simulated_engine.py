"""An engine without a model: TP ranks as processes, torch KV tensors, and the stack of `tiering`.

Everything below the engine is real: region, workers, manager, store process, disk.  What a model
would compute is a pattern that follows from chunk, layer, shard and block, so that every byte that
comes back can be checked, on every rank.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.service.client import RegionRows, StoreClient
from storage.types import RowKey
from tiering.manager import LookupResult, Tier, TieringManager
from tiering.primary import PrimaryTier
from tiering.region import Region
from tiering.rows import RowLayout, row_identity
from tiering.summary import row_facts
from tiering.topology import LayerFacts, Parallelism
from tiering.worker import BlockRun, CopyWorker, LayerPages

Bytes = npt.NDArray[np.uint8]

RANK_TIMEOUT_S = 60.0  # for one command of a rank, generous for a loaded machine
PARENT_CHECK_S = 1.0  # how long a rank may outlive a killed engine
_TOKENS_PER_BLOCK = 16  # as reports on the store count them; nothing here has tokens
STEP_S = 0.0005  # of a scheduler with nothing to do

# Of four bf16 numbers: sign, the exponent's last three bits and the fraction; and of the exponents'
# other bits those that make it 2^-7 to 1.
_BF16_DRAWN, _BF16_SET = np.uint64(0x83FF83FF83FF83FF), np.uint64(0x3C003C003C003C00)


class RankFailed(Exception):
    """A rank process died or reported an error."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What one engine looks like.  `layers` are of one KV-cache group."""

    layers: tuple[LayerFacts, ...]
    tp: int = 1
    blocks_per_chunk: int = 1
    device_blocks: int = 256
    region_bytes: int = 64 << 20
    dedup: bool = True
    """False: every rank's pages stand in the row, as if nothing were known of replicas."""
    as_bf16: bool = False
    """Pages are bf16 numbers that a codec finds something in, not noise."""

    @property
    def layout(self) -> RowLayout:
        parallel = Parallelism(tp=self.tp, world_size=self.tp, dedup=self.dedup)
        return RowLayout.of(self.layers, parallel, self.blocks_per_chunk)


def identity_of(shape: EngineShape, model: str = "simulated") -> Identity:
    """Of the pattern's bytes: the same for every TP where all layers are single copies."""
    layout = shape.layout
    fields = {**row_identity(layout), "blocks_per_chunk": layout.blocks_per_chunk}
    return Identity(model, fields, element_bytes=2 if shape.as_bf16 else 1)


def chunk_key(prefix: str, index: int) -> RowKey:
    """A key as vLLM makes them: 32 bytes of hash, 4 of group index."""
    return RowKey(hashlib.sha256(f"{prefix}/{index}".encode()).digest() + bytes(4))


def page(
    key: bytes, layer: int, shard: int, block: int, page_bytes: int, *, as_bf16: bool = False
) -> Bytes:
    """What a rank with `shard` of `layer` would have computed for a block: uint8[page_bytes].

    `as_bf16` makes it bf16 numbers with signs and fractions drawn and exponents close together, as
    those of KV are: 11 bits of 16 are noise.
    """
    seed = zlib.crc32(key + bytes((layer, shard, block)))
    words = np.random.SFC64(seed).random_raw(-(-page_bytes // 8))
    if as_bf16:
        words = words & _BF16_DRAWN | _BF16_SET
    return words.view(np.uint8)[:page_bytes]


# -- one rank ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankBlocks:
    """Device blocks of chunks, blocks_per_chunk for each key, and their region slots."""

    keys: Sequence[RowKey]
    block_ids: Sequence[int]
    slots: Sequence[int] = ()


class _Rank:
    """One worker: device tensors and a `CopyWorker`."""

    def __init__(self, shape: EngineShape, engine_id: str, rank: int) -> None:
        layout = shape.layout
        if rank == 0:
            region = Region.create(engine_id, layout, shape.region_bytes, size_field="--region")
        else:
            region = Region.attach(engine_id, rank=rank, expected=layout)
        self.shape, self.layout, self.rank = shape, layout, rank
        self.tensors = [
            torch.zeros((shape.device_blocks, layer.page_bytes), dtype=torch.int8)
            for layer in shape.layers
        ]
        group = [LayerPages(i, layer.page_bytes) for i, layer in enumerate(shape.layers)]
        self.worker = CopyWorker(region, rank, self.tensors, [group])

    def _pages(self, blocks: RankBlocks) -> Iterator[tuple[Bytes, Bytes]]:
        per_chunk = self.layout.blocks_per_chunk
        for position, block_id in enumerate(blocks.block_ids):
            key, block = blocks.keys[position // per_chunk], position % per_chunk
            for index, layer in enumerate(self.layout.layers):
                shard = layer.shard_of(self.rank)
                expected = page(
                    *(key, index, shard, block, layer.page_bytes), as_bf16=self.shape.as_bf16
                )
                yield self.tensors[index][block_id].numpy().view(np.uint8), expected

    def compute(self, blocks: RankBlocks) -> int:
        for target, expected in self._pages(blocks):
            target[:] = expected
        return 0

    def store(self, blocks: RankBlocks) -> int:
        return self.worker.store([self._run(blocks)]).bytes_moved

    def load(self, blocks: RankBlocks) -> int:
        return self.worker.load([self._run(blocks)]).bytes_moved

    def check(self, blocks: RankBlocks) -> int:
        """Bytes that are not what was computed."""
        return sum(int(np.count_nonzero(a != b)) for a, b in self._pages(blocks))

    def wipe(self, blocks: RankBlocks) -> int:
        for tensor in self.tensors:
            for block_id in blocks.block_ids:
                tensor[block_id].fill_(-1)
        return 0

    def _run(self, blocks: RankBlocks) -> BlockRun:
        return BlockRun(np.array(blocks.block_ids), np.array(blocks.slots), 0)


def _next_command(connection: Connection) -> Any:
    """None at the end.  A forked rank has the other ends of its elders' pipes and may never see
    them close, so it asks who its parent is."""
    parent = multiprocessing.parent_process()
    while not connection.poll(PARENT_CHECK_S):
        if parent is None or not parent.is_alive():
            return None
    return connection.recv()


def _rank_main(shape: EngineShape, engine_id: str, rank: int, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the engine, which ends its ranks
    torch.set_num_threads(1)
    try:
        worker = _Rank(shape, engine_id, rank)
        connection.send(0)
        while (command := _next_command(connection)) is not None:
            name, blocks = command
            connection.send(getattr(worker, name)(blocks))
        worker.worker.close()
    except EOFError:
        pass  # the engine is gone
    except Exception as exc:
        connection.send(exc)


# -- the engine --------------------------------------------------------------


@dataclass
class Served:
    """What became of the chunks of some requests, and the bytes that came back wrong."""

    chunks: Counter[str] = field(default_factory=Counter)  # "computed", "region", "disk"
    wrong_bytes: int = 0
    stored_bytes: int = 0  # by all ranks, device to region
    loaded_bytes: int = 0


class SimulatedEngine:
    """A scheduler with its ranks.  A context manager; `serve` is its whole work."""

    def __init__(
        self,
        shape: EngineShape,
        store: StoreOptions | None,
        *,
        engine_id: str | None = None,
        identity: Identity | None = None,
        start_method: str = "spawn",
    ) -> None:
        """`start_method` "fork" saves each rank the start of an interpreter, for processes that
        have no other threads."""
        self.shape = shape
        engine_id = engine_id or f"simulated-{os.getpid()}-{time.monotonic_ns()}"
        context: Any = multiprocessing.get_context(start_method)
        self._ranks: list[tuple[Any, Connection]] = []
        self._free_blocks = list(range(shape.device_blocks))
        self._requests = 0
        try:
            for rank in range(shape.tp):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(shape, engine_id, rank, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
            for rank in range(shape.tp):
                self._answer(rank)
            self.region = Region.attach(engine_id, rank=None, expected=shape.layout)
            self.region.wait_for_ranks()
            self.region.unlink()
            self.client: StoreClient | None = None
            if store is not None:
                rows = RegionRows(
                    self.region.fd,
                    self.region.rows_offset,
                    shape.layout.row_bytes,
                    self.region.row_count,
                )
                name = identity or identity_of(shape)
                facts = row_facts(shape.layout, {0: _TOKENS_PER_BLOCK})
                self.client = StoreClient(store, name, rows, facts=facts)
                self.client.connect(RANK_TIMEOUT_S)
        except BaseException:
            self._end_ranks()
            raise
        self.manager = TieringManager(
            PrimaryTier(self.region.row_count), {} if self.client is None else {"disk": self.client}
        )

    def serve(self, keys: Sequence[RowKey], served: Served | None = None) -> Served:
        """One request whose prompt is the chain of chunks `keys`: load what is found, compute and
        store the rest, check every byte that was loaded, on every rank."""
        served = served or Served()
        self._requests += 1
        request = f"request-{self._requests}"
        self.manager.begin(request)
        found = self._find(keys, request)
        if found:
            sources = Counter(self.manager.source(key, request) for key in found)
            served.chunks["region"] += sources[Tier.REGION]
            served.chunks["disk"] += sources[Tier.DISK]
            slots = self.manager.prepare_load(found, request)
            blocks = self._take_blocks(found, slots)
            served.loaded_bytes += self._all("load", blocks)
            self.manager.complete_load(set(found))
            served.wrong_bytes += self._all("check", blocks)
            self._give_back(blocks)
        self._compute(list(keys[len(found) :]), request, served)
        self.manager.finish(request)
        self.manager.end_step()
        return served

    def _find(self, keys: Sequence[RowKey], request: str) -> list[RowKey]:
        """The longest prefix of `keys` that can be loaded, once its promotions are done."""
        while True:
            hits, is_pending = [], False
            for key in keys:
                result = self.manager.lookup(key, request)
                if result is LookupResult.MISS:
                    break
                is_pending |= result is not LookupResult.HIT
                hits.append(key)
            if not is_pending:
                return hits
            self.manager.end_step()
            time.sleep(STEP_S)

    def _compute(self, keys: list[RowKey], request: str, served: Served) -> None:
        served.chunks["computed"] += len(keys)
        per_step = max(1, len(self._free_blocks) // self.shape.blocks_per_chunk // 2)
        for start in range(0, len(keys), per_step):
            step = keys[start : start + per_step]
            plan = self.manager.prepare_store(step, request)
            if plan is None:
                self.manager.end_step()
                continue
            blocks = self._take_blocks(plan.keys, plan.slots)
            self._all("compute", blocks)
            served.stored_bytes += self._all("store", blocks)
            self.manager.complete_store(set(plan.keys))
            self.manager.end_step()
            self._give_back(blocks)

    def drain(self, timeout_s: float = RANK_TIMEOUT_S) -> None:
        """Step until every transfer to and from disk has ended."""
        deadline = time.monotonic() + timeout_s
        while self.manager.has_pending_work():
            assert time.monotonic() < deadline, "transfers did not end"
            self.manager.end_step()
            time.sleep(STEP_S)

    def close(self) -> None:
        """End as an engine ends: the store writes what it was given."""
        self._end_ranks()
        self.manager.close()
        self.region.close()

    def __enter__(self) -> SimulatedEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- ranks and device blocks --------------------------------------------------------------

    def _take_blocks(self, keys: Sequence[RowKey], slots: Sequence[int]) -> RankBlocks:
        count = len(keys) * self.shape.blocks_per_chunk
        if count > len(self._free_blocks):
            raise ValueError(f"a request of {count} blocks on {len(self._free_blocks)} free ones")
        taken, self._free_blocks = self._free_blocks[:count], self._free_blocks[count:]
        return RankBlocks(list(keys), taken, list(slots))

    def _give_back(self, blocks: RankBlocks) -> None:
        """Wiped, and to the end of the queue: the next use of a chunk gets other blocks."""
        self._all("wipe", blocks)
        self._free_blocks += blocks.block_ids

    def _all(self, name: str, blocks: RankBlocks) -> int:
        """The sum of what all ranks answer."""
        for _, connection in self._ranks:
            connection.send((name, blocks))
        return sum(self._answer(rank) for rank in range(len(self._ranks)))

    def _answer(self, rank: int) -> int:
        _, connection = self._ranks[rank]
        if not connection.poll(RANK_TIMEOUT_S):
            raise RankFailed(f"rank {rank} did not answer in {RANK_TIMEOUT_S:g} s")
        try:
            answer = connection.recv()
        except EOFError:
            raise RankFailed(f"rank {rank} died") from None
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, int)
        return answer

    def _end_ranks(self) -> None:
        for process, connection in self._ranks:
            try:
                connection.send(None)
            except OSError:
                process.kill()
        for process, connection in self._ranks:
            process.join(RANK_TIMEOUT_S)
            connection.close()
        self._ranks.clear()
