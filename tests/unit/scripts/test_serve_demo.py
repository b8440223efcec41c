"""The verdict of `make run`: what it expects of a row, and what it calls a fault."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import models
from scripts.demo_prompts import DemoPrompt
from scripts.models import MODELS, LayerShape, ModelPreset
from scripts.serve_demo import DemoError, ranks_of_runs, rows_on_disk
from scripts.serve_report import (
    Answered,
    DiskUse,
    Drafts,
    Report,
    RowsOnDisk,
    Sources,
    faults_of,
    row_faults,
    row_lines,
    summary_of,
)
from scripts.serving import Completion

MLA = {"num_hidden_layers": 2, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
GQA = {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 32}
NAMESPACE = "SomeModel-" + 32 * "a"


def answered(number: int = 1, *, disk: int = 0, token: int = 7, accepted: int = 0) -> Answered:
    """An answer to a prompt of 1,600 tokens."""
    return Answered(
        DemoPrompt("GPL-3", number, "What?", ()),
        Completion("x", (token,), 1600, 0.2, 0.3),
        Sources(computed=1600 - disk, device=0, host=0, disk=disk),
        Drafts(9, accepted),
    )


REPORT = Report(
    model="tiny-mla",
    tensor_parallel=(2, 1),
    cold=[answered()],
    warm=[answered(disk=1584)],
    ready_s=(1.0, 1.0),
    disk=DiskUse(100, 1000, 100),
    rows_before=[],
    rows=[RowsOnDisk(NAMESPACE, 100, 8192)],
    store_was_cold=True,
    row_bytes=8192,
)
TWO = [*REPORT.rows, RowsOnDisk("tiny-mla-" + 32 * "b", 100, 8192)]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models of which only the configurations are there."""
    monkeypatch.setattr(models, "MODELS_DIR", tmp_path)
    configs: dict[str, dict[str, Any]] = {
        "tiny-mla": MLA,
        "tiny-mla-gqa-draft": MLA,
        "tiny-mla-gqa-draft/draft": GQA,
        "tiny-mqa": {**GQA, "num_key_value_heads": 1},
        "tiny-gemma3": {**GQA, "num_hidden_layers": 7},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_run_that_keeps_its_promises_has_no_fault() -> None:
    assert faults_of(REPORT) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"warm": [answered(disk=1584, token=8)]}, "1 of 1 answers differ"),
        ({"warm": [answered(disk=1584, accepted=1)]}, "guessed otherwise in 1 of 1"),
        ({"warm": [answered(disk=800)]}, "only 800 of 1600 tokens came from the disk"),
        ({"cold": [answered(disk=16)]}, "the cold run was not cold"),
        ({"rows": TWO}, "2 namespaces where 1 should be"),
        ({"rows": [RowsOnDisk(NAMESPACE, 9, 12288)]}, "12288 bytes on disk, its distinct bytes"),
        ({"disk": DiskUse(100, 1000, 1001)}, "past the budget"),
    ],
    ids=str,
)
def test_each_broken_promise_is_a_fault(change: dict[str, Any], fault: str) -> None:
    [found] = faults_of(replace(REPORT, **change))
    assert fault in found


def test_rows_of_another_number_of_ranks_are_to_be_missed_where_they_depend_on_it() -> None:
    report = replace(REPORT, model="tiny-mla-gqa-draft", warm=[answered()], rows=TWO)
    assert faults_of(report) == []
    [fault] = faults_of(replace(report, warm=[answered(disk=32)]))
    assert "32 tokens came from rows of TP 2" in fault
    assert faults_of(replace(report, tensor_parallel=(2, 2)))[0].startswith("GPL-3: only 0 of 1600")


@pytest.mark.usefixtures("made")
def test_replica_dedup_in_words() -> None:
    row, reader = row_lines(REPORT)
    assert row == (
        "one row on disk: 8192 bytes, 12288 without dedup at TP 2: every distinct byte once"
        " (2 layer(s) in 1 part(s))"
    )
    assert reader == "what TP 2 wrote, TP 1 read: 1 namespace(s)"
    report = replace(REPORT, model="tiny-mla-gqa-draft", rows=TWO)
    assert "depend on the number of ranks" in row_lines(report)[-1]


