"""crc32c, the checksum that Zarr's codec of the same name appends to a chunk."""

from __future__ import annotations

try:  # twice as fast, by 512-bit carry-less multiplication
    from awscrt.checksums import crc32c as _crc32c
except ImportError:  # not installed, or no wheel for this platform
    from crc32c import crc32c as _crc32c

TRAILER_BYTES = 4  # a crc32c, little-endian


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """The crc32c of contiguous `data`, or of what has the crc32c `before` and then `data`; long
    buffers release the interpreter lock."""
    checksum: int = _crc32c(data, before)
    return checksum
