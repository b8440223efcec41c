"""A serving vLLM seen through HTTP: its counters before and after some work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from scripts.serve_demo import (
    DRAIN_QUIET_S,
    FINISHED,
    gauge,
    wait_until,
    waiting_writes,
    written_bytes,
)
from scripts.serve_report import Sources
from scripts.serving import REQUEST_TIMEOUT_S, Metrics, ServeError
from storage.testing.rows import bytes_on_disk

TTFT = "vllm:time_to_first_token_seconds"
STARTED = "process_start_time_seconds"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
IDLE_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0  # far longer than writing what a run leaves in memory
RESTART_TIMEOUT_S = 3600.0  # by a person, of a server that may load a large model


class Endpoint:
    """A server by its URL. Raises `ServeError` when it does not answer as vLLM does."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=self.url, timeout=REQUEST_TIMEOUT_S, trust_env=False)
        [model] = self._ask("GET", "/v1/models").json()["data"][:1]
        self.model = str(model["id"])
        self.length_tokens = int(model["max_model_len"])

    def close(self) -> None:
        self._client.close()

    def metrics(self) -> Metrics:
        return Metrics(self._ask("GET", "/metrics").text)

    def step(self) -> None:
        """Make the engine step, so that its counters move: a request shorter than a block."""
        body = {"model": self.model, "prompt": "x", "max_tokens": 1, "temperature": 0}
        self._ask("POST", "/v1/completions", json=body)

    def finished(self) -> int:
        """Requests answered since the server started."""
        return int(self.metrics().value(FINISHED))

    def settle(self) -> Metrics:
        """Metrics once no request runs and the counters have followed."""

        def is_idle() -> bool:
            metrics = self.metrics()
            return metrics.value(RUNNING) + metrics.value(WAITING) == 0

        wait_until(is_idle, IDLE_TIMEOUT_S)
        self.step()
        return self.metrics()

    def drain(self, root: Path | None) -> Metrics:
        """Metrics once nothing has been written for a moment."""
        last: tuple[float, int] | None = None
        quiet_since = time.monotonic()

        def is_quiet() -> bool:
            nonlocal last, quiet_since
            self.step()
            metrics = self.metrics()
            now = (written_bytes(metrics), bytes_on_disk(root) if root else 0)
            if now != last or waiting_writes(metrics):
                last, quiet_since = now, time.monotonic()
            return time.monotonic() - quiet_since > DRAIN_QUIET_S

        wait_until(is_quiet, DRAIN_TIMEOUT_S)
        return self.metrics()

    def _ask(self, method: str, path: str, **body: object) -> httpx.Response:
        try:
            return self._client.request(method, path, **body).raise_for_status()  # type: ignore[arg-type]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServeError(f"{method} {self.url}{path} failed: {error}") from error


def await_restart(url: str, started_s: float, timeout_s: float = RESTART_TIMEOUT_S) -> None:
    """Wait until another process than the one started at `started_s` serves at `url`.

    Raises `ServeError` when that takes too long.
    """

    def is_another() -> bool:
        try:
            endpoint = Endpoint(url)
        except ServeError:
            return False  # it is down, or not up yet
        try:
            return endpoint.metrics().value(STARTED) != started_s
        except ServeError:
            return False
        finally:
            endpoint.close()

    if not wait_until(is_another, timeout_s):
        raise ServeError(f"{url} was not restarted within {timeout_s:.0f} s")


def quantile(before: Metrics, after: Metrics, name: str, share: float) -> float | None:
    """Of a histogram's growth, linear within a bucket as Prometheus does; None without any growth.

    What is above the last finite bound is that bound.
    """
    old, new = before.buckets(name), after.buckets(name)
    grown = {bound: count - old.get(bound, 0.0) for bound, count in new.items()}
    total = max(grown.values(), default=0.0)
    if not total:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in grown.items():
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError("a histogram's last bucket holds everything")


@dataclass(frozen=True, slots=True)
class Moved:
    """What the counters grew by."""

    sources: Sources
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    bytes_written: int
    bytes_read: int
    state_changes: int | None
    rows_corrupt: int | None
    disk_used_bytes: int | None
    disk_budget_bytes: int | None


def moved(before: Metrics, asked: Metrics, drained: Metrics) -> Moved:
    """Between `before` and `asked` lie the questions; until `drained` the writes that follow."""

    def grown(name: str, **labels: str) -> int:
        return int(drained.value(name, **labels) - before.value(name, **labels))

    def bytes_of(verb: str) -> int:
        own, stock = f"kvtier:{verb}_bytes_total", f"vllm:kv_offload_tiering_{verb}_bytes_total"
        return grown(own if drained.has(own) else stock)

    is_kvtier = drained.has("kvtier:disk_budget_bytes")
    changes = "kvtier:disk_state_changes_total"
    corrupt = grown("kvtier:rows_read_total", outcome="corrupt")
    return Moved(
        Sources.between(before, asked),
        quantile(before, asked, TTFT, 0.5),
        quantile(before, asked, TTFT, 0.99),
        bytes_of("write"),
        bytes_of("read"),
        grown(changes) - grown(changes, state="growing") if is_kvtier else None,
        corrupt if is_kvtier else None,
        gauge(drained, "kvtier:disk_used_bytes"),
        gauge(drained, "kvtier:disk_budget_bytes"),
    )


Progress = Callable[[int, int | None], None]
"""Called with the questions answered so far, and all of them where that is known."""
