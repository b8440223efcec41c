"""The root directory: its lock, its owner's record, and what is found in it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from storage.device import PARTIAL_SUFFIX, Device, exists, replace_file
from storage.errors import CorruptRecord, DeviceError, RootInUse, RootUnusable, StorageError
from storage.namespace import (
    METADATA,
    ROWS,
    Json,
    is_namespace_directory,
    is_unrepeatable,
    read_metadata,
    root_metadata,
)
from storage.segment import segment_path
from storage.space import NAMESPACE_OVERHEAD_BYTES, SEGMENT_OVERHEAD_BYTES, is_full
from storage.status import STATUS
from storage.types import SegmentId

log = logging.getLogger("kvtier.storage")


@dataclass(frozen=True, slots=True)
class StaleNamespace:
    """A namespace on disk that no one has open."""

    directory: Path
    opened_s: float  # Unix time of its last opening; 0: nobody will open it again
    segments: dict[SegmentId, int]  # what each is charged
    other_bytes: int  # charged for its metadata and for anything that is not ours

    @property
    def charged_bytes(self) -> int:
        return sum(self.segments.values()) + self.other_bytes


def take_root(root: Path, device: Device, lock_timeout_s: float) -> int:
    """Make the root if need be and lock it, waiting for a predecessor that is ending."""
    try:
        device.make_directory(root)
        deadline = time.monotonic() + lock_timeout_s
        while (lock_fd := device.lock(root)) is None:
            if time.monotonic() > deadline:
                raise RootInUse(
                    f"root: {root} belongs to {_owner_of(device, root)}; "
                    "stop it, or give this engine a root of its own"
                )
            time.sleep(0.05)
    except DeviceError as exc:
        raise RootUnusable(f"root: {exc}; expected a directory that this user may write") from exc
    return lock_fd


def check_root(root: Path, device: Device) -> None:
    """Refuse a root of a newer format, or one that can't be written.  A full disk is no reason."""
    metadata = root / METADATA
    try:
        raw = device.read_file(metadata)
        if raw.strip(b"\0"):
            read_metadata(raw, str(metadata))
        else:  # what a power cut may leave of a file; nobody else's either
            log.warning("%s is empty: made anew", metadata)
    except DeviceError as exc:
        if exc.errno != errno.ENOENT:
            raise RootUnusable(f"root: {exc}") from exc
    except CorruptRecord as exc:
        raise RootUnusable(
            f"root: {exc}; expected a directory of kvtier's own, new or empty, or one of its stores"
        ) from exc
    except StorageError as exc:
        raise RootUnusable(f"root: {exc}") from exc
    probe = root / f"writable-{os.getpid()}{PARTIAL_SUFFIX}"
    try:
        device.write_file(probe, b"")
        device.remove(probe)
    except DeviceError as exc:
        if not is_full(exc.errno):
            raise RootUnusable(
                f"root: {exc}; expected a directory that this user may write"
            ) from exc


def record_owner(root: Path, device: Device) -> None:
    """Say in the root's metadata who has it open."""
    owner: dict[str, Json] = {
        "pid": os.getpid(),
        "command": " ".join(psutil.Process().cmdline())[:200],
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    try:
        replace_file(device, root / METADATA, root_metadata(owner))
    except DeviceError as exc:
        # On a disk that is full to the last byte the old record stays; a new root must have one.
        if not exists(device, root / METADATA):
            raise RootUnusable(f"root: {exc}; expected room for a small file") from exc


def _owner_of(device: Device, root: Path) -> str:
    try:
        raw = device.read_file(root / METADATA)
        owner = read_metadata(raw, METADATA)["attributes"]["kvtier"]["owner"]
        named = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        return named + (_parent_of(owner["pid"]) if owner["host"] == socket.gethostname() else "")
    except (StorageError, KeyError, TypeError):
        return "another process"


def _parent_of(pid: object) -> str:
    """Who started an owner on this machine: of a store process its engine, to be stopped."""
    with contextlib.suppress(psutil.Error, ValueError, OverflowError):
        parent = psutil.Process(int(str(pid))).parent()
        return f", started by {parent.name()} ({parent.pid})" if parent is not None else ""
    return ""


def remove_partials(root: Path, device: Device) -> None:
    """Remove what a crash left half-made: our partial files, in our directories only."""

    def clean(directory: Path, depth: int) -> None:
        try:
            for name in device.list(directory):
                path = directory / name
                if device.stat(path).is_directory:
                    if depth or is_namespace_directory(name) or name == STATUS:
                        clean(path, depth + 1)
                elif name.endswith(PARTIAL_SUFFIX):
                    device.remove(path)
        except DeviceError as exc:  # what stays is charged like any other file
            log.warning("could not clean up: %s", exc)

    clean(root, 0)


def survey(directory: Path, device: Device) -> StaleNamespace:
    """What a namespace's directory holds, whatever a crash or a person left of it.

    Raises `DeviceError` if the disk does not say: what is not seen would not be charged.
    """
    segments = {}
    for number in segment_numbers(directory / ROWS, device):
        stat = device.stat(segment_path(directory / ROWS, number))
        # A sparse segment may still fill: charge whichever is more.
        size = max(stat.allocated_bytes, stat.size_bytes)
        segments[number] = size + SEGMENT_OVERHEAD_BYTES
    opened_s = 0.0
    with contextlib.suppress(DeviceError):
        metadata = directory / METADATA
        if not is_unrepeatable(device.read_file(metadata), str(metadata)):
            opened_s = device.stat(metadata).modified_s
    ours = {segment_path(directory / ROWS, number) for number in segments}
    ours |= {directory / METADATA, directory / ROWS / METADATA}
    foreign = allocated_bytes(directory, device, without=ours)
    return StaleNamespace(directory, opened_s, segments, NAMESPACE_OVERHEAD_BYTES + foreign)


def allocated_bytes(path: Path, device: Device, without: set[Path] | None = None) -> int:
    """Of a file, or of all files below a directory that may be seen; links are not followed.

    Raises `DeviceError` if the disk does not say.
    """
    if without and path in without:
        return 0
    try:
        stat = device.stat(path)
        if not stat.is_directory:
            return stat.allocated_bytes
        names = device.list(path)
    except DeviceError as exc:
        if exc.errno not in (errno.EACCES, errno.EPERM, errno.ENOENT):
            raise
        log.warning("not charged: %s", exc)  # such as lost+found, or gone since
        return 0
    return sum(allocated_bytes(path / name, device, without) for name in names)


def segment_numbers(rows: Path, device: Device) -> list[SegmentId]:
    """Of the segments below an array's directory, in order.  Raises `DeviceError`."""
    if not exists(device, rows / "c"):
        return []
    names = device.list(rows / "c")
    numbers = sorted(int(n) for n in names if n.isascii() and n.isdigit() and str(int(n)) == n)
    return [SegmentId(n) for n in numbers if exists(device, segment_path(rows, SegmentId(n)))]


def remove_namespace(directory: Path, device: Device) -> None:
    """Remove a namespace without segments.  Raises `DeviceError` if it holds anything else."""
    rows = directory / ROWS
    with contextlib.suppress(DeviceError):
        for name in device.list(rows / "c"):
            device.remove_directory(rows / "c" / name)
    for path in (rows / METADATA, rows / "c", rows, directory / METADATA, directory):
        if exists(device, path):
            remove = device.remove if path.name == METADATA else device.remove_directory
            remove(path)
