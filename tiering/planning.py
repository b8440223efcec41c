"""How large rows, regions and drives must be: arithmetic for those who plan a store.  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from storage.errors import ConfigError
from storage.header import SegmentGeometry
from storage.pool import charge_of
from storage.sizes import parse_size
from storage.space import NAMESPACE_OVERHEAD_BYTES, ROOT_OVERHEAD_BYTES, default_reserve
from storage.types import PAGE_BYTES, round_up
from tiering.presets import Preset
from tiering.rows import RowLayout
from tiering.topology import Parallelism, kv_tp_replicas, replicated_layout


@dataclass(frozen=True, slots=True)
class RowSize:
    """One line of the table.  Sizes in bytes."""

    model: str
    tp: int
    worker_bytes_per_block: int
    blocks_per_chunk: int
    row_bytes_without_dedup: int
    row_bytes: int
    replicas: dict[str, int]
    """Per kind of layer: ranks that hold the same."""
    kv_tp_replicas: int
    replicated_layout: bool
    groups: int
    """KV-cache groups: a chunk has at most one row in each."""
    tokens_per_chunk: int | None
    """None where the tokens of a block are not known; then `unit` is chunks."""
    rows: tuple[int, ...]
    """Bytes of the row of each group, on disk; in the region it has a slot of `row_bytes`."""
    rows_without_dedup: tuple[int, ...]

    @property
    def factor(self) -> float:
        return self.row_bytes_without_dedup / self.row_bytes

    @property
    def tokens_per_gb(self) -> int | None:
        """Tokens that 10^9 bytes of region hold, with dedup."""
        return self.region_holds(10**9) if self.tokens_per_chunk is not None else None

    @property
    def unit(self) -> str:
        """What `region_holds` and `disk_holds` count."""
        return "chunks" if self.tokens_per_chunk is None else "tokens"

    @property
    def units_per_chunk(self) -> int:
        return self.tokens_per_chunk or 1

    def unit_bytes(self, *, dedup: bool = True) -> float:
        """Of a token, or of a chunk, on disk, with a row in every group."""
        return sum(self.rows if dedup else self.rows_without_dedup) / self.units_per_chunk

    def region_holds(self, region_bytes: int, *, dedup: bool = True) -> int:
        """Tokens that a region holds, with a row in every group."""
        row_bytes = self.row_bytes if dedup else self.row_bytes_without_dedup
        return region_bytes * self.units_per_chunk // (row_bytes * self.groups)

    def disk_rows(self, budget_bytes: int, *, dedup: bool = True) -> int:
        """Rows that the store keeps within a budget, its headers and metadata taken off, if each
        group has as many."""
        rows = self.rows if dedup else self.rows_without_dedup
        row_bytes = round_up(-(-sum(rows) // len(rows)), PAGE_BYTES)
        geometry = SegmentGeometry.choose(row_bytes, budget_bytes)
        room = budget_bytes - ROOT_OVERHEAD_BYTES - NAMESPACE_OVERHEAD_BYTES
        return max(0, room // charge_of(geometry)) * geometry.slots_per_segment

    def disk_holds(self, budget_bytes: int, *, dedup: bool = True) -> int:
        """Tokens of which a store of that budget keeps the KV, with a row in every group."""
        rows = self.disk_rows(budget_bytes, dedup=dedup)
        return rows // self.groups * self.units_per_chunk

    def budget_for(self, count: int) -> int:
        """The least budget, to 0.1 %, that holds so many tokens."""
        low, high = 0, self.row_bytes
        while self.disk_holds(high) < count:
            low, high = high, 2 * high
        while high - low > high // 1000:
            middle = (low + high) // 2
            low, high = (low, middle) if self.disk_holds(middle) >= count else (middle, high)
        return high


def row_size(preset: Preset, tp: int, blocks_per_chunk: int) -> RowSize:
    """Raises `ConfigError` if the model's shards can't be spread evenly over `tp` ranks."""
    parallel = Parallelism(tp=tp, world_size=tp)
    facts = preset.facts(tp)
    layout = RowLayout.of(facts, parallel, blocks_per_chunk)
    per_group = preset.layers_per_group or (len(facts),) * preset.groups
    of_groups = [RowLayout.of(facts[:count], parallel, blocks_per_chunk) for count in per_group]
    kinds = [kind.kind for kind in preset.layers for _ in range(kind.count)]
    tokens = preset.tokens_per_block
    replicas = {k: row.replicas for k, row in zip(kinds, layout.layers, strict=True)}
    return RowSize(
        preset.model,
        tp,
        sum(layer.page_bytes for layer in facts),
        blocks_per_chunk,
        layout.row_bytes_without_dedup,
        layout.row_bytes,
        replicas,
        kv_tp_replicas(facts, parallel),
        replicated_layout(facts, parallel),
        preset.groups,
        tokens * blocks_per_chunk if tokens is not None else None,
        tuple(each.row_bytes for each in of_groups),
        tuple(each.row_bytes_without_dedup for each in of_groups),
    )


# -- what to recommend --------------------------------------------------------------------------

HEADROOM = 1.1  # over the prompts that are expected: recency needs some to choose from
GOOD_ENOUGH = 0.98  # of the best hit rate: beyond, bytes buy little
IN_FLIGHT_TOKENS = 262_144  # such as 8 prompts of 32,768 tokens on their way through the region
IN_FLIGHT_CHUNKS = 1024  # where the tokens of a chunk are not known
_REGION_STEP_BYTES = 1 << 30
_DAYS_PER_YEAR = 365


def budget_of(disk_bytes: int) -> int:
    """What of a drive, or of the free space on it, the store may be given: all but the reserve."""
    return disk_bytes - default_reserve(disk_bytes)


def region_for(size: RowSize, in_flight: int) -> int:
    """A region for prompts of so many tokens (chunks, where tokens are not known) at a time, in
    whole GiB."""
    rows = -(-in_flight // size.units_per_chunk) * size.groups
    return -(-rows * size.row_bytes // _REGION_STEP_BYTES) * _REGION_STEP_BYTES


@dataclass(frozen=True, slots=True)
class HitPoint:
    """What a disk of one size would have done."""

    budget_bytes: int
    hit_rate: float
    """Of chunks looked up; without a trace, the share of the expected tokens that fits."""
    written_bytes_per_day: int | None
    """None without a trace."""


def knee(points: Sequence[HitPoint]) -> HitPoint:
    """The smallest disk that comes close to the best; `points` by size."""
    best = max(point.hit_rate for point in points)
    return next(point for point in points if point.hit_rate >= GOOD_ENOUGH * best)


_DRIVE_WRITES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*DWPD\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Endurance:
    """How much a drive may be written, by its data sheet."""

    total_bytes: int
    years: float
    """Of its warranty, or as long as it must last."""

    @classmethod
    def parse(cls, text: str, drive_bytes: int | None, years: float) -> Endurance:
        """Of "1.2PB" (total bytes written) or "0.3DWPD" (drive writes per day, of a drive of
        `drive_bytes`).  Raises `ConfigError`."""
        if not years > 0 or not math.isfinite(years):
            raise ConfigError("--years", "years above 0", years)
        if match := _DRIVE_WRITES.fullmatch(text):
            if drive_bytes is None:
                raise ConfigError("--endurance", "--disk with drive writes per day", text)
            daily = float(match.group(1)) * drive_bytes
            if daily <= 0:
                raise ConfigError("--endurance", "drive writes per day above 0", text)
            return cls(round(daily * years * _DAYS_PER_YEAR), years)
        return cls(parse_size(text, "--endurance"), years)

    @property
    def bytes_per_day(self) -> int:
        return int(self.total_bytes / (self.years * _DAYS_PER_YEAR))

    def years_at(self, bytes_per_day: float) -> float:
        """How long it lasts at so many bytes a day."""
        if bytes_per_day <= 0:
            return math.inf
        return self.total_bytes / bytes_per_day / _DAYS_PER_YEAR


def kv_transfer_config(
    root: str, budget: str, region: str, blocks_per_chunk: int, write_bytes_per_day: str | None
) -> dict[str, Any]:
    """What `vllm serve --kv-transfer-config` takes; settings that are None stay out."""
    disk = {"root": root, "budget": budget}
    if write_bytes_per_day is not None:
        disk["write_bytes_per_day"] = write_bytes_per_day
    extra: dict[str, Any] = {"cpu_bytes_to_use": region, "disk": disk}
    if blocks_per_chunk > 1:
        extra["blocks_per_chunk"] = blocks_per_chunk
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "tiering.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
