"""SilenceWatch against the definition of a store that stands still."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from storage.service.silence import SILENCE_S, SilenceWatch

READ_S, WRITE_S = 2.0, 9.0
EVENTS = st.lists(
    st.tuples(st.sampled_from(["read", "write", "end", "heard", "look"]), st.integers(0, 8)),
    max_size=40,
)


@given(EVENTS)
def test_stands_still_when_a_deadline_is_missed_in_silence(events: list[tuple[str, int]]) -> None:
    """`SILENCE_S` after the oldest deadline, and no sign for the time of a read and as long."""
    clock = 0.0
    watch = SilenceWatch(READ_S, WRITE_S, lambda: clock)
    due: dict[int, float] = {}
    heard_at = 0.0
    for number, (event, seconds) in enumerate(events):
        clock += seconds
        if event in ("read", "write"):
            watch.begin(number, is_read=event == "read")
            due[number] = clock + (READ_S if event == "read" else WRITE_S)
        elif event == "end" and due:
            job = sorted(due)[seconds % len(due)]
            watch.end(job)
            del due[job]
        elif event == "heard":
            watch.heard()
            heard_at = clock
        elif event == "look":
            oldest = min(due.values(), default=math.inf)
            late = clock > max(oldest, heard_at + READ_S) + SILENCE_S
            assert watch.stands_still() is late
            if late:
                assert sorted(watch.give_up()) == sorted(due)
                due.clear()
