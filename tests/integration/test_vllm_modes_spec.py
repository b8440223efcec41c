"""Our spec in the modes that vLLM's users combine, in the real `vllm serve`: exact fp32 tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.serve_demo import rows_on_disk
from scripts.serve_report import ACCEPTED, DRAFTED
from scripts.serving import REQUEST_TIMEOUT_S, ServeError, VllmServer
from tests.integration.conftest import (
    StartServer,
    await_store_gone,
    needs_vllm,
    settled,
    short_prompts,
    tokens_from,
    transfer_config,
)
from tests.integration.settling import await_that, current_metrics, reset_cache

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache
PREEMPTIONS = "vllm:num_preemptions_total"


@dataclass(frozen=True, slots=True)
class Asked:
    """Answers in the order of the prompts, and prompt tokens that came from host or disk."""

    tokens: list[tuple[int, ...]]
    from_store: float


def ask(
    server: VllmServer,
    prompts: Sequence[str | Sequence[int]],
    tokens_max: int = 16,
    *,
    at_once: int = 1,
    ranks: Sequence[int] | None = None,
    writes: bool = True,
) -> Asked:
    """`ranks` are the data-parallel engines that shall answer, one prompt at a time.  `writes` is
    False where the store takes none, after a reset."""
    before = from_store(server, writes)
    tokens: list[tuple[int, ...]] = []
    for start in range(0, len(prompts), at_once):
        headers = {} if ranks is None else {"X-data-parallel-rank": str(ranks[start])}
        batch = prompts[start : start + at_once]
        tokens += server.complete_all(batch, tokens_max, headers=headers)
    return Asked(tokens, from_store(server, writes) - before)


def from_store(server: VllmServer, writes: bool) -> float:
    metrics = settled(server) if writes else current_metrics(server)
    return sum(tokens_from(metrics, source) for source in ("disk", "host"))


def cancel_some(server: VllmServer, prompts: Sequence[str]) -> None:
    """Ask for long answers and go away after the first piece of each, all at once."""

    def one(prompt: str) -> None:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        body = {
            "model": server.config.preset.name,
            "prompt": prompt,
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
        }
        with (
            httpx.Client(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client,
            client.stream("POST", url, json=body) as response,
        ):
            next(response.iter_lines())

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def assert_nothing_is_held(server: VllmServer) -> None:
    await_that(
        lambda: settled(server).value("kvtier:region_slots", use="busy") == 0, "slots stay pinned"
    )


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts servers that store generated tokens too, on one root."""

    start_server: StartServer
    root: Path

    def start(self, role: str, blocks_per_chunk: int, *flags: str, **more: Any) -> VllmServer:
        config: dict[str, Any] = dict(transfer_config(self.root))
        config["kv_role"] = role
        extra = {"blocks_per_chunk": blocks_per_chunk, "offload_prompt_only": False}
        config["kv_connector_extra_config"] = {**config["kv_connector_extra_config"], **extra}
        return self.start_server("tiny-llama", config, flags=flags, env=DEV_MODE, **more)

    def stop(self, server: VllmServer) -> None:
        server.stop()
        await_store_gone(self.root)


