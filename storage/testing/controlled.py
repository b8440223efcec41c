"""`ControlledDevice`: the faults of a device in another process, as a file says at each call.

A test writes a `Control` and the store that runs meanwhile meets it at its next call:

    Control(hang=["preadv"]).write(path)        # reads do not return ...
    Control(delay_s={"preadv": 0.2}).write(path)  # ... until this; from here they take 200 ms
    Control().write(path)                       # a good disk again

`is_hanging(path)` says whether a call has met the hang that is in force.
"""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

import msgspec

from storage.device import LocalDevice
from storage.errors import DeviceError
from storage.testing.faulty import Action, FaultyDevice

ANY = "*"
_POLL_S = 0.01
_FILE_BYTES = 4096  # of the control; behind it the checksum of the one under which a call hangs


class Control(msgspec.Struct, frozen=True):
    """What happens at calls of the device's methods, by name; `ANY` is all of them."""

    delay_s: dict[str, float] = {}
    """How long a call waits before it does its work."""
    hang: list[str] = []
    """Calls that wait until the file no longer names them."""
    errno: dict[str, int] = {}
    """Calls that fail and do nothing."""

    def write(self, path: Path) -> None:
        """Put it in force.  In place: its reader has the file open, also when it may open none."""
        encoded = msgspec.json.encode(self)
        assert len(encoded) <= _FILE_BYTES, "too many faults at once"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, encoded.ljust(_FILE_BYTES), 0)
        finally:
            os.close(fd)


def is_hanging(path: Path) -> bool:
    """Whether a call hangs, or did, under the control that is in force."""
    content = path.read_bytes()
    return content[_FILE_BYTES:] == _mark(content[:_FILE_BYTES])


def _mark(control: bytes) -> bytes:
    return zlib.crc32(control).to_bytes(4, "big")


class ControlledDevice(FaultyDevice):
    """A local device under the control of the file at `control`, which is there, for stores that
    run for long: it keeps no record of its calls.  Safe from any thread."""

    def __init__(self, control: Path) -> None:
        super().__init__(LocalDevice())
        self._fd = os.open(control, os.O_RDWR | os.O_CLOEXEC)

    def _read_control(self) -> tuple[Control, bytes]:
        """The control, and its mark."""
        while True:
            content = os.pread(self._fd, _FILE_BYTES, 0)
            try:
                return msgspec.json.decode(content, type=Control), _mark(content)
            except msgspec.DecodeError:  # read while it was written
                time.sleep(_POLL_S)

    def _strike(
        self,
        name: str,
        path: Path,
        offset: int = 0,  # noqa: ARG002
        size_bytes: int = 0,  # noqa: ARG002
    ) -> list[Action]:
        control, mark = self._read_control()
        while not {name, ANY}.isdisjoint(control.hang):
            os.pwrite(self._fd, mark, _FILE_BYTES)
            time.sleep(_POLL_S)
            control, mark = self._read_control()
        time.sleep(control.delay_s.get(name, control.delay_s.get(ANY, 0.0)))
        code = control.errno.get(name, control.errno.get(ANY))
        if code is not None:
            raise DeviceError(name, path, code)
        return []
