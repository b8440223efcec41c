"""`FaultyDevice`: a device that fails where a test says so.

What it models: errors that the operating system reports (`Raise`), transfers that end early
(`Shorten`), calls that hang (`Wait`), bytes that change on their way (`FlipBit`), and the death of
the process at any operation, the torn write included (`Die`).  What it does not: the loss of
writes that the operating system had taken, which `power.PowerLossDevice` models.

To make every operation of a history fail in turn:

    for device in each_operation(LocalDevice, Raise(errno.EIO)):
        history(device)
        check()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path

from storage.device import Device, FileStat, LocalDevice, SpaceStat
from storage.errors import DeviceError


class Crash(BaseException):
    """The process died here, as far as the store can tell: nothing catches this to carry on."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a device's method `name`; `number` counts all calls from 1."""

    number: int
    name: str
    path: Path
    offset: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Raise:
    """The call fails with `errno` and does nothing."""

    errno: int


@dataclass(frozen=True, slots=True)
class Shorten:
    """A transfer moves at most `bytes_max`; the caller must come again."""

    bytes_max: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The call waits for `event` before it goes on; `reached` is set when it begins to wait."""

    event: threading.Event
    reached: threading.Event


@dataclass(frozen=True, slots=True)
class FlipBit:
    """One bit of what is read or written changes, at `offset` in the transfer."""

    offset: int


@dataclass(frozen=True, slots=True)
class Die:
    """The process dies in this call, of whose bytes the first `torn_bytes` are written."""

    torn_bytes: int = 0


Action = Raise | Shorten | Wait | FlipBit | Die


@dataclass(slots=True)
class Fault:
    """`action` at the calls that match: of method `op` (any if None) and `when`; of those the
    `nth` (all if None, counted from 1), and no more than `times`."""

    action: Action
    op: str | None = None
    nth: int | None = None
    when: Callable[[Operation], bool] = lambda _operation: True
    times: int | None = None
    seen: int = 0
    struck: int = 0

    def strikes(self, operation: Operation) -> bool:
        """Whether it happens at `operation`; counts."""
        if self.op not in (None, operation.name) or not self.when(operation):
            return False
        self.seen += 1
        if self.nth not in (None, self.seen) or self.struck == self.times:
            return False
        self.struck += 1
        return True


class FaultyDevice:
    """Wraps a device.  `faults` may be changed at any time; `operations` records every call."""

    def __init__(self, device: Device, *faults: Fault) -> None:
        self.faults = list(faults)
        self.operations: list[Operation] = []
        self.has_crashed = False
        self.refuses_direct = False
        """Open files without O_DIRECT but say nothing, so that odd lengths pass."""
        self._device = device
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()

    def add(
        self,
        action: Action,
        op: str | None = None,
        nth: int | None = None,
        *,
        when: Callable[[Operation], bool] = lambda _operation: True,
        times: int | None = None,
    ) -> Fault:
        """One more fault; it is in force until taken out of `faults`."""
        fault = Fault(action, op, nth, when, times)
        self.faults.append(fault)
        return fault

    def count(self, op: str) -> int:
        """Calls of method `op` so far."""
        return sum(operation.name == op for operation in self.operations)

    def abandon(self) -> None:
        """After a crash: close every descriptor, as the end of a process does."""
        self.has_crashed = True
        with self._lock:
            fds, self._paths = list(self._paths), {}
        for fd in fds:
            self._device.close(fd)

    def _strike(self, name: str, path: Path, offset: int = 0, size_bytes: int = 0) -> list[Action]:
        """Record a call; raise what must be raised; what remains is for transfers."""
        with self._lock:
            if self.has_crashed:
                raise Crash(f"{name} after the crash")
            operation = Operation(len(self.operations) + 1, name, path, offset, size_bytes)
            self.operations.append(operation)
            actions = [fault.action for fault in self.faults if fault.strikes(operation)]
        rest: list[Action] = []
        for action in actions:
            match action:
                case Raise(errno):
                    raise DeviceError(name, path, errno)
                case Wait(event, reached):
                    reached.set()
                    event.wait()
                case Die(torn_bytes) if torn_bytes == 0 or name not in ("pwritev", "write_file"):
                    self._die(operation)
                case _:
                    rest.append(action)
        return rest

    def _die(self, operation: Operation) -> None:
        self.has_crashed = True
        raise Crash(f"at operation {operation.number}, {operation.name} {operation.path}")

    def _path(self, fd: int) -> Path:
        return self._paths.get(fd, Path("?"))

    # -- transfers ------------------------------------------------------------------------------

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        size = sum(buffer.nbytes for buffer in buffers)
        actions = self._strike("preadv", self._path(fd), offset, size)
        flips = []
        for action in actions:
            if isinstance(action, Shorten):
                buffers = first_bytes(buffers, action.bytes_max)
            elif isinstance(action, FlipBit):
                flips.append(action.offset)
        count = self._device.preadv(fd, buffers, offset)
        for flip in flips:
            flip_bit(buffers, flip)
        return count

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        size = sum(buffer.nbytes for buffer in buffers)
        for action in self._strike("pwritev", self._path(fd), offset, size):
            if isinstance(action, Shorten):
                buffers = first_bytes(buffers, action.bytes_max)
            elif isinstance(action, FlipBit):
                buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
                flip_bit(buffers, action.offset)
            elif isinstance(action, Die):
                torn = first_bytes(buffers, action.torn_bytes)
                self._device.pwritev(fd, torn, offset)
                self._die(self.operations[-1])
        return self._device.pwritev(fd, buffers, offset)

    def write_file(self, path: Path, data: bytes) -> None:
        for action in self._strike("write_file", path, 0, len(data)):
            if isinstance(action, Die):
                self._device.write_file(path, data[: action.torn_bytes])
                self._die(self.operations[-1])
        self._device.write_file(path, data)

    # -- the rest -------------------------------------------------------------------------------

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        self._strike("open", path)
        direct = direct and not self.refuses_direct
        fd = self._device.open(path, create=create, direct=direct)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        path = self._path(fd)
        try:
            self._strike("close", path)
        except DeviceError:
            self._paths.pop(fd, None)
            self._device.close(fd)  # the kernel frees the number whatever it reports
            raise
        self._paths.pop(fd, None)
        self._device.close(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._strike("allocate", self._path(fd), 0, size_bytes)
        self._device.allocate(fd, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._strike("truncate", self._path(fd), 0, size_bytes)
        self._device.truncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        self._strike("sync", self._path(fd))
        self._device.sync(fd)

    def stat(self, path: Path) -> FileStat:
        self._strike("stat", path)
        return self._device.stat(path)

    def is_linked(self, fd: int) -> bool:
        self._strike("is_linked", self._path(fd))
        return self._device.is_linked(fd)

    def leads_to(self, path: Path, fd: int) -> bool:
        self._strike("leads_to", path)
        return self._device.leads_to(path, fd)

    def space(self, path: Path) -> SpaceStat:
        self._strike("space", path)
        return self._device.space(path)

    def list(self, path: Path) -> list[str]:
        self._strike("list", path)
        return self._device.list(path)

    def make_directory(self, path: Path) -> None:
        self._strike("make_directory", path)
        self._device.make_directory(path)

    def remove_directory(self, path: Path) -> None:
        self._strike("remove_directory", path)
        self._device.remove_directory(path)

    def remove(self, path: Path) -> None:
        self._strike("remove", path)
        self._device.remove(path)

    def rename(self, source: Path, target: Path) -> None:
        self._strike("rename", source)
        self._device.rename(source, target)
        for fd, path in list(self._paths.items()):
            if path == source:
                self._paths[fd] = target

    def read_file(self, path: Path) -> bytes:
        self._strike("read_file", path)
        return self._device.read_file(path)

    def lock(self, path: Path) -> int | None:
        self._strike("lock", path)
        fd = self._device.lock(path)
        if fd is not None:
            self._paths[fd] = path
        return fd


class BufferedDevice(LocalDevice):
    """Files of a file system that refuses O_DIRECT."""

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        if direct:
            raise DeviceError("open", path, EINVAL)
        return super().open(path, create=create)


def first_bytes(buffers: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    """The first `count` bytes of `buffers`, at least one."""
    kept = []
    left = max(1, count)
    for buffer in buffers:
        if left <= 0:
            break
        kept.append(buffer[:left])
        left -= buffer.nbytes
    return kept


def flip_bit(buffers: Sequence[memoryview], offset: int) -> None:
    """Flip the lowest bit of the byte at `offset`, if the buffers are that long."""
    for buffer in buffers:
        if offset < buffer.nbytes:
            buffer[offset] ^= 1
            return
        offset -= buffer.nbytes


def each_operation(
    make: Callable[[], Device], action: Action, op: str | None = None, limit: int = 2000
) -> Iterator[FaultyDevice]:
    """Devices whose operation 1, 2, ... (of method `op`) is struck, until one comes back whose
    fault was not reached: that was the clean run."""
    for number in range(1, limit):
        fault = Fault(action, op, nth=number)
        yield FaultyDevice(make(), fault)
        if not fault.struck:
            return
    raise AssertionError(f"no clean run within {limit} operations")
