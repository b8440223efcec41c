"""Row <-> frame: lossless codecs, as every Zarr reader decodes them.  Does no I/O.

Both codecs are Blosc frames, made and read by numcodecs, so that one format of frames, and of rows
that stand raw in one, serves both: zarr's codec `blosc`.  What differs is what suits KV (the ratios
are those of `scripts/bench/codecs.py` on SmolLM2's KV in bf16 / fp16 / fp8):

- `blosc-lz4`: bits of like weight together, then LZ4.  1.22 / 1.03 / 1.03, and fast.
- `zstd`: bytes of like weight together, then Zstandard at level 1, in blocks of 256 KiB: its
  entropy coder needs long runs of exponents.  1.40 / 1.14 / 1.17; plain Zstandard reaches
  1.26 / 1.07 / 1.17 and is no faster.
"""

from __future__ import annotations

import struct
import threading
import time
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numcodecs.blosc import Blosc

from storage.codec_gate import CodecGate, Verdict
from storage.errors import ConfigError
from storage.header import FRAME_HEAD_BYTES, SegmentGeometry

NO_CODEC = "none"
ELEMENT_BYTES = (1, 2, 4, 8)  # of fp8, bf16 and fp16, fp32, fp64

# version, version of the inner format, flags, typesize, bytes of the row, of a block, of the frame
_FRAME_HEAD = struct.Struct("<BBBBIII")
assert _FRAME_HEAD.size == FRAME_HEAD_BYTES


class _Shuffle(IntEnum):
    """Blosc's numbers for what the Zarr specification calls by these names."""

    SHUFFLE = 1
    BITSHUFFLE = 2


@dataclass(frozen=True, slots=True)
class _Parameters:
    compressor: str
    level: int
    shuffle: _Shuffle
    block_bytes: int  # 0: as Blosc thinks best


_PARAMETERS = {
    "blosc-lz4": _Parameters("lz4", 5, _Shuffle.BITSHUFFLE, 0),
    "zstd": _Parameters("zstd", 1, _Shuffle.SHUFFLE, 256 << 10),
}
CODEC_NAMES = (NO_CODEC, *_PARAMETERS)
ROW_BYTES_MAX = (1 << 31) - 1 - FRAME_HEAD_BYTES  # of a Blosc frame


class BadFrame(Exception):
    """A frame that is not one of a row; the reader makes a `CorruptRecord` of it."""


@dataclass(frozen=True)
class Codec:
    """A codec with the element size of the rows it is for.  Safe from any thread."""

    name: str
    element_bytes: int

    def __post_init__(self) -> None:
        if self.name not in _PARAMETERS:
            raise ConfigError("codec", f"one of {', '.join(CODEC_NAMES)}", self.name)
        if self.element_bytes not in ELEMENT_BYTES:
            expected = f"one of {', '.join(map(str, ELEMENT_BYTES))}"
            raise ConfigError("element_bytes", expected, self.element_bytes)

    @classmethod
    def of(cls, name: str, element_bytes: int) -> Codec | None:
        """The codec of that name, or None for "none".  Raises `ConfigError`."""
        return None if name == NO_CODEC else cls(name, element_bytes)

    @property
    def zarr_metadata(self) -> dict[str, Any]:
        """Its entry among the codecs in a `zarr.json`."""
        parameters = _PARAMETERS[self.name]
        return {
            "name": "blosc",
            "configuration": {
                "cname": parameters.compressor,
                "clevel": parameters.level,
                "shuffle": parameters.shuffle.name.lower(),
                "typesize": self.element_bytes,
                "blocksize": parameters.block_bytes,
            },
        }

    @cached_property
    def _blosc(self) -> Blosc:
        parameters = _PARAMETERS[self.name]
        return Blosc(
            parameters.compressor,
            parameters.level,
            int(parameters.shuffle),
            parameters.block_bytes,
        )

    def encode(self, row: memoryview) -> memoryview:
        """The frame of `row`, at most `FRAME_HEAD_BYTES` longer than the row."""
        # The library takes the size of an element from its argument's type.
        return memoryview(self._blosc.encode(np.frombuffer(row, f"u{self.element_bytes}")))

    def decode(self, frame: memoryview, row: memoryview) -> None:
        """Fill `row` from its frame.  On `BadFrame` the row holds no defined content.

        The library believes the sizes in a frame's head, and reads as far as they say (a frame cut
        short is a segmentation fault): so they are held against the real ones first.
        """
        if frame.nbytes < FRAME_HEAD_BYTES:
            raise BadFrame(f"frame of {frame.nbytes} bytes")
        *_, row_bytes, _, frame_bytes = _FRAME_HEAD.unpack_from(frame)
        if (row_bytes, frame_bytes) != (row.nbytes, frame.nbytes):
            raise BadFrame(
                f"frame of {frame.nbytes} bytes for a row of {row.nbytes} bytes says "
                f"{frame_bytes} and {row_bytes}"
            )
        try:
            self._blosc.decode(frame, row)
        except (RuntimeError, ValueError) as exc:
            raise BadFrame(f"frame does not decode: {exc}") from exc


