"""When a running `vllm serve` has done what it was asked for, and what its metrics say then.

kvtier's metrics of an engine that takes step after step are up to `REPORT_S` old; its last step
tells them.  They reach `/metrics` in the order of the engine's answers, and so before the answer
of a request that was made after them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

from scripts.serving import Metrics, VllmServer
from tiering.pace import REPORT_S

HANG_S = 120.0  # of anything that must end at all, on a machine that does other things too
_IDLE_WINDOW_S, _LOOKS = 0.1, 5
_IDLE_SWITCHES = 5  # in that time; an engine that steps has a hundred


def await_that(holds: Callable[[], bool], otherwise: str, timeout_s: float = HANG_S) -> None:
    """Return once `holds()`; fail with `otherwise` when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def step(server: VllmServer) -> None:
    """Make the engine look at its tiers: it steps for requests only.  Shorter than a block."""
    server.complete("zz", 1, ignore_eos=True)


def rests(server: VllmServer) -> bool:
    """Whether no engine of the server takes steps.

    The thread that does is asleep, then: one that works is seen to wake up, or, where others have
    the core, to be kept waiting for it.
    """
    engines = [p.pid for p in server.processes() if "EngineCore" in p.name()]
    assert engines, "no engine runs"
    threads = [Path(f"/proc/{pid}/task/{pid}/status") for pid in engines]
    before = [_switches(thread) for thread in threads]
    for _ in range(_LOOKS):
        if any(_field(thread, "State").split()[0] != "S" for thread in threads):
            return False
        time.sleep(_IDLE_WINDOW_S / _LOOKS)
    return all(
        _switches(thread) - count < _IDLE_SWITCHES
        for thread, count in zip(threads, before, strict=True)
    )


def _switches(thread: Path) -> int:
    """How often the thread has waited for something."""
    return int(_field(thread, "voluntary_ctxt_switches"))


def _field(thread: Path, name: str) -> str:
    [line] = [li for li in thread.read_text().splitlines() if li.startswith(f"{name}:")]
    return line.split(":")[1].strip()


def look(rests: Callable[[], bool], step: Callable[[], object]) -> None:
    """From here on `/metrics` says what was so at this call, or later."""
    step()  # what came while the engine rested is taken in
    if not rests():
        time.sleep(REPORT_S)
    step()


def current_metrics(server: VllmServer) -> Metrics:
    """As of now.  The server has nothing else to do, or it is not told in time to wait for."""
    look(lambda: rests(server), lambda: step(server))
    return server.metrics()


def settled_metrics(
    server: VllmServer, is_settled: Callable[[Metrics], bool], otherwise: str
) -> Metrics:
    """Metrics of an engine that rests, once they are so; fails with `otherwise`."""
    found: list[Metrics] = []

    def is_so() -> bool:
        step(server)
        if not rests(server):
            return False
        step(server)
        found[:] = [server.metrics()]
        return is_settled(found[0])

    await_that(is_so, otherwise)
    return found[0]


def reset_cache(server: VllmServer, *, external: bool = False) -> None:
    """Empty the device's own cache, as who loads other weights does, and with `external` what is
    below; vLLM says to try again while blocks are in use."""
    url = f"http://127.0.0.1:{server.port}/reset_prefix_cache"

    def is_reset() -> bool:
        answer = httpx.post(
            url, params={"reset_external": external}, timeout=HANG_S, trust_env=False
        )
        assert answer.status_code == httpx.codes.OK, answer.text
        return bool(answer.json()["success"])

    await_that(is_reset, "never reset")
