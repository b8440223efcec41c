from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.service.messages import (
    FRAME_HEAD,
    MAX_FRAME_BYTES,
    Done,
    FrameSplitter,
    Read,
    Request,
    Touch,
    encode_frame,
    reply_decoder,
    request_decoder,
)


@given(st.lists(st.lists(st.binary(min_size=1, max_size=40), max_size=5), max_size=5), st.data())
def test_frames_may_arrive_in_any_pieces(batches: list[list[bytes]], data: st.DataObject) -> None:
    sent: list[list[Request]] = [
        [Touch(keys), Read(len(keys), keys, list(range(len(keys))))] for keys in batches
    ]
    stream = b"".join(encode_frame(messages) for messages in sent)
    splitter = FrameSplitter()
    received = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        received += [request_decoder.decode(body) for body in splitter.feed(stream[:size])]
        stream = stream[size:]
    assert received == sent


def test_outcomes_travel_as_bytes() -> None:
    frame = encode_frame([Done(7, bytes([0, 3]), 4096, 0.5)])
    assert reply_decoder.decode(frame[FRAME_HEAD.size :]) == [Done(7, bytes([0, 3]), 4096, 0.5)]


def test_a_frame_that_no_one_sends_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at most"):
        FrameSplitter().feed(FRAME_HEAD.pack(MAX_FRAME_BYTES + 1))
