"""Bad settings: one line that names the setting, what was expected and what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from storage.errors import ConfigError
from tiering.config import Config, DiskSettings, refuse_shared_root
from tiering.tier_config import check_tiers
from tiering.vllm.plugin import check_command_line

ROOT = Path(__file__).resolve().parents[3]

GOOD: dict[str, Any] = {
    "cpu_bytes_to_use": "1GiB",
    "disk": {"root": "/var/lib/kvtier", "budget": "500GB"},
}


def test_good_settings() -> None:
    config = Config.parse(GOOD)
    assert config.region_bytes == 1 << 30
    assert "disk" in config.stores
    assert config.stores["disk"].budget_bytes == 500 * 10**9
    assert config.stores["disk"].reserve_bytes is None
    assert (config.stores["disk"].admission, config.stores["disk"].eviction) == ("learned", "lru")
    assert config.stores["disk"].write_bytes_per_day is None
    assert config.blocks_per_chunk == 1
    assert not Config.parse({"cpu_bytes_to_use": 4096}).stores
    assert Config.parse(_with(disk={"reserve": 0})).stores["disk"].reserve_bytes == 0


def _with(disk: dict[str, Any] | None = None, **top: Any) -> dict[str, Any]:
    return {**GOOD, "disk": {**GOOD["disk"], **(disk or {})}, **top}


_EXTRA = "kv_connector_extra_config"
FS = {"type": "fs", "root_dir": "/fs"}
TIER = {"type": "disk", "root": "/a", "budget": "1GB", "backpressure": {}}


def test_our_tier_among_an_engines_own() -> None:
    options = check_tiers([FS, {**TIER, "io_threads": 3}], "tiers")
    assert options is not None
    assert (options.root, options.io_threads) == (Path("/a"), 3)
    assert check_tiers([FS, "what vLLM makes of this is its affair"], "tiers") is None
    assert check_tiers([], "tiers") is None
    replicas = [{**TIER, "root": "/a/{dp_rank}"}]
    second = check_tiers(replicas, "tiers", 1, engines=2)
    assert second is not None
    assert second.root == Path("/a/1")
    with pytest.raises(ConfigError, match=r"^tiers\[0\].root: .* 2 data-parallel engines"):
        check_tiers([TIER], "tiers", engines=2)


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ([FS, {**TIER, "budget": "10XB"}], r"^tiers\[1\].budget: .*, got '10XB'$"),
        ([{**TIER, "buget": 1}], r"^tiers\[0\].buget: .*did you mean 'budget'\?\), got 1$"),
        ([{**TIER, "io_threads": "8"}], r"^tiers\[0\].io_threads: expected int, got '8'$"),
        ([{"type": "disk"}], r"^tiers\[0\].root: expected a value, got None$"),
        ([TIER, FS, TIER], r"^tiers\[2\].type: expected one 'disk', .*`roots`, got 'another'$"),
    ],
)
def test_bad_settings_of_our_tier_are_refused_by_place(tiers: list[Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_tiers(tiers, "tiers")


def _command_line(tiers: object, *flags: str) -> list[str]:
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
    connector = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    return ["vllm", "serve", "m", f"--kv-transfer-config={json.dumps(connector)}", *flags]


def test_our_tier_is_checked_on_the_command_line() -> None:
    check_command_line(_command_line([FS, TIER]))
    check_command_line(_command_line("not a list, as vLLM will say"))
    check_command_line(
        [
            "--kv-transfer-config",
            '{"kv_connector": "KvtierConnector", "kv_connector_extra_config": "x"}',
        ]
    )
    place = r"^kv_connector_extra_config.secondary_tiers\[1\]"
    with pytest.raises(ConfigError, match=place + ".budget: .*, got '10XB'$"):
        check_command_line(_command_line([FS, {**TIER, "budget": "10XB"}]))
    with pytest.raises(ConfigError, match=place + ".type: "):
        check_command_line(_command_line([TIER, TIER]))
    with pytest.raises(ConfigError, match=place + ".root: .* 2 data-parallel engines"):
        check_command_line(_command_line([FS, TIER], "--data-parallel-size", "2"))


def test_settings_are_checked_wherever_a_command_line_has_them(tmp_path: Path) -> None:
    place = r"^kv_connector_extra_config.disk.budget: expected .*, got '10XB'$"
    config = {"kv_connector": "KvtierConnector", _EXTRA: _with({"budget": "10XB"})}
    flags = ["--kv-transfer-config.kv_connector=KvtierConnector"]
    flags += [f"--kv_transfer_config.{_EXTRA}.cpu_bytes_to_use", "1GiB"]
    flags += [f"--kv-transfer-config.{_EXTRA}.disk.root", "/a"]
    budget = f"--kv-transfer-config.{_EXTRA}.disk.budget"
    for good in ("4000000", "256m", "1G", "256MB", "1.5GiB"):
        check_command_line([*flags, budget, good])
    chunks = f"--kv-transfer-config.{_EXTRA}.blocks_per_chunk"
    check_command_line([*flags, budget, "1G", chunks, "1k"])  # vLLM makes 1000 of it
    with pytest.raises(ConfigError, match=r"blocks_per_chunk: expected 1 to .*, got 1048576$"):
        check_command_line([*flags, budget, "1G", chunks, "1M"])
    with pytest.raises(ConfigError, match=r"disk.roots\[0\]: expected object, got '/a'$"):
        check_command_line([*flags, f"--kv-transfer-config.{_EXTRA}.disk.roots+", "/a,/b"])
    with pytest.raises(ConfigError, match=place):
        check_command_line([*flags, f"{budget}=10XB"])
    path = tmp_path / "vllm.yaml"
    for written in (config, json.dumps(config)):
        path.write_text(json.dumps({"port": 1, "kv-transfer-config": written}))
        with pytest.raises(ConfigError, match=place):
            check_command_line(["vllm", "serve", "--config", str(path)])


@pytest.mark.parametrize("text", ["", "[", "- 3", "kv-transfer-config: 3", None])
def test_a_file_that_cannot_be_read_is_vllms_affair(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "vllm.yaml"
    if text is not None:
        path.write_text(text)
    check_command_line(["vllm", "--config", str(path), "--kv-transfer-config.kv_connector"])
    whole = ["--kv-transfer-config.kv_connector", "x", "--kv-transfer-config.kv_connector.y", "1"]
    check_command_line(whole)


def _roots(*roots: tuple[str, str]) -> dict[str, Any]:
    drives = [{"root": root, "budget": budget} for root, budget in roots]
    return {"cpu_bytes_to_use": "1GB", "disk": {"roots": drives}}


def test_several_roots_are_drives_of_one_store() -> None:
    store = Config.parse(_roots(("/a", "1GB"), ("/b", "2GB"))).stores["disk"]
    assert (store.root, store.budget_bytes) == (Path("/a"), 10**9)
    assert [(d.root, d.budget_bytes) for d in store.more_drives] == [(Path("/b"), 2 * 10**9)]


def _tiers(*tiers: dict[str, Any], **top: Any) -> dict[str, Any]:
    """Each with what it needs, unless it says otherwise."""
    full = [
        {"type": "disk", "name": f"t{n}", "root": f"/t{n}", "budget": "1GB", **tier}
        for n, tier in enumerate(tiers)
    ]
    return {"cpu_bytes_to_use": "1GB", "secondary_tiers": full, **top}


def test_several_tiers_are_stores_in_order() -> None:
    raw = _tiers({"name": "nvme", "io_threads": 4}, {"name": "big-disk_2", "budget": "9GB"})
    stores = Config.parse(raw).stores
    assert list(stores) == ["nvme", "big-disk_2"]
    assert [store.root for store in stores.values()] == [Path("/t0"), Path("/t1")]
    assert (stores["nvme"].io_threads, stores["big-disk_2"].budget_bytes) == (4, 9 * 10**9)
    drives = {"roots": [{"root": "/a", "budget": "1GB"}], "root": None, "budget": None}
    assert Config.parse(_tiers(drives)).stores["t0"].root == Path("/a")
    assert not Config.parse(_tiers()).stores


@pytest.mark.parametrize(
    ("raw", "field", "found"),
    [
        ({}, "cpu_bytes_to_use", "None"),
        (_with(cpu_bytes_to_use=0), "cpu_bytes_to_use", "0"),
        (_with(cpu_bytes_to_use=True), "cpu_bytes_to_use", "True"),
        (_with(cpu_bytes_to_use=1.5), "cpu_bytes_to_use", "1.5"),
        (_with(blocks_per_chunk=0), "blocks_per_chunk", "0"),
        (_with(weights_fingerprint="headers"), "weights_fingerprint", "'headers'"),
        (_with(blocks_per_chunk="2"), "blocks_per_chunk", "'2'"),
        (_with(blocks_per_chunk=65537), "blocks_per_chunk", "65537"),
        (_with(promotion_timeout_s=float("inf")), "promotion_timeout_s", "inf"),
        (_with(dedup="\ud800"), "dedup", "'\\ud800'"),
        (_with({"read_timeout_s": 1e30}), "disk.read_timeout_s", "1e+30"),
        (_with({"root": "/a\n/b"}), "disk.root", "'/a\\n/b'"),
        (_with({"root": "/a\0"}), "disk.root", "'/a\\x00'"),
        (_with({"root": "~no-such-user/x"}), "disk.root", "'~no-such-user/x'"),
        (_roots(("/a", "1GB"), ("/b\t", "1GB")), "disk.roots[1].root", "'/b\\t'"),
        (_with({"segment_size": ""}), "disk.segment_size", "''"),
        (_with({"segment_size": 0}), "disk.segment_size", "0"),
        (_with({"budget": 2**60 + 1}), "disk.budget", f"{2**60 + 1}"),
        (_with(promotion_timeout_s=0), "promotion_timeout_s", "0.0"),
        (_with({"budget": "10XB"}), "disk.budget", "'10XB'"),
        (_with({"budget": -1}), "disk.budget", "-1"),
        (_with({"budget": "50%"}), "disk.budget", "'50%'"),
        (_with({"budget": "1MB", "segment_size": "2MB"}), "disk.budget", "'1MB'"),
        (_with({"root": " "}), "disk.root", "' '"),
        (_with({"root": 3}), "disk.root", "3"),
        (_with({"io_threads": 0}), "disk.io_threads", "0"),
        (_with({"roots": [{"root": "/a", "budget": "1GB"}]}), "disk.roots", "'both'"),
        (_roots(("/a", "1GB"), ("/a/b", "1GB")), "disk.roots[1].root", "'/a/b'"),
        (_roots(("/a/b/..", "1GB"), ("/a/c", "1GB")), "disk.roots[1].root", "'/a/c'"),
        (_roots(("/a", "1GB"), ("/b", "-1")), "disk.roots[1].budget", "'-1'"),
        (_roots((" ", "1GB")), "disk.roots[0].root", "' '"),
        (_with({"write_threads": 9}), "disk.write_threads", "9"),
        (_with({"write_queue": 0}), "disk.write_queue", "0"),
        (_with({"read_timeout_s": 0}), "disk.read_timeout_s", "0.0"),
        (_with({"write_timeout_s": -1}), "disk.write_timeout_s", "-1.0"),
        (_with({"admission": "sieve"}), "disk.admission", "'sieve'"),
        (_with({"eviction": ""}), "disk.eviction", "''"),
        (_with({"write_bytes_per_day": "-1"}), "disk.write_bytes_per_day", "'-1'"),
        (_with({"codec": "gzip"}), "disk.codec", "'gzip'"),
        (_with({"codec_always": True}), "disk.codec_always", "'none'"),
        ({"cpu_bytes_to_use": "1GB", "disk": {"root": "/x"}}, "disk.budget", "None"),
        (_tiers({}, disk=GOOD["disk"]), "secondary_tiers", "'both'"),
        (_tiers({}, {"type": "fs"}), "secondary_tiers[1].type", "'fs'"),
        (_tiers({}, {"type": 3}), "secondary_tiers[1].type", "3"),
        (_tiers({}, {"name": "t0"}), "secondary_tiers[1].name", "'t0'"),
        (_tiers({"name": "region"}), "secondary_tiers[0].name", "'region'"),
        (_tiers({"name": "A b"}), "secondary_tiers[0].name", "'A b'"),
        (_tiers({}, {"root": "/t0/sub"}), "secondary_tiers[1].root", "'/t0/sub'"),
        (_tiers({}, {"budget": "x"}), "secondary_tiers[1].budget", "'x'"),
        (_tiers({"io_threads": "4"}), "secondary_tiers[0].io_threads", "'4'"),
        ({**_tiers(), "secondary_tiers": [3]}, "secondary_tiers[0]", "3"),
        ({**_tiers(), "secondary_tiers": [{"type": "disk"}]}, "secondary_tiers[0].name", "None"),
        ({"cpu_bytes_to_use": "1GB", "disk": "/x"}, "disk", "'/x'"),
    ],
)
def test_bad_values(raw: dict[str, Any], field: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.parse(raw)
    message = str(error.value)
    assert message.startswith(f"kv_connector_extra_config.{field}: expected ")
    assert message.endswith(f", got {found}")
    assert "\n" not in message


def test_a_long_value_is_quoted_in_part() -> None:
    with pytest.raises(ConfigError) as error:
        Config.parse(_with({"budget": "9" * 5000}))
    assert len(str(error.value)) < 400
    assert str(error.value).endswith("999... (5002 characters)")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (
            _with(blocks_per_chunks=2),
            "blocks_per_chunks: expected a known setting (did you mean 'bl",
        ),
        (_with({"buget": "1GB"}), "disk.buget: expected a known setting (did you mean 'budget'?)"),
        (
            _tiers({}, {"buget": "1GB"}),
            "secondary_tiers[1].buget: expected a known setting (did you mean 'budget'?)",
        ),
        (
            _with({"max_byte": 1}),
            "disk.max_byte: expected a known setting (one of admission, budget",
        ),
    ],
)
def test_unknown_settings_are_refused_by_name(raw: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.parse(raw)
    assert text in str(error.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "deployments").glob("*.json")))
def test_presets_are_valid(path: Path) -> None:
    preset = json.loads(path.read_text())
    settings = preset["kv_connector_extra_config"]
    if preset["kv_connector"] == "KvtierConnector":
        Config.parse(settings)
    else:
        assert preset["kv_connector"] == "OffloadingConnector"
        assert check_tiers(settings["secondary_tiers"], "secondary_tiers") is not None


def test_the_readme_shows_every_setting_of_the_disk() -> None:
    readme = (ROOT / "README.md").read_text()
    for field in msgspec.structs.fields(DiskSettings):
        assert f"`disk.{field.name}`" in readme


def test_an_engine_of_a_data_parallel_rank_has_a_root_of_its_own() -> None:
    raw = _with(disk={"root": "/cache/{dp_rank}/kv"})
    stores = [Config.parse(raw, dp_rank=rank).stores["disk"] for rank in range(2)]
    assert [store and store.root for store in stores] == [Path("/cache/0/kv"), Path("/cache/1/kv")]
    refuse_shared_root(raw, 2)
    both = _roots(("/a/{dp_rank}", "1GB"), ("/b", "1GB"))
    for shared, root in ((GOOD, "/var/lib/kvtier"), (both, "/b")):
        refuse_shared_root(shared, 1)
        with pytest.raises(ConfigError) as caught:
            refuse_shared_root(shared, 2)
        assert str(caught.value) == (
            "kv_connector_extra_config.disk.root: expected a root for each of the 2 data-parallel "
            "engines of this node, each with the budget that is given: "
            f"\"{root}/{{dp_rank}}\", got '{root}'"
        )
    refuse_shared_root({"cpu_bytes_to_use": "1GB"}, 2)
    refuse_shared_root(_tiers({"root": "/a/{dp_rank}"}, {"root": "/b/{dp_rank}"}), 2)
    with pytest.raises(ConfigError, match=r"extra_config\.secondary_tiers\[1\]\.root: expected a"):
        refuse_shared_root(_tiers({"root": "/a/{dp_rank}"}, {"root": "/b"}), 2)


@pytest.mark.parametrize(
    ("flags", "is_refused"),
    [
        ("", False),
        ("--data-parallel-size 1", False),
        ("--data-parallel-size 2", True),
        ("--data_parallel_size=2", True),
        ("-dp 2", True),
        ("-dp 4 -dpl 2", True),
        ("-dp 2 --data-parallel-size-local 1", False),
        ("-dp 2 --data-parallel-rank 1", False),
        ("-dp 2 --nnodes 2", False),
        ("-dp 2 --data-parallel-backend=ray", False),
        ("-dp 2 -dpe", False),
    ],
)
def test_a_command_line_of_several_engines_on_one_root_is_refused(
    flags: str, is_refused: bool
) -> None:
    connector = {"kv_connector": "KvtierConnector", "kv_connector_extra_config": GOOD}
    line = ["vllm", "serve", "m", "--kv-transfer-config", json.dumps(connector), *flags.split()]
    if not is_refused:
        check_command_line(line)
        return
    with pytest.raises(ConfigError, match="data-parallel engines of this node"):
        check_command_line(line)
