from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from storage.errors import ConfigError
from tiering.weights import weights_fingerprint


def write_safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    tensors = {"a": bytes(10_000), "b": b"\1" * 10_000}
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "copy")
    assert weights_fingerprint(model) == weights_fingerprint(tmp_path / "copy")


def test_a_fine_tune_of_equal_shapes_is_another_model(model: Path) -> None:
    before = weights_fingerprint(model)
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-10_000] ^= 1  # the first byte of the last tensor
    path.write_bytes(raw)
    assert weights_fingerprint(model) != before


def test_other_formats_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(3 << 20))
    before = weights_fingerprint(tmp_path)
    with (tmp_path / "model.bin").open("r+b") as file:
        file.seek(2 << 20)
        file.write(b"\1")
    assert weights_fingerprint(tmp_path) != before


def test_no_weights_and_half_a_file_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: expected weights"):
        weights_fingerprint(tmp_path)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ConfigError, match="whole safetensors"):
        weights_fingerprint(model)
