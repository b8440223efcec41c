"""Who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _imports(folder: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path, node.module


def _offenders(folder: str, package: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path, name in _imports(folder)
        if name.split(".")[0] == package
    ]


def test_storage_never_imports_tiering() -> None:
    assert _offenders("storage", "tiering") == []


def test_storage_knows_no_device() -> None:
    assert _offenders("storage", "torch") == []


def test_only_the_adapter_imports_vllm() -> None:
    offenders = _offenders("storage", "vllm") + _offenders("tiering", "vllm")
    assert [o for o in offenders if not o.startswith("tiering/vllm/")] == []
    assert any(o.startswith("tiering/vllm/") for o in offenders), "the search finds nothing"


@pytest.mark.parametrize("package", ["pickle", "marshal", "shelve"])
def test_nothing_is_ever_unpickled(package: str) -> None:
    assert [o for folder in ("storage", "tiering") for o in _offenders(folder, package)] == []


def test_only_the_device_seam_opens_files() -> None:
    """Calls of `open`, `os.open`, `os.pread`... in storage outside of device.py."""
    banned = {"open", "preadv", "pwritev", "pread", "pwrite", "ftruncate", "posix_fallocate"}
    found = []
    for path in sorted((ROOT / "storage").rglob("*.py")):
        if path.name == "device.py" or "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            is_builtin = isinstance(function, ast.Name) and function.id == "open"
            is_os = (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and function.value.id == "os"
                and function.attr in banned
            )
            if is_builtin or is_os:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_the_core_imports_without_vllm() -> None:
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "vllm":
            raise ImportError("vllm is blocked")
sys.meta_path.insert(0, Refuse())
import storage.service.server, storage.service.client, tiering.manager, tiering.worker
import tiering.region, tiering.config, tiering.metrics, tiering.weights
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=280)