def answered(
    server: VllmServer, prompts: Sequence[str], answers: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Prompts that go on where an earlier answer ended."""
    return [
        [*server.tokenize(prompt), *answer] for prompt, answer in zip(prompts, answers, strict=True)
    ]


def test_spec_roles_with_generated_tokens_in_chunks_of_two_blocks(
    start_server: StartServer, tmp_path: Path
) -> None:
    """A producer, then a consumer, on one root."""
    prompts = short_prompts(8, 330)
    of = Starter(start_server, tmp_path / "store")
    server = of.start("kv_producer", 2)
    produced = ask(server, prompts, 100, at_once=4)
    reset_cache(server, external=False)
    again = ask(server, prompts, 100, at_once=4)
    assert again.tokens == produced.tokens
    assert produced.from_store == again.from_store == 0, "a producer never loads"
    # Of each prompt and its answer, 430 tokens, 6 chunks of 64: those of the answer too.
    assert server.metrics().value("kvtier:disk_rows") >= 6 * len(prompts)
    of.stop(server)

    server = of.start("kv_consumer", 2)
    consumed = ask(server, prompts, 100, at_once=4)
    assert consumed.tokens == produced.tokens
    assert consumed.from_store >= 5 * 64 * len(prompts)
    reset_cache(server, external=False)
    continued = ask(server, answered(server, prompts, produced.tokens), at_once=4)
    assert continued.from_store >= 6 * 64 * len(prompts), "what was generated is found as well"
    new = ask(server, short_prompts(10, 331)[8:])
    assert new.from_store == 0
    assert settled(server).value("kvtier:chunks_stored_total") == 0, "a consumer never stores"
    of.stop(server)


def test_spec_preemption_drafts_cancelled_requests_and_reset(
    start_server: StartServer, tmp_path: Path
) -> None:
    """12 requests at once where 3 have room, prompts computed in pieces of 128 tokens, guesses of
    3 tokens; then what was reset stays gone, without a cache on the device too."""
    prompts = short_prompts(12, 330)
    of = Starter(start_server, tmp_path / "store")
    ngram = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}'
    flags = ("--speculative-config", ngram, "--max-num-batched-tokens", "128")
    block_bytes = 32 * 2 * 2 * 2 * 32 * 4
    server = of.start(
        *("kv_both", 4, *flags, "--max-model-len", "1024"), kv_cache_bytes=48 * block_bytes
    )
    expected = ask(server, prompts, 100)
    assert expected.from_store == 0
    for turn in range(2):
        crowded = ask(server, prompts, 100, at_once=12)
        assert crowded.tokens == expected.tokens, turn
        assert crowded.from_store > 0
    metrics = server.metrics()
    assert metrics.value(PREEMPTIONS) > 0
    assert 0 < metrics.value(ACCEPTED) < metrics.value(DRAFTED)
    cancel_some(server, prompts)
    assert_nothing_is_held(server)
    longer = answered(server, prompts[:3], expected.tokens[:3])
    continued = ask(server, longer)
    reset_cache(server, external=True)
    assert ask(server, longer, writes=False) == Asked(continued.tokens, 0)
    of.stop(server)

    server = of.start("kv_both", 4, "--no-enable-prefix-caching")
    assert ask(server, prompts, 100, at_once=4) == Asked(expected.tokens, 0), "resurrected"
    again = ask(server, prompts, 100, at_once=4)
    assert again.tokens == expected.tokens
    assert again.from_store >= 2 * 128 * len(prompts), "the region needs no cache on the device"
    of.stop(server)


DP_LINE = (
    "kvtier: kv_connector_extra_config.disk.root: expected a root for each of the 2 data-parallel "
    "engines of this node, each with the budget that is given: \"{root}/{{dp_rank}}\", got '{root}'"
)


def test_spec_data_parallel_engines_with_an_fp8_cache(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Two engines on one node: a region and a root each.  Of fp8 KV every byte comes back."""
    prompts = short_prompts(4, 330)
    ranks = [0, 1, 0, 1]
    flags = ("--data-parallel-size", "2", "--api-server-count", "1", "--kv-cache-dtype", "fp8")
    server = start_server("tiny-llama", transfer_config(tmp_path), flags=flags, wait=False)
    with pytest.raises(ServeError, match="ended with code 1"):
        server.start()
    assert server.log_path.read_text().splitlines()[-1] == DP_LINE.format(root=tmp_path)

    config = transfer_config(tmp_path / "store-{dp_rank}")
    roots = [tmp_path / f"store-{rank}" for rank in (0, 1)]
    server = start_server("tiny-llama", config, flags=flags)
    cold = ask(server, prompts, ranks=ranks)
    assert cold.from_store == 0
    server.stop()
    for root in roots:
        await_store_gone(root)
        [rows] = rows_on_disk(root)
        assert rows.row_bytes == 32 * 2 * 2 * 2 * 32, "a byte per number"

    server = start_server("tiny-llama", config, flags=flags)
    warm = ask(server, prompts, ranks=ranks)
    assert warm.tokens == cold.tokens
    assert warm.from_store >= 0.9 * sum(len(prompt) for prompt in prompts)
    server.stop()
