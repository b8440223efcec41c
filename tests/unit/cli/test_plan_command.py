"""`kvtier plan` as a person runs it."""

from __future__ import annotations

import gzip
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tiering.cli.main import main
from tiering.config import Config
from tiering.presets import load_preset

FLASH = ["plan", "--preset", "deepseek-v4-flash", "--tp", "8"]
SIZED = [*FLASH, "--block-size", "256"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("width", [80, 140])
def test_plan_prints_a_table_and_a_configuration_that_works(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([*FLASH, "--disk", "177GB"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width
    for figure in ("5,013,504", "40,103,936", "199", "177 GB"):
        assert figure in printed
    *_, command = printed.partition("vllm serve MODEL")
    option, text = shlex.split(command)
    assert option == "--kv-transfer-config"
    document = json.loads(text)
    assert document["kv_connector"] == "KvtierConnector"
    config = Config.parse(document["kv_connector_extra_config"])
    assert "disk" in config.stores
    assert 170e9 < config.stores["disk"].budget_bytes < 177e9
    assert config.region_bytes == 5 << 30


def test_plan_has_no_configuration_for_a_disk_that_holds_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*FLASH, "--disk", "1MB"]) == 2
    assert "--disk: expected room for one row at least" in capsys.readouterr().err
    assert plan(capsys, *FLASH, "--disk", "20MB")["budget_bytes"] < 20e6


@pytest.mark.parametrize(
    ("preset", "tp", "rows"),
    [
        ("deepseek-v2-lite", 2, (995_328, 499_712)),
        ("deepseek-v4-flash", 8, (40_103_936, 5_013_504)),
        ("glm-5.3", 8, (32_071_680, 4_009_984)),
        ("deepseek-v3.2-exp", 8, (27_619_328, 3_452_928)),
    ],
)
def test_plan_of_a_preset_has_the_known_rows(
    preset: str, tp: int, rows: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(capsys, "plan", "--preset", preset, "--tp", str(tp))
    assert (found["row_bytes_without_dedup"], found["row_bytes"]) == rows
    assert found["kv_transfer_config"] is None  # nobody said how much disk there is
    worker_bytes = str(load_preset(preset).measured_worker_bytes)
    own = plan(capsys, "plan", "--worker-bytes", worker_bytes, "--tp", str(tp))
    assert (own["row_bytes_without_dedup"], own["row_bytes"]) == rows


def test_plan_for_expected_tokens_says_what_fits_and_no_more_than_the_disk(
    capsys: pytest.CaptureFixture[str],
) -> None:
    roomy = plan(capsys, *SIZED, "--tokens", "2M", "--disk", "177GB")
    assert roomy["budget_bytes"] < 60e9  # 2.2 million tokens of 50,930 per GB
    assert roomy["curve"]["points"][-1]["hit_rate"] == 1
    tight = plan(capsys, *SIZED, "--tokens", "20M", "--disk", "177GB")
    assert tight["budget_bytes"] == 175_000_000_000
    shares = [point["hit_rate"] for point in tight["curve"]["points"]]
    without = [point["hit_rate"] for point in tight["curve"]["points_without_dedup"]]
    assert shares == sorted(shares)
    assert all(low < high for low, high in zip(without, shares, strict=True))
    worn = plan(capsys, *SIZED, "--tokens", "2M", "--tokens-per-day", "1M", "--endurance", "1.2PB")
    assert worn["written_bytes_per_day"] == pytest.approx(1e6 * 5_013_504 / 256, abs=1)
    assert worn["endurance"]["bytes_per_day"] == int(1.2e15 / 5 / 365)


def test_plan_limits_writes_that_would_wear_the_drive_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    drive = ["--tokens", "2M", "--endurance", "365TB", "--years", "1"]  # 1 TB a day
    for per_day, limit in (("40M", None), ("100M", 10**12)):
        found = plan(capsys, *SIZED, *drive, "--tokens-per-day", per_day)
        settings = found["kv_transfer_config"]["kv_connector_extra_config"]
        config = Config.parse(settings)
        assert "disk" in config.stores
        assert config.stores["disk"].write_bytes_per_day == limit


def write_trace(path: Path, rounds: int) -> Path:
    """Four documents of eight chunks each, asked for in turns, a request every ten seconds."""
    requests = [[document * 8 + i for i in range(8)] for document in range(4)] * rounds
    lines = [json.dumps({"t": 10 * i, "chunks": r}) for i, r in enumerate(requests)]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def test_plan_replays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "t.jsonl.gz", 10)
    found = plan(capsys, *SIZED, "--trace", str(trace))
    points = found["curve"]["points"]
    assert points[-1]["hit_rate"] == found["curve"]["best"] == pytest.approx(0.9)
    assert points[-1]["hit_rate"] > points[0]["hit_rate"]
    # 32 chunks of 512 tokens, written once in 390 seconds.
    daily = 32 * 512 * 5_013_504 / 256 * 86_400 / 390
    assert points[-1]["written_bytes_per_day"] == pytest.approx(daily, rel=1e-6)
    assert found["budget_bytes"] == pytest.approx(points[-1]["budget_bytes"], rel=0.01)
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    assert plan(capsys, *SIZED, "--trace", str(plain)) == found


@pytest.mark.parametrize("source", ["--trace", "--tokens", None])
def test_plan_draws_a_picture(
    tmp_path: Path, source: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    trace = write_trace(tmp_path / "t.jsonl.gz", 3)
    more = {"--trace": ["--trace", str(trace)], "--tokens": ["--tokens", "1M"], None: []}[source]
    picture = tmp_path / "curve.png"
    assert main([*SIZED, *more, "--disk", "20GB", "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "MODEL: expected one of"),
        (["plan", "x", "--preset", "gqa-70b"], "MODEL: expected one of"),
        (["plan", "--preset", "deepseek-v4"], "did you mean deepseek-v4-flash"),
        (["plan", "/nowhere"], "/nowhere: No such file"),
        (["plan", "--preset", "gqa-70b", "--dtype", "fp8"], "--dtype"),
        (["plan", "--preset", "gqa-70b", "--block-size", "32"], "--block-size"),
        (["plan", "--preset", "gqa-70b", "--tp", "3"], "tp: expected a divisor"),
        (["plan", "--worker-bytes", "100"], "--tp"),
        (["plan", "--worker-bytes", "0", "--tp", "2"], "--worker-bytes"),
        ([*FLASH, "--disk", "much"], "--disk: expected a size"),
        ([*FLASH, "--tokens", "5"], "--tokens: expected --block-size with it"),
        ([*FLASH, "--trace", "x"], "--trace: expected --block-size with it"),
        ([*SIZED, "--tokens", "-5"], "--tokens: expected a number above 0"),
        ([*FLASH, "--tokens", "5", "--trace", "x"], "--trace: expected either"),
        ([*SIZED, "--trace", "/nowhere.jsonl"], "/nowhere.jsonl: No such file"),
        ([*FLASH, "--endurance", "1DWPD"], "--endurance: expected --disk"),
        ([*FLASH, "--disk", "1TB", "--plot", "curve.doc"], "--plot: expected a file .png"),
        ([*FLASH, "--disk", "1TB", "--plot", "/nowhere/curve.png"], "--plot: expected"),
        ([*FLASH, "--blocks-per-chunk", "0"], "blocks-per-chunk"),
    ],
)
def test_plan_refuses_bad_input_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err
