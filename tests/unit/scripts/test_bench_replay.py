"""The replay of traces in small, so that it can't rot, and what it says of bad input."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench.belady import belady_hit_rate
from scripts.bench.replay import replay
from storage.types import RowKey
from tiering.traces import BadTrace, Trace, read_traces

ROOT = Path(__file__).resolve().parents[3]


def write_trace(folder: Path, name: str, requests: Sequence[Sequence[int]]) -> None:
    lines = [json.dumps({"t": i / 2, "chunks": list(r), "in": 1}) for i, r in enumerate(requests)]
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def trace_of(requests: Sequence[Sequence[int]]) -> Trace:
    return Trace("t", [[RowKey(b"%d" % chunk) for chunk in request] for request in requests])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a person does: by its path, from anywhere."""
    program = str(ROOT / "scripts" / "bench" / "replay.py")
    return subprocess.run(
        [sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "120"},
    )


def test_a_small_run_says_everything(tmp_path: Path) -> None:
    documents = [[document * 10 + i for i in range(4)] for document in range(4)]
    write_trace(tmp_path, "two", [documents[i] for i in (0, 1, 2, 0, 1, 2, 3) * 9])
    write_trace(tmp_path, "one", [[0, 1], [0, 1, 2], [0, 3]])
    out = tmp_path / "out.json"
    done = run("--traces", str(tmp_path), "--capacity", "0.5,1", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "behind a region of 5%" in done.stdout
    found = json.loads(out.read_text())
    places = [(c["trace"], c["capacity"], c["policy"], c["region"]) for c in found["cells"]]
    assert places == [(t, c, "learned", 0) for t in ("one", "two") for c in (0.5, 1.0)]
    assert {c["policy"] for c in found["compared"]} == {"learned", "always", "second-touch"}
    whole = next(c for c in found["cells"] if (c["trace"], c["capacity"]) == ("one", 1.0))
    for rate in ("hit_rate", "belady", "infinite"):
        assert whole[rate] == pytest.approx(3 / 7)
    assert (whole["writes"], whole["written_per_hit"]) == (1.0, pytest.approx(4 / 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--traces", "{}/none"], "none: No such file"),
        (["--traces", "{}"], "expected files *.jsonl.gz, found none"),
        (["--traces", "{}/good", "--capacity", "0,1"], "fractions above 0"),
        (["--traces", "{}/good", "--admission", "sieve"], "learned, always, second-touch"),
        (["--traces", "{}/good", "--json", "{}/no/where.json"], "No such file"),
    ],
)
def test_bad_input_is_one_line_and_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "good").mkdir()
    write_trace(tmp_path / "good", "one", [[0, 1], [0, 1, 2]])
    done = run(*(argument.format(tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"t": 0, "chunks": [1]}\n{"t": 1}\n', mtime=0), "line 2: .*chunks"),
        (gzip.compress(b'{"t": 0, "chunks": [1]}\nno', mtime=0), "line 2: "),
        (gzip.compress(b'{"t": 0, "chunks": ["1"]}', mtime=0), "line 1: Expected `int`"),
        (gzip.compress(b'{"t": 0, "chunks": [1, 2, 1]}', mtime=0), "line 1: a chunk comes twice"),
        (gzip.compress(b"", mtime=0), "expected requests with chunks"),
        (gzip.compress(b'{"t": 0, "chunks": []}', mtime=0), "expected requests with chunks"),
        (b"plain text", "gzipped"),
        (gzip.compress(b'{"t": 0, "chunks": [1]}', mtime=0)[:-9], "end-of-stream"),
        (gzip.compress(b"", mtime=0)[:10] + b"\x07" * 20, "gz: .*invalid block type"),
    ],
)
def test_a_malformed_trace_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl.gz").write_bytes(content)
    with pytest.raises(BadTrace, match=message) as error:
        read_traces(tmp_path)
    assert "\n" not in str(error.value)


def test_a_chunk_hits_only_behind_its_prefix() -> None:
    """1 is gone when [1, 2] comes again: 2 is there, and no hit."""
    requests = [[1, 2], [3], [2, 4], [1, 2]]
    cell = replay(trace_of(requests), 0.5, 0.0, "always", "lru", belady=True)
    assert cell.slots == 2
    assert cell.hit_rate == 0
    assert cell.writes == 1.5


def test_a_region_in_front_is_served_first() -> None:
    requests = [[1, 2], [1, 2], [1, 2]]
    cell = replay(trace_of(requests), 1.0, 1.0, "always", "lru", belady=False)
    assert (cell.hit_rate, cell.disk_hit_rate) == (pytest.approx(4 / 6), 0)
    assert cell.written_per_hit is None


chains = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 4)).map(
        lambda doc: [doc[0] * 10 + i for i in range(doc[1])]
    ),
    min_size=1,
    max_size=40,
)


@given(chains, st.sampled_from(["learned", "always", "second-touch"]), st.sampled_from([0.2, 0.5]))
def test_nobody_passes_the_bounds(
    requests: list[list[int]], admission: str, capacity: float
) -> None:
    trace = trace_of(requests)
    cell = replay(trace, capacity, 0.0, admission, "lru", belady=True)
    assert cell.belady is not None
    assert cell.hit_rate <= cell.belady + 1e-9
    assert cell.belady <= cell.infinite + 1e-9
    assert belady_hit_rate(trace, trace.unique_count) == pytest.approx(cell.infinite)
