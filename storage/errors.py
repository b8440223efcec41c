"""One exception tree for all that the disk, the files on it or a caller's settings can do wrong.

A miss is a result, never an exception.  Foreign errors (`OSError`) become `DeviceError` in one
place, `storage.device`, with the original as `__cause__`.
"""

from __future__ import annotations

import errno as errno_codes
import os
from pathlib import Path

_FOUND_CHARACTERS_MAX = 200  # of a found value that a message quotes


class StorageError(Exception):
    """Base of all errors that `storage` raises on purpose."""


class ConfigError(StorageError):
    """A setting that can't be used; found at start, before anything is changed.

    `field` is the full path of the setting, as the user writes it.
    """

    def __init__(self, field: str, expected: str, found: object) -> None:
        self.field = field
        self.expected = expected
        self.found = found
        quoted = repr(found)
        if len(quoted) > _FOUND_CHARACTERS_MAX:
            quoted = f"{quoted[:_FOUND_CHARACTERS_MAX]}... ({len(quoted)} characters)"
        super().__init__(f"{field}: expected {expected}, got {quoted}")


class DeviceError(StorageError):
    """A file operation that the operating system refused."""

    def __init__(self, op: str, path: str | os.PathLike[str], errno: int) -> None:
        self.op = op
        self.path = Path(path)
        self.errno = errno
        name = errno_codes.errorcode.get(errno, str(errno))
        super().__init__(f"{op} {self.path}: {os.strerror(errno)} ({name})")


class CorruptRecord(StorageError):
    """Bytes on disk that are not what was written there."""

    def __init__(self, place: str, reason: str) -> None:
        self.place = place
        self.reason = reason
        super().__init__(f"{place}: {reason}")


class LayoutMismatch(StorageError):
    """Two sides that must describe the same bytes do not."""

    def __init__(self, what: str, expected: object, found: object) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        super().__init__(f"{what}: expected {expected}, found {found}")


class RootUnusable(StorageError):
    """A store root that can't be opened; the message says why and what to do."""


class RootInUse(RootUnusable):
    """Another process owns the root."""
