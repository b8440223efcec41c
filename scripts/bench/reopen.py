"""How long a store of a million rows takes to open, and how much memory its index takes.

    python scripts/bench/reopen.py --json out.json

The store is synthetic: segments are sparse files whose headers are real and whose rows are holes,
so that half a terabyte of rows fits in a few hundred megabytes.  It is opened in a process of its
own, each time from the disk (headers are read with O_DIRECT): first as a crash leaves it, then as a
clean stop does.  Both read the headers and nothing else, so that nothing stale can be believed; a
clean stop has written the latest uses to them.  The order of use is checked against the one that
was made.  Memory is what the process has grown by, what its allocator keeps after opening included.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and a file in it is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import gc
import hashlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Annotated, NamedTuple

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from storage import header
from storage.device import LocalDevice, replace_file
from storage.errors import ConfigError, StorageError
from storage.header import SegmentGeometry
from storage.namespace import (
    METADATA,
    ROWS,
    Identity,
    namespace_metadata,
    root_metadata,
    rows_metadata,
)
from storage.options import StoreOptions
from storage.segment import segment_path
from storage.sizes import parse_size
from storage.space import (
    NAMESPACE_OVERHEAD_BYTES,
    ROOT_OVERHEAD_BYTES,
    SEGMENT_OVERHEAD_BYTES,
)
from storage.store import DiskStore
from storage.types import PAGE_BYTES, RowKey, SegmentId

KEY_BYTES = 36  # of vLLM: a sha256 and a group index
CRASH_S, CLEAN_S, BYTES_PER_ROW = 10.0, 2.0, 200.0  # per 1,000,000 rows: what is asked for
_TARGET_ROWS = 1_000_000
_TIMEOUT_S = 600.0

console = Console(width=100)


class Opening(NamedTuple):
    """`memory_bytes` is what the process grew by, `order` a hash of all keys, oldest first."""

    seconds: float
    rows: int
    memory_bytes: int
    order: str
    close_seconds: float


def geometry_of(rows: int, row_bytes: int) -> SegmentGeometry:
    """As the store would choose it for a budget that holds so many rows."""
    return SegmentGeometry.choose(row_bytes, rows * (row_bytes + PAGE_BYTES))


def options_of(root: Path, rows: int, geometry: SegmentGeometry) -> StoreOptions:
    segments = -(-rows // geometry.slots_per_segment)
    budget = ROOT_OVERHEAD_BYTES + NAMESPACE_OVERHEAD_BYTES + (64 << 20)
    budget += segments * (geometry.segment_bytes + SEGMENT_OVERHEAD_BYTES)
    return StoreOptions(root, budget, reserve_bytes=0)


def make_store(root: Path, rows: int, geometry: SegmentGeometry, identity: Identity) -> str:
    """A store of `rows` rows with random keys, used in random order; the hash of that order."""
    device = LocalDevice()
    slots = geometry.slots_per_segment
    segment_count = -(-rows // slots)
    namespace = root / identity.directory
    device.make_directory(namespace / ROWS / "c")
    replace_file(device, root / METADATA, root_metadata({}))
    replace_file(device, namespace / METADATA, namespace_metadata(identity))
    replace_file(device, namespace / ROWS / METADATA, rows_metadata(geometry, segment_count))
    rng = np.random.default_rng(1)
    keys = np.zeros((segment_count * slots, header.ENTRY["key"].itemsize), np.uint8)
    keys[:rows, :KEY_BYTES] = rng.integers(0, 256, (rows, KEY_BYTES), np.uint8)
    uses = rng.permutation(segment_count * slots).astype(np.uint64) + 1
    for number in range(segment_count):
        first = number * slots
        count = min(slots, rows - first)
        entries = header.new_entries(geometry)
        used = entries[:count]
        used["key_bytes"] = KEY_BYTES
        used["offset"] = [geometry.row_offset(slot) for slot in range(count)]
        used["length"] = geometry.record_bytes
        used["last_use"] = uses[first : first + count]
        used["key"] = keys[first : first + count].view(header.ENTRY["key"])[:, 0]
        path = segment_path(namespace / ROWS, SegmentId(number))
        device.make_directory(path.parent)
        with path.open("wb") as file:
            raw = header.encode_index(geometry, entries)
            raw += b"".join(
                header.encode_table(geometry, entries, generation, identity.namespace)
                for generation in (0, 1)
            )
            file.write(raw)
            file.truncate(geometry.segment_bytes)
    order = hashlib.sha256()
    for row in np.argsort(uses[:rows]):
        order.update(keys[row, :KEY_BYTES].tobytes())
    return order.hexdigest()


def open_in_process(options: StoreOptions, identity: Identity, row_bytes: int) -> Opening:
    """Open and close the store in a fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_open, args=(theirs, options, identity, row_bytes))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_TIMEOUT_S):
            raise TimeoutError(f"not opened within {_TIMEOUT_S:g} s")
        found = ours.recv()
    finally:
        process.join(_TIMEOUT_S)
    assert isinstance(found, Opening)
    return found


