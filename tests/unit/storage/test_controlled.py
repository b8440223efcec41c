"""The device that a file controls: what a fault of a running store is made of."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import pytest

from storage.errors import DeviceError
from storage.testing.controlled import Control, ControlledDevice, is_hanging

HANG_S = 60.0


@pytest.fixture
def control(tmp_path: Path) -> Path:
    path = tmp_path / "control.json"
    Control().write(path)
    return path


def test_calls_fail_by_name_until_the_file_says_otherwise(tmp_path: Path, control: Path) -> None:
    device = ControlledDevice(control)
    Control(errno={"write_file": errno.EROFS}).write(control)
    with pytest.raises(DeviceError, match="EROFS"):
        device.write_file(tmp_path / "f", b"1")
    assert not (tmp_path / "f").exists()
    assert device.list(tmp_path) == ["control.json"], "other calls go well"
    Control().write(control)
    device.write_file(tmp_path / "f", b"1")
    Control(errno={"*": errno.EIO}).write(control)
    for call in (device.read_file, device.stat):
        with pytest.raises(DeviceError, match="EIO"):
            call(tmp_path / "f")


def test_a_call_hangs_until_the_file_lets_go_of_it(tmp_path: Path, control: Path) -> None:
    device = ControlledDevice(control)
    (tmp_path / "f").write_bytes(b"content")
    Control(hang=["read_file"]).write(control)
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.append(device.read_file(tmp_path / "f")))
    assert not is_hanging(control)
    thread.start()
    end = time.monotonic() + HANG_S
    while not is_hanging(control):
        assert time.monotonic() < end
        time.sleep(0.001)
    thread.join(0.1)
    assert thread.is_alive()
    Control(hang=["stat"]).write(control)
    thread.join(HANG_S)
    assert read == [b"content"]
    assert not is_hanging(control), "under another control"
