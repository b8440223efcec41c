"""Sizes as people write them: "500GB", "1.5TiB" or a number of bytes."""

from __future__ import annotations

import re

from storage.errors import ConfigError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}{b}": 1000**i for i, p in enumerate("KMGTP", 1) for b in ("", "B")},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGTP", 1)},
}
_SIZE = re.compile(r"\s*(\d{1,20})(?:\.(\d{1,20}))?\s*([A-Za-z]*)\s*", re.ASCII)
_LARGEST = 1 << 60  # 1 EiB: sums of sizes still fit what messages and files have for them
_EXPECTED = 'a size above 0 in bytes, or with a unit such as "500GB" (10^9) or "1.5TiB" (2^40)'


def parse_size(value: object, field: str) -> int:
    """`value` in bytes.

    Decimal units are K, M, G, T, P with or without a B (upper or lower case); binary ones are
    KiB to PiB.  A number without a unit is bytes.  Raises `ConfigError` naming `field` for
    anything else: 0, negatives, floats, booleans, percentages, exponents, unknown units, and what
    is above 1 EiB.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        whole, fraction, unit = match.groups()
        factor = _UNITS.get(unit.upper())
        if factor is None or (fraction and factor == 1):
            raise ConfigError(field, _EXPECTED, value)
        # Integers throughout: 1.1TB has no exact float.
        digits = len(fraction or "")
        size = int(whole + (fraction or "")) * factor // 10**digits
    else:
        raise ConfigError(field, _EXPECTED, value)
    if size <= 0:
        raise ConfigError(field, _EXPECTED, value)
    if size > _LARGEST:
        raise ConfigError(field, "a size of at most 1 EiB (2^60 bytes)", value)
    return size


def format_size(size_bytes: float) -> str:
    """`size_bytes` with a decimal unit and three figures: "1.23 GB"."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} PB"
