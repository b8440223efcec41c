"""The codecs on the KV cache of a trained model, beside memcpy and the bare device.

    python scripts/bench/codecs.py --json out.json

The KV is that of SmolLM2-135M on the demo's documents, computed in fp32 by `transformers` (keys
after rotation, as engines keep them) and rounded to each dtype; a row is a block of 32 tokens,
layer by layer [K, V][head][token][dimension].  Weights that are not trained flatter every codec.

The first table is the codec alone: `ratio` of rows to their frames, `slots` of rows to the slots
that they stand in, and the speed of so many threads in bytes of rows; every side allocates what it
encodes into.  The second is the whole store with its own threads, slots overwritten in place;
`disk` is what the file system allocated per byte of row.  Settings without "always" leave rows raw
where the codec does not pay.  Rounds are interleaved; figures are medians.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run by its path, this file's directory comes first, and in it a file is called `storage`.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any

import numcodecs
import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from scripts.bench.sides import RawSide, RowJob, WrongBytes
from scripts.demo_prompts import DOCUMENT_TOKENS, documents
from scripts.make_model import ModelError, ensure_model
from scripts.models import MODELS
from storage.codec import CODEC_NAMES, NO_CODEC, Codec
from storage.device import aligned_buffer
from storage.errors import ConfigError, StorageError
from storage.header import SLOT_HEADER_BYTES, SegmentGeometry
from storage.namespace import Identity
from storage.options import StoreOptions
from storage.sizes import format_size
from storage.store import DiskStore
from storage.testing.rows import bytes_on_disk, key_of
from storage.types import RowOutcome

MODEL = "smollm2"
BLOCK_TOKENS = 32
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
FP8_MAX = 448.0  # of e4m3, which has no infinity
SEGMENT_ROWS = 5
MEMCPY, RAW = "memcpy", "raw device"
PLAIN_ZSTD = "plain zstd-1"  # zarr's own codec of that name, which kvtier does not use

console = Console(width=118)
Rows = Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """A codec alone, on rows of one dtype."""

    dtype: str
    codec: str
    ratio: float
    slot_ratio: float
    encode_gb_s: float
    decode_gb_s: float


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """The whole store, or the bare device, on rows of one dtype."""

    dtype: str
    setting: str
    disk_per_row_byte: float
    encoded_share: float
    write_gb_s: float
    read_gb_s: float


# -- the rows --------------------------------------------------------------------------------


def kv_of_documents(count: int) -> torch.Tensor:
    """KV in fp32: [block, layer, 2, head, token, dimension].  Raises `ModelError`."""
    path = ensure_model(MODEL)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    blocks = []
    for text in documents(count).values():
        tokens = torch.tensor([tokenizer(text)["input_ids"][:DOCUMENT_TOKENS]])
        with torch.inference_mode():
            cache = model(tokens, use_cache=True).past_key_values
        layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
        kv = torch.stack(layers)  # [layer, 2, head, token, dimension]
        count_blocks = kv.shape[3] // BLOCK_TOKENS
        whole = kv[:, :, :, : count_blocks * BLOCK_TOKENS]
        split = whole.reshape(*kv.shape[:3], count_blocks, BLOCK_TOKENS, kv.shape[4])
        blocks.append(split.permute(3, 0, 1, 2, 4, 5))
    if not blocks:
        raise ModelError("no documents to compute the KV of: expected texts in common-licenses")
    return torch.cat(blocks)


def rows_of(kv: torch.Tensor, dtype: str) -> list[memoryview]:
    """The rows of a dtype, page-aligned."""
    if dtype == "fp8":
        kv = kv.clamp(-FP8_MAX, FP8_MAX)
    blocks = kv.to(DTYPES[dtype]).contiguous().view(torch.uint8).flatten(1).numpy()
    return aligned_copies([memoryview(block) for block in blocks])


def aligned_copies(rows: Rows) -> list[memoryview]:
    row_bytes = rows[0].nbytes
    memory = aligned_buffer(len(rows) * row_bytes)
    copies = [memory[i * row_bytes : (i + 1) * row_bytes] for i in range(len(rows))]
    for copy, row in zip(copies, rows, strict=True):
        copy[:] = row
    return copies


# -- the codec alone -------------------------------------------------------------------------

Encode = Callable[[memoryview], Any]
Decode = Callable[[Any, memoryview], object]


def contenders(element_bytes: int) -> Iterator[tuple[str, Encode, Decode]]:
    def copy(source: memoryview, target: memoryview) -> None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def fresh(row: memoryview) -> memoryview:
        target = memoryview(bytearray(row.nbytes))
        copy(row, target)
        return target

    yield MEMCPY, fresh, copy
    for name in CODEC_NAMES:
        if name != NO_CODEC:
            codec = Codec(name, element_bytes)
            yield name, codec.encode, codec.decode
    zstd = numcodecs.Zstd(level=1)
    yield PLAIN_ZSTD, zstd.encode, zstd.decode


def measure_codecs(dtype: str, rows: Rows, rounds: int, threads: int) -> list[CodecFigures]:
    """Every codec on `rows`, checked byte for byte.  Raises `WrongBytes`."""
    total = sum(row.nbytes for row in rows)
    targets = aligned_copies(rows)
    classes = SegmentGeometry(rows[0].nbytes, SEGMENT_ROWS).size_classes()
    seconds: dict[str, list[tuple[float, float]]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(rounds):
            for name, encode, decode in contenders(DTYPES[dtype].itemsize):
                started = time.perf_counter()
                frames = list(pool.map(encode, rows))
                encoded = time.perf_counter()
                list(pool.map(decode, frames, targets))
                ended = time.perf_counter()
                if list(targets) != list(rows):
                    raise WrongBytes(f"{name} on {dtype}: another row came back")
                seconds.setdefault(name, []).append((encoded - started, ended - encoded))
                lengths = [memoryview(frame).nbytes for frame in frames]
                slots = [next((c for c in classes if c.takes(n)), classes[-1]) for n in lengths]
                sizes[name] = (sum(lengths), sum(slot.stride for slot in slots))
    return [
        CodecFigures(
            dtype,
            name,
            total / sizes[name][0],
            total / sizes[name][1],
            total / median(encode for encode, _ in taken) / 1e9,
            total / median(decode for _, decode in taken) / 1e9,
        )
        for name, taken in seconds.items()
    ]


# -- the whole store -------------------------------------------------------------------------


class StoreSetting:
    """A store of one setting, into and out of the same buffers."""

    def __init__(self, name: str, root: Path, options: dict[str, Any], rows: Rows, element: int):
        self.name = name
        self.seconds: list[tuple[float, float]] = []
        self._rows = rows
        self._targets = aligned_copies(rows)
        self._keys = [key_of(number) for number in range(len(rows))]
        stride = SegmentGeometry(rows[0].nbytes, SEGMENT_ROWS).size_classes()[-1].stride
        segment = SEGMENT_ROWS * (stride + SLOT_HEADER_BYTES)
        budget = 2 * stride * len(rows) + 8 * segment
        self._store = DiskStore.open(
            StoreOptions(root, budget, segment_bytes=segment, reserve_bytes=0, **options)
        )
        self._row_store = self._store.open_rows(
            Identity("bench", {}, element_bytes=element), rows[0].nbytes
        )

    def run(self) -> None:
        """Write all rows where they stood before, and read them.  Raises `WrongBytes`."""
        self._row_store.remove(self._keys)
        written = self._row_store.write(self._keys, self._rows)
        for target in self._targets:
            target[:64] = bytes(64)
        read = self._row_store.read(self._keys, self._targets)
        for result in (written, read):
            if set(result.outcomes) != {RowOutcome.OK}:
                raise WrongBytes(f"{self.name}: {set(result.outcomes)}")
        if list(self._targets) != list(self._rows):
            raise WrongBytes(f"{self.name}: another row came back")
        self.seconds.append((written.seconds, read.seconds))

    def figures(self, dtype: str) -> StoreFigures:
        total = sum(row.nbytes for row in self._rows)
        counters = self._row_store.count()
        return StoreFigures(
            dtype,
            self.name,
            bytes_on_disk(self._row_store.directory) / total,
            counters.rows_encoded / counters.rows_written,
            *(total / median(taken) / 1e9 for taken in zip(*self.seconds, strict=True)),
        )

    def close(self) -> None:
        self._store.close()


def measure_store(
    dtype: str, rows: Rows, rounds: int, directory: Path, on_round: Callable[[], None]
) -> list[StoreFigures]:
    """Every setting of the store, and the bare device, in turns.  Raises `WrongBytes`."""
    element = DTYPES[dtype].itemsize
    settings = [StoreSetting(NO_CODEC, directory / NO_CODEC, {}, rows, element)]
    for codec in CODEC_NAMES:
        if codec != NO_CODEC:
            for always in (False, True):
                name = f"{codec}, always" if always else codec
                options = {"codec": codec, "codec_always": always}
                settings.append(StoreSetting(name, directory / name, options, rows, element))
    geometry = SegmentGeometry(rows[0].nbytes, SEGMENT_ROWS)
    raw = RawSide(directory / "raw", aligned_copies(rows), geometry, len(rows))
    jobs = [RowJob([key_of(number) for number in range(len(rows))], range(len(rows)))]
    total = sum(row.nbytes for row in rows)
    seconds = []
    try:
        for number in range(rounds + 1):
            started = time.perf_counter()
            raw.write(jobs)
            written = time.perf_counter()
            raw.read(jobs)
            seconds.append((written - started, time.perf_counter() - written))
            for setting in settings:
                setting.run()
            if number == 0:  # new files: not what a store does all day
                seconds.clear()
                for setting in settings:
                    setting.seconds.clear()
            on_round()
        speeds = (total / median(taken) / 1e9 for taken in zip(*seconds, strict=True))
        disk = bytes_on_disk(directory / "raw") / total
        return [
            StoreFigures(dtype, RAW, disk, 0.0, *speeds),
            *(setting.figures(dtype) for setting in settings),
        ]
    finally:
        raw.close()
        for setting in settings:
            setting.close()


# -- command line ----------------------------------------------------------------------------


def tables(codecs: Sequence[CodecFigures], stores: Sequence[StoreFigures]) -> Iterator[Table]:
    alone = Table("dtype", "codec", *("ratio", "slots", "encode GB/s", "decode GB/s"))
    for codec in codecs:
        figures = (codec.ratio, codec.slot_ratio, codec.encode_gb_s, codec.decode_gb_s)
        alone.add_row(codec.dtype, codec.codec, *(f"{figure:.2f}" for figure in figures))
    yield alone
    whole = Table("dtype", "store", *("disk", "encoded", "write GB/s", "read GB/s"))
    for store in stores:
        speeds = (f"{store.write_gb_s:.2f}", f"{store.read_gb_s:.2f}")
        share = f"{store.encoded_share:.0%}"
        whole.add_row(store.dtype, store.setting, f"{store.disk_per_row_byte:.2f}", share, *speeds)
    yield whole


def main(
    directory: Annotated[Path, typer.Option(help="Where the files go.")] = Path("/var/tmp"),
    document_count: Annotated[int, typer.Option("--documents", min=1)] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of the codec alone.")] = os.cpu_count() or 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write it here.")] = None,
) -> None:
    """The codecs on real KV, beside memcpy and the bare device."""
    try:
        if not directory.is_dir():
            raise ConfigError("--directory", "a directory", str(directory))
        if json_path is not None and not json_path.absolute().parent.is_dir():
            raise ConfigError("--json", "a path in a directory that is there", str(json_path))
        kv = kv_of_documents(document_count)
        # Six stores and the bare device, each with room to spare.
        needed = 8 * kv.numel() * kv.itemsize
        if shutil.disk_usage(directory).free < needed:
            raise ConfigError("--directory", f"{format_size(needed)} free", str(directory))
        codecs: list[CodecFigures] = []
        stores: list[StoreFigures] = []
        load = os.getloadavg()[0]
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("", total=len(DTYPES) * (rounds + 2))
            for dtype in DTYPES:
                progress.update(task, description=dtype)
                rows = rows_of(kv, dtype)
                codecs += measure_codecs(dtype, rows, rounds, threads)
                progress.advance(task)
                with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=directory) as scratch:
                    stores += measure_store(
                        dtype, rows, rounds, Path(scratch), lambda: progress.advance(task)
                    )
    except ModelError as exc:
        typer.echo(
            f"{MODEL}: {exc}; run this once with a network, or copy {MODELS[MODEL].path} from a "
            "machine that has it",
            err=True,
        )
        raise typer.Exit(2) from None
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    except WrongBytes as exc:
        typer.echo(f"failed: {exc}", err=True)
        raise typer.Exit(1) from None
    for table in tables(codecs, stores):
        console.print(table)
    console.print(
        f"{len(kv)} rows of {BLOCK_TOKENS} tokens of {MODEL}, {rounds} rounds, codecs alone on "
        f"{threads} threads; {os.cpu_count()} cores, load average {load:.1f} before and "
        f"{os.getloadavg()[0]:.1f} after"
    )
    if json_path is not None:
        found = {"codecs": [asdict(c) for c in codecs], "stores": [asdict(s) for s in stores]}
        json_path.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
