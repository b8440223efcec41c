from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.device import (
    LocalDevice,
    aligned_buffer,
    exists,
    read_fully,
    replace_file,
    reserve,
    supports_direct,
    write_fully,
)
from storage.errors import CorruptRecord, DeviceError
from storage.testing.faulty import BufferedDevice, Fault, FaultyDevice, Raise, Shorten
from storage.testing.rows import files_under


def test_transfers_go_on_until_all_bytes_are_moved(tmp_path: Path) -> None:
    device = FaultyDevice(LocalDevice(), Fault(Shorten(1000)))
    fd = device.open(tmp_path / "f", create=True)
    data = os.urandom(65536)
    parts = [memoryview(data)[:100], memoryview(data)[100:100], memoryview(data)[100:]]
    write_fully(device, fd, parts, 4096)
    assert (tmp_path / "f").read_bytes() == bytes(4096) + data
    buffers = [memoryview(bytearray(n)) for n in (1, 0, 999, 64536)]
    read_fully(device, fd, buffers, 4096, "here")
    assert b"".join(buffers) == data
    assert device.count("pwritev") == device.count("preadv") == 66
    device.close(fd)


def test_a_file_that_ends_early_is_corrupt_not_old_bytes(tmp_path: Path) -> None:
    device = LocalDevice()
    fd = device.open(tmp_path / "f", create=True)
    write_fully(device, fd, [memoryview(bytes(5000))], 0)
    with pytest.raises(CorruptRecord, match="here: file ends at 5000"):
        read_fully(device, fd, [memoryview(bytearray(6000))], 0, "here")
    device.close(fd)


def test_an_error_names_the_file_as_it_is_called_now(tmp_path: Path) -> None:
    device = LocalDevice()
    fd = device.open(tmp_path / "made.partial", create=True)
    device.rename(tmp_path / "made.partial", tmp_path / "made")
    with pytest.raises(DeviceError) as error:
        device.truncate(fd, -1)
    assert error.value.path == tmp_path / "made"
    device.close(fd)


def test_a_write_of_nothing_is_an_error_not_a_loop(tmp_path: Path) -> None:
    class Stuck(LocalDevice):
        def pwritev(self, *_: object) -> int:
            return 0

    device = Stuck()
    fd = device.open(tmp_path / "f", create=True)
    with pytest.raises(DeviceError):
        write_fully(device, fd, [memoryview(b"x")], 0)
    device.close(fd)


def test_errors_name_operation_path_and_errno(tmp_path: Path) -> None:
    device = LocalDevice()
    missing = tmp_path / "no" / "f"
    calls: list[Callable[[], object]] = [
        lambda: device.open(missing),
        lambda: device.stat(missing),
        lambda: device.space(missing),
        lambda: device.list(missing),
        lambda: device.remove(missing),
        lambda: device.remove_directory(missing),
        lambda: device.rename(missing, tmp_path / "g"),
        lambda: device.read_file(missing),
        lambda: device.write_file(missing, b""),
        lambda: device.lock(missing),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match=r"no/f: No such file or directory \(ENOENT\)") as e:
            call()
        assert e.value.errno == errno.ENOENT
        assert isinstance(e.value.__cause__, OSError)
    for use in (
        lambda: device.preadv(10**6, [memoryview(bytearray(1))], 0),
        lambda: device.pwritev(10**6, [memoryview(b"x")], 0),
        lambda: device.allocate(10**6, 1),
        lambda: device.truncate(10**6, 1),
        lambda: device.sync(10**6),
        lambda: device.close(10**6),
    ):
        with pytest.raises(DeviceError, match="EBADF"):
            use()


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    link = tmp_path / "link"
    link.symlink_to("target")
    device = LocalDevice()
    for call in (
        lambda: device.open(link),
        lambda: device.open(link, create=True),
        lambda: device.write_file(link, b"x"),
        lambda: device.read_file(link),
    ):
        with pytest.raises(DeviceError):
            call()
    assert device.stat(link).size_bytes == len("target")
    (tmp_path / "dirlink").symlink_to(tmp_path)
    assert not device.stat(tmp_path / "dirlink").is_directory
    assert (tmp_path / "target").read_bytes() == b"precious"


