"""When nobody waits for a tier's reads, and how it comes back."""

from __future__ import annotations

from tiering.breaker import ReadBreaker


def read(breaker: ReadBreaker, now: float, *, answered: int = 0, failed: int = 0) -> None:
    breaker.started(now)
    breaker.finished(now, answered=answered, failed=failed)


def opened(now: float = 0.0) -> ReadBreaker:
    breaker = ReadBreaker(5.0)
    for _ in range(3):
        read(breaker, now, failed=4)
    assert breaker.is_open
    return breaker


def test_reads_that_stand_still_open_it() -> None:
    breaker = ReadBreaker(5.0)
    breaker.started(100.0)
    breaker.started(104.0)
    breaker.check(104.9)
    assert not breaker.is_open
    breaker.finished(104.9, answered=1, failed=0)
    breaker.check(109.8)
    assert not breaker.is_open, "something ended lately"
    breaker.check(109.9)
    assert breaker.is_open
    assert breaker.times_opened == 1


def test_an_idle_tier_does_not_stand_still() -> None:
    breaker = ReadBreaker(5.0)
    read(breaker, 0.0, answered=1)
    breaker.check(1000.0)
    breaker.started(1000.0)
    breaker.check(1004.0)
    assert not breaker.is_open


def test_jobs_that_fail_one_after_the_other_open_it_and_a_success_between_them_does_not() -> None:
    breaker = ReadBreaker(5.0)
    for _ in range(10):
        read(breaker, 0.0, failed=9)
        read(breaker, 0.0, failed=9)
        read(breaker, 0.0, answered=1, failed=9)
    assert not breaker.is_open
    assert opened().is_open


def test_rows_that_are_not_there_are_no_failure() -> None:
    breaker = ReadBreaker(5.0)
    for _ in range(10):
        read(breaker, 0.0)
    assert not breaker.is_open


def test_probes_back_off_and_one_success_brings_it_back() -> None:
    breaker = opened()
    probes = []
    for second in range(200):
        if breaker.may_probe(float(second)):
            probes.append(second)
            breaker.probe()
            read(breaker, float(second), failed=1)
    assert probes == [1, 3, 7, 15, 31, 63, 123, 183]
    read(breaker, 200.0, answered=1)
    assert not breaker.is_open
    assert not opened(201.0).may_probe(201.5), "and the next time begins with a short wait"


def test_there_is_no_second_probe_while_one_hangs() -> None:
    breaker = opened()
    assert breaker.may_probe(1.0)
    breaker.probe()
    breaker.started(1.0)
    assert not breaker.may_probe(1000.0)
    breaker.finished(1000.0, answered=0, failed=1)
    assert not breaker.may_probe(1001.0)
    assert breaker.may_probe(1002.0)


def test_a_probe_for_a_row_that_is_not_there_is_tried_again_at_once() -> None:
    breaker = opened()
    breaker.probe()
    read(breaker, 1.0)
    assert breaker.is_open
    assert breaker.may_probe(1.0)
