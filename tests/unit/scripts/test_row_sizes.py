"""Presets, and the table of rows with and without dedup."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import tiering.presets
from scripts.row_sizes import preset_sizes
from tiering.planning import RowSize, row_size
from tiering.presets import PRESETS, PresetError, load_preset, preset_names, read_preset

ROOT = Path(__file__).resolve().parents[3]

KNOWN = {  # model, TP: worker bytes per block, row without dedup, row with dedup
    ("DeepSeek-V2-Lite", 2): (497_664, 995_328, 499_712),
    ("DeepSeek-V4-Flash", 8): (5_012_992, 40_103_936, 5_013_504),
    ("GLM-5.3", 8): (4_008_960, 32_071_680, 4_009_984),
    ("DeepSeek-V3.2-Exp", 8): (3_452_416, 27_619_328, 3_452_928),
}


def by_model() -> dict[tuple[str, int], RowSize]:
    return {(size.model, size.tp): size for size in preset_sizes()}


def test_dedup_rows_of_the_presets_are_the_known_ones() -> None:
    sizes = by_model()
    for key, known in KNOWN.items():
        size = sizes[key]
        found = (size.worker_bytes_per_block, size.row_bytes_without_dedup, size.row_bytes)
        assert found == known
        assert size.kv_tp_replicas == size.tp
        assert size.replicated_layout


def test_partial_dedup_of_kv_heads_and_of_a_draft_layer() -> None:
    sizes = by_model()
    assert sizes["GQA 70B", 8].factor == 1
    assert sizes["GQA 70B", 16].factor == 2
    assert (sizes["GQA 70B", 16].replicas, sizes["GQA 70B", 16].kv_tp_replicas) == ({"gqa": 2}, 2)
    draft = sizes["MLA + GQA draft", 8]
    assert (draft.replicas, draft.kv_tp_replicas) == ({"mla": 8, "gqa draft": 1}, 1)
    assert draft.row_bytes == 60 * 18432 + 8 * 8192  # one copy of the 60, although the gcd is 1


def test_tokens_per_gb() -> None:
    sizes = by_model()
    assert sizes["DeepSeek-V2-Lite", 2].tokens_per_gb == 16 * 10**9 // 499_712
    assert sizes["DeepSeek-V4-Flash", 8].tokens_per_gb is None  # nobody knows which block it was


def test_a_rank_with_several_kv_heads_has_larger_pages() -> None:
    preset = load_preset("gqa-70b")
    rows = {tp: row_size(preset, tp, 1) for tp in (1, 2, 4, 8, 16, 32)}
    assert {size.row_bytes for size in rows.values()} == {80 * 8 * 8192}
    assert [size.worker_bytes_per_block // (80 * 8192) for size in rows.values()] == [
        *(8, 4, 2, 1, 1, 1)
    ]


VALID: dict[str, Any] = {
    "model": "m",
    "tp": [2],
    "tokens_per_block": 16,
    "layers": [{"kind": "mla", "count": 1, "page_bytes": 4096, "max_tp_shards": 1}],
    "note": "",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 1}, "page_size"),
        ({"layers": [{**VALID["layers"][0], "shards": 1}]}, r"shards.*layers"),
        ({"layers": []}, "a layer"),
        ({"tp": []}, "a TP size"),
        ({"tp": [0]}, "above 0"),
        ({"tokens_per_block": "16"}, "tokens_per_block"),
        ({"tokens_per_block": 0}, "above 0"),
        ({"measured_worker_bytes": 4095}, "add up to 4096 bytes at TP 2, got 4095"),
        ({"groups": 2, "layers_per_group": [1]}, r"layers_per_group: expected 2 .* 1, got \[1\]"),
        ({"groups": 2, "layers_per_group": [1, 2]}, r"layers_per_group: .* got \[1, 2\]"),
        ({"tp": [3], "layers": [{**VALID["layers"][0], "max_tp_shards": 2}]}, "multiple of 2"),
    ],
)
def test_a_preset_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(VALID))
    assert read_preset(path).model == "m"
    path.write_text(json.dumps(VALID | change))
    with pytest.raises(PresetError, match=message) as caught:
        read_preset(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_presets_are_shipped_with_the_package() -> None:
    assert PRESETS.parent == Path(tiering.presets.__file__).parent
    assert PRESETS.resolve() == ROOT / "configs" / "models"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["tiering"] == ["models/*.json"]


def test_every_preset_says_where_its_figures_come_from() -> None:
    assert len(preset_names()) == len(list(PRESETS.iterdir())) == 6
    assert all(load_preset(name).note for name in preset_names())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.row_sizes", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=280, check=False
    )


def test_the_command_prints_dedup_rows() -> None:
    table = run()
    assert table.returncode == 0, table.stderr
    for _, without, with_dedup in KNOWN.values():
        assert f"{without:,}" in table.stdout
        assert f"{with_dedup:,}" in table.stdout
    own = run("--worker-bytes", "497664", "--tp", "2", "--json")
    (size,) = json.loads(own.stdout)
    assert (size["row_bytes_without_dedup"], size["row_bytes"]) == (995_328, 499_712)
    assert size["factor"] == 1.9918
    chunked = run("--preset", "deepseek-v4-flash", "--tp", "4", "--blocks-per-chunk", "3", "--json")
    (size,) = json.loads(chunked.stdout)
    assert (size["tp"], size["row_bytes"]) == (4, -(-3 * 5_012_992 // 4096) * 4096)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "gqa-7b"],
        ["--preset", "nowhere.json"],
        ["--preset", "gqa-70b", "--tp", "3"],
        ["--tp", "3"],
        ["--tp", "0", "--preset", "gqa-70b"],
        ["--worker-bytes", "5"],
        ["--worker-bytes", "5", "--tp", "2", "--max-tp-shards", "4"],
    ],
)
def test_bad_input_is_one_line(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1, done.stderr
