"""What a row weighs with and without dedup, for the presets or for one's own model.

    python -m scripts.row_sizes
    python -m scripts.row_sizes --preset gqa-70b --tp 32 --blocks-per-chunk 4
    python -m scripts.row_sizes --worker-bytes 497664 --tp 2

Worker bytes are those of one block on one rank, over all layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from storage.errors import ConfigError, StorageError
from tiering.planning import RowSize, row_size
from tiering.presets import load_preset, own_model, preset_names


def preset_sizes(blocks_per_chunk: int = 1) -> Iterator[RowSize]:
    """Every preset at every TP size that it names."""
    for name in preset_names():
        preset = load_preset(name)
        for tp in preset.tp:
            yield row_size(preset, tp, blocks_per_chunk)


def run(
    preset: Annotated[
        str | None, typer.Option(help="Name of a preset, or a JSON file like one.")
    ] = None,
    worker_bytes: Annotated[
        int | None, typer.Option(help="Bytes of one block on one rank, all layers together.")
    ] = None,
    max_tp_shards: Annotated[
        int, typer.Option(help="With --worker-bytes: 1 for MLA, else the KV heads.")
    ] = 1,
    tokens_per_block: Annotated[int, typer.Option(help="With --worker-bytes.")] = 16,
    tp: Annotated[int | None, typer.Option(help="TP ranks; default: those of the preset.")] = None,
    blocks_per_chunk: Annotated[int, typer.Option()] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects instead.")] = False,
) -> None:
    """What a row weighs with and without dedup."""
    try:
        for name, number in (
            ("--worker-bytes", worker_bytes),
            ("--max-tp-shards", max_tp_shards),
            ("--tokens-per-block", tokens_per_block),
            ("--tp", tp),
            ("--blocks-per-chunk", blocks_per_chunk),
        ):
            if number is not None and number < 1:
                raise ConfigError(name, "a number above 0", number)
        if worker_bytes is not None:
            if preset is not None or tp is None:
                raise ConfigError("--worker-bytes", "--tp with it and no --preset", worker_bytes)
            own = own_model(worker_bytes, tp, max_tp_shards, tokens_per_block)
            sizes = [row_size(own, tp, blocks_per_chunk)]
        elif preset is not None:
            chosen = load_preset(preset)
            ranks = chosen.tp if tp is None else (tp,)
            sizes = [row_size(chosen, count, blocks_per_chunk) for count in ranks]
        elif tp is not None:
            raise ConfigError("--tp", "--preset or --worker-bytes with it", tp)
        else:
            sizes = list(preset_sizes(blocks_per_chunk))
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    if as_json:
        plain = [_plain(size) for size in sizes]
        typer.echo(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
    else:
        Console(width=160).print(_table(sizes))


def _plain(size: RowSize) -> dict[str, Any]:
    return dataclasses.asdict(size) | {"factor": round(size.factor, 4)}


def _table(sizes: list[RowSize]) -> Table:
    table = Table("model")
    for title in (
        "TP",
        "worker bytes\nper block",
        "row without\ndedup",
        "row with\ndedup",
        "factor",
    ):
        table.add_column(title, justify="right")
    table.add_column("replicas per\nkind of layer")
    table.add_column("kv_tp_\nreplicas", justify="right")
    table.add_column("replicated_\nlayout")
    table.add_column("tokens\nper GB", justify="right")
    for size in sizes:
        table.add_row(
            size.model,
            str(size.tp),
            f"{size.worker_bytes_per_block:,}",
            f"{size.row_bytes_without_dedup:,}",
            f"{size.row_bytes:,}",
            f"{size.factor:.2f}x",
            ", ".join(f"{kind} {count}" for kind, count in size.replicas.items()),
            str(size.kv_tp_replicas),
            "yes" if size.replicated_layout else "no",
            "?" if size.tokens_per_gb is None else f"{size.tokens_per_gb:,}",
        )
    return table


if __name__ == "__main__":
    typer.run(run)
