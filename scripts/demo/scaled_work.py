"""The work of four models on a full disk, scaled down: the same rows, fewer of them, less disk.

What is scaled is counts alone: the size of the disk, the number of chunks and of a segment's rows.
A row has the bytes that the model's row really has.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.demo.small_disk import disk_space
from scripts.simulated_engine import EngineShape, Served, SimulatedEngine, chunk_key
from storage.codec import NO_CODEC
from storage.options import StoreOptions
from storage.service.messages import Usage
from storage.types import RowKey
from tiering.presets import load_preset

DISK_BYTES = 177_000_000_000  # of the machine on which the models were measured
SEGMENT_BYTES = 1 << 30  # of a store as large as that
SCALE = 196  # 3,915 chunks, the fewest of a model, are 20 then, to 0.2 %
_BUDGET_TIMES_DISK = 10  # so that the file system, not the budget, is what limits
_ORDER_SEED = 1


@dataclass(frozen=True, slots=True)
class Work:
    """One model, and the chunks of one block that its requests stored in full size."""

    preset: str
    chunks: int
    origin: str
    """The measured size on disk that `chunks` follows from."""
    chunks_per_request: int
    """As many as make a request of a size that a small region holds."""


WORKS = (
    # Not measured: chosen so that it shows the same.
    Work("deepseek-v2-lite", 300_173, "150 GB with dedup", 32),
    Work("deepseek-v4-flash", 3_915, "157 GB without dedup", 2),
    Work("glm-5.3", 25_686, "103 GB with dedup", 8),
    Work("deepseek-v3.2-exp", 43_152, "149 GB with dedup", 8),
)


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What became of one model's work on one disk, in bytes as they stood on the small disk."""

    model: str
    tp: int
    dedup: bool
    codec: str
    row_bytes: int
    chunks: int
    disk_bytes: int
    used_bytes: int
    """Allocated on the file system after the second pass, as `df` counts."""
    state: str
    state_reason: str
    state_changes: int
    """As the store counts them, over both passes."""
    hit_rate: float
    """Chunks that the second pass read from disk, of all that it asked for."""
    wrong_bytes: int
    """Of all bytes loaded, on every rank."""
    errors: int
    """Reads and writes that failed, and rows that failed their checksum."""

    @property
    def needed_bytes(self) -> int:
        """What the rows of all chunks weigh, without a codec."""
        return self.chunks * self.row_bytes

    @property
    def variant(self) -> str:
        """How the rows were stored."""
        dedup = "with dedup" if self.dedup else "without dedup"
        return dedup if self.codec == NO_CODEC else f"{dedup}, {self.codec}"


def run_work(
    work: Work, disk: Path, scale: float, *, dedup: bool, codec: str = NO_CODEC
) -> WorkResult:
    """Serve the work twice, the second time with an engine whose region is empty.

    `disk` is an empty file system.  Requests come in another order each time, as those of many
    clients do; and an LRU asked in the order in which it was filled would find nothing.  Under
    a codec pages are bf16 numbers; without one it makes no difference what they are.
    """
    preset = load_preset(work.preset)
    (tp,) = preset.tp
    per_request = work.chunks_per_request
    shape = EngineShape(
        tuple(preset.facts(tp)),
        tp=tp,
        device_blocks=2 * per_request,
        dedup=dedup,
        as_bf16=codec != NO_CODEC,
    )
    row_bytes = shape.layout.row_bytes
    shape = replace(shape, region_bytes=2 * per_request * row_bytes)
    options = StoreOptions(
        root=disk / "store",
        budget_bytes=_BUDGET_TIMES_DISK * disk_space(disk).size_bytes,
        segment_bytes=int(SEGMENT_BYTES / scale),
        reserve_bytes=0,
        codec=codec,
        codec_always=codec != NO_CODEC,  # for room, not for speed
    )
    keys = [chunk_key(preset.model, index) for index in range(round(work.chunks / scale))]
    requests = [keys[i : i + per_request] for i in range(0, len(keys), per_request)]
    rng = random.Random(_ORDER_SEED)
    passes = []
    for _ in range(2):
        rng.shuffle(requests)
        passes.append(_serve(shape, options, requests))
    space = disk_space(disk)
    last = passes[-1]
    return WorkResult(
        preset.model,
        tp,
        dedup,
        codec,
        row_bytes,
        len(keys),
        space.size_bytes,
        space.used_bytes,
        last.usage.state,
        last.usage.state_reason,
        sum(each.state_changes for each in passes),
        last.served.chunks["disk"] / len(keys),
        sum(each.served.wrong_bytes for each in passes),
        sum(each.errors for each in passes),
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    served: Served
    usage: Usage

    @property
    def state_changes(self) -> int:
        return sum(self.usage.state_changes.values())

    @property
    def errors(self) -> int:
        usage = self.usage
        writes = usage.writes_failed + usage.writes_hung
        reads = usage.reads_failed + usage.reads_hung + usage.reads_expired
        return writes + reads + usage.rows_corrupt


def _serve(
    shape: EngineShape, options: StoreOptions, requests: Sequence[Sequence[RowKey]]
) -> _Pass:
    served = Served()
    # Ranks are forked: this process has no other threads, and an interpreter each takes seconds.
    with SimulatedEngine(shape, options, start_method="fork") as engine:
        assert engine.client is not None
        for keys in requests:
            engine.serve(keys, served)
            engine.drain()  # so that the region never declines a chunk for want of a slot
        return _Pass(served, engine.client.usage)