def raw_head(row_bytes: int) -> bytes:
    """What stands before a raw row to make it a frame: Blosc's own head of what it only copied."""
    return bytes(Blosc("lz4", clevel=0).encode(np.zeros(row_bytes, np.uint8))[:FRAME_HEAD_BYTES])


@dataclass
class CodecCounters:
    """Since the namespace was opened."""

    rows_encoded: int = 0
    """Rows that went into smaller slots."""
    rows_raw: int = 0
    """Rows left as they are: the codec did not pay, or did not shrink them enough."""
    bytes_before_codec: int = 0
    """Of the rows encoded ..."""
    bytes_after_codec: int = 0
    """... and of their frames."""
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0


class RowCodec:
    """A codec at work on the rows of one namespace: measures itself, and steps aside where it does
    not pay.  Safe from any thread; its own lock is never held while it encodes or decodes.
    """

    def __init__(self, codec: Codec, classes: tuple[SegmentGeometry, ...], *, always: bool) -> None:
        """`classes` are the namespace's, the last being for raw rows.  `always` leaves nothing to
        the gate."""
        self.codec = codec
        self.classes = classes
        self.head = raw_head(classes[-1].row_bytes)
        self._always = always
        self._gate = CodecGate()
        self._counters = CodecCounters()
        self._lock = threading.Lock()

    def count(self) -> CodecCounters:
        """A copy of the counters."""
        with self._lock:
            return replace(self._counters)

    def encode(self, row: memoryview) -> tuple[SegmentGeometry, memoryview]:
        """The class that a row is to stand in, and what stands there: its frame, or the row."""
        raw = self.classes[-1]
        with self._lock:
            verdict = Verdict.ENCODE if self._always else self._gate.next_row()
        if verdict is Verdict.RAW:
            with self._lock:
                self._counters.rows_raw += 1
            return raw, row
        started = time.monotonic()
        frame = self.codec.encode(row)
        seconds = time.monotonic() - started
        place = next((c for c in self.classes if c.takes(frame.nbytes)), raw)
        if verdict is Verdict.PROBE:
            self.decode(frame, memoryview(bytearray(row.nbytes)))
        is_raw = place is raw or verdict is Verdict.PROBE
        with self._lock:
            self._gate.encoded(row.nbytes, min(place.stride, row.nbytes), seconds)
            self._counters.encode_seconds += seconds
            if is_raw:
                self._counters.rows_raw += 1
            else:
                self._counters.rows_encoded += 1
                self._counters.bytes_before_codec += row.nbytes
                self._counters.bytes_after_codec += frame.nbytes
        return (raw, row) if is_raw else (place, frame)

    def decode(self, frame: memoryview, row: memoryview) -> None:
        """`Codec.decode`."""
        started = time.monotonic()
        self.codec.decode(frame, row)
        seconds = time.monotonic() - started
        with self._lock:
            self._gate.decoded(row.nbytes, seconds)
            self._counters.decode_seconds += seconds

    def wrote(self, size_bytes: int, seconds: float) -> None:
        """The device took so much."""
        with self._lock:
            self._gate.wrote(size_bytes, seconds)

    def read(self, size_bytes: int, seconds: float) -> None:
        """The device gave so much."""
        with self._lock:
            self._gate.read(size_bytes, seconds)
