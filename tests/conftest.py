"""Fixtures of all tests.  Files go to `tmp_path`, that is to TMPDIR: a file system with O_DIRECT
is best, since that is the store's usual way."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from storage.device import LocalDevice, supports_direct

# Servers of tests are on this machine: a proxy of the environment has no business with them.
os.environ.update(NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
# Programs write as into a file, whatever the terminal or the service that runs the tests is.
for _name in ("COLUMNS", "LINES", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS"):
    os.environ.pop(_name, None)

# The largest store of a test has 600 segments, each an open file.
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
_files = 1024 if _hard == resource.RLIM_INFINITY else min(1024, _hard)
if _soft != resource.RLIM_INFINITY and _soft < _files:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_files, _hard))

settings.register_profile(
    "kvtier",
    deadline=None,  # disks and shared cores: a slow example is no finding
    # A run that decides about a change asks the same each time; all others look for more.
    derandomize="KVTIER_CI_RUN" in os.environ,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("kvtier")


@pytest.fixture
def direct_path(tmp_path: Path) -> Path:
    """A directory that takes O_DIRECT."""
    if not supports_direct(LocalDevice(), tmp_path):
        pytest.skip(f"{tmp_path} takes no O_DIRECT: set TMPDIR")
    return tmp_path


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """A directory on tmpfs, for histories of many small operations; else `tmp_path`."""
    try:
        directory = Path(tempfile.mkdtemp(prefix="kvtier-test-", dir="/dev/shm"))
    except OSError:
        yield tmp_path
        return
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mount() -> Iterator[Callable[..., Path]]:
    """`mount("tmpfs", "size=8m")`, `mount("ext4", size_bytes=24 << 20, mkfs=("-m", "20"))`: an
    empty file system of its own.  Skips without the right to mount."""
    mounted: list[Path] = []
    # Not below tmp_path: pytest removes those of runs that were killed, and must meet no mount.
    scratch = Path(tempfile.mkdtemp(prefix="kvtier-test-disk-", dir="/var/tmp"))

    def run(*command: str) -> None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except FileNotFoundError:
            pytest.skip(f"there is no {command[0]}")
        if done.returncode:
            pytest.skip(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")

    def make(
        kind: str, options: str = "", size_bytes: int = 24 << 20, mkfs: tuple[str, ...] = ()
    ) -> Path:
        if os.geteuid():
            pytest.skip("mounting needs root")
        at = scratch / f"disk{len(mounted)}"
        at.mkdir()
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", options, "kvtier-test", str(at))
        else:
            image = scratch / f"image{len(mounted)}"
            with image.open("wb") as file:
                file.truncate(size_bytes)
            run(f"mkfs.{kind}", "-q", "-F", *mkfs, str(image))
            run("mount", "-o", ",".join(filter(None, ("loop", options))), str(image), str(at))
        mounted.append(at)
        return at

    yield make
    for at in mounted:
        subprocess.run(["umount", str(at)], check=True, timeout=60)
    shutil.rmtree(scratch)


@pytest.fixture(autouse=True)
def _no_io_thread_is_left() -> Iterator[None]:
    """Every store that a test opened is closed, or abandoned and idle, when it ends."""
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 30.0
    while left := [
        thread
        for thread in set(threading.enumerate()) - before
        if thread.name.startswith("kvtier-io")
    ]:
        if time.monotonic() > end:
            pytest.fail(f"I/O threads are left: {left}")
        time.sleep(0.005)
