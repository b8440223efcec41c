"""Faults under a running `vllm serve`: right tokens, nobody waits for ever, pins back to zero, and
metrics that say what happened.

Tokens are compared with those of a server without kvtier, in fp32.  The tests of a server share
it, in this order: each leaves it with a good disk and an idle region.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from scripts.models import MODELS, ROOT
from scripts.serving import Metrics, ServeError
from tests.integration.conftest import (
    await_store_gone,
    needs_vllm,
    regions_left,
    tokens_from,
)
from tests.integration.faults import (
    CHUNK_TOKENS,
    DEADLINE_S,
    MODEL,
    FaultyServer,
    in_background,
)
from tests.integration.settling import await_that

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]

PROMPT_TOKENS = 900
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS  # of each prompt
REGION_ROWS = 96  # of three prompts
SMALL_REGION_ROWS = 8
PROMOTION_TIMEOUT_S = 3.0
READ_TIMEOUT_S, WRITE_TIMEOUT_S = 2.0, 3.0

_letters = random.Random(20261130)


def _prompts(count: int) -> list[str]:
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(_letters.choices(alphabet, k=PROMPT_TOKENS)) for _ in range(count)]


OTHERS = _prompts(4)  # more than the region holds
GOOD = _prompts(3)  # on disk, and untouched by faults: no read of it has failed lately
SLOW, HUNG, STOPPED, KILLED, LEFT, DAMAGED, REFUSED = (_prompts(5) for _ in range(7))
WARM = [GOOD, SLOW, HUNG, STOPPED, KILLED, LEFT, DAMAGED, REFUSED]  # on disk from the start
FRESH = {
    name: _prompts(3)
    for name in ("slow", "hung", "stopped", "refused", "descriptors", "root", "queued", "full")
}
MANY = _prompts(32)
KEPT = _prompts(4)  # on a file system of their own
ALL = [p for group in (OTHERS, *WARM, *FRESH.values(), MANY, KEPT) for p in group]

Tokens = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """The tokens of every prompt, without kvtier."""
    plain = FaultyServer(tmp_path_factory.mktemp("plain"), None)
    try:
        plain.start()
        return dict(zip(ALL, plain.tokens(ALL), strict=True))
    finally:
        plain.server.kill()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


def started(directory: Path, root: Path, number: int, **settings: Any) -> FaultyServer:
    return FaultyServer(
        directory,
        root,
        number=number,
        segment_size="1MiB",
        admission="always",
        read_timeout_s=READ_TIMEOUT_S,
        write_timeout_s=WRITE_TIMEOUT_S,
        connector={"promotion_timeout_s": PROMOTION_TIMEOUT_S},
        **settings,
    ).start()


@pytest.fixture(scope="module")
def server(directory: Path, expected: Tokens) -> Iterator[FaultyServer]:
    """Its store is on a device whose faults a test sets; what is in WARM is on disk."""
    server = started(directory, directory / "store", 0, region_rows=REGION_ROWS)
    try:
        prompts = [prompt for group in (OTHERS, *WARM) for prompt in group]
        assert server.store(prompts) == [expected[prompt] for prompt in prompts]
        server.settled()
        yield server
    finally:
        server.server.kill()


@pytest.fixture(scope="module")
def small(directory: Path, server: FaultyServer) -> Iterator[FaultyServer]:
    """The next server on the same root, with a region smaller than any prompt."""
    assert not server.server.alive(), "the test that stops it comes before"
    small = started(directory, directory / "store", 1, region_rows=SMALL_REGION_ROWS)
    try:
        yield small
    finally:
        small.server.kill()


def check(server: FaultyServer, prompts: Sequence[str], expected: Tokens) -> None:
    assert server.tokens(prompts) == [expected[prompt] for prompt in prompts]


def check_from_disk(
    server: FaultyServer, prompts: Sequence[str], expected: Tokens, least: float = 0.95
) -> None:
    """The tokens are right, and at least so much of the prompts came from disk."""
    server.leave_on_disk_alone(OTHERS)
    before = tokens_from(server.metrics(), "disk")
    check(server, prompts, expected)
    from_disk = tokens_from(server.metrics(), "disk") - before
    assert from_disk >= least * sum(map(len, prompts))


def check_one_by_one(server: FaultyServer, prompts: Sequence[str], expected: Tokens) -> list[float]:
    """The tokens are right; the seconds of each."""
    answers = [server.ask(prompt) for prompt in prompts]
    assert [answer.tokens for answer in answers] == [expected[prompt] for prompt in prompts]
    return [round(answer.seconds, 2) for answer in answers]


def await_from_disk(server: FaultyServer, prompts: Sequence[str], expected: Tokens) -> None:
    """They come from disk, perhaps not at once: what failed is asked again after a while."""

    def come_from_disk() -> bool:
        server.leave_on_disk_alone(OTHERS)
        before = tokens_from(server.metrics(), "disk")
        check(server, prompts, expected)
        # What was computed is written before the others of the next turn take its place.
        from_disk = tokens_from(server.settled(), "disk") - before
        return from_disk >= 0.95 * sum(map(len, prompts))

    await_that(come_from_disk, "nothing comes from disk again")


def await_written(server: FaultyServer, prompts: Sequence[str], expected: Tokens) -> None:
    """They are written, once the disk is tried again, and found."""

    def are_written() -> bool:
        before = server.value("rows_written_total", outcome="ok")
        server.leave_on_disk_alone(OTHERS)
        check(server, prompts, expected)
        server.settled()
        return server.value("rows_written_total", outcome="ok") > before

    await_that(are_written, "nothing is written again")
    await_from_disk(server, prompts, expected)


class Change:
    """What counters have gained since it was made, or gauges are now."""

    def __init__(self, server: FaultyServer) -> None:
        self._server = server
        self._before = server.metrics()
        self.now = self._before

    def look(self, metrics: Metrics | None = None) -> None:
        self.now = metrics or self._server.metrics()

    def of(self, name: str, **labels: str) -> float:
        name = f"kvtier:{name}"
        return self.now.value(name, **labels) - self._before.value(name, **labels)

    def unsuccessful_reads(self) -> float:
        return self.of("rows_read_total") - self.of("rows_read_total", outcome="ok")

    def gauge(self, name: str, **labels: str) -> float:
        return self.now.value(f"kvtier:{name}", **labels)


# -- slow, hung, stopped, killed ----------------------------------------------------------------


def test_faults_a_disk_of_200_ms_per_call_is_slow_and_nothing_else(
    server: FaultyServer, expected: Tokens
) -> None:
    change = Change(server)
    server.control(delay_s={"preadv": 0.2, "pwritev": 0.2})
    check_from_disk(server, SLOW, expected)
    check(server, FRESH["slow"], expected)
    change.look(server.settled())
    server.control()
    assert change.of("rows_read_total", outcome="failed") == 0
    assert change.of("promotions_failed_total") == 0
    # Each chunk that was stored is written, or was held back for a disk that has enough to do.
    held_back = change.of("cascades_waiting") + change.of("cascades_lost_total")
    written = change.of("rows_written_total", outcome="ok")
    assert 0 < written == change.of("chunks_stored_total") - held_back
    assert change.gauge("disk_degraded") == change.gauge("reads_suspended") == 0


@pytest.mark.parametrize("calls", ["preadv", "*"])
def test_faults_a_disk_that_hangs_is_a_miss_and_comes_back(
    server: FaultyServer, expected: Tokens, calls: str
) -> None:
    server.leave_on_disk_alone(OTHERS)
    change = Change(server)
    server.control(hang=[calls])
    seconds = check_one_by_one(server, [*HUNG, *FRESH["hung"]], expected)
    change.look()
    print(f"seconds per request while {calls} hangs: {seconds}")
    assert change.of("read_suspensions_total") == change.gauge("reads_suspended") == 1
    assert change.of("lookups_refused_total") > 0
    stored = change.of("chunks_stored_total")
    assert stored >= len(FRESH["hung"]) * CHUNKS, "the region is starved"
    await_that(lambda: server.value("rows_read_total", outcome="hung") > 0, "no read hangs")
    server.control()
    server.settled()
    await_from_disk(server, GOOD, expected)
    assert server.value("reads_suspended") == 0
    if calls == "*":
        await_from_disk(server, HUNG, expected)  # once they are asked of the disk again
    server.settled()


def test_faults_a_store_that_is_stopped_resumes_where_it_was(
    server: FaultyServer, expected: Tokens
) -> None:
    """SIGSTOP: the process hears nothing and keeps no deadline of its own."""
    server.leave_on_disk_alone(OTHERS)
    change = Change(server)
    store = server.store_process()
    store.suspend()
    try:
        seconds = check_one_by_one(server, [*STOPPED, *FRESH["stopped"]], expected)
        print(f"seconds per request while the store is stopped: {seconds}")
        await_that(lambda: server.value("disk_up") == 0, "the store is taken to serve")
        await_that(server.rests, "the engine does not rest")
    finally:
        store.resume()
    server.settled()
    await_from_disk(server, GOOD, expected)
    change.look(server.settled())
    assert server.store_process().pid == store.pid
    assert change.of("store_restarts_total") == 0
    assert change.gauge("disk_up") == 1


def test_faults_a_store_killed_while_eight_requests_wait_for_it(
    server: FaultyServer, expected: Tokens
) -> None:
    prompts = [*KILLED, *SLOW[:3]]
    server.leave_on_disk_alone(OTHERS)
    change = Change(server)
    server.control(hang=["preadv"])
    store = server.store_process()
    tokens: list[tuple[int, ...]] = []
    asking = in_background(lambda: tokens.extend(a.tokens for a in server.ask_at_once(prompts)))
    server.await_hanging()
    store.kill()
    server.control()
    asking.join()
    assert tokens == [expected[prompt] for prompt in prompts]
    await_that(lambda: server.value("disk_up") == 1, "the store does not come back")
    await_from_disk(server, GOOD, expected)
    change.look(server.settled())
    assert change.of("store_restarts_total") == 1
    assert change.of("promotions_failed_total") > 0


def test_faults_clients_that_go_while_their_prompts_are_read(
    server: FaultyServer, expected: Tokens
) -> None:
    server.leave_on_disk_alone(OTHERS)
    server.control(hang=["preadv"])

    went: list[str] = []

    def go(prompt: str) -> None:
        try:
            server.ask(prompt, timeout_s=0.4)
        except httpx.TimeoutException:
            went.append(prompt)

    going = [in_background(lambda p=p: go(p)) for p in LEFT[:3]]  # type: ignore[misc]
    tokens: list[tuple[int, ...]] = []
    others = in_background(lambda: tokens.extend(server.tokens(LEFT[3:])))
    for thread in going:
        thread.join()
    assert went, "answered although its chunks are not there"
    server.control()
    others.join()
    assert tokens == [expected[prompt] for prompt in LEFT[3:]]
    server.settled()
    await_from_disk(server, GOOD, expected)
    server.settled()


# -- errors -------------------------------------------------------------------------------------


def check_read_only(
    server: FaultyServer, expected: Tokens, warm: Sequence[str], fresh: Sequence[str]
) -> None:
    """Of a disk that has just turned read-only: reads go on, and what is not written is counted."""
    change = Change(server)
    check(server, fresh, expected)
    server.settled()
    assert server.value("disk_state", state="read-only") == 1
    await_from_disk(server, warm, expected)
    change.look(server.settled())
    assert change.gauge("disk_degraded") == 1
    assert change.of("rows_written_total", outcome="ok") == 0
    not_written = ("failed", "declined disk")
    refused = sum(change.of("rows_written_total", outcome=outcome) for outcome in not_written)
    assert 0 < refused == change.of("writes_not_stored_total")
    assert change.of("cascades_held_back_total", reason="disk state") > 0


def test_faults_a_disk_that_turns_read_only_and_back(
    server: FaultyServer, expected: Tokens
) -> None:
    calls = ("pwritev", "write_file", "open", "allocate", "rename", "make_directory", "remove")
    server.control(errno=dict.fromkeys(calls, errno.EROFS))
    check_read_only(server, expected, GOOD, FRESH["refused"])
    server.control()
    await_written(server, FRESH["refused"], expected)
    assert server.value("disk_state", state="read-only") == 0
    assert server.value("disk_degraded") == 0


def test_faults_reads_that_the_disk_refuses(server: FaultyServer, expected: Tokens) -> None:
    server.leave_on_disk_alone(OTHERS)
    change = Change(server)
    server.control(errno={"preadv": errno.EIO})
    check(server, REFUSED, expected)
    change.look(server.settled())
    server.control()
    assert change.of("rows_read_total", outcome="failed") > 0
    assert change.of("promotions_failed_total") == change.unsuccessful_reads()
    await_from_disk(server, GOOD, expected)
    server.settled()


# -- damage -------------------------------------------------------------------------------------


def _flip(segment: Path) -> None:
    """One bit in every row."""
    with segment.open("r+b") as file:
        for offset in range(65536, segment.stat().st_size, 16384):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def _cut(segment: Path) -> None:
    os.truncate(segment, segment.stat().st_size // 3)


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink])
def test_faults_segments_damaged_under_a_running_server(
    server: FaultyServer, expected: Tokens, damage: Callable[[Path], None]
) -> None:
    server.leave_on_disk_alone(OTHERS)
    change = Change(server)
    assert server.root is not None
    for segment in server.root.glob("*/rows/c/*/0"):
        damage(segment)
    check(server, DAMAGED, expected)
    change.look(server.settled())
    # Rows are missing that the store found removed after the lookup and before the read.
    assert change.of("promotions_failed_total") == change.unsuccessful_reads()
    if damage is not Path.unlink:  # which takes no byte from who has it open
        assert change.of("rows_read_total", outcome="corrupt") > 0
    check(server, [*OTHERS, *GOOD, *DAMAGED], expected)  # stored again
    server.settled()
    if damage is Path.unlink:
        await_that(
            lambda: server.value("disk_external_removals_total") > 0, "nobody misses the files"
        )
    await_from_disk(server, GOOD, expected)
    server.settled()


def test_faults_no_descriptor_is_left(server: FaultyServer, expected: Tokens) -> None:
    """A segment more is a file more: none is made, and slots are reused."""
    store = server.store_process()
    before = store.rlimit(psutil.RLIMIT_NOFILE)
    store.rlimit(psutil.RLIMIT_NOFILE, (store.num_fds(), before[1]))
    check(server, MANY, expected)
    server.settled()
    assert server.value("disk_limit", limit="descriptors") == 1
    assert server.value("disk_state", state="full") == 1
    await_from_disk(server, MANY[-2:], expected)
    store.rlimit(psutil.RLIMIT_NOFILE, before)
    server.settled()


def test_faults_the_whole_root_removed_under_a_running_server(
    server: FaultyServer, expected: Tokens
) -> None:
    assert server.root is not None
    change = Change(server)
    while server.root.exists():  # the store may make a file while others are removed
        shutil.rmtree(server.root, ignore_errors=True)
    check(server, [*GOOD, *FRESH["root"]], expected)
    await_that(lambda: server.value("store_restarts_total") > 0, "nobody misses the root")
    await_that(lambda: server.value("disk_up") == 1, "the store does not come back")
    await_written(server, FRESH["root"], expected)
    change.look(server.settled())
    assert change.of("store_restarts_total") == 1


# -- the end of one server, and the next on its root ----------------------------------------------


def test_faults_sigterm_with_stores_queued(
    server: FaultyServer, directory: Path, expected: Tokens
) -> None:
    check(server, MANY, expected)
    server.settled()
    server.control(delay_s={"pwritev": 0.7})
    check(server, FRESH["queued"], expected)
    server.server.stop(DEADLINE_S)
    assert server.root is not None
    await_store_gone(server.root)
    assert regions_left(directory) == []
    verify(server.root)


def verify(root: Path) -> None:
    """`kvtier verify` finds every row whole."""
    command = [sys.executable, "-m", "tiering.cli.main", "verify", str(root)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_faults_a_region_too_small_for_one_request(small: FaultyServer, expected: Tokens) -> None:
    """Loads the part that fits; of what was queued when its predecessor ended, nothing is wrong."""
    before = tokens_from(small.metrics(), "disk")
    prompts = [*FRESH["root"], *FRESH["queued"]]
    check(small, prompts, expected)
    metrics = small.settled()
    from_disk = tokens_from(metrics, "disk") - before
    assert len(FRESH["root"]) <= from_disk / CHUNK_TOKENS <= len(prompts) * SMALL_REGION_ROWS
    assert metrics.value("kvtier:rows_read_total", outcome="corrupt") == 0


def test_faults_32_requests_over_a_region_of_8_rows(small: FaultyServer, expected: Tokens) -> None:
    change = Change(small)
    before = tokens_from(change.now, "disk")
    tokens = [answer.tokens for answer in small.ask_at_once(MANY)]
    assert tokens == [expected[prompt] for prompt in MANY]
    change.look(small.settled())
    from_disk = tokens_from(change.now, "disk") - before
    print(f"from disk: {from_disk / sum(map(len, MANY)):.1%}")
    print(f"timed out: {change.of('promotions_timed_out_total'):.0f} of {len(MANY)} requests")
    assert from_disk > 0


def test_faults_the_engine_s_process_killed_alone(small: FaultyServer, directory: Path) -> None:
    small.control(delay_s={"pwritev": 0.3})
    asking = in_background(lambda: _ask_in_vain(small, MANY[:8]))
    time.sleep(0.5)
    small.kill_one("EngineCore")
    asking.join()
    assert small.root is not None
    await_store_gone(small.root)
    assert regions_left(directory) == []
    verify(small.root)


def _ask_in_vain(server: FaultyServer, prompts: Sequence[str]) -> None:
    with contextlib.suppress(httpx.HTTPError):
        server.ask_at_once(prompts)


# -- a file system of its own, and a rank that dies -----------------------------------------------


def _fill(directory: Path) -> Path:
    """A file that takes what room there is."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65536))
    return filler


