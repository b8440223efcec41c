"""Copies that run beside the model, under vLLM's own scheduler: no block is used too early.

The real scheduler, block pool, connector and worker; only the model is made up.  What it "computes"
for a token is a digest of all tokens up to it, so that every byte that it finds in its blocks can
be checked before every pass.  The copies are made as late as vLLM's rules allow, or at any time
before: whoever does not wait for them finds, or stores, something else.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import tiering.vllm.worker as worker_module
from tiering.copy_queue import CopyQueue, FinishedCopy
from tiering.vllm.connector import KvtierConnector
from tiering.worker import Copied

BLOCK = 16  # tokens
BLOCKS = 20  # of the device: four requests do not fit
ROWS = 24  # of the region
WINDOW = 32  # tokens
TOKEN_BYTES = 64  # of one layer
PAGE_BYTES = BLOCK * TOKEN_BYTES
HANG_S = 30.0


class LateQueue(CopyQueue):
    """Makes a copy when it is waited for, or when `chance` says so at a poll, and not before."""

    chance: random.Random

    def __init__(self) -> None:
        super().__init__()
        self._gates: dict[int, threading.Event] = {}  # of copies not yet made, in order

    def submit(self, job_id: int, copy: Callable[[], Copied], *, at_once: bool = False) -> None:
        gate = self._gates[job_id] = threading.Event()

        def late() -> Copied:
            assert gate.wait(HANG_S)
            return copy()

        super().submit(job_id, late, at_once=at_once)

    def wait(self, job_ids: Collection[int], timeout_s: float | None = None) -> None:
        if timeout_s is None:
            # The queue is in order: those before one that is waited for are made too.
            last = [job for job in self._gates if job in job_ids][-1:]
            while last and last[0] in self._gates:
                self._make(next(iter(self._gates)))
            super().wait(job_ids)

    def poll(self) -> list[FinishedCopy]:
        while self._gates and self.chance.random() < 0.4:
            self._make(next(iter(self._gates)))
        return super().poll()

    def close(self) -> None:
        while self._gates:
            self._make(next(iter(self._gates)))
        super().close()

    def _make(self, job_id: int) -> None:
        self._gates.pop(job_id).set()
        super().wait({job_id})


def kv_of(tokens: list[int], count: int, weights: int) -> np.ndarray[Any, np.dtype[np.int8]]:
    """int8[count, TOKEN_BYTES]: what a model of such weights makes of the first `count` tokens."""
    kv = np.empty((count, TOKEN_BYTES), np.int8)
    digest = weights.to_bytes(4)
    for position in range(count):
        digest = hashlib.blake2b(digest + tokens[position].to_bytes(4), digest_size=64).digest()
        kv[position] = np.frombuffer(digest, np.int8)
    return kv


class Engine:
    """One scheduler and one rank, step by step."""

    def __init__(
        self,
        directory: Path,
        name: str,
        windowed: bool,
        window: int = WINDOW,
        chunk_blocks: int = 1,
    ) -> None:
        model = directory / "model"
        model.mkdir(exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "vocab_size": 512,
            "max_position_embeddings": 512,
        }
        (model / "config.json").write_text(json.dumps(config))
        settings = VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=256
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_model_len=256,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvtierConnector",
                kv_connector_module_path="tiering.vllm.connector",
                kv_role="kv_both",
                engine_id=name,
                kv_connector_extra_config={
                    "cpu_bytes_to_use": ROWS * 4096 + 8192,
                    "offload_prompt_only": False,
                    "blocks_per_chunk": chunk_blocks,
                },
            ),
        )
        self.chunk_blocks = chunk_blocks
        settings.cache_config.num_gpu_blocks = BLOCKS
        shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        full = FullAttentionSpec(**shape)
        assert full.page_size_bytes == PAGE_BYTES
        second = SlidingWindowSpec(**shape, sliding_window=window) if windowed else full
        size = 2 * BLOCKS * PAGE_BYTES
        names = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
        groups = [KVCacheGroupSpec([names[0]], full), KVCacheGroupSpec([names[1]], second)]
        if not windowed:
            groups = [KVCacheGroupSpec(names, full)]
        self.kv_cache_config = KVCacheConfig(
            num_blocks=BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size, [name], 0, PAGE_BYTES, offset=i * BLOCKS * PAGE_BYTES)
                for i, name in enumerate(names)
            ],
            kv_cache_groups=groups,
            kv_cache_layout="LBNHC",
            hash_block_size=BLOCK,
        )
        memory = torch.zeros(size, dtype=torch.int8)
        self.pages = memory.numpy().reshape(2, BLOCKS, BLOCK, TOKEN_BYTES)
        self.layers = [[0], [1]] if windowed else [[0, 1]]
        """Which layers a block of each group has."""
        self.windows = [None, window] if windowed else [None]
        self.rank = KvtierConnector(settings, KVConnectorRole.WORKER, self.kv_cache_config)
        shaped = memory.view(torch.float32).view(2, BLOCKS, BLOCK, 1, 2, 8)
        self.rank.register_kv_caches(
            {name: shaped[i].permute(0, 2, 1, 3, 4).flatten(3) for i, name in enumerate(names)}
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = Scheduler(
            settings,
            self.kv_cache_config,
            StructuredOutputManager(settings),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        self.random = np.random.default_rng(1)
        self.weights = 0
        self.tokens: dict[str, list[int]] = {}
        self.blocks: dict[str, list[list[int]]] = {}  # per group
        self.seen = Counter(
            dict.fromkeys(("checked", "loads", "stores", "flushes", "resumed", "resets"), 0)
        )

    def add(self, request_id: str, prompt: list[int], answer_tokens: int) -> None:
        self.tokens[request_id] = list(prompt)
        params = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
        params.update_from_generation_config({}, None)
        self.scheduler.add_request(
            Request(request_id, list(prompt), params, None, block_hasher=self.hasher)
        )

    def load_weights(self) -> None:
        """Other ones, in place: what was computed with the old must never be seen again."""
        try:
            is_reset = self.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
        except RuntimeError:
            return  # a load is under way, which vLLM's reset does not take
        assert is_reset
        self.weights += 1
        self.seen["resets"] += 1

    def step(self) -> None:
        """One step, in the order of vLLM's model runner."""
        output = self.scheduler.schedule()
        meta = output.kv_connector_metadata
        for job in meta.store_jobs.values():
            blocks = [*job.src_spec.group_sizes, *job.src_spec.block_indices]
            assert not any(count % self.chunk_blocks for count in blocks), "a part as the whole"
        self.seen["loads"] += len(meta.load_jobs)
        self.seen["stores"] += len(meta.store_jobs)
        self.seen["flushes"] += len(meta.jobs_to_flush)
        self.seen["resumed"] += len(output.scheduled_cached_reqs.resumed_req_ids)
        self.rank.handle_preemptions(meta)
        starts = self._take_blocks(output)
        self.rank.bind_connector_metadata(meta)
        for request_id, start in starts.items():
            self._write(request_id, start, output.num_scheduled_tokens[request_id])
        # A request may use what another writes in the same pass.
        sampled = [
            self._attend(request_id, start + output.num_scheduled_tokens[request_id])
            for request_id, start in starts.items()
        ]
        self.rank.start_load_kv(None)
        self.rank.wait_for_save()
        results = self.rank.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=self.rank.build_connector_worker_meta(),
        )
        self.rank.clear_connector_metadata()
        places = {request_id: place for place, request_id in enumerate(starts)}
        done = ModelRunnerOutput(list(starts), places, sampled, kv_connector_output=told)
        self.scheduler.update_from_output(output, done)

    def _take_blocks(self, output: Any) -> dict[str, int]:
        """Follow the scheduler's blocks, and fill at once those that are new with rubbish; how many
        tokens of each scheduled request are computed."""
        starts = {}
        for new in output.scheduled_new_reqs:
            self.blocks[new.req_id] = [list(ids) for ids in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
            self._spoil(new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for request_id, ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            starts[request_id] = computed
            if request_id in cached.resumed_req_ids:
                self.blocks[request_id] = [list(group) for group in ids]
                self._spoil(ids, computed)
            elif ids is not None:
                for blocks, more in zip(self.blocks[request_id], ids, strict=True):
                    blocks += more
                self._spoil(ids, 0)
        return starts

    def _spoil(self, block_ids: tuple[list[int], ...], computed: int) -> None:
        for ids, layers in zip(block_ids, self.layers, strict=True):
            for block_id in ids[-(-computed // BLOCK) :]:
                if block_id:
                    page = self.random.integers(-128, 128, (BLOCK, TOKEN_BYTES), np.int8)
                    self.pages[layers, block_id] = page

    def _write(self, request_id: str, start: int, count: int) -> None:
        kv = kv_of(self.tokens[request_id], start + count, self.weights)
        for position in range(start, start + count):
            for layers, blocks in zip(self.layers, self.blocks[request_id], strict=True):
                block_id = blocks[position // BLOCK]
                assert block_id, (request_id, position)
                self.pages[layers, block_id, position % BLOCK] = kv[position]

    def _attend(self, request_id: str, count: int) -> list[int]:
        """Check the KV of the first `count` tokens, or of the last window; sample one if due."""
        tokens = self.tokens[request_id]
        kv = kv_of(tokens, count, self.weights)
        for layers, blocks, window in zip(
            self.layers, self.blocks[request_id], self.windows, strict=True
        ):
            for position in range(0 if window is None else max(0, count - window), count):
                found = self.pages[layers, blocks[position // BLOCK], position % BLOCK]
                assert (found == kv[position]).all(), (request_id, layers, position)
                self.seen["checked"] += 1
        if count < len(tokens):
            return []
        tokens.append(int(kv[-1, 0]) % 3 + 500)
        return tokens[-1:]

    def close(self) -> None:
        self.scheduler.shutdown()
        self.rank.shutdown()


@pytest.mark.parametrize(
    ("windowed", "chunk_blocks"),
    [(False, 1), (True, 1), (True, 2)],
    ids=["full attention", "sliding window", "sliding window, chunks of two blocks"],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_history_makes_the_model_see_another_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windowed: bool, chunk_blocks: int, seed: int
) -> None:
    monkeypatch.setattr(worker_module, "CopyQueue", LateQueue)
    LateQueue.chance = random.Random(seed)
    chance = random.Random(seed)
    name = f"order-{windowed}-{chunk_blocks}-{seed}"
    engine = Engine(tmp_path, name, windowed, chunk_blocks=chunk_blocks)
    documents = [[chance.randrange(500) for _ in range(200)] for _ in range(4)]
    for step in range(250):
        if len(engine.scheduler.requests) < 6 and chance.random() < 0.5:
            document = chance.choice(documents)
            prompt = [*document[: chance.choice([20, 50, 90, 150])], step]
            engine.add(f"r{step}", prompt, chance.randrange(1, 40))
        if engine.scheduler.requests and chance.random() < 0.03:
            aborted = chance.choice(list(engine.scheduler.requests))
            engine.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
        if chance.random() < 0.15:
            engine.scheduler.reset_prefix_cache()  # of the device: what comes back, is loaded
        if chance.random() < 0.02:
            engine.load_weights()
        engine.step()
    engine.close()
    assert min(engine.seen.values()) > 0, engine.seen


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2])
def test_what_a_window_left_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """However the window lies to the blocks: what vLLM keeps of it is all that was stored."""
    monkeypatch.setattr(worker_module, "CopyQueue", LateQueue)
    LateQueue.chance = random.Random(1)
    engine = Engine(tmp_path, f"window-{window}", True, window)
    prompt = [position * 7 % 500 for position in range(6 * BLOCK + 5)]
    for turn in range(2):
        engine.add(f"r{turn}", prompt, 4)
        for _ in range(60):
            engine.step()
        assert not engine.scheduler.requests
        engine.scheduler.reset_prefix_cache()
    engine.close()
    assert engine.seen["loads"] == 1
