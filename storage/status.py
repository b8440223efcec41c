"""What a root remembers of its own use, for reports and `kvtier watch`.

    <root>/status/zarr.json     group; attributes.kvtier.status: a `StoreStatus`

so it is part of the hierarchy, and small: `STATUS_BYTES_MAX` is charged to every root.  Written
by the owner at a slow interval while something happens, and at the end.  It is never needed to open
a root, never trusted by the store, and a disk that refuses it is not asked for more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from storage.device import Device, replace_file
from storage.errors import DeviceError, StorageError
from storage.namespace import FORMAT_VERSION, METADATA, read_metadata

log = logging.getLogger("kvtier.storage")

STATUS = "status"
STATUS_BYTES_MAX = 24 << 10  # of the file; there are two while one replaces the other

_HISTORY_POINTS = 200  # 70 bytes each
_HISTORY_INTERVAL_S = 60.0  # at first; doubled whenever the points are used up
_NAMESPACES_MAX = 32  # whose counters are kept, most recently opened first


class Counters(msgspec.Struct, omit_defaults=True):
    """Totals over all openings of a namespace, or of a root."""

    rows_read: int = 0
    rows_missing: int = 0
    rows_corrupt: int = 0
    rows_written: int = 0
    rows_evicted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def plus(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f) + getattr(other, f) for f in self.__struct_fields__))


class NamespaceStatus(msgspec.Struct, omit_defaults=True):
    opened_s: float = 0.0
    """Unix time of its last opening."""
    counters: Counters = msgspec.field(default_factory=Counters)


class Point(msgspec.Struct, array_like=True):
    """The root at one time.  What is counted is counted over all openings."""

    time_s: int
    used_bytes: int
    rows: int
    bytes_written: int
    bytes_read: int
    rows_read: int
    rows_missing: int


class StoreStatus(msgspec.Struct):
    """The figures of the last owner.  Times are Unix seconds."""

    written_s: float = 0.0
    is_open: bool = False
    """False after a close; a store that was killed still says True."""
    budget_bytes: int = 0
    reserve_bytes: int = 0
    used_bytes: int = 0
    state: str = ""
    state_reason: str = ""
    limit: str = ""
    health: str = ""
    rows: int = 0
    """Of the namespaces that are open."""
    queued_reads: int = 0
    queued_writes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    counters: Counters = msgspec.field(default_factory=Counters)
    namespaces: dict[str, NamespaceStatus] = {}
    history_interval_s: float = _HISTORY_INTERVAL_S
    history: list[Point] = []


def read_status(root: Path, device: Device) -> StoreStatus | None:
    """None if there is none that can be read."""
    path = root / STATUS / METADATA
    try:
        attributes = read_metadata(device.read_file(path), str(path))["attributes"]["kvtier"]
        return msgspec.convert(attributes[STATUS], StoreStatus)
    except (StorageError, KeyError, TypeError, msgspec.ValidationError):
        return None


class StatusKeeper:
    """Writes the status of one root.  Made and called by its owner, by one thread at a time."""

    def __init__(self, root: Path, device: Device, now: Callable[[], float] = time.time) -> None:
        """`now` is in Unix seconds."""
        self._directory = root / STATUS
        self._device = device
        self._now = now
        before = read_status(root, device) or StoreStatus()
        self._before = before.counters
        self._namespaces_before = before.namespaces
        self._opened_s = now()
        self._interval_s = before.history_interval_s
        self._history = before.history
        self._written: dict[str, Any] | None = None

    def write(self, status: StoreStatus, namespaces: dict[str, Counters]) -> None:
        """Write the present figures, if any changed; `namespaces` are those open, by directory.

        Their counters, and those of `status`, are since this opening.  Never raises for a disk that
        refuses, and never writes more than `STATUS_BYTES_MAX`.
        """
        now = self._now()
        total = self._before
        for counters in namespaces.values():
            total = total.plus(counters)
        status.counters = total
        status.namespaces = self._kept(namespaces)
        figures = msgspec.to_builtins(status)
        if figures == self._written:
            return
        self._remember(now, status)
        self._written = figures
        status.written_s = now
        raw = self._encode(status)
        try:
            self._device.make_directory(self._directory)
            replace_file(self._device, self._directory / METADATA, raw)
        except DeviceError as exc:
            log.debug("status not written: %s", exc)

    def _kept(self, namespaces: dict[str, Counters]) -> dict[str, NamespaceStatus]:
        kept = dict(self._namespaces_before)
        for name, counters in namespaces.items():
            before = self._namespaces_before.get(name, NamespaceStatus())
            kept[name] = NamespaceStatus(self._opened_s, before.counters.plus(counters))
        recent = sorted(kept.items(), key=lambda item: item[1].opened_s, reverse=True)
        return dict(recent[:_NAMESPACES_MAX])

    def _remember(self, now: float, status: StoreStatus) -> None:
        """Add a point to the history, unless the last one is too young; thin it when it is full."""
        if self._history and 0 <= now - self._history[-1].time_s < self._interval_s:
            return
        total = status.counters
        self._history.append(
            Point(
                int(now),
                status.used_bytes,
                status.rows,
                total.bytes_written,
                total.bytes_read,
                total.rows_read,
                total.rows_missing,
            )
        )
        if len(self._history) > _HISTORY_POINTS:
            self._thin_history()

    def _thin_history(self) -> None:
        self._history = self._history[::2] if len(self._history) > 1 else []
        self._interval_s *= 2

    def _encode(self, status: StoreStatus) -> bytes:
        while True:
            status.history, status.history_interval_s = self._history, self._interval_s
            ours = {"format_version": FORMAT_VERSION, STATUS: status}
            group = {"zarr_format": 3, "node_type": "group", "attributes": {"kvtier": ours}}
            raw = msgspec.json.encode(group)
            if len(raw) <= STATUS_BYTES_MAX:
                return raw
            if self._history:
                self._thin_history()
            else:
                recent = list(status.namespaces.items())
                status.namespaces = dict(recent[: len(recent) // 2])
