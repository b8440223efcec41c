"""Figures as an operator reads them."""

from __future__ import annotations

from storage.sizes import format_size

_UNKNOWN = "-"


def size(size_bytes: float | None) -> str:
    """ "1.23 GB" """
    return _UNKNOWN if size_bytes is None else format_size(size_bytes)


def count(number: float | None) -> str:
    """In full up to five digits, then with three figures: "12,345", "1.23 M"."""
    if number is None:
        return _UNKNOWN
    if abs(number) < 100_000:
        return f"{number:,.0f}"
    for unit in ("k", "M", "G"):
        number /= 1000
        if abs(number) < 999.5:
            return f"{number:.3g} {unit}"
    return f"{number / 1000:.3g} T"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else _UNKNOWN


def span(seconds: float | None) -> str:
    """In the largest unit that has two of it: "45 s", "110 min", "9 h", "12 days"."""
    if seconds is None:
        return _UNKNOWN
    for unit, unit_s in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:,.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
