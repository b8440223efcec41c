from __future__ import annotations

import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import ConfigError, CorruptRecord, LayoutMismatch
from storage.header import SegmentGeometry
from storage.namespace import (
    Identity,
    is_namespace_directory,
    namespace_metadata,
    read_geometry,
    read_metadata,
    root_metadata,
    rows_metadata,
)

NAMES = [
    "a/b", "a-SEP-b", "a--b", "a_b", "../x", "A/b", "m" * 300, "m\n",
    unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"),
    "m", "..", ".", "/etc/passwd", "a\0b", "\u202e", "con", "a" * 60 + "/x",
]  # fmt: skip


def test_every_name_has_a_directory_of_its_own_inside_the_root(tmp_path: Path) -> None:
    directories = [Identity(name, {}).directory for name in NAMES]
    assert len({name.casefold() for name in directories}) == len(NAMES)
    for name in directories:
        assert is_namespace_directory(name)
        assert len(name.encode()) <= 255
        assert name.isascii()
        assert not name.startswith((".", "-"))
        assert os.path.realpath(tmp_path / name) == os.path.join(os.path.realpath(tmp_path), name)


@pytest.mark.parametrize("name", ["", " ", "\n"])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="model: expected a name"):
        Identity(name, {})


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
fields = st.dictionaries(st.text(max_size=3), json, max_size=3)


@settings(max_examples=50)
@given(fields)
def test_a_fingerprint_does_not_depend_on_the_order_of_fields(values: dict[str, object]) -> None:
    turned = dict(reversed(list(values.items())))
    one, two = Identity("m", values), Identity("m", turned)  # type: ignore[arg-type]
    assert one.fingerprint == two.fingerprint
    assert one.namespace == bytes.fromhex(one.fingerprint)


@settings(max_examples=50)
@given(fields, fields)
def test_any_difference_is_another_namespace(
    left: dict[str, object], right: dict[str, object]
) -> None:
    same = msgspec.json.encode(left, order="deterministic") == msgspec.json.encode(
        right, order="deterministic"
    )
    one, two = Identity("m", left), Identity("m", right)  # type: ignore[arg-type]
    assert (one.directory == two.directory) == same


def test_types_and_absence_are_differences() -> None:
    values: list[object] = [None, 0, False, "", "0", [], {}, "None"]
    found = {Identity("m", {"x": v}).fingerprint for v in values}  # type: ignore[dict-item]
    assert len({*found, Identity("m", {}).fingerprint}) == len(values) + 1


def test_names_are_the_same_in_fresh_interpreters_whatever_the_hash_seed() -> None:
    code = (
        "from storage.namespace import Identity, namespace_metadata as n\n"
        "i = Identity('org/m', {k: {'b': [1, 'x'], 'a': k} for k in ('z', 'q', 'a', 'm')})\n"
        "print(i.directory, n(i))"
    )
    outputs = set()
    for seed in (None, "0", "1"):
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        if seed is not None:
            env["PYTHONHASHSEED"] = seed
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_metadata_reads_back() -> None:
    geometry = SegmentGeometry(8192, 12)
    assert read_geometry(rows_metadata(geometry, 7), "here") == (geometry, 7)
    for raw in (root_metadata({"pid": 1}), namespace_metadata(Identity("m", {"a": 1}))):
        assert read_metadata(raw, "here")["node_type"] == "group"


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"{}", b'{"attributes": {}}', b'{"attributes": {"kvtier": 3}}', b"\xff"],
)
def test_what_is_not_ours_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptRecord, match="here: not the metadata of a kvtier store"):
        read_metadata(raw, "here")


def altered(raw: bytes, **changes: object) -> bytes:
    metadata = msgspec.json.decode(raw)
    metadata.update(changes)
    return msgspec.json.encode(metadata)


@pytest.mark.parametrize("version", [2, 10**9, "1", None, 1.5])
def test_a_newer_format_is_refused_by_name(version: object) -> None:
    raw = altered(root_metadata({}), attributes={"kvtier": {"format_version": version}})
    with pytest.raises(LayoutMismatch, match="here: format_version: expected at most 1"):
        read_metadata(raw, "here")


@pytest.mark.parametrize(
    "changes",
    [
        {"data_type": "uint16"},
        {"codecs": [{"name": "bytes"}]},
        {"fill_value": 1},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 8192]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [12, 8191]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": ["x", 8192]}}},
        {"shape": []},
        {"shape": [85, 8192]},
    ],
)
def test_an_array_that_is_not_one_of_rows_is_corrupt(changes: dict[str, object]) -> None:
    raw = altered(rows_metadata(SegmentGeometry(8192, 12), 7), **changes)
    with pytest.raises(CorruptRecord, match="here: the array"):
        read_geometry(raw, "here")
