"""Decodes damaged frames with an unreadable page right behind the frame and right behind the row:
whoever reads or writes past either is killed.  `python -m tests.unit.storage.hostile_frames SEED N`
prints how many frames were refused, decoded to something else, and decoded to the row."""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import sys

from storage.codec import CODEC_NAMES, NO_CODEC, BadFrame, Codec
from storage.testing.rows import key_of, row_of, soft_row_of

PAGE = mmap.PAGESIZE
ROW_BYTES = 8 * PAGE
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(size_bytes: int) -> memoryview:
    """`size_bytes` that end where an unreadable page begins."""
    pages = -(-size_bytes // PAGE)
    mapping = mmap.mmap(-1, (pages + 1) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if _libc.mprotect(ctypes.c_void_p(start + pages * PAGE), PAGE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return memoryview(mapping)[pages * PAGE - size_bytes : pages * PAGE]


def damaged(rng: random.Random, frame: bytes) -> bytes:
    """Bits flipped, mostly in what directs the decoder, or the frame cut short."""
    raw = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        reach = rng.choice((16, 16, 64, len(raw)))
        raw[rng.randrange(min(reach, len(raw)))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        raw = raw[: rng.randrange(len(raw))]
    if rng.random() < 0.5:  # a liar that knows the format: sizes that pass our check
        raw[4:8] = ROW_BYTES.to_bytes(4, "little")
        raw[12:16] = len(raw).to_bytes(4, "little")
    return bytes(raw)


def main(seed: int, count: int) -> None:
    rng = random.Random(seed)
    row = guarded(ROW_BYTES)
    outcomes = {"refused": 0, "something else": 0, "the row": 0}
    frames = []
    for name in CODEC_NAMES:
        for element_bytes in (1, 2, 4) if name != NO_CODEC else ():
            codec = Codec(name, element_bytes)
            for make in (row_of, soft_row_of):
                content = make(key_of(seed), ROW_BYTES)
                frames.append((codec, content, bytes(codec.encode(memoryview(content)))))
    for _ in range(count):
        codec, content, frame = rng.choice(frames)
        wrong = damaged(rng, frame)
        source = guarded(len(wrong))
        source[:] = wrong
        try:
            codec.decode(source, row)
        except BadFrame:
            outcomes["refused"] += 1
        else:
            outcomes["the row" if row == content else "something else"] += 1
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
