from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest

from storage.errors import ConfigError
from tiering.weights import CONTENT, WEIGHTS_FINGERPRINTS, weights_fingerprint


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


@pytest.mark.parametrize("how", WEIGHTS_FINGERPRINTS)
def test_the_same_weights_elsewhere_are_the_same(model: Path, tmp_path: Path, how: str) -> None:
    shutil.copytree(model, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    assert weights_fingerprint(model, how) == weights_fingerprint(tmp_path / "copy", how)


def test_what_was_compared_is_part_of_the_fingerprint(model: Path) -> None:
    assert [weights_fingerprint(model, how).split()[0] for how in WEIGHTS_FINGERPRINTS] == [
        *WEIGHTS_FINGERPRINTS
    ]


def change_a_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("how", WEIGHTS_FINGERPRINTS)
@pytest.mark.parametrize("position", [-20_000, -10_001, -10_000, -1, -5_000])
def test_a_fine_tune_of_equal_shapes_is_another_model(model: Path, how: str, position: int) -> None:
    """Also one that changes the end or the middle of a tensor alone."""
    before = weights_fingerprint(model, how)
    change_a_byte(model / "model.safetensors", position)
    assert weights_fingerprint(model, how) != before


def test_an_edit_of_a_few_rows_is_seen_by_content(tmp_path: Path) -> None:
    """16 samples of a large tensor can miss it; that is what the setting is for."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {"embeddings": bytes(33 << 20), "other": bytes(100)})
    sampled, content = (weights_fingerprint(tmp_path, how) for how in WEIGHTS_FINGERPRINTS)
    change_a_byte(path, (17 << 20) + 12_345)
    assert weights_fingerprint(tmp_path) == sampled
    assert weights_fingerprint(tmp_path, CONTENT) != content


def test_many_tensors_get_fewer_samples_each(tmp_path: Path) -> None:
    """But of each its first and its last bytes at least."""
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {f"t{n}": bytes(8192) for n in range(4000)})
    before = weights_fingerprint(tmp_path)
    for position in (-1, -8192):
        change_a_byte(path, position)
        assert weights_fingerprint(tmp_path) != before
        change_a_byte(path, position)
    assert weights_fingerprint(tmp_path) == before


@pytest.mark.parametrize("how", WEIGHTS_FINGERPRINTS)
def test_names_of_tensors_and_of_files_count(model: Path, tmp_path: Path, how: str) -> None:
    before = weights_fingerprint(model, how)
    tensors = {"b": bytes(10_000), "a": b"\1" * 10_000}
    other = tmp_path / "other"
    other.mkdir()
    write_safetensors(other / "model.safetensors", tensors)
    assert weights_fingerprint(other, how) != before
    (model / "model.safetensors").rename(model / "renamed.safetensors")
    assert weights_fingerprint(model, how) != before


def test_weights_in_one_file_are_known_by_their_content(tmp_path: Path) -> None:
    for name, last in (("a.gguf", b"\0"), ("b.gguf", b"\0"), ("c.gguf", b"\1")):
        (tmp_path / name).write_bytes(bytes(3000) + last)
    a, b, c = (weights_fingerprint(tmp_path / f"{name}.gguf") for name in "abc")
    assert a == b != c


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
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"weights that can be read, got .*No such file"):
        weights_fingerprint(model)
    (tmp_path / "bad.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]" + bytes(8))
    with pytest.raises(ConfigError, match="a safetensors header"):
        weights_fingerprint(tmp_path / "bad.safetensors")
