from __future__ import annotations

import errno

import pytest

from storage.device import SpaceStat
from storage.errors import DeviceError
from storage.space import DEGRADED_AFTER, DiskState, Limit, Space, limit_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def states() -> list[str]:
    return []


@pytest.fixture
def space(clock: Clock, states: list[str]) -> Space:
    return Space(1000, 100, clock, on_state=lambda state, _reason: states.append(state.value))


def test_growth_asks_the_budget_and_the_free_space_less_a_reserve(space: Space) -> None:
    assert space.can_charge(1000, 1100)
    assert not space.can_charge(1001, 10**9)
    assert not space.can_charge(1000, 1099)
    space.charge(600)
    assert not space.can_charge(401, 10**9)
    assert space.can_charge(400, 10**9)
    space.release(600)
    assert space.charged_bytes == 0
    with pytest.raises(AssertionError):
        space.release(1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
def test_a_full_disk_takes_writes_but_does_not_grow(
    space: Space, clock: Clock, states: list[str], code: int
) -> None:
    space.write_failed(code, "no room")
    assert space.state is DiskState.FULL
    assert space.may_write()
    assert not space.may_grow()
    clock.now += 0.99
    assert not space.may_grow()
    clock.now += 0.02
    assert space.may_grow()
    space.growth_succeeded()
    assert space.may_grow()
    assert states == ["full", "growing"]


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (errno.EROFS, DiskState.READ_ONLY),
        (errno.EACCES, DiskState.READ_ONLY),
        (errno.EIO, DiskState.SUSPENDED),
        (errno.ENODEV, DiskState.SUSPENDED),
    ],
)
def test_a_disk_that_refuses_writes_is_probed_once_per_back_off(
    space: Space, clock: Clock, states: list[str], code: int, state: DiskState
) -> None:
    space.write_failed(code, "refused")
    assert space.state is state
    assert not space.may_write()
    clock.now += 1.01
    assert space.may_write()
    assert not space.may_write(), "one probe at a time"
    space.write_succeeded()
    assert space.state is DiskState.GROWING
    assert space.may_write()
    assert states == [state.value, "growing"]


def test_back_off_doubles_to_a_minute_and_starts_anew_after_success(
    space: Space, clock: Clock, states: list[str]
) -> None:
    waits = []
    for _ in range(9):
        space.write_failed(errno.EIO, "refused")
        waited = 0
        while not space.may_write():
            clock.now += 1.0
            waited += 1
        waits.append(waited)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert states == ["suspended"], "one line per change of state"
    space.write_succeeded()
    space.write_failed(errno.EIO, "refused")
    clock.now += 1.0
    assert space.may_write()


def test_growth_that_fails_leaves_writes_to_slots_that_are_there(space: Space) -> None:
    space.growth_failed(Limit.DEVICE, errno.EIO, "allocate", can_reuse=True)
    assert space.state is DiskState.FULL
    assert space.may_write()


def test_growth_that_fails_with_nothing_to_reuse_suspends(
    space: Space, clock: Clock, states: list[str]
) -> None:
    space.growth_failed(Limit.DEVICE, errno.EIO, "allocate", can_reuse=False)
    clock.now += 1.0
    assert space.may_write()
    assert space.may_grow(), "growing is the only probe there is"
    space.growth_succeeded()
    assert states == ["suspended", "growing"]


def test_growth_on_a_read_only_disk_stops_writes(space: Space) -> None:
    space.growth_failed(Limit.DEVICE, errno.EROFS, "open", can_reuse=True)
    assert space.state is DiskState.READ_ONLY


def test_a_budget_used_up_says_nothing_about_a_suspended_disk(space: Space) -> None:
    space.write_failed(errno.EIO, "refused")
    space.growth_refused(Limit.BUDGET, "budget used up")
    assert space.state is DiskState.SUSPENDED


ROOMY = SpaceStat(10**12, 10**11, 10**6, 10**5)


@pytest.mark.parametrize(
    ("op", "code", "stat", "limit"),
    [
        ("allocate", errno.ENOSPC, ROOMY, Limit.SPACE),
        ("open", errno.ENOSPC, ROOMY, Limit.NAMES),
        ("make_directory", errno.ENOSPC, ROOMY, Limit.NAMES),
        ("open", errno.ENOSPC, ROOMY._replace(available_bytes=999), Limit.SPACE),
        ("open", errno.ENOSPC, ROOMY._replace(available_inodes=1), Limit.INODES),
        ("open", errno.ENOSPC, ROOMY._replace(available_inodes=0, total_inodes=0), Limit.NAMES),
        ("open", errno.ENOSPC, None, Limit.SPACE),
        ("open", errno.EDQUOT, ROOMY, Limit.QUOTA),
        ("open", errno.EMFILE, ROOMY, Limit.DESCRIPTORS),
        ("allocate", errno.EFBIG, ROOMY, Limit.FILE_SIZE),
        ("allocate", errno.EIO, ROOMY, Limit.DEVICE),
    ],
)
def test_what_was_short(op: str, code: int, stat: SpaceStat | None, limit: Limit) -> None:
    assert limit_of(DeviceError(op, "x", code), stat, 1000) is limit


def test_enospc_is_counted_by_what_it_is_about(space: Space) -> None:
    space.growth_failed(Limit.NAMES, errno.ENOSPC, "open", can_reuse=True)
    assert (space.enospc, space.enospc_other) == (0, 1)
    for limit, code in ((Limit.QUOTA, errno.EDQUOT), (Limit.INODES, errno.ENOSPC)):
        space.growth_failed(limit, code, "open", can_reuse=True)
    space.write_failed(errno.ENOSPC, "write")
    assert (space.enospc, space.enospc_other) == (3, 1)


def test_a_disk_with_less_than_the_budget_says_what_it_has(space: Space) -> None:
    space.charge(400)
    assert space.effective_bytes == 1000
    space.growth_refused(Limit.BUDGET, "budget used up")
    assert space.effective_bytes == 1000
    space.growth_failed(Limit.QUOTA, errno.EDQUOT, "allocate", can_reuse=True)
    assert space.effective_bytes == 400
    space.growth_succeeded()
    assert space.effective_bytes == 1000


def test_health_follows_failures_in_a_row(space: Space) -> None:
    for _ in range(DEGRADED_AFTER - 1):
        space.write_failed(errno.ENOSPC, "full")
    assert not space.is_degraded
    space.place_failed(errno.ESTALE)
    assert space.is_degraded
    assert space.last_errno == errno.ESTALE
    space.read_succeeded()
    assert not space.is_degraded
    space.write_failed(errno.EIO, "refused")
    assert space.is_degraded, "it takes no writes"
    space.write_succeeded()
    assert not space.is_degraded
    assert space.state_changes == {
        DiskState.FULL: 1, DiskState.SUSPENDED: 1, DiskState.GROWING: 1
    }  # fmt: skip
