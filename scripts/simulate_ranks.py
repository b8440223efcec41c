"""Drive the whole stack without vLLM: store, wipe, load into other blocks, compare every byte.

    python -m scripts.simulate_ranks --tp 4 --layers mla:4,gqa:1

Two engines, one after the other, on one store: the second has an empty region, so everything that
it does not compute comes from disk.  Exits 0 only if no byte differs and the second computed
nothing that the disk should have had.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from scripts.simulated_engine import EngineShape, Served, SimulatedEngine, chunk_key
from storage.errors import StorageError
from storage.options import StoreOptions
from storage.sizes import format_size, parse_size
from tiering.summary import dedup_line
from tiering.topology import LayerFacts

KINDS = {"mla": 1, "gqa2": 2, "gqa8": 8, "mha": None}  # max_tp_shards of each kind of layer


def parse_layers(text: str, page_bytes: int) -> tuple[LayerFacts, ...]:
    """Layers from "mla:4,gqa2:1".  Raises `typer.BadParameter`."""
    layers: list[LayerFacts] = []
    for part in text.split(","):
        kind, _, count = part.partition(":")
        if kind not in KINDS or not count.isdigit():
            raise typer.BadParameter(
                f"--layers: expected KIND:COUNT with KIND of {', '.join(KINDS)}, got {part!r}"
            )
        shards = KINDS[kind]
        layers += [
            LayerFacts(f"{kind}.{len(layers) + i}", page_bytes, shards) for i in range(int(count))
        ]
    if not layers:
        raise typer.BadParameter("--layers: expected at least one layer")
    return tuple(layers)


def run(
    tp: Annotated[int, typer.Option(min=1, max=64, help="Simulated TP ranks.")] = 2,
    layers: Annotated[str, typer.Option(help="KIND:COUNT,...; kinds: mla, gqa2, gqa8, mha.")] = (
        "mla:6,gqa2:2"
    ),
    page: Annotated[str, typer.Option(help="Bytes of one block of one layer on a rank.")] = "16KiB",
    blocks_per_chunk: Annotated[int, typer.Option(min=1)] = 2,
    requests: Annotated[int, typer.Option(min=1)] = 8,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a request.")] = 16,
    region: Annotated[str, typer.Option(help="Size of the region.")] = "64MiB",
    budget: Annotated[str, typer.Option(help="Budget of the disk store.")] = "1GB",
    root: Annotated[Path | None, typer.Option(help="Store root; default: a temporary one.")] = None,
) -> None:
    """Store, wipe, load into other blocks on every rank, compare every byte."""
    try:
        shape = EngineShape(
            parse_layers(layers, parse_size(page, "--page")),
            tp=tp,
            blocks_per_chunk=blocks_per_chunk,
            device_blocks=4 * chunks * blocks_per_chunk,
            region_bytes=parse_size(region, "--region"),
        )
        with tempfile.TemporaryDirectory(prefix="kvtier-simulated-", dir="/var/tmp") as scratch:
            options = StoreOptions(
                root=(root or Path(scratch) / "store").absolute(),
                budget_bytes=parse_size(budget, "--budget"),
            )
            passed = simulate(shape, options, requests, chunks)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if passed else 1)


def simulate(shape: EngineShape, options: StoreOptions, requests: int, chunks: int) -> bool:
    """Serve the same requests with two engines and print what happened; whether all was right."""
    prompts = [
        [chunk_key(f"document-{number}", index) for index in range(chunks)]
        for number in range(requests)
    ]
    runs: list[Served] = []
    for _ in range(2):
        served = Served()
        with SimulatedEngine(shape, options) as engine:
            for prompt in prompts:
                engine.serve(prompt, served)
            engine.drain()
            assert engine.client is not None
            usage = engine.client.usage
        runs.append(served)
    console = Console(width=110)
    console.print(dedup_line(shape.layout, [[layer.name for layer in shape.layers]]))
    table = Table("engine", "computed", "from region", "from disk", "stored", "loaded", "wrong")
    for name, served in zip(("first", "second"), runs, strict=True):
        table.add_row(
            name,
            *(str(served.chunks[source]) for source in ("computed", "region", "disk")),
            format_size(served.stored_bytes),
            format_size(served.loaded_bytes),
            f"{served.wrong_bytes} bytes",
        )
    console.print(table)
    console.print(
        f"disk: {format_size(usage.used_bytes)} of {format_size(usage.budget_bytes)}, "
        f"{usage.rows} rows of {shape.layout.row_bytes} bytes"
    )
    first, second = runs
    wrong = first.wrong_bytes + second.wrong_bytes
    from_disk = second.chunks["disk"]
    fits = usage.rows_evicted == 0
    return wrong == 0 and from_disk > 0 and (not fits or second.chunks["computed"] == 0)


if __name__ == "__main__":
    typer.run(run)
