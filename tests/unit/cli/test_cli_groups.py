"""`kvtier du` and `ls` of an engine whose KV-cache groups have rows of their own sizes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from storage.facts import RowFacts
from storage.namespace import Identity, WantedRows
from storage.options import StoreOptions
from storage.store import DiskStore
from storage.survey import survey_root
from storage.testing.rows import aligned_rows
from storage.types import RowKey
from tiering.cli.figures import root_figures
from tiering.cli.main import main

LARGE, SMALL = 8 * 4096, 2 * 4096
TOKENS = (16, 16, 16)


def key(group: int, number: int) -> RowKey:
    return RowKey(hashlib.sha256(b"%d" % number).digest() + group.to_bytes(4, "big"))


@pytest.fixture
def root(memory_path: Path) -> Path:
    """Two namespaces of one engine: groups 0 and 2 with large rows, group 1 with small ones."""
    root = memory_path / "root"
    options = StoreOptions(root, 4_000_000, segment_bytes=200_000, admission="always")
    common = {"dtype": "bf16", "groups": [["a"], ["b"], ["c"]]}
    with DiskStore.open(options) as store:
        large, small = store.open_all(
            [
                WantedRows(
                    Identity("m", {**common, "layers": [["x", size]], "row_of_groups": numbers}),
                    size,
                    RowFacts(TOKENS, 1, 1, size, groups=tuple(numbers), largest_row_bytes=LARGE),
                )
                for size, numbers in ((LARGE, [0, 2]), (SMALL, [1]))
            ]
        )
        for number in range(10):
            large.write([key(0, number), key(2, number)], aligned_rows(2, LARGE))
            small.write([key(1, number)], aligned_rows(1, SMALL))
    return root


def test_cli_du_counts_an_engines_tokens_once_and_what_its_groups_save(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["du", str(root), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    by_groups = {tuple(one["groups"]): one for one in found["namespaces"]}
    assert by_groups[0, 2]["saved_by_groups_bytes"] == 0
    assert by_groups[1,]["saved_by_groups_bytes"] == 10 * (LARGE - SMALL)
    assert by_groups[0, 2]["tokens"] == by_groups[1,]["tokens"] == 160
    assert found["total"]["tokens"] == 160
    assert found["total"]["saved_by_groups_bytes"] == 10 * (LARGE - SMALL)
    assert main(["du", str(root)]) == 0
    assert "246 KB saved by rows of each group's own size" in capsys.readouterr().out


def test_cli_du_says_how_many_tokens_of_all_groups_fit(root: Path) -> None:
    """What it says fits, to the coarseness of segments, and not much more does."""
    fits = root_figures(survey_root(root), 1e9).tokens_that_fit
    assert fits is not None
    chunks, room = fits // 16, 4_000_000 - root_figures(survey_root(root), 1e9).charged_bytes
    assert 0.5 * room < chunks * (2 * LARGE + SMALL) < room


def test_cli_ls_names_the_groups(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", str(root), "--json"]) == 0
    assert sorted(one["groups"] for one in json.loads(capsys.readouterr().out)) == [[0, 2], [1]]
    assert main(["ls", str(root)]) == 0
    assert {"0,2", "1"} <= set(capsys.readouterr().out.split())


def test_cli_verify_reads_every_size(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(root)]) == 0
    assert "30 rows" in " ".join(capsys.readouterr().out.split())
