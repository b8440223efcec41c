"""What dedup comes to for one engine, in words for its log.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from storage.facts import RowFacts
from storage.sizes import format_size
from storage.types import PAGE_BYTES, round_up
from tiering.rows import RowKind, RowLayout


def replicas_by_group(
    layout: RowLayout, group_layers: Sequence[Sequence[str]]
) -> list[dict[int, int]]:
    """Per KV-cache group, replicas -> how many of its layers have so many."""
    replicas = {name: layer.replicas for layer in layout.layers for name in layer.name.split()}
    found: list[dict[int, int]] = []
    for names in group_layers:
        counts: dict[int, int] = {}
        for name in names:
            if name in replicas:
                counts[replicas[name]] = counts.get(replicas[name], 0) + 1
        found.append(counts)
    return found


def row_facts(
    layout: RowLayout,
    tokens_per_block: Mapping[int, int],
    model_name: str = "",
    kind: RowKind | None = None,
) -> RowFacts:
    """What reports on the store are told of rows of a `kind`, of all rows if there is only one;
    `tokens_per_block` is given by the number of each KV-cache group."""
    kinds = layout.kinds()
    kind = kind or kinds[0]
    is_one_of_several = len(kinds) > 1
    numbers = range(max(tokens_per_block, default=-1) + 1)
    return RowFacts(
        tokens_per_row=tuple(tokens_per_block.get(n, 0) * layout.blocks_per_chunk for n in numbers),
        ranks=layout.ranks,
        replicas=layout.kv_tp_replicas,
        row_bytes_without_dedup=kind.row_bytes_without_dedup,
        model_name=model_name,
        groups=kind.numbers if is_one_of_several else (),
        largest_row_bytes=layout.row_bytes if is_one_of_several else 0,
    )


def reasons(layout: RowLayout) -> str:
    """What every rank keeps a copy of, and why; empty if there is nothing of the kind."""
    return "; ".join(f"{count} layer(s): {why}" for why, count in layout.copies.items())


def dedup_line(layout: RowLayout, group_layers: Sequence[Sequence[str]]) -> str:
    """The row with and without dedup, replicas per group, and what stood against more."""
    saved = layout.row_bytes_without_dedup / layout.row_bytes
    parts = [
        f"row of {layout.row_bytes} bytes",
        *_smaller(layout),
        f"{layout.row_bytes_without_dedup} without dedup ({saved:.2f}x)",
        f"{layout.ranks} rank(s)",
        f"{layout.blocks_per_chunk} block(s) per chunk",
    ]
    if layout.ranks > 1:
        for number, counts in enumerate(replicas_by_group(layout, group_layers)):
            shares = ", ".join(
                f"{count} layer(s) with {replicas} replica(s)"
                for replicas, count in sorted(counts.items(), reverse=True)
            )
            parts.append(f"group {number}: {shares}")
        if why := reasons(layout):
            parts.append(f"not deduplicated: {why}")
    return "; ".join(parts)


def _smaller(layout: RowLayout) -> Iterator[str]:
    for kind in layout.kinds()[1:]:
        numbers = ", ".join(map(str, kind.numbers))
        yield f"{kind.row_bytes} on disk for group(s) {numbers}"


def mean_row_bytes(layout: RowLayout) -> int:
    """Of a row on disk, with one in every group, in whole pages."""
    total = sum(group.row_bytes for group in layout.groups)
    return round_up(-(-total // len(layout.groups)), PAGE_BYTES)


def capacity_line(
    group_count: int, tokens_per_chunk: int, tiers: Mapping[str, tuple[int, int]]
) -> str:
    """What the tiers hold: by name of the tier, how many rows, and bytes of each.

    Tokens are counted with a row in every group; a group that keeps less of a prompt, such as that
    of a sliding window, leaves room for more.
    """
    return "; ".join(
        f"{tier} of {count} rows, {format_size(count * row_bytes)}, "
        f"{count // group_count * tokens_per_chunk} tokens"
        for tier, (count, row_bytes) in tiers.items()
    )