def _open(
    connection: Connection, options: StoreOptions, identity: Identity, row_bytes: int
) -> None:
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    np.argsort(np.arange(10))  # what numpy loads at first use is not the index
    before = _memory_bytes()
    started = time.perf_counter()
    store = DiskStore.open(options)
    rows = store.open_rows(identity, row_bytes)
    seconds = time.perf_counter() - started
    memory_bytes = _memory_bytes() - before
    order = hashlib.sha256()
    for key in list(rows.keys()):
        order.update(key)
    count = len(rows)
    started = time.perf_counter()
    store.close()
    opening = Opening(
        seconds, count, memory_bytes, order.hexdigest(), time.perf_counter() - started
    )
    connection.send(opening)


def _memory_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def replica_bytes_per_row(rows: int) -> float:
    """Of the engine's replica of the index: a set of keys, as `StoreClient` keeps it."""
    before = _memory_bytes()
    replica: set[bytes] = set()
    replica.update(RowKey(os.urandom(KEY_BYTES)) for _ in range(rows))
    return (_memory_bytes() - before) / len(replica)


def main(
    directory: Annotated[Path, typer.Option(help="Where the store is made.")] = Path("/var/tmp"),
    rows: Annotated[int, typer.Option(min=1000, help="Rows of the store.")] = _TARGET_ROWS,
    row_bytes: Annotated[str, typer.Option(help="Size of a row.")] = "499712",
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
) -> None:
    """How long a store takes to open, and how much memory its index takes."""
    try:
        size = parse_size(row_bytes, "--row-bytes")
        if size % PAGE_BYTES:
            raise ConfigError("--row-bytes", f"a multiple of {PAGE_BYTES}", size)
        if not directory.is_dir():
            raise ConfigError("--directory", "a directory", str(directory))
        found = run(directory, rows, size)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=2) + "\n")


def run(directory: Path, rows: int, row_bytes: int) -> dict[str, float]:
    """Make, open twice, and print; the figures."""
    geometry = geometry_of(rows, row_bytes)
    identity = Identity("bench", {})
    with tempfile.TemporaryDirectory(prefix="kvtier-reopen-", dir=directory) as scratch:
        root = Path(scratch) / "root"
        order = make_store(root, rows, geometry, identity)
        os.sync()
        options = options_of(root, rows, geometry)
        crash = open_in_process(options, identity, row_bytes)
        clean = open_in_process(options, identity, row_bytes)
    replica = replica_bytes_per_row(rows)
    for opening in (crash, clean):
        if opening.rows != rows or opening.order != order:
            raise StorageError(f"found {opening.rows} of {rows} rows, or not in their order of use")
    scale = rows / _TARGET_ROWS
    table = Table(
        title=f"{rows:,} rows of {row_bytes:,} bytes in {geometry.slots_per_segment} a segment"
    )
    for name in ("what", "wanted", "found", ""):
        table.add_column(name, justify="right" if name in ("wanted", "found") else "left")
    for what, wanted, value in (
        ("open after a crash, s", CRASH_S * scale, crash.seconds),
        ("open after a clean stop, s", CLEAN_S * scale, clean.seconds),
        ("memory of the store, bytes per row", BYTES_PER_ROW, clean.memory_bytes / rows),
        ("memory of the engine's replica, bytes per row", BYTES_PER_ROW, replica),
    ):
        verdict = "reached" if value <= wanted else "[bold]missed[/bold]"
        table.add_row(what, f"<= {wanted:g}", f"{value:.2f}", verdict)
    console.print(table)
    console.print(f"recency kept; closed in {clean.close_seconds:.2f} s")
    return {
        "rows": rows,
        "row_bytes": row_bytes,
        "crash_s": crash.seconds,
        "clean_s": clean.seconds,
        "close_s": clean.close_seconds,
        "bytes_per_row": clean.memory_bytes / rows,
        "crash_bytes_per_row": crash.memory_bytes / rows,
        "replica_bytes_per_row": replica,
    }


if __name__ == "__main__":
    typer.run(main)