def test_faults_a_rank_killed_then_a_disk_full_and_read_only(
    directory: Path, mount: Callable[..., Path], expected: Tokens
) -> None:
    """One store through its life: a rank of two is killed, the next server has one rank and finds
    what was stored; then the file system fills up to the last byte, has room again, and aborts."""
    disk = mount("ext4", size_bytes=48 << 20)
    root = disk / "store"
    server = started(directory, root, 2, region_rows=REGION_ROWS, tp=2)
    try:
        assert server.store(KEPT) == [expected[prompt] for prompt in KEPT]
        server.settled()
        server.kill_one("Worker")
    finally:
        server.server.kill()
    await_store_gone(root)
    assert regions_left(directory) == []
    verify(root)

    server = started(directory, root, 3, region_rows=REGION_ROWS, reserve=0)
    try:
        check(server, OTHERS, expected)
        check_from_disk(server, KEPT, expected)

        filler = _fill(disk)
        check(server, MANY, expected)
        metrics = server.settled()
        assert metrics.value("kvtier:disk_state", state="full") == 1
        assert metrics.value("kvtier:disk_limit", limit="space") == 1
        assert metrics.value("kvtier:chunks_evicted_total", tier="disk") > 0
        await_from_disk(server, MANY[-2:], expected)
        filler.unlink()
        await_written(server, FRESH["full"], expected)

        subprocess.run(["mount", "-o", "remount,abort", str(disk)], check=True, timeout=60)
        check_read_only(server, expected, FRESH["full"][:2], FRESH["stopped"])
        server.server.stop(DEADLINE_S)
    finally:
        server.server.kill()
    await_store_gone(root)


def test_faults_a_region_that_does_not_fit_is_one_line(directory: Path) -> None:
    stat = os.statvfs("/dev/shm")
    rows = stat.f_blocks * stat.f_frsize // MODELS[MODEL].row_bytes() + 1
    with pytest.raises(ServeError, match="ended with code"):
        started(directory, directory / "unused", 4, region_rows=rows)
    lines = (directory / "serve-4.log").read_text().splitlines()
    ours = [line for line in lines if "spec.py:" in line and "ERROR" in line]
    assert len(ours) == 1, "\n".join(lines[-40:])
    assert "cpu_bytes_to_use: a region of" in ours[0]
    assert "does not fit /dev/shm" in ours[0]
    assert not [line for line in lines if "made /dev/shm" in line]
    assert not (directory / "unused").exists()
