"""Start, ask and stop a real `vllm serve`, as a subprocess of a demo or a test.

The server leads a process group of its own: whatever ends it also ends its engine and its workers.
One `VllmServer` is one run of the server; make another to start again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from scripts.models import ROOT, ModelPreset, cpu_binding

Prompt = str | Sequence[int]  # text, or token ids

START_TIMEOUT_S = 400.0  # ready after 25 to 60 s on two idle cores, most of it imports
SHUTDOWN_TIMEOUT_S = 10.0  # what vLLM grants its engine: less leaves files in /dev/shm
STOP_TIMEOUT_S = 120.0  # of a hang: vLLM's own time-out, and the exit of every process after it
REQUEST_TIMEOUT_S = 300.0  # a long prompt on two cores that others use too
POLL_S = 0.1
SHM = "/dev/shm/"
LOG_LINES, LOG_COLUMNS = 15, 200  # how much of the log an error quotes: vLLM logs long lines


class ServeError(Exception):
    """The server did not start, died or did not answer; the message quotes the end of its log."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """One `vllm serve` command line. `kv_transfer_config` of None serves without any offloading."""

    preset: ModelPreset
    kv_transfer_config: Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    kv_cache_bytes: int = 512 << 20
    seqs_max: int = 8
    extra_flags: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        preset = self.preset
        command = [
            str(Path(sys.executable).with_name("vllm")),
            *("serve", str(preset.path)),
            *("--served-model-name", preset.name),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", preset.dtype),
            *("--block-size", str(preset.block_size_tokens)),
            *("--max-model-len", str(preset.max_model_len_tokens)),
            *("--max-num-seqs", str(self.seqs_max)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--tensor-parallel-size", str(self.tensor_parallel)),
            *("--shutdown-timeout", str(int(SHUTDOWN_TIMEOUT_S))),
            "--enforce-eager",
            "--enable-prefix-caching",
            *preset.flags(self.tensor_parallel),
            *self.extra_flags,
        ]
        if self.kv_transfer_config is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer_config)]
        return command

    def env(self) -> dict[str, str]:
        env = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",  # else the first request with logprobs compiles for 20 s
            # After 5 s it would close the client's connection, perhaps as the next request is sent.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
            "PYTHONPATH": os.pathsep.join(
                part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part
            ),
        }
        if self.tensor_parallel > 1:
            env["VLLM_CPU_OMP_THREADS_BIND"] = cpu_binding(self.tensor_parallel)
        return {**env, **self.extra_env}


@dataclass(frozen=True, slots=True)
class Completion:
    """One greedy answer. `ttft_s` runs from the request to the first streamed token."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    ttft_s: float
    total_s: float


