"""The row layout: which rank's pages stand where in a chunk's row, and who writes them.  Pure.

A row is, layer after layer and block after block, one page per distinct shard, padded to 4 KiB at
its end.  Consecutive ranks are replicas of each other.  Pages of a layer follow each other whole,
`[shards][page_bytes]`, or, where `KvHeads` says how they may, interleaved in the order of the
heads, `[stretches][shards][page_bytes / stretches]`: then the bytes are those of one rank that has
all the heads, whatever the number of ranks.

A chunk belongs to one KV-cache group.  Groups take turns in the same device memory, but need not
use all of it: fewer layers, or less of each page.  So each group has a row of its own, dense from
its first byte; all of them stand in slots of the largest row's size.  Groups that use the same
bytes of every tensor share one row, of whole pages.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from storage.namespace import Json
from storage.types import PAGE_BYTES, round_up
from tiering.topology import (
    LayerFacts,
    Parallelism,
    head_stretches,
    kv_tp_replicas,
    reason_for_copies,
    replicated_layout,
    shard_count,
)


class ByteRange(NamedTuple):
    start: int
    stop: int


class LayerRow(msgspec.Struct, frozen=True):
    """One layer's part of a row.  Layers that share device memory share one part."""

    name: str
    page_bytes: int
    """Of one block on one rank."""
    shards: int
    offset: int
    ranks: int
    """How many ranks hold the layer: all, or under pipeline parallelism a single one."""
    first_rank: int = 0
    stretches: int = 1
    head_order: bool = False
    """Whether the part would be the same, byte for byte, at any number of ranks."""

    @property
    def block_bytes(self) -> int:
        """The layer's part of one block."""
        return self.shards * self.page_bytes

    @property
    def piece_bytes(self) -> int:
        """What of a page stands in one piece in the row."""
        return self.page_bytes // self.stretches

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.ranks // self.shards

    @property
    def depends_on_ranks(self) -> bool:
        return self.ranks > 1 and self.shards > 1 and not self.head_order

    def is_on(self, rank: int) -> bool:
        return self.first_rank <= rank < self.first_rank + self.ranks

    def shard_of(self, rank: int) -> int:
        """Which shard `rank`, one of those that hold the layer, has."""
        return (rank - self.first_rank) // self.replicas

    def pieces(self, block: int, shard: int) -> Iterator[ByteRange]:
        """Where the page of `shard` in the chunk's `block` stands, in the order of the page."""
        start = self.offset + block * self.block_bytes + shard * self.piece_bytes
        for stretch in range(self.stretches):
            first = start + stretch * self.shards * self.piece_bytes
            yield ByteRange(first, first + self.piece_bytes)


class GroupLayer(msgspec.Struct, frozen=True):
    """A layer as one rank has it in one KV-cache group."""

    facts: LayerFacts
    """`page_bytes` are those of its content, from the start of each page."""
    tensor: int
    """Index of the device memory that it shares with layers of other groups."""
    tensor_bytes: int
    """Of a whole page there."""


class GroupRow(msgspec.Struct, frozen=True):
    """The row of one KV-cache group."""

    number: int
    """What the keys of its chunks end in."""
    layers: tuple[int, ...]
    """Which of the layout's layers stand in it, in the order of the row."""
    row_bytes: int


class RowKind(NamedTuple):
    """Rows of one size: of one KV-cache group or of several."""

    numbers: tuple[int, ...]
    layers: tuple[LayerRow, ...]
    row_bytes: int
    row_bytes_without_dedup: int
    """Of the largest of them, with every rank's pages in it."""


