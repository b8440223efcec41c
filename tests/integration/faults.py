"""A real `vllm serve` whose store meets faults while it runs, for the tests of this folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from scripts.make_model import ensure_model
from scripts.models import MODELS, ROOT
from scripts.serving import Metrics, ServeConfig, VllmServer
from storage.testing.controlled import Control, is_hanging
from tests.integration.conftest import ANSWER_TOKENS
from tests.integration.processes import serves, store_processes
from tests.integration.settling import HANG_S, await_that, look, rests

MODEL = "tiny-llama"
CHUNK_TOKENS = MODELS[MODEL].block_size_tokens
DEADLINE_S = HANG_S
_SITE = Path(__file__).with_name("controlled_store")


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    seconds: float


class FaultyServer:
    """A server with a small region, and a store on a `ControlledDevice`.

    `control` is in force at the device's next call. Requests may be made from any thread.
    """

    def __init__(
        self,
        directory: Path,
        root: Path | None,
        *,
        region_rows: int = 40,
        tp: int = 1,
        kv_cache_bytes: int = 16 << 20,
        number: int = 0,
        connector: dict[str, Any] | None = None,
        **disk: Any,
    ) -> None:
        """Without `root` there is no connector at all."""
        ensure_model(MODEL)
        self.root = root
        self.region_rows = region_rows
        self.control_path = directory / f"control-{number}.json"
        self.control()
        config = None
        if root is not None:
            extra = {
                "cpu_bytes_to_use": region_rows * MODELS[MODEL].row_bytes(),
                "disk": {"root": str(root), "budget": "64MB", **disk},
                **(connector or {}),
            }
            config = {
                "kv_connector": "KvtierConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        env = {
            "PYTHONPATH": f"{ROOT}:{_SITE}",
            "KVTIER_TEST_CONTROL": str(self.control_path),
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        }
        serve = ServeConfig(MODELS[MODEL], config, tp, kv_cache_bytes, seqs_max=32, extra_env=env)
        self.server = VllmServer(serve, directory / f"serve-{number}.log")
        # One for all threads: to make a client takes longer than an answer.  It keeps no
        # connection, which a server that is killed would break.
        self._client = httpx.Client(
            timeout=DEADLINE_S,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def start(self) -> FaultyServer:
        self.server.start()
        return self

    def kill_one(self, name: str) -> None:
        """SIGKILL for the last of the processes that are called so, alone; returns once every
        process of the server is gone."""
        queues = self.server._queue_files()  # vLLM's own, which it leaves behind then
        sorted((p for p in self.server.processes() if name in p.name()), key=_name)[-1].kill()
        await_that(
            lambda: not self.server.alive() and not self.server.processes(),
            "the server outlives a part of it",
        )
        for path in queues:
            path.unlink(missing_ok=True)

    # -- the disk -------------------------------------------------------------------------------

    def control(self, **faults: Any) -> None:
        """Of all calls of the device that begin from now on; without `faults` a good disk."""
        Control(**faults).write(self.control_path)

    def await_hanging(self) -> None:
        """Return once a call has met the hang that is in force."""
        await_that(lambda: is_hanging(self.control_path), "no call hangs")

    def store_process(self) -> psutil.Process:
        """The one that serves this root, once there is one."""
        assert self.root is not None
        root = self.root
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = [process for process in store_processes() if serves(process, root)]
            return bool(found)

        await_that(is_there, "there is no store process")
        return found[0]

    # -- requests -------------------------------------------------------------------------------

    def ask(
        self, prompt: str, tokens: int = ANSWER_TOKENS, timeout_s: float = DEADLINE_S
    ) -> Answer:
        """The greedy tokens of one prompt. Raises `httpx.TimeoutException`: a client that goes."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        started = time.monotonic()
        reply = self._client.post(self._url("/v1/completions"), json=body, timeout=timeout_s)
        reply.raise_for_status()
        [choice] = reply.json()["choices"]
        return Answer(tuple(choice["token_ids"]), time.monotonic() - started)

    def ask_at_once(self, prompts: Sequence[str]) -> list[Answer]:
        """The answers to all prompts, asked concurrently."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.ask, prompts))

    def tokens(self, prompts: Sequence[str]) -> list[tuple[int, ...]]:
        """The greedy tokens of each prompt, asked one after the other."""
        return [self.ask(prompt).tokens for prompt in prompts]

    def leave_on_disk_alone(self, others: Sequence[str]) -> None:
        """Have `others`, which are more than the region holds, take the place of all that the
        device and the region have."""
        self._forget_device()
        self.tokens(others)
        self._forget_device()

    def _forget_device(self) -> None:
        def is_reset() -> bool:
            reply = self._client.post(self._url("/reset_prefix_cache")).raise_for_status()
            return bool(reply.json()["success"])

        await_that(is_reset, "blocks of the device are in use for ever")  # by copies, at first

    def metrics(self) -> Metrics:
        """As of now, or later; others may ask meanwhile."""
        look(self.rests, lambda: self.ask("zz", 1))
        return Metrics(self._client.get(self._url("/metrics")).raise_for_status().text)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics().value(f"kvtier:{name}", **labels)

    def settled(self) -> Metrics:
        """Metrics once no slot of the region is in use and the engine rests."""
        found: list[Metrics] = []

        def is_settled() -> bool:
            found[:] = [self.metrics()]
            return found[0].value("kvtier:region_slots", use="busy") == 0

        await_that(is_settled, "slots of the region are in use for ever")
        await_that(self.rests, "the engine does not rest: has_pending_work stays true")
        return found[0]

    def store(self, prompts: Sequence[str]) -> list[tuple[int, ...]]:
        """The greedy tokens of each prompt, each asked when all chunks of the one before are on
        the disk, which takes them: so none leaves the region before it was offered."""
        tokens = []
        for prompt in prompts:
            tokens.append(self.ask(prompt).tokens)
            await_that(self._is_written, "chunks wait for the disk for ever")
        return tokens

    def _is_written(self) -> bool:
        metrics = self.metrics()
        lost = metrics.value("kvtier:cascades_lost_total")
        ended = ("rows_written_total", "cascades_waiting")
        count = lost + sum(metrics.value(f"kvtier:{name}") for name in ended)
        is_idle = metrics.value("kvtier:region_slots", use="busy") == 0
        is_offered = metrics.value("kvtier:cascades_waiting") == 0
        return is_idle and is_offered and count >= metrics.value("kvtier:chunks_stored_total")

    def rests(self) -> bool:
        """Whether the engine takes no steps."""
        return rests(self.server)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server.port}{path}"


def _name(process: psutil.Process) -> str:
    return str(process.name())


def in_background(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread
