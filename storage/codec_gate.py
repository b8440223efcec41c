"""Whether it pays to encode rows: a rule over measured speeds.  Pure: no bytes, files or clocks.

The rule, in seconds of an I/O thread per byte of row:

    encode + decode  <  (1 - share) * (write + read)

A row is encoded while the codec's time for one write and one read of it is less than the device
time that its smaller frame saves on both.  `share` is what is stored of a row's bytes.  While it
does not pay rows stand raw; now and then one is encoded and decoded for its figures alone, so
that a drive that becomes slow, or rows that begin to shrink, are noticed.  That takes no more than
2 % of the time in which raw rows are written.
"""

from __future__ import annotations

from enum import Enum

PROBE_EVERY_ROWS_MIN = 64  # while the codec is off ...
_PROBE_SHARE = 50  # ... and no more often than a probe is 1/50 of the time of the writes between
_MEMORY_ROWS = 64  # about so many of the latest transfers count


class Verdict(Enum):
    """What to do with the next row."""

    ENCODE = "encode"
    PROBE = "probe"
    """Encode and decode it, tell the gate what that took, and store it raw."""
    RAW = "raw"


class Average:
    """A ratio of two sums over about the latest `_MEMORY_ROWS` observations."""

    def __init__(self) -> None:
        self._above = 0.0
        self._below = 0.0

    def add(self, above: float, below: float) -> None:
        keep = 1 - 1 / _MEMORY_ROWS
        self._above = self._above * keep + above
        self._below = self._below * keep + below

    @property
    def value(self) -> float | None:
        """None before the first observation."""
        return self._above / self._below if self._below else None


class CodecGate:
    """The figures of one namespace and the verdicts from them.  The caller serialises calls."""

    def __init__(self) -> None:
        self._encode = Average()  # seconds per byte of row
        self._decode = Average()
        self._write = Average()  # seconds per byte that moved
        self._read = Average()
        self._share = Average()  # bytes stored per byte of row, of rows that were encoded
        self._raw_in_a_row = 0

    def encoded(self, row_bytes: int, stored_bytes: int, seconds: float) -> None:
        """A row was encoded; its frame takes a slot of `stored_bytes`."""
        self._encode.add(seconds, row_bytes)
        self._share.add(stored_bytes, row_bytes)

    def decoded(self, row_bytes: int, seconds: float) -> None:
        self._decode.add(seconds, row_bytes)

    def wrote(self, size_bytes: int, seconds: float) -> None:
        """The device took `size_bytes`."""
        self._write.add(seconds, size_bytes)

    def read(self, size_bytes: int, seconds: float) -> None:
        """The device gave `size_bytes`."""
        self._read.add(seconds, size_bytes)

    def next_row(self) -> Verdict:
        """What to do with the next row to be written."""
        pays = self.pays
        if pays:
            self._raw_in_a_row = 0
            return Verdict.ENCODE
        if pays is None or self._raw_in_a_row >= self.probe_every_rows:
            self._raw_in_a_row = 0
            return Verdict.PROBE
        self._raw_in_a_row += 1
        return Verdict.RAW

    @property
    def probe_every_rows(self) -> float:
        """How many rows stand raw between two probes."""
        encode, decode, write = self._encode.value, self._decode.value, self._write.value
        if encode is None or decode is None or not write:
            return PROBE_EVERY_ROWS_MIN
        return max(PROBE_EVERY_ROWS_MIN, _PROBE_SHARE * (encode + decode) / write)

    @property
    def pays(self) -> bool | None:
        """By the rule; None while a row was never encoded or never written.

        A device that was not read yet is taken to read as fast as it writes.
        """
        encode, decode, share = self._encode.value, self._decode.value, self._share.value
        write = self._write.value
        if encode is None or decode is None or share is None or write is None:
            return None
        read = write if self._read.value is None else self._read.value
        return encode + decode < (1 - share) * (write + read)