def test_files_and_directories_are_the_owners_alone(tmp_path: Path) -> None:
    device = LocalDevice()
    device.make_directory(tmp_path / "a" / "b")
    device.make_directory(tmp_path / "a" / "b")
    device.write_file(tmp_path / "a" / "b" / "f", b"x")
    device.close(device.open(tmp_path / "a" / "b" / "g", create=True))
    for directory in (tmp_path / "a", tmp_path / "a" / "b"):
        assert directory.stat().st_mode & 0o777 == 0o700
    for name in "fg":
        assert (tmp_path / "a" / "b" / name).stat().st_mode & 0o777 == 0o600


def test_free_space_is_what_this_user_may_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Stat:
        f_frsize, f_bsize, f_blocks, f_bfree, f_bavail = 4096, 1 << 20, 2000, 1000, 10
        f_files, f_favail = 9, 7

    monkeypatch.setattr(os, "statvfs", lambda _path: Stat)
    assert LocalDevice().space(tmp_path) == (2000 * 4096, 40960, 9, 7)


def test_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    for op in ("write_file", "rename"):
        replace_file(LocalDevice(), tmp_path / "f", b"old")
        faulty = FaultyDevice(LocalDevice(), Fault(Raise(errno.ENOSPC), op))
        with pytest.raises(DeviceError, match="ENOSPC"):
            replace_file(faulty, tmp_path / "f", b"new")
        assert files_under(tmp_path) == ["f"]
        assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_preallocation_a_file_gets_its_size_all_the_same(tmp_path: Path, code: int) -> None:
    device = FaultyDevice(LocalDevice(), Fault(Raise(code), "allocate"))
    fd = device.open(tmp_path / "f", create=True)
    reserve(device, fd, 1 << 20)
    assert device.stat(tmp_path / "f").size_bytes == 1 << 20
    device.close(fd)


def test_a_full_disk_is_not_taken_for_one_without_preallocation(tmp_path: Path) -> None:
    device = FaultyDevice(LocalDevice(), Fault(Raise(errno.ENOSPC), "allocate"))
    fd = device.open(tmp_path / "f", create=True)
    with pytest.raises(DeviceError, match="ENOSPC"):
        reserve(device, fd, 1 << 20)
    device.close(fd)


def test_preallocated_bytes_are_allocated(tmp_path: Path) -> None:
    device = LocalDevice()
    fd = device.open(tmp_path / "f", create=True)
    reserve(device, fd, 1 << 20)
    stat = device.stat(tmp_path / "f")
    assert stat.size_bytes == 1 << 20
    assert stat.allocated_bytes >= 1 << 20
    device.close(fd)


def test_direct_probe(direct_path: Path, open_fds: Callable[[], int]) -> None:
    fds = open_fds()
    assert supports_direct(LocalDevice(), direct_path)
    assert not supports_direct(BufferedDevice(), direct_path)
    refused = FaultyDevice(LocalDevice(), Fault(Raise(errno.EINVAL), "pwritev"))
    assert not supports_direct(refused, direct_path), "opens, but does not write"
    full = FaultyDevice(LocalDevice(), Fault(Raise(errno.ENOSPC), "pwritev"))
    assert supports_direct(full, direct_path), "a full disk is still a direct one"
    assert files_under(direct_path) == []
    assert open_fds() == fds


def test_a_lock_has_one_holder(tmp_path: Path, open_fds: Callable[[], int]) -> None:
    one, two = LocalDevice(), LocalDevice()
    fd = one.lock(tmp_path)
    assert fd is not None
    fds = open_fds()
    assert two.lock(tmp_path) is None
    assert open_fds() == fds
    one.close(fd)
    again = two.lock(tmp_path)
    assert again is not None
    two.close(again)


def test_exists_says_no_only_when_it_knows(tmp_path: Path) -> None:
    assert exists(LocalDevice(), tmp_path)
    assert not exists(LocalDevice(), tmp_path / "no")
    assert exists(FaultyDevice(LocalDevice(), Fault(Raise(errno.EIO))), tmp_path / "no")


def test_buffers_are_aligned_and_zero() -> None:
    for size in (1, 4096, 10_000):
        buffer = aligned_buffer(size)
        assert bytes(buffer) == bytes(size)
