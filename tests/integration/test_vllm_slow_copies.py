"""The real vLLM whose blocks are used again while copies of them wait: the same tokens."""

from __future__ import annotations

import pytest

from scripts.make_model import ensure_model
from scripts.models import MODELS
from tests.integration.conftest import (
    StartServer,
    needs_vllm,
    short_prompts,
    tokens_from,
)

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

MODEL = "tiny-mla"
BLOCK_TOKENS = 16
BLOCKS = 260  # just more than one request may have
REQUESTS = 24  # come to need 648
ANSWER_TOKENS = 120


def test_copies_that_take_many_steps_change_no_token(start_server: StartServer) -> None:
    """Two dozen requests on blocks for nine: they preempt each other, and the blocks of one that is
    stored are the next one's in the same step."""
    config = {
        "kv_connector": "SlowCopiesConnector",
        "kv_connector_module_path": "tests.integration.slow_copies",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64MiB", "offload_prompt_only": False},
    }
    ensure_model(MODEL)
    token_bytes = sum(layer.token_bytes for layer in MODELS[MODEL].kv_shapes())
    server = start_server(MODEL, config, kv_cache_bytes=BLOCKS * BLOCK_TOKENS * token_bytes)
    prompts = short_prompts(REQUESTS, 300)

    # Requests of one salt find nothing of another's.
    alone = [server.complete_all([p], ANSWER_TOKENS, cache_salt="alone")[0] for p in prompts]
    for _ in range(2):  # computed and stored, then loaded
        before = tokens_from(server.metrics(), "host")
        assert server.complete_all(prompts, ANSWER_TOKENS, cache_salt="together") == alone
    metrics = server.metrics()
    assert metrics.value("vllm:num_preemptions_total") > 0
    assert tokens_from(metrics, "host") > before
    assert server.stop() == 0
