"""When an engine that asks in every step is told figures."""

from __future__ import annotations

from tiering.pace import REPORT_S, ReportPace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_busy_engine_is_told_now_and_then() -> None:
    clock = Clock()
    pace = ReportPace(clock)
    told = []
    for _ in range(int(10 * REPORT_S)):
        told.append(pace.is_due(is_busy=True, figures=None))
        clock.now += 0.1
    assert told[0]
    assert told.count(True) == 1
    clock.now = REPORT_S
    assert pace.is_due(is_busy=True, figures=None)


def test_the_last_figures_are_told_once() -> None:
    pace = ReportPace(Clock())
    assert pace.is_due(is_busy=True, figures=1)
    assert not pace.is_due(is_busy=True, figures=2)
    assert pace.is_due(is_busy=False, figures=2), "the last step"
    assert not pace.is_due(is_busy=False, figures=2)


def test_what_changes_an_engine_that_rests_is_told_at_once() -> None:
    pace = ReportPace(Clock())
    assert pace.is_due(is_busy=False, figures=1)
    assert not pace.is_due(is_busy=False, figures=1)
    assert pace.is_due(is_busy=False, figures=2)
    pace.note()
    assert pace.is_due(is_busy=False, figures=2)
    assert not pace.is_due(is_busy=False, figures=2)
