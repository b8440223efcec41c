"""Rows that were not what was stored, kept aside for a person to look at.

    <root>/quarantine/zarr.json                          group
    <root>/quarantine/<namespace>-<segment>-<slot>-<n>/
        zarr.json                                        array uint8[bytes]; key, place and
                                                         checksums in its attributes
        c/0                                              what stood in the slot

so it is part of the hierarchy: `zarr.open_group(root)["quarantine"][name][:]` gives the bytes.
Nothing here is ever read again by the store, or removed by it: delete what you have seen.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from storage.device import PARTIAL_SUFFIX, Device, exists, replace_file
from storage.errors import DeviceError
from storage.namespace import METADATA, Json, bytes_metadata, group_metadata
from storage.types import PAGE_BYTES, round_up

log = logging.getLogger("kvtier.storage")

QUARANTINE = "quarantine"
_ENTRY_OVERHEAD_BYTES = 4 * PAGE_BYTES  # two directories, zarr.json and its successor
_OVERHEAD_BYTES = 4 * PAGE_BYTES  # of the group


class Quarantine:
    """The rows kept under one root, `rows_max` at most; 0: none are.  Safe from any thread but for
    `keep`, which the caller serialises."""

    def __init__(self, root: Path, device: Device, rows_max: int) -> None:
        self._directory = root / QUARANTINE
        self._device = device
        self._rows_max = rows_max
        self._count = self._clean_up() if rows_max else 0

    @property
    def is_on(self) -> bool:
        return self._rows_max > 0

    def most_bytes(self, slot_bytes: int) -> int:
        """What it takes of the budget with as many rows as it may hold, of slots of that size."""
        if not self.is_on:
            return 0
        return self._rows_max * (round_up(slot_bytes, PAGE_BYTES) + _ENTRY_OVERHEAD_BYTES) + (
            _OVERHEAD_BYTES
        )

    def keep(self, name: str, content: memoryview, attributes: dict[str, Json]) -> bool:
        """Keep what stood in a slot; False if there are `rows_max` already, or the disk refuses.

        On False nothing is left behind that the next opening does not remove.
        """
        if self._count >= self._rows_max:
            log.warning("quarantine is full: %s is not kept", name)
            return False
        entry = self._directory / f"{name}-{time.time_ns() // 1000}"
        device = self._device
        try:
            device.make_directory(entry / "c")
            if not exists(device, self._directory / METADATA):
                replace_file(device, self._directory / METADATA, group_metadata({}))
            device.write_file(entry / "c" / "0", bytes(content))
            replace_file(device, entry / METADATA, bytes_metadata(content.nbytes, attributes))
        except DeviceError as exc:
            log.warning("quarantine: %s", exc)
            with contextlib.suppress(DeviceError):
                self._remove(entry)
            return False
        self._count += 1
        log.warning("kept in %s", entry)
        return True

    def _clean_up(self) -> int:
        """Remove entries that a crash left half-made; how many are whole."""
        count = 0
        device = self._device
        with contextlib.suppress(DeviceError):  # not there yet; what can't be seen now stays
            for name in device.list(self._directory):
                entry = self._directory / name
                if name == METADATA + PARTIAL_SUFFIX:
                    device.remove(entry)
                elif not device.stat(entry).is_directory:
                    continue
                elif exists(device, entry / METADATA):
                    count += 1
                else:
                    self._remove(entry)
        return count

    def _remove(self, entry: Path) -> None:
        for path in (entry / "c" / "0", entry / (METADATA + PARTIAL_SUFFIX), entry / METADATA):
            if exists(self._device, path):
                self._device.remove(path)
        for path in (entry / "c", entry):
            if exists(self._device, path):
                self._device.remove_directory(path)