class Metrics:
    """One reading of `/metrics`."""

    def __init__(self, text: str) -> None:
        self._samples = [
            (sample.name, sample.labels, sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]

    def names(self) -> set[str]:
        return {name for name, _, _ in self._samples}

    def has(self, name: str) -> bool:
        return any(found == name for found, _, _ in self._samples)

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric over its samples with these labels; 0 when there are none."""
        return sum(
            value
            for found, has, value in self._samples
            if found == name and labels.items() <= has.items()
        )

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound, ascending; empty if there is none."""
        counts: dict[float, float] = {}
        for found, labels, value in self._samples:
            if found == f"{name}_bucket":
                bound = float(labels["le"])
                counts[bound] = counts.get(bound, 0.0) + value
        return dict(sorted(counts.items()))


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class VllmServer:
    """A running `vllm serve`: a context manager that is ready on entry and gone on exit.

    `stop` asks and waits; `kill` is a crash, on purpose. Both may be called at any time, in any
    order, more than once. Used by one thread.
    """

    def __init__(self, config: ServeConfig, log_path: Path) -> None:
        self.config = config
        self.log_path = log_path
        self.port = 0
        self.ready_s = 0.0  # from the start of the process until it answered
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.Client | None = None

    # -- life ----------------------------------------------------------------

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Start the server and wait until it is healthy. On failure nothing is left running."""
        assert self._process is None, "a VllmServer is started once"
        self.port = free_port()
        command = self.config.command(self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with self.log_path.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=self.config.env(),
                    start_new_session=True,
                )
            except FileNotFoundError as error:
                raise ServeError(f"no {command[0]}; run `make setup-vllm` first") from error
        # Only the loopback: a proxy of the environment has no business here.
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
        try:
            self._wait_healthy(started + timeout_s)
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask the server to end (SIGTERM) and wait for all its processes; the exit code.

        Raises when it does not end in time, after killing what is left.
        """
        process = self._started()
        self._close_client()
        if process.poll() is None:
            process.terminate()
        deadline = time.monotonic() + timeout_s
        while process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                left = len(self.processes())
                self.kill()
                raise ServeError(
                    self._with_log(f"{left} processes did not stop in {timeout_s:.0f} s")
                )
            time.sleep(POLL_S)
        return process.returncode

    def kill(self) -> None:
        """End every process of the server at once (SIGKILL), as a crash would.

        Removes the shared memory of Python's and vLLM's own message queues, which nobody else
        would; what a connector keeps in /dev/shm stays, for the next start to deal with.
        """
        process = self._started()
        self._close_client()
        queues = self._queue_files()
        while members := self.processes():
            for member in members:
                try:
                    member.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs([m for m in members if m.pid != process.pid], timeout=POLL_S)
            process.poll()
        process.wait()
        for path in queues:
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    @property
    def pid(self) -> int:
        return self._started().pid

    def alive(self) -> bool:
        return self._started().poll() is None

    def processes(self) -> list[psutil.Process]:
        """The living processes of the server's session: API server, engine, workers, and theirs."""
        session = self._started().pid
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """The end of the server's log, with long lines cut."""
        last = self.log_path.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join(line[:LOG_COLUMNS] for line in last)

    # -- requests ------------------------------------------------------------

    def complete(self, prompt: Prompt, tokens_max: int, *, ignore_eos: bool = False) -> Completion:
        """One greedy completion, streamed."""
        body = {
            "model": self.config.preset.name,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens_max,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, token_ids, prompt_tokens, ttft_s = "", list[int](), 0, 0.0
        started = time.monotonic()
        try:
            with self._http().stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ServeError(f"completion refused: {response.text}")
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ServeError(self._with_log(f"completion failed: {event['error']}"))
                    for choice in event["choices"]:
                        ttft_s = ttft_s or time.monotonic() - started
                        text += choice["text"]
                        token_ids += choice.get("token_ids") or ()
                    if usage := event.get("usage"):
                        prompt_tokens = usage["prompt_tokens"]
        except httpx.HTTPError as error:
            raise ServeError(self._with_log(f"completion failed: {error!r}")) from error
        total_s = time.monotonic() - started
        return Completion(text, tuple(token_ids), prompt_tokens, ttft_s, total_s)

    def complete_all(
        self,
        prompts: Sequence[Prompt],
        tokens_max: int,
        *,
        headers: Mapping[str, str] | None = None,
        **more: str,
    ) -> list[tuple[int, ...]]:
        """The greedy tokens of each prompt, of all prompts in one request: they are in the engine
        together, however long a client takes.  `more` goes into the request's body."""
        body = {
            "model": self.config.preset.name,
            "prompt": [p if isinstance(p, str) else list(p) for p in prompts],
            "max_tokens": tokens_max,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }
        answer = self._ask("POST", "/v1/completions", json=body, headers=headers or {})
        choices = answer.json()["choices"]
        return [tuple(c["token_ids"]) for c in sorted(choices, key=lambda c: int(c["index"]))]

    def tokenize(self, text: str) -> list[int]:
        """The token ids of a piece of text, without any added at its ends."""
        body = {"model": self.config.preset.name, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._ask("POST", "/tokenize", json=body).json()["tokens"]
        return tokens

    def metrics(self) -> Metrics:
        return Metrics(self._ask("GET", "/metrics").text)

    # -- inside --------------------------------------------------------------

    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was not started"
        return self._process

    def _http(self) -> httpx.Client:
        assert self._client is not None, "the server is not running"
        return self._client

    def _close_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        try:
            return self._http().request(method, path, **body).raise_for_status()
        except httpx.HTTPError as error:
            raise ServeError(self._with_log(f"{method} {path} failed: {error!r}")) from error

    def _wait_healthy(self, deadline: float) -> None:
        process = self._started()
        while True:
            if process.poll() is not None:
                raise ServeError(self._with_log(f"vllm serve ended with code {process.returncode}"))
            if time.monotonic() > deadline:
                raise ServeError(self._with_log("vllm serve was not ready in time"))
            try:
                if self._http().get("/health", timeout=POLL_S * 10).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)

    def _queue_files(self) -> set[Path]:
        """The files of multiprocessing's shared memory and semaphores that the server maps.

        By inode: glibc gives a semaphore its name after mapping it under another.
        """
        inodes: set[int] = set()
        for process in self.processes():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue
            inodes.update(int(line.split()[4]) for line in maps.splitlines() if SHM in line)
        found = set()
        for path in Path(SHM).glob("*"):
            with suppress(FileNotFoundError):
                if path.name.startswith(("psm_", "sem.")) and path.stat().st_ino in inodes:
                    found.add(path)
        return found

    def _with_log(self, message: str) -> str:
        return f"{message}\n--- the end of {self.log_path}:\n{self.log_tail()}"
