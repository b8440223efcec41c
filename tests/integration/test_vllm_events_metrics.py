"""KV events and metrics of a real `vllm serve`, beside what its disk and the test itself say.

Region and disk are so small that both evict.  One test goes on from one state of a server to the
next, since a start costs half a minute.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.models import MODELS
from scripts.serving import Metrics, VllmServer
from storage.survey import survey_root
from storage.testing.rows import bytes_on_disk
from tests.integration.conftest import (
    StartServer,
    answers,
    await_store_gone,
    byte_prompts,
    needs_vllm,
    tokens_from,
    transfer_config,
)
from tests.integration.kv_events import DISK, REGION, Subscriber
from tests.integration.processes import serves, store_processes
from tests.integration.settling import await_that, reset_cache, settled_metrics, step

pytestmark = [needs_vllm, pytest.mark.timeout(900)]

MODEL = MODELS["tiny-llama"]
PROMPTS = byte_prompts(6)
# Events name blocks by their whole hash, which is what a key of ours is made of.
ENV = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0", "VLLM_SERVER_DEV_MODE": "1"}


@pytest.fixture
def subscriber() -> Iterator[Callable[[], Subscriber]]:
    """Makes subscribers whose sockets have short names, as ZMQ wants them."""
    made: list[Subscriber] = []
    with tempfile.TemporaryDirectory(prefix="kv", dir="/tmp") as directory:

        def make() -> Subscriber:
            place = Path(directory) / str(len(made))
            place.mkdir()
            made.append(Subscriber(place))
            return made[-1]

        yield make
        for one in made:
            one.close()


def config_for(root: Path, **extra: Any) -> dict[str, Any]:
    """About 60 rows in the region and 100 on disk; a prompt has 28, and there are six."""
    config = dict(transfer_config(root, budget="4MB", admission="always"))
    config["kv_connector_extra_config"] |= {"cpu_bytes_to_use": "2MiB", **extra}
    return config


def keys_on_disk(root: Path) -> set[bytes]:
    """As `kvtier ls` finds them, beside the running server."""
    return {
        segment.key(slot)
        for namespace in survey_root(root).namespaces
        for segment in namespace.segments
        for slot in segment.named.tolist()
    }


def await_agreement(
    server: VllmServer, heard: Subscriber, root: Path, rows: int | None = None
) -> Metrics:
    """Metrics of an engine that rests, once events, disk and metrics say the same and the disk has
    `rows`, if so many are expected.  Fails if they never do."""
    found: dict[str, tuple[object, object]] = {}

    def agree(metrics: Metrics) -> bool:
        used = metrics.value("kvtier:disk_used_bytes")
        assert used <= metrics.value("kvtier:disk_budget_bytes")
        found.update(
            {
                "busy slots": (metrics.value("kvtier:region_slots", use="busy"), 0),
                "rows of the region": (
                    metrics.value("kvtier:region_slots", use="occupied"),
                    len(heard.keys(REGION)),
                ),
                "more than is used": (max(bytes_on_disk(root) - used, 0), 0),
                "rows on disk": (metrics.value("kvtier:disk_rows"), len(keys_on_disk(root))),
                "keys on disk": (keys_on_disk(root), heard.keys(DISK)),
                "expected rows": (len(heard.keys(DISK)) if rows is not None else None, rows),
            }
        )
        return all(said == counted for said, counted in found.values())

    try:
        return settled_metrics(server, agree, "events, disk and metrics do not agree")
    except AssertionError as exc:
        exc.add_note(str(found))
        raise


def assert_counters_go_on(before: Metrics, after: Metrics) -> None:
    """No counter of ours went back."""
    names = [n for n in before.names() if n.startswith("kvtier:") and n.endswith("_total")]
    assert {name for name in names if after.value(name) < before.value(name)} == set()


class Growth:
    """By how much counters grew between two readings."""

    def __init__(self, before: Metrics, after: Metrics) -> None:
        assert_counters_go_on(before, after)
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        return self._after.value(name, **labels) - self._before.value(name, **labels)


def assert_loads_agree(grown: Growth) -> None:
    """What we found is what vLLM says that requests got, in tokens and in bytes, by source."""
    loaded = 0.0
    for tier, source in (("region", "host"), ("disk", "disk")):
        tokens = grown("vllm:prompt_tokens_cached_by_source_total", source=source)
        assert tokens == grown("kvtier:chunk_hits_total", tier=tier) * MODEL.block_size_tokens
        loaded += tokens
    assert grown("vllm:external_prefix_cache_hits_total") == loaded
    external = grown("vllm:prompt_tokens_by_source_total", source="external_kv_transfer")
    assert external == loaded
    blocks = loaded / MODEL.block_size_tokens
    assert grown("vllm:kv_offload_load_bytes_total") == blocks * MODEL.row_bytes()
    rows = grown("kvtier:rows_read_total", outcome="ok")
    assert grown("kvtier:read_bytes_total", tier="disk") == rows * MODEL.row_bytes()
    bad = grown("kvtier:rows_read_total") - rows
    assert grown("kvtier:promotions_failed_total") == bad


def damage_every_row(root: Path) -> None:
    """Change what stands in the second half of each segment: rows, not headers."""
    for segment in root.glob("*/rows/c/*/0"):
        size = segment.stat().st_size
        with segment.open("r+b") as file:
            file.seek(size // 2)
            file.write(b"\xa5" * (size - size // 2))


def test_events_and_metrics_say_what_the_disk_and_the_test_have_counted(
    start_server: StartServer, subscriber: Callable[[], Subscriber], tmp_path: Path
) -> None:
    root = tmp_path / "store"
    heard = subscriber()
    config = config_for(root, self_describing_kv_events=True)
    flags = ["--kv-events-config", json.dumps(heard.server_config())]
    server = start_server("tiny-llama", config, flags=flags, env=ENV)

    # Stored, and evicted in both places.
    expected = answers(server, PROMPTS)
    metrics = await_agreement(server, heard, root)
    chunks = sum(len(prompt) // MODEL.block_size_tokens for prompt in PROMPTS)
    stored = metrics.value("kvtier:chunks_stored_total")
    assert stored + metrics.value("kvtier:stores_declined_total") >= chunks >= stored
    assert metrics.value("vllm:kv_offload_store_bytes_total") == stored * MODEL.row_bytes()
    evicted = metrics.value("kvtier:chunks_evicted_total", tier="region")
    assert evicted == stored - len(heard.keys(REGION)) > 0
    written = metrics.value("kvtier:rows_written_total", outcome="ok")
    evicted = metrics.value("kvtier:chunks_evicted_total", tier="disk")
    assert evicted == written - len(heard.keys(DISK)) > 0
    assert metrics.value("kvtier:write_bytes_total") == written * MODEL.row_bytes()
    # Of a prompt that is not there one chunk is looked up: the first.
    for name in ("kvtier:chunk_misses_total", "kvtier:chunk_queries_total"):
        assert metrics.value(name) == len(PROMPTS) * (1 + (name == "kvtier:chunk_queries_total"))
    assert metrics.value("kvtier:disk_limit", limit="budget") == 1
    assert metrics.value("kvtier:region_pins") == 0
    assert len(heard.keys(DISK)) > 50
    _assert_self_describing(heard)

    # Promoted, which evicts others.
    reset_cache(server)
    assert answers(server, PROMPTS[3:4]) == expected[3:4]
    before, metrics = metrics, await_agreement(server, heard, root)
    assert tokens_from(metrics, "disk") > 0
    assert_loads_agree(Growth(before, metrics))

    # Damaged: what is asked for and turns out corrupt is gone for a router too.
    known = heard.keys(DISK)
    damage_every_row(root)
    reset_cache(server)
    assert answers(server, PROMPTS[3:]) == expected[3:]
    before, metrics = metrics, await_agreement(server, heard, root)
    assert_loads_agree(Growth(before, metrics))
    dropped = server.log_path.read_text().count("dropped row")
    assert metrics.value("kvtier:rows_read_total", outcome="corrupt") == dropped > 0
    assert not known <= heard.keys(DISK)

    # A store that is gone holds nothing; when it is back, what it finds.
    known = heard.keys(DISK)
    [store] = [process for process in store_processes() if serves(process, root)]
    os.kill(store.pid, signal.SIGKILL)

    def was_emptied() -> bool:
        step(server)
        return heard.known.times_emptied.get(DISK) == 1

    await_that(was_emptied, "nobody was told that the rows are gone")
    before, metrics = metrics, await_agreement(server, heard, root)
    assert heard.keys(DISK) == known
    assert metrics.value("kvtier:store_restarts_total") == 1
    grown = Growth(before, metrics)
    for name in ("rows_read", "rows_written", "read_bytes", "write_bytes", "chunks_evicted"):
        assert grown(f"kvtier:{name}_total") == 0, "nothing was asked for since"

    # A late follower learns the same.
    late = heard.replayed()
    assert late.keys == heard.known.keys
    assert heard.known.complaints == late.complaints == []
    server.stop()
    await_store_gone(root)
    on_disk = keys_on_disk(root)
    assert len(on_disk) > 40

    # A warm store is told before the first request; a reset takes it all back.
    heard = subscriber()
    flags = ["--kv-events-config", json.dumps(heard.server_config())]
    server = start_server("tiny-llama", config, flags=flags, env=ENV)
    await_that(lambda: heard.keys(DISK) == on_disk, "not told before the first request")
    assert heard.keys(REGION) == set()

    reset_cache(server, external=True)
    await_agreement(server, heard, root, rows=0)
    assert keys_on_disk(root) == heard.keys(REGION) == set()
    # The next process may still be on its way: what it misses, it is given then.
    assert answers(server, PROMPTS[:1]) == expected[:1]
    await_agreement(server, heard, root, rows=len(PROMPTS[0]) // MODEL.block_size_tokens)
    assert heard.known.complaints == []
    server.stop()


def _assert_self_describing(heard: Subscriber) -> None:
    """The first two blocks of some prompt, told of both places with tokens and parent."""
    for medium in ("CPU", "STORAGE"):
        told = [event for event in heard.known.stored if event.medium == medium]
        first = next(event for event in told if event.parent_block_hash is None)
        assert len(first.token_ids) == first.block_size == MODEL.block_size_tokens
        assert any(event.parent_block_hash == first.block_hashes[-1] for event in told)
