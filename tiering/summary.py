"""What dedup comes to for one engine, in words for its log.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from storage.facts import RowFacts
from storage.sizes import format_size
from tiering.rows import RowLayout


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


def row_facts(layout: RowLayout, tokens_per_block: Sequence[int], model_name: str = "") -> RowFacts:
    """What reports on the store are told; `tokens_per_block` is given per KV-cache group."""
    return RowFacts(
        tokens_per_row=tuple(count * layout.blocks_per_chunk for count in tokens_per_block),
        ranks=layout.ranks,
        replicas=layout.kv_tp_replicas,
        row_bytes_without_dedup=layout.row_bytes_without_dedup,
        model_name=model_name,
    )


def reasons(layout: RowLayout) -> str:
    """What every rank keeps a copy of, and why; empty if there is nothing of the kind."""
    return "; ".join(f"{count} layer(s): {why}" for why, count in layout.copies.items())


def dedup_line(layout: RowLayout, group_layers: Sequence[Sequence[str]]) -> str:
    """The row with and without dedup, replicas per group, and what stood against more."""
    saved = layout.row_bytes_without_dedup / layout.row_bytes
    parts = [
        f"row of {layout.row_bytes} bytes",
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


def capacity_line(
    layout: RowLayout, group_count: int, tokens_per_chunk: int, rows: Mapping[str, int]
) -> str:
    """What the tiers hold, `rows` by name of the tier.

    Tokens are counted with a row in every group; a group that keeps less of a prompt, such as that
    of a sliding window, leaves room for more.
    """
    return "; ".join(
        f"{tier} of {count} rows, {format_size(count * layout.row_bytes)}, "
        f"{count // group_count * tokens_per_chunk} tokens"
        for tier, count in rows.items()
    )
