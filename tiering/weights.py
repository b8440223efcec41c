"""A fingerprint of model weights: cheap at every start, yet it tells fine-tunes apart."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import msgspec

from storage.errors import ConfigError

_SAMPLE_BYTES = 4096  # of the start of every tensor: training changes all of a tensor or none of it
_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def weights_fingerprint(directory: Path) -> str:
    """32 hexadecimal digits over the weight files in `directory`: names, sizes and samples.

    Of a safetensors file the whole header and the first 4 KiB of every tensor; of another kind the
    first 4 KiB of every MiB.  Independent of the directory's own path.  Raises `ConfigError` if
    there are no weights or a header can't be read.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES)
    if not files:
        raise ConfigError("model", f"weights ({', '.join(_SUFFIXES)})", str(directory))
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(msgspec.json.encode([path.name, size]))
        if path.suffix == ".safetensors":
            _add_safetensors(digest, path, size)
        else:
            _add_samples(digest, path, range(0, size, 1 << 20))
    return digest.hexdigest()[:32]


def _add_safetensors(digest: Any, path: Path, size: int) -> None:
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if header_bytes > size - 8:
            raise ConfigError("model", "a whole safetensors file", str(path))
        header = file.read(header_bytes)
    digest.update(header)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, dict[str, Any]])
        tensors.pop("__metadata__", None)
        starts = sorted(8 + header_bytes + int(t["data_offsets"][0]) for t in tensors.values())
    except (msgspec.DecodeError, KeyError, IndexError, ValueError) as exc:
        raise ConfigError("model", "a safetensors header", str(path)) from exc
    _add_samples(digest, path, starts)


def _add_samples(digest: Any, path: Path, starts: Any) -> None:
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