@pytest.mark.usefixtures("made")
def test_a_store_that_was_not_cold_is_said_to_be() -> None:
    report = replace(
        REPORT, store_was_cold=False, cold=[answered(disk=1584)], rows_before=REPORT.rows
    )
    assert faults_of(report) == []
    lines = "\n".join(summary_of(report))
    assert "the store was NOT cold: it held 1 namespace(s) of this model" in lines
    assert "took 1584 of 1600 tokens" in lines
    assert "first 200 ms, second 200 ms" in lines


@pytest.mark.parametrize(
    ("text", "ranks"), [("1", (1, 1)), ("2", (2, 2)), ("2,1", (2, 1)), ("1,2", (1, 2))]
)
def test_ranks_of_both_runs(text: str, ranks: tuple[int, int]) -> None:
    assert ranks_of_runs(text) == ranks


@pytest.mark.parametrize("text", ["", "0", "3", "2,1,2", "two", "-1", "1;2"])
def test_ranks_that_cannot_be(text: str) -> None:
    with pytest.raises(DemoError, match="--tp: expected"):
        ranks_of_runs(text)


@pytest.mark.usefixtures("made")
def test_row_bytes_with_and_without_replicas() -> None:
    mla, mixed, mqa = (MODELS[name] for name in ("tiny-mla", "tiny-mla-gqa-draft", "tiny-mqa"))
    assert mla.row_bytes() == 8192  # 2 layers x 16 tokens x 48 x 4 bytes, and padding
    assert mla.row_bytes_without_dedup(2) == 12288
    # 2 layers x 32 tokens x 48 x 4 bytes once, and the draft layer's 32 x 2 heads x 256
    assert mixed.row_bytes() == mixed.row_bytes_without_dedup(1) == 28672
    assert mixed.row_bytes_without_dedup(2) == 12288 * 2 + 16384
    assert (mqa.row_bytes(), mqa.row_bytes_without_dedup(2)) == (8192, 16384)


def test_a_rank_holds_a_whole_head_where_there_are_fewer_than_ranks() -> None:
    shape = LayerShape.of({**GQA, "num_key_value_heads": 2}, "bfloat16")
    assert shape.token_bytes == 256
    assert [shape.token_bytes_on_rank(tp) for tp in (1, 2, 4)] == [256, 128, 128]


def make_namespace(root: Path, name: str, model: str) -> None:
    (root / name / "rows").mkdir(parents=True)
    attributes = {"kvtier": {"model": "SomeModel", "rows": {"model_name": model}}}
    (root / name / "zarr.json").write_text(json.dumps({"attributes": attributes}))
    (root / name / "rows" / "zarr.json").write_text('{"shape": [100, 8192]}')


def test_only_rows_of_the_named_model(tmp_path: Path) -> None:
    """Which the directory does not tell: it is the same for a model by another name."""
    make_namespace(tmp_path, NAMESPACE, "tiny-mla")
    make_namespace(tmp_path, "SomeModel-" + 32 * "c", "tiny-mla-gqa-draft")
    assert rows_on_disk(tmp_path, "tiny-mla") == REPORT.rows
    assert len(rows_on_disk(tmp_path)) == 2


@pytest.mark.usefixtures("made")
def test_smaller_rows_of_other_groups_are_no_fault() -> None:
    rows = [RowsOnDisk("Gemma-" + 32 * "a", 100, 65536), RowsOnDisk("Gemma-" + 32 * "b", 100, 4096)]
    report = replace(REPORT, model="tiny-gemma3", rows=rows, row_bytes=65536)
    assert row_faults(report) == []
    assert row_lines(report)[0] == "one row of a smaller KV-cache group: 4096 bytes"
    assert row_faults(replace(report, rows=rows[1:])) == ["0 namespaces where 1 should be"]
    assert row_faults(replace(report, rows=rows, row_bytes=69632)) != []


def test_flags_of_a_draft_model_follow_the_number_of_ranks(made: Path) -> None:
    flags = MODELS["tiny-mla-gqa-draft"].flags(2)
    speculative = json.loads(flags[flags.index("--speculative-config") + 1])
    assert speculative["draft_tensor_parallel_size"] == 2
    assert speculative["model"] == str(made / "tiny-mla-gqa-draft" / "draft")
    assert ModelPreset("plain", 16, trained=False).flags(2) == []
