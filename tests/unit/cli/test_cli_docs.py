"""The documentation is true: commands, settings, metrics, links, and the format with its reader."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from scripts import metrics_reference
from scripts.config_reference import REFERENCE, reference
from storage.codec import CODEC_NAMES, NO_CODEC
from storage.header import decode_header
from storage.header import key_of as name_in
from storage.testing.contract import StoreHarness
from storage.testing.mixed import MixedHarness, keys_of, mixed_row_of
from storage.testing.rows import key_of, row_of
from storage.types import SlotId
from tiering.cli.main import app
from tiering.config import Config, DiskSettings, Settings
from tiering.exporter import STANDALONE
from tiering.metrics import ALL, Kind
from tiering.traces import read_trace

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
Reader = Callable[[Path], dict[bytes, bytes]]


def page_id(page: Path) -> str:
    return page.name


def test_docs_of_the_settings_are_those_of_the_code() -> None:
    assert REFERENCE.read_text() == reference(), "run python -m scripts.config_reference"
    for kind in (Settings, DiskSettings):
        for field in msgspec.structs.fields(kind):
            assert f"{field.encode_name}`\n" in reference()


def test_docs_of_the_metrics_are_those_of_the_code() -> None:
    expected = metrics_reference.reference()
    found = metrics_reference.REFERENCE.read_text()
    assert found == expected, "run python -m scripts.metrics_reference"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_docs_name_settings_metrics_and_commands_that_are_there(page: Path) -> None:
    text = page.read_text()
    settings = {field.encode_name for field in msgspec.structs.fields(DiskSettings)}
    assert set(re.findall(r"`disk\.(\w+)`", text)) <= settings
    exported = (*ALL, *STANDALONE)
    metrics = {m.name + ("_total" if m.kind is Kind.COUNTER else "") for m in exported}
    assert set(re.findall(r"kvtier:\w+", text)) <= metrics
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(re.findall(r"^ {4,}kvtier (\w+)", text, re.MULTILINE)) <= commands
    assert set(re.findall(r"`kvtier (\w+)", text)) <= commands


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_docs_link_to_what_is_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_docs_show_configurations_that_work() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    assert blocks, "no page shows a configuration"
    for block in blocks:
        settings = json.loads(block)["kv_connector_extra_config"]
        assert Config.parse(settings).stores, "a disk is what they are about"


def test_docs_make_a_trace_that_plan_reads(tmp_path: Path) -> None:
    names = code_of("operations.md")
    shared = list(range(1024))
    lines = [names["line_of_trace"](i, [*shared, *range(i, i + 700)]) for i in range(4)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    trace = read_trace(path)
    assert [len(request) for request in trace.requests] == [3, 3, 3, 3]  # of 1,724 tokens
    assert trace.unique_count == 2 + 4
    assert trace.seconds == 3


def code_of(page: str) -> dict[str, Any]:
    """What the one Python block of a page defines."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    assert not re.search("storage|tiering", code), "it must stand alone"
    names: dict[str, Any] = {}
    exec(compile(code, page, "exec"), names)
    return names


# -- the format ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def read_namespace() -> Reader:
    """The reader of docs/format.md, exactly as it stands there."""
    reader: Reader = code_of("format.md")["read_namespace"]
    return reader


def test_docs_reader_reads_a_store_that_evicted(memory_path: Path, read_namespace: Reader) -> None:
    harness = StoreHarness(memory_path / "root")
    for first in range(0, 60, 6):
        harness.write([key_of(i) for i in range(first, first + 6)])
    stored = harness.keys()
    expected = {bytes(key): row_of(key, harness.row_bytes) for key in stored}
    assert len(expected) == harness.capacity_rows
    directory = harness.rows.directory.parent
    assert read_namespace(directory) == expected  # beside the store that is running
    harness.close()
    assert read_namespace(directory) == expected


@pytest.mark.parametrize("codec", [name for name in CODEC_NAMES if name != NO_CODEC])
def test_docs_reader_reads_all_size_classes(
    codec: str, memory_path: Path, read_namespace: Reader
) -> None:
    harness = MixedHarness(memory_path / "root", codec)
    keys = [key for kind in range(4) for key in keys_of(kind, 3)]
    for key in keys:
        harness.write([key])
    assert len(harness.segments_by_class) >= 3
    assert set(harness.rows.keys()) == set(keys)
    expected = {bytes(key): mixed_row_of(key) for key in keys}
    harness.close()
    assert read_namespace(harness.rows.directory.parent) == expected


def test_docs_reader_takes_nothing_that_is_damaged(
    memory_path: Path, read_namespace: Reader
) -> None:
    harness = StoreHarness(memory_path / "root")
    keys = [key_of(i) for i in range(4)]
    harness.write(keys[:2])
    harness.write(keys[2:])
    directory = harness.rows.directory.parent
    geometry = harness.rows.geometry
    namespace = harness.identity.namespace
    harness.close()
    (path,) = directory.glob("rows/c/*/0")
    whole = path.read_bytes()
    entries = decode_header(geometry, whole[: geometry.header_bytes], namespace).entries
    (slot,) = [SlotId(i) for i in range(len(entries)) if name_in(entries, i) == keys[0]]
    before = read_namespace(directory)
    assert set(before) == {bytes(key) for key in keys}

    def damaged(offset: int) -> dict[bytes, bytes]:
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        return read_namespace(directory)

    for offset in (0, 100, geometry.row_bytes):  # in the row, and in its trailer
        found = damaged(geometry.row_offset(slot) + offset)
        assert found == {key: row for key, row in before.items() if key != keys[0]}
    for copy in (0, 1):  # the other copy of the table names these rows, or older ones
        key_offset = geometry.table_offset(copy) + 48 + 104 * slot + 32
        found = damaged(key_offset)  # another name for a row that is whole
        assert found.items() <= before.items()
    path.write_bytes(whole[: geometry.row_offset(slot) + 10])
    assert keys[0] not in read_namespace(directory)
    path.write_bytes(whole)
    other = directory.rename(directory.with_name(directory.name[:-32] + 32 * "0"))
    assert read_namespace(other) == {}  # these keys name rows of another namespace
    directory = other.rename(directory)
    path.write_bytes(b"")
    assert read_namespace(directory).items() <= before.items()


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_docs_say_how_the_fingerprint_is_made(codec: str, memory_path: Path) -> None:
    harness = StoreHarness(memory_path / "root", codec=codec)
    harness.write([key_of(0)])
    harness.close()
    directory = harness.rows.directory.parent
    namespace = json.loads((directory / "zarr.json").read_bytes())["attributes"]["kvtier"]
    plain = {"format": 1, "model": namespace["model"], "fields": namespace["identity"]}
    array = json.loads((directory / "rows" / "zarr.json").read_bytes())
    inner = array["codecs"][0]["configuration"]["codecs"]
    if codec != NO_CODEC:
        (plain["codec"],) = [entry for entry in inner if entry["name"] == "blosc"]
    encoded = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    fingerprint = hashlib.sha256(encoded.encode()).hexdigest()[:32]
    assert namespace["fingerprint"] == fingerprint
    assert directory.name.endswith(f"-{fingerprint}")
    assert namespace["format_version"] == 1
