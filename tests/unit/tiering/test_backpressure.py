"""How many rows a tier is offered, by what it did with the last ones."""

from __future__ import annotations

from tiering.backpressure import SLOW_S, STALL_S, HeldBack, WriteGate


def grant(gate: WriteGate, wanted: int, now: float = 0.0, *, takes_writes: bool = True) -> int:
    return gate.grant(wanted, now, takes_writes=takes_writes)[0]


def reason(
    gate: WriteGate, wanted: int, now: float = 0.0, *, takes_writes: bool = True
) -> HeldBack | None:
    return gate.grant(wanted, now, takes_writes=takes_writes)[1]


def write(gate: WriteGate, rows: int, now: float, *, seconds: float) -> None:
    """A job of its own, stored in so many seconds."""
    ahead = gate.started(rows, now)
    gate.finished(rows, ahead, now + seconds, stored=rows, failed=0, seconds=seconds)


def fail(gate: WriteGate, now: float) -> None:
    gate.finished(1, gate.started(1, now), now, stored=0, failed=1, seconds=0.1)


def test_rows_under_way_are_bounded() -> None:
    gate = WriteGate(10)
    assert gate.grant(8, 0.0, takes_writes=True) == (8, None)
    ahead = gate.started(8, 0.0)
    assert gate.grant(8, 0.0, takes_writes=True) == (2, HeldBack.SHARE)
    gate.started(2, 0.0)
    assert gate.grant(1, 0.0, takes_writes=True) == (0, HeldBack.SHARE)
    gate.finished(8, ahead, 0.1, stored=8, failed=0, seconds=0.1)
    assert grant(gate, 100, 0.1) == 8


def test_a_slow_tier_is_offered_what_it_writes_in_good_time() -> None:
    gate = WriteGate(1000)
    write(gate, 10, 0.0, seconds=1.0)
    assert grant(gate, 1000) == int(SLOW_S / 0.1), "20 rows at 0.1 s each"
    assert reason(gate, 1000) is HeldBack.SLOW
    gate.started(20, 1.0)
    assert grant(gate, 1, 1.0) == 0


def test_once_slow_more_follows_only_when_little_is_left() -> None:
    gate = WriteGate(1000)
    write(gate, 10, 0.0, seconds=1.0)
    jobs = [gate.started(4, 1.0) for _ in range(5)]
    assert grant(gate, 1, 1.0) == 0
    for number, ahead in enumerate(jobs[:3]):
        gate.finished(4, ahead, 2.0, stored=4, failed=0, seconds=ahead * 0.1)
        assert grant(gate, 100, 2.0) == 0, number
    gate.finished(4, jobs[3], 2.0, stored=4, failed=0, seconds=jobs[3] * 0.1)
    assert grant(gate, 100, 2.0) == 16


def test_speed_is_measured_by_all_that_was_ahead() -> None:
    """A small job behind a long queue does not make the disk slow."""
    gate = WriteGate(1000)
    first, second = gate.started(99, 0.0), gate.started(1, 0.0)
    gate.finished(99, first, 1.0, stored=99, failed=0, seconds=0.99)
    gate.finished(1, second, 1.0, stored=1, failed=0, seconds=1.0)
    assert gate.seconds_per_row is not None
    assert abs(gate.seconds_per_row - 0.01) < 1e-9


def test_a_terribly_slow_tier_gets_one_row_at_a_time() -> None:
    gate = WriteGate(100)
    write(gate, 1, 0.0, seconds=9.0)
    for turn in range(3):
        assert grant(gate, 100, 9.0 * (turn + 1)) == 1
        ahead = gate.started(1, 9.0 * (turn + 1))
        assert grant(gate, 100, 9.0 * (turn + 1)) == 0
        gate.finished(1, ahead, 9.0 * (turn + 2), stored=1, failed=0, seconds=9.0)


def test_a_tier_that_is_quick_again_is_offered_everything_again() -> None:
    gate = WriteGate(100)
    write(gate, 1, 0.0, seconds=9.0)
    for _ in range(30):
        write(gate, grant(gate, 100), 10.0, seconds=0.001)
    assert gate.grant(100, 10.0, takes_writes=True) == (100, None)


def test_a_tier_that_stands_still_is_offered_nothing_until_it_moves() -> None:
    gate = WriteGate(100)
    ahead = gate.started(1, 0.0)
    assert grant(gate, 5, STALL_S - 0.1) == 5
    assert gate.grant(5, STALL_S, takes_writes=True) == (0, HeldBack.STALLED)
    gate.finished(1, ahead, STALL_S + 1, stored=1, failed=0, seconds=0.1)
    assert grant(gate, 5, STALL_S + 1) == 5


def test_a_failing_tier_is_probed_with_one_row_and_a_back_off() -> None:
    gate = WriteGate(100)
    for _ in range(2):
        fail(gate, 0.0)
    assert grant(gate, 9) == 9, "two failures are a bad place"
    fail(gate, 0.0)
    assert gate.closed is HeldBack.FAILING
    probes = []
    for tenth in range(1200):
        if grant(gate, 9, tenth / 10) == 1:
            probes.append(tenth / 10)
            fail(gate, tenth / 10)
    assert probes[:5] == [1.0, 3.0, 7.0, 15.0, 31.0]
    assert len(probes) == 10, "then every 16 s"
    write(gate, 1, 120.0, seconds=0.1)
    assert grant(gate, 9, 121.0) == 9


def test_a_probe_that_hangs_is_the_only_one() -> None:
    gate = WriteGate(100)
    for _ in range(3):
        fail(gate, 0.0)
    assert grant(gate, 9, 2.0) == 1
    gate.started(1, 2.0)
    assert grant(gate, 9, 100.0) == 0


def test_a_disk_that_takes_no_writes_is_offered_probes_only() -> None:
    gate = WriteGate(100)
    assert gate.grant(9, 0.0, takes_writes=False) == (0, HeldBack.DISK)
    assert grant(gate, 9, 0.9, takes_writes=False) == 0
    assert grant(gate, 9, 1.0, takes_writes=False) == 1
    assert grant(gate, 9, 1.1, takes_writes=False) == 0
    assert gate.grant(9, 1.2, takes_writes=True) == (9, None)