class RowLayout(msgspec.Struct, frozen=True):
    """Built by the methods `of...` alone; the same on every rank and in the scheduler."""

    ranks: int
    blocks_per_chunk: int
    layers: tuple[LayerRow, ...]
    """Of all groups; where unlike groups have rows of their own, layers of these overlay."""
    row_bytes: int
    """Of the largest row, and so of a slot."""
    groups: tuple[GroupRow, ...]
    kv_tp_replicas: int = 1
    """As vLLM reports it; the layout goes by each layer's own replicas."""
    replicated_layout: bool = False
    """As vLLM reports it: every rank holds the same bytes of every layer."""
    copies: dict[str, int] = {}
    """Why -> how many layers of which every rank keeps its own copy."""

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerFacts],
        parallel: Parallelism,
        blocks_per_chunk: int,
        engine_layers: Sequence[LayerFacts] | None = None,
        numbers: Sequence[int] = (0,),
    ) -> RowLayout:
        """Of ranks that all have the same `layers`, given in the order of the row, which is that
        of every group in `numbers`.

        `engine_layers` are those that `kv_tp_replicas` is about, where they are not the row's:
        some share memory, or are not offloaded.
        """
        return cls._of_like_ranks([(numbers, layers)], parallel, blocks_per_chunk, engine_layers)

    @classmethod
    def of_groups(
        cls,
        groups: Mapping[int, Sequence[GroupLayer]],
        parallel: Parallelism,
        blocks_per_chunk: int,
        engine_layers: Sequence[LayerFacts] | None = None,
    ) -> RowLayout:
        """As `of`, of KV-cache groups by number, each with the layers that it has on any rank."""
        shared = shared_layers(list(groups.values()))
        rows: list[tuple[Sequence[int], Sequence[LayerFacts]]] = [
            ([number], [layer.facts for layer in layers]) for number, layers in groups.items()
        ]
        if shared is not None:
            rows = [(list(groups), shared)]
        return cls._of_like_ranks(rows, parallel, blocks_per_chunk, engine_layers)

    @classmethod
    def _of_like_ranks(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[LayerFacts]]],
        parallel: Parallelism,
        blocks_per_chunk: int,
        engine_layers: Sequence[LayerFacts] | None,
    ) -> RowLayout:
        layers = [layer for _, of_row in rows for layer in of_row]
        reported = layers if engine_layers is None else engine_layers
        reasons = Counter(reason_for_copies(layer, parallel) for layer in layers)
        placed = [
            (numbers, [_unplaced(layer, parallel) for layer in of_row]) for numbers, of_row in rows
        ]
        return msgspec.structs.replace(
            cls._placed(placed, parallel.world_size, blocks_per_chunk),
            kv_tp_replicas=kv_tp_replicas(reported, parallel),
            replicated_layout=replicated_layout(reported, parallel),
            copies={reason: count for reason, count in reasons.items() if reason is not None},
        )

    @classmethod
    def of_unlike_ranks(
        cls,
        groups_by_rank: Sequence[Mapping[int, Sequence[GroupLayer]]],
        blocks_per_chunk: int,
    ) -> RowLayout:
        """Of ranks that have layers of their own: the stages of a pipeline.  Nothing is shared.

        Every rank has the same groups; of some it may have no layer.
        """
        numbers = list(groups_by_rank[0])
        shared = [shared_layers(list(groups.values())) for groups in groups_by_rank]
        rows: list[tuple[Sequence[int], list[LayerRow]]]
        if all(layers is not None for layers in shared):
            rows = [(numbers, [_of_stage(f, r) for r, fs in enumerate(shared) for f in fs or ()])]
        else:
            rows = [
                (
                    [number],
                    [
                        _of_stage(layer.facts, rank)
                        for rank, groups in enumerate(groups_by_rank)
                        for layer in groups[number]
                    ],
                )
                for number in numbers
            ]
        return msgspec.structs.replace(
            cls._placed(rows, len(groups_by_rank), blocks_per_chunk),
            copies={"the ranks are stages of a pipeline": sum(len(layers) for _, layers in rows)},
        )

    @classmethod
    def of_private_rows(cls, own: Sequence[RowLayout], parallel: Parallelism) -> RowLayout:
        """What rows weigh on all ranks together, where each keeps `own` rows of its pages alone.

        For figures; no byte is placed by it.
        """
        numbers = [group.number for group in own[0].groups]
        positions: list[Sequence[int]] = [[position] for position in range(len(numbers))]
        if all(layout.is_shared for layout in own):
            positions = [range(len(numbers))]
        rows = [
            (
                [numbers[position] for position in of_row],
                [
                    msgspec.structs.replace(layout.layers[index], first_rank=rank)
                    for rank, layout in enumerate(own)
                    for index in layout.groups[of_row[0]].layers
                ],
            )
            for of_row in positions
        ]
        return msgspec.structs.replace(
            cls._placed(rows, len(own), own[0].blocks_per_chunk),
            row_bytes=sum(layout.row_bytes for layout in own),
            copies={"; ".join(parallel.refusals()): sum(len(layers) for _, layers in rows)},
        )

    @classmethod
    def _placed(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[LayerRow]]],
        ranks: int,
        blocks_per_chunk: int,
    ) -> RowLayout:
        """`rows`: the groups that have each row, by number, and what stands in it."""
        assert blocks_per_chunk >= 1, blocks_per_chunk
        placed: list[LayerRow] = []
        groups = []
        for numbers, layers in rows:
            assert layers, "a row of no layer"
            first, offset = len(placed), 0
            for layer in layers:
                assert layer.page_bytes > 0, layer
                assert layer.ranks % layer.shards == 0, layer
                placed.append(msgspec.structs.replace(layer, offset=offset))
                offset += blocks_per_chunk * layer.block_bytes
            indices = tuple(range(first, len(placed)))
            row_bytes = round_up(offset, PAGE_BYTES)
            groups += [GroupRow(number, indices, row_bytes) for number in numbers]
        largest = max(group.row_bytes for group in groups)
        return cls(ranks, blocks_per_chunk, tuple(placed), largest, tuple(groups))

    def layers_in(self, group: GroupRow, rank: int) -> list[int]:
        """Which of the layers stand in the row of `group` and are on `rank`."""
        return [index for index in group.layers if self.layers[index].is_on(rank)]

    def kinds(self) -> list[RowKind]:
        """The groups by the size of their rows, the largest first."""
        found: dict[int, list[GroupRow]] = {}
        for group in self.groups:
            found.setdefault(group.row_bytes, []).append(group)
        return [
            RowKind(
                tuple(group.number for group in groups),
                tuple(self.layers[i] for i in sorted({i for g in groups for i in g.layers})),
                row_bytes,
                max(self._bytes_without_dedup(group) for group in groups),
            )
            for row_bytes, groups in sorted(found.items(), reverse=True)
        ]

    @property
    def is_shared(self) -> bool:
        """Whether all groups have the same row."""
        return all(group.layers == self.groups[0].layers for group in self.groups)

    def layers_of(self, rank: int) -> list[LayerRow]:
        """The layers that `rank` holds, in its own order."""
        return [layer for layer in self.layers if layer.is_on(rank)]

    @property
    def payload_bytes(self) -> int:
        """The largest row without its padding."""
        return max(
            layer.offset + self.blocks_per_chunk * layer.block_bytes for layer in self.layers
        )

    @property
    def row_bytes_without_dedup(self) -> int:
        """What the largest row would weigh with every rank's pages in it."""
        return max(self._bytes_without_dedup(group) for group in self.groups)

    def _bytes_without_dedup(self, group: GroupRow) -> int:
        layers = [self.layers[index] for index in group.layers]
        block_bytes = sum(layer.ranks * layer.page_bytes for layer in layers)
        return round_up(self.blocks_per_chunk * block_bytes, PAGE_BYTES)

    @property
    def depends_on_ranks(self) -> bool:
        """Whether another number of ranks would make another row."""
        return any(layer.depends_on_ranks for layer in self.layers) or any(
            layer.ranks < self.ranks for layer in self.layers
        )

    @property
    def digest(self) -> str:
        """Equal for equal layouts only."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def is_writer(self, layer: LayerRow, rank: int, slot: int, block: int) -> bool:
        """Whether `rank`, of the ranks that hold its shard of `layer`, writes this page.

        A pure function of region slot and block, so that all ranks agree and take turns.
        """
        turn = (slot * self.blocks_per_chunk + block) % layer.replicas
        return turn == (rank - layer.first_rank) % layer.replicas

    def written_ranges(self, rank: int, slot: int, group: int = 0) -> Iterator[ByteRange]:
        """The bytes of the row in `slot` that `rank` writes when a whole chunk of the group at
        position `group` is stored."""
        for layer in self._layers_in(group, rank):
            for block in range(self.blocks_per_chunk):
                if self.is_writer(layer, rank, slot, block):
                    yield from layer.pieces(block, layer.shard_of(rank))

    def read_ranges(self, rank: int, group: int = 0) -> Iterator[ByteRange]:
        """The bytes of any row that `rank` loads when a whole chunk of the group at position
        `group` is loaded."""
        for layer in self._layers_in(group, rank):
            for block in range(self.blocks_per_chunk):
                yield from layer.pieces(block, layer.shard_of(rank))

    def _layers_in(self, group: int, rank: int) -> list[LayerRow]:
        return [self.layers[index] for index in self.layers_in(self.groups[group], rank)]


def _unplaced(layer: LayerFacts, parallel: Parallelism) -> LayerRow:
    """A layer that all ranks hold; where in a row comes later."""
    stretches = head_stretches(layer, parallel)
    assert layer.page_bytes % (stretches or 1) == 0, layer
    return LayerRow(
        layer.name,
        layer.page_bytes,
        shard_count(layer, parallel),
        0,
        parallel.world_size,
        stretches=stretches or 1,
        head_order=stretches is not None,
    )


def _of_stage(layer: LayerFacts, rank: int) -> LayerRow:
    """A layer that `rank` alone holds."""
    return LayerRow(f"{layer.name} of rank {rank}", layer.page_bytes, 1, 0, 1, first_rank=rank)


def shared_layers(groups: Sequence[Sequence[GroupLayer]]) -> list[LayerFacts] | None:
    """The layers of one row for all groups of a rank, one per tensor and of whole pages, if all
    use the same bytes of every tensor and know the same of them; else None.

    A single group shares its row with nobody, so it has whole pages too.
    """
    uses = [
        [(layer.tensor, msgspec.structs.replace(layer.facts, name="")) for layer in group]
        for group in groups
    ]
    if any(use != uses[0] for use in uses):
        return None
    layers = []
    for parts in zip(*groups, strict=True):
        facts, tensor_bytes = parts[0].facts, parts[0].tensor_bytes
        layers.append(
            msgspec.structs.replace(
                facts,
                name=" ".join(part.facts.name for part in parts),
                page_bytes=tensor_bytes,
                # Of a page that holds more than heads, nothing is known of where they lie.
                heads=facts.heads if facts.page_bytes == tensor_bytes else None,
            )
        )
    return layers


def row_identity(layout: RowLayout, kind: RowKind | None = None) -> dict[str, Json]:
    """What of a layout shapes the bytes of the rows of a `kind`, of all rows if there is only one,
    for the identity of a namespace.

    A layer whose part is the same at any number of ranks is named with the bytes of its part; of
    the others the shards count, and with them the ranks.
    """
    kinds = layout.kinds()
    kind = kind or kinds[0]
    layers: list[Json] = []
    ranks = None
    for layer in kind.layers:
        if layer.depends_on_ranks or layer.ranks < layout.ranks:
            layers.append([layer.name, layer.page_bytes, layer.shards, layer.first_rank])
            ranks = layout.ranks
        else:
            layers.append([layer.name, layer.block_bytes])
    fields: dict[str, Json] = {"layers": layers, "ranks": ranks}
    if len(kinds) > 1:
        fields["row_of_groups"] = list(kind.numbers)
    return fields


def rows_differ(one: RowLayout, other: RowLayout) -> tuple[str, str, str]:
    """Where two layouts that are not equal first differ, and what each has there, with the row."""
    assert one != other
    kind, first, second = "other facts", str(one.copies), str(other.copies)
    if one.blocks_per_chunk != other.blocks_per_chunk:
        kind = "blocks per chunk"
        first, second = str(one.blocks_per_chunk), str(other.blocks_per_chunk)
    elif len(one.layers) != len(other.layers):
        kind, first, second = "layers", str(len(one.layers)), str(len(other.layers))
    elif [(g.number, g.layers) for g in one.groups] != [(g.number, g.layers) for g in other.groups]:
        kind = "groups"
        first, second = (
            f"{len(layout.groups)} of {', '.join(str(len(g.layers)) for g in layout.groups)} layers"
            for layout in (one, other)
        )
    else:
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            if mine != theirs:
                kind = f"layer {mine.name}"
                first, second = (
                    f"{layer.name}: {layer.shards} x {layer.page_bytes} bytes at {layer.offset}"
                    for layer in (mine, theirs)
                )
                break
    return (
        kind,
        f"{first}, row of {one.row_bytes} bytes for {one.ranks} rank(s)",
        f"{second}, row of {other.row_bytes} bytes for {other.ranks} rank(s)",
    )
