"""Row <-> frame, and the rule by which rows are encoded or left raw."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import numcodecs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.codec import (
    CODEC_NAMES,
    ELEMENT_BYTES,
    NO_CODEC,
    BadFrame,
    Codec,
    RowCodec,
    raw_head,
)
from storage.codec_gate import PROBE_EVERY_ROWS_MIN, CodecGate, Verdict
from storage.errors import ConfigError
from storage.header import FRAME_HEAD_BYTES, SegmentGeometry
from storage.testing.rows import key_of, row_of, soft_row_of

CODECS = [name for name in CODEC_NAMES if name != NO_CODEC]
codecs = st.builds(Codec, st.sampled_from(CODECS), st.sampled_from(ELEMENT_BYTES))


def floats_of(seed: int, kind: str, row_bytes: int) -> bytes:
    """A row of numbers as KV has them: normal, of some scale per stretch of 64."""
    rng = np.random.default_rng(seed)
    count = row_bytes // 2
    values = rng.standard_normal(count) * np.repeat(rng.lognormal(0, 2, count // 64), 64)
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    if kind == "fp16":
        return np.clip(values, -6e4, 6e4).astype(np.float16).tobytes()
    if kind == "fp32":
        return values.astype(np.float32).tobytes()[:row_bytes]
    return (values * 8).astype(np.int8).tobytes().ljust(row_bytes, b"\x01")


@settings(max_examples=120)
@given(
    codecs,
    st.sampled_from([1, 2, 3, 17, 122, 300]),
    st.sampled_from(["bf16", "fp16", "fp32", "int8", "zeros", "noise", "soft"]),
    st.integers(0, 2**32),
)
def test_a_row_reads_back_from_its_frame(codec: Codec, pages: int, kind: str, seed: int) -> None:
    row_bytes = pages * 4096
    row = {
        "zeros": lambda: bytes(row_bytes),
        "noise": lambda: row_of(key_of(seed), row_bytes),
        "soft": lambda: soft_row_of(key_of(seed), row_bytes),
    }.get(kind, lambda: floats_of(seed, kind, row_bytes))()
    frame = codec.encode(memoryview(row))
    assert frame.nbytes <= row_bytes + FRAME_HEAD_BYTES
    out = memoryview(bytearray(b"\xa5" * (row_bytes + 128)))
    codec.decode(frame, out[64:-64])
    assert out[64:-64] == row
    assert bytes(out[:64]) == bytes(out[-64:]) == b"\xa5" * 64
    # What any reader of the format makes of it.
    decoded: npt.NDArray[np.uint8] = np.frombuffer(numcodecs.Blosc().decode(frame), np.uint8)
    assert decoded.tobytes() == row


@pytest.mark.parametrize("row_bytes", [4096, 499_712, 40_103_936])
def test_a_raw_row_behind_its_head_is_a_frame(row_bytes: int) -> None:
    row = row_of(key_of(1), row_bytes)
    frame = memoryview(raw_head(row_bytes) + row)
    assert frame.nbytes == row_bytes + FRAME_HEAD_BYTES
    out = memoryview(bytearray(row_bytes))
    for name in CODECS:
        Codec(name, 2).decode(frame, out)
        assert out == row
        out[:] = bytes(row_bytes)


def test_shuffles_know_the_size_of_a_number() -> None:
    """The same bytes shrink best with the element size that they have."""
    row = memoryview(floats_of(3, "bf16", 262_144))
    for name in CODECS:
        right = Codec(name, 2).encode(row).nbytes
        assert right < 0.9 * row.nbytes
        assert right < Codec(name, 4).encode(row).nbytes


@pytest.mark.parametrize("seed", [1, 2])
def test_a_damaged_frame_never_reads_or_writes_past_its_ends(seed: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.storage.hostile_frames", str(seed), "2000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr}"
    outcomes = json.loads(ran.stdout)
    assert outcomes["refused"] > 500
    assert outcomes["something else"] > 100, "else the guard was never put to the test"


def test_a_frame_of_another_size_is_refused() -> None:
    codec = Codec("zstd", 2)
    frame = codec.encode(memoryview(soft_row_of(key_of(0), 8192)))
    for row_bytes in (4096, 12288):
        with pytest.raises(BadFrame, match="frame of"):
            codec.decode(frame, memoryview(bytearray(row_bytes)))
    for cut in (0, 1, 15, 16, 100, frame.nbytes - 1):
        with pytest.raises(BadFrame, match="frame of"):
            codec.decode(frame[:cut], memoryview(bytearray(8192)))


def test_what_is_no_codec() -> None:
    assert Codec.of("none", 3) is None
    with pytest.raises(ConfigError, match=r"codec: expected one of none, .*, got 'gzip'"):
        Codec.of("gzip", 2)
    with pytest.raises(ConfigError, match=r"element_bytes: expected one of 1, 2, 4, 8, got 3"):
        Codec.of("zstd", 3)


# -- the gate --------------------------------------------------------------------------------


def told(
    encode: float = 1.0,
    decode: float = 0.5,
    write: float = 4.0,
    read: float | None = 4.0,
    share: float = 0.75,
) -> CodecGate:
    """A gate that saw one row of 1000 bytes at so many nanoseconds per byte."""
    gate = CodecGate()
    gate.encoded(1000, int(1000 * share), encode * 1e-6)
    gate.decoded(1000, decode * 1e-6)
    gate.wrote(4000, write * 4e-6)
    if read is not None:
        gate.read(4000, read * 4e-6)
    return gate


@pytest.mark.parametrize(
    ("gate", "pays"),
    [
        (told(), True),  # 1.5 < 0.25 * 8
        (told(write=2), False),  # 1.5 > 0.25 * 6: exactly as fast does not pay
        (told(write=2.1), True),
        (told(encode=1.6), False),
        (told(encode=1.4), True),
        (told(share=0.82), False),
        (told(share=1.0, encode=0, decode=0), False),
        (told(read=None), True),  # taken to read as it writes
        (told(read=None, write=2.9), False),
        (told(read=100), True),  # a drive that is slow to read
    ],
)
def test_the_rule(gate: CodecGate, pays: bool) -> None:
    assert gate.pays is pays
    assert (gate.next_row() is Verdict.ENCODE) is pays


def test_before_it_knows_enough_it_probes() -> None:
    gate = CodecGate()
    assert gate.pays is None
    assert gate.next_row() is Verdict.PROBE
    gate.encoded(1000, 500, 1e-6)
    gate.decoded(1000, 1e-6)
    assert gate.next_row() is Verdict.PROBE
    gate.wrote(1000, 1.0)
    assert gate.next_row() is Verdict.ENCODE


@pytest.mark.parametrize(
    ("gate", "every"),
    [
        (told(encode=0.5, decode=0.5, write=1, read=1), PROBE_EVERY_ROWS_MIN),
        (told(encode=1.0, decode=1.0, write=1, read=1), 100),  # 2 of 2 + 100 * 1
        (told(encode=8.0, decode=2.0, write=0.5, read=1), 1000),
    ],
)
def test_while_it_does_not_pay_one_row_in_many_is_a_probe(gate: CodecGate, every: int) -> None:
    assert gate.probe_every_rows == pytest.approx(every)
    verdicts = [gate.next_row() for _ in range(10 * (every + 2))]
    assert verdicts.count(Verdict.PROBE) == 10
    assert set(verdicts) == {Verdict.PROBE, Verdict.RAW}


def test_a_drive_that_turns_slow_turns_the_codec_on_and_back() -> None:
    gate = told(write=0.5, read=0.5)
    assert not gate.pays
    for _ in range(100):
        gate.wrote(4000, 4e-6 * 12)
    assert gate.pays
    for _ in range(300):
        gate.wrote(4000, 4e-6 * 0.5)
    assert not gate.pays


def test_rows_that_begin_to_shrink_are_noticed_by_probes() -> None:
    gate = told(share=1.0)
    rows = 0
    while not gate.pays:
        rows += 1
        assert rows < 300 * PROBE_EVERY_ROWS_MIN
        if gate.next_row() is Verdict.PROBE:
            gate.encoded(1000, 500, 1e-6)
            gate.decoded(1000, 0.5e-6)
    assert rows > PROBE_EVERY_ROWS_MIN


# -- the codec of a namespace ----------------------------------------------------------------


def codec_of(row_bytes: int, *, always: bool = True, name: str = "zstd") -> RowCodec:
    classes = SegmentGeometry(row_bytes, 4).size_classes()
    return RowCodec(Codec(name, 2), classes, always=always)


def test_a_row_goes_to_the_least_class_that_takes_its_frame() -> None:
    rng = random.Random(0)
    codec = codec_of(65536)
    seen = set()
    for _ in range(40):
        noise = rng.randrange(0, 65536, 2048)
        row = memoryview(rng.randbytes(noise) + bytes(65536 - noise))
        size_class, content = codec.encode(row)
        seen.add(size_class)
        if size_class is codec.classes[-1]:
            assert content is row
            continue
        assert size_class.takes(content.nbytes)
        smaller = [c for c in codec.classes if c.stride < size_class.stride]
        assert not any(c.takes(content.nbytes) for c in smaller)
        out = memoryview(bytearray(65536))
        codec.decode(content, out)
        assert out == row
    assert len(seen) > 5
    counters = codec.count()
    assert counters.rows_encoded + counters.rows_raw == 40
    assert 0 < counters.bytes_after_codec < counters.bytes_before_codec
    assert counters.bytes_before_codec == counters.rows_encoded * 65536
    assert counters.encode_seconds > 0
    assert counters.decode_seconds > 0


def test_on_a_fast_drive_rows_stand_raw_and_on_a_slow_one_encoded() -> None:
    codec = codec_of(65536, always=False)
    row = memoryview(soft_row_of(key_of(0), 65536))
    raw = codec.classes[-1]
    assert codec.encode(row) == (raw, row), "a probe: nothing is known yet"
    codec.wrote(65536, 65536 / 100e9)
    assert codec.encode(row)[0] == raw
    assert codec.count().rows_encoded == 0
    for _ in range(200):
        codec.wrote(65536, 65536 / 1e3)  # so slow that no pause of this machine counts
    size_class, frame = codec.encode(row)
    assert size_class != raw
    assert frame.nbytes < 0.85 * row.nbytes
    assert codec.count().rows_encoded == 1
