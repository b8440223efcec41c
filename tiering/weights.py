"""A fingerprint of model weights: by samples, cheap at every start, or by every byte."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from storage.errors import ConfigError

SAMPLED = "sampled"
CONTENT = "content"
WEIGHTS_FINGERPRINTS = (SAMPLED, CONTENT)

_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_SAMPLE_BYTES = 4096
_SAMPLES_PER_TENSOR = 16  # the first and the last bytes, and evenly between them
_SAMPLES = 1 << 16  # about how many of one model: a second or two from a cold drive
_PIECE_BYTES = 16 << 20  # what one thread hashes at a time
_THREADS = 8


def weights_fingerprint(path: Path, how: str = SAMPLED) -> str:
    """`how`, and 32 hexadecimal digits over the weight files in the directory `path`, or over that
    one file.

    `SAMPLED`: names, sizes, safetensors headers, and up to 16 samples of 4 KiB of every tensor (of
    other kinds of files, 4 KiB of every MiB).  Tells checkpoints and fine-tunes apart, which change
    a tensor all over; it can miss an edit of a few rows of one.  `CONTENT`: every byte.  Both are
    independent of where the files lie.  Raises `ConfigError` if there are no weights, or they can't
    be read.
    """
    try:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise ConfigError("model", f"weights ({', '.join(_SUFFIXES)})", str(path))
        weights = [_WeightFile.of(file) for file in files]
        digest = hashlib.sha256()
        for file in weights:
            name = file.path.name if path.is_dir() else ""
            digest.update(msgspec.json.encode([name, file.size_bytes, len(file.header)]))
            digest.update(file.header)
        for part in _content(weights) if how == CONTENT else _samples(weights):
            digest.update(part)
    except OSError as exc:
        raise ConfigError("model", "weights that can be read", f"{path} ({exc})") from exc
    return f"{how} {digest.hexdigest()[:32]}"


@dataclass(frozen=True, slots=True)
class _WeightFile:
    """`header` is that of a safetensors file, else empty; `tensors` are where each begins and ends,
    in bytes of the file, None for a file of another kind."""

    path: Path
    size_bytes: int
    header: bytes
    tensors: list[tuple[int, int]] | None

    @classmethod
    def of(cls, path: Path) -> _WeightFile:
        size = path.stat().st_size
        if path.suffix != ".safetensors":
            return cls(path, size, b"", None)
        with path.open("rb") as file:
            prefix = file.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if header_bytes > size - 8:
                raise ConfigError("model", "a whole safetensors file", str(path))
            header = file.read(header_bytes)
        try:
            described = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
            described.pop("__metadata__", None)
            offsets = msgspec.convert(
                [tensor["data_offsets"] for tensor in described.values()], list[tuple[int, int]]
            )
        except (msgspec.DecodeError, msgspec.ValidationError, KeyError) as exc:
            raise ConfigError("model", "a safetensors header", str(path)) from exc
        base = 8 + header_bytes
        tensors = sorted((base + begin, base + end) for begin, end in offsets)
        if any(not base <= begin <= end <= size for begin, end in tensors):
            raise ConfigError("model", "a whole safetensors file", str(path))
        return cls(path, size, header, tensors)


def _samples(files: Iterable[_WeightFile]) -> Iterator[bytes]:
    files = list(files)
    tensor_count = sum(len(file.tensors or ()) for file in files)
    per_tensor = max(2, min(_SAMPLES_PER_TENSOR, _SAMPLES // max(1, tensor_count)))
    for file in files:
        starts: Iterable[int] = range(0, file.size_bytes, 1 << 20)
        if file.tensors is not None:
            starts = (at for tensor in file.tensors for at in _spread(*tensor, per_tensor))
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for start in starts:
                yield os.pread(fd, _SAMPLE_BYTES, start)
        finally:
            os.close(fd)


def _spread(begin: int, end: int, count: int) -> list[int]:
    """Where up to `count` samples of the bytes from `begin` to `end` start."""
    last = max(begin, end - _SAMPLE_BYTES)
    gaps = min(count - 1, -(-(last - begin) // _SAMPLE_BYTES))
    return [begin + (last - begin) * i // max(1, gaps) for i in range(gaps + 1)]


def _content(files: Iterable[_WeightFile]) -> Iterator[bytes]:
    """The digest of every piece of every file, hashed by several threads."""
    pieces = [
        (file.path, start) for file in files for start in range(0, file.size_bytes, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(_THREADS) as threads:
        yield from threads.map(_hash_piece, pieces)


def _hash_piece(piece: tuple[Path, int]) -> bytes:
    path, start = piece
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        data, left = hashlib.sha256(), _PIECE_BYTES
        while left and (read := file.read(min(left, 1 << 20))):
            data.update(read)
            left -= len(read)
    return data.digest()
