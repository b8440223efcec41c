"""A process that stores is killed at random moments, again and again: never a wrong byte."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from storage.namespace import Identity
from storage.options import StoreOptions
from storage.space import ROOT_OVERHEAD_BYTES
from storage.store import DiskStore
from storage.testing.contract import options_for
from storage.testing.rows import (
    aligned_rows,
    bytes_on_disk,
    files_under,
    filled_rows,
    key_of,
    row_of,
)
from storage.types import STORED, RowOutcome

KILLS = 200
ROW_BYTES = 65536
CAPACITY = 24
IDENTITY = Identity("killed/model", {"layout": "plain"})
OK, MISSING = RowOutcome.OK, RowOutcome.MISSING


def work(options: StoreOptions, seed: int, reports: Connection) -> None:
    """Opens the root, then writes, reads, touches and removes at random until it is killed.

    Reports each write after its result, ("stored", numbers), and "wrong" for wrong bytes.
    """
    rng = random.Random(seed)
    store = DiskStore.open(options)
    rows = store.open_rows(IDENTITY, ROW_BYTES)
    reports.send(("open", []))
    while True:
        numbers = rng.sample(range(60), rng.randint(1, 6))
        keys = [key_of(n) for n in numbers]
        what = rng.random()
        if what < 0.6:
            outcomes = rows.write(keys, filled_rows(keys, ROW_BYTES)).outcomes
            stored = [n for n, o in zip(numbers, outcomes, strict=True) if o in STORED]
            reports.send(("stored", stored))
        elif what < 0.9:
            buffers = aligned_rows(len(keys), ROW_BYTES)
            outcomes = rows.read(keys, buffers).outcomes
            for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
                if outcome not in (OK, MISSING) or (
                    outcome is OK and bytes(buffer) != row_of(key, ROW_BYTES)
                ):
                    reports.send(("wrong", [int(outcome)]))
        elif what < 0.95:
            reports.send(("removing", numbers))  # before: it may be killed once they are gone
            rows.remove(keys)
        else:
            store.maintain()


@pytest.mark.timeout(900)
def test_kill_at_random_moments_never_gives_a_wrong_byte(tmp_path: Path) -> None:
    options = options_for(tmp_path / "root", ROW_BYTES, CAPACITY)
    # A forkserver has no threads, and has imported what the child needs: a start costs 20 ms.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["storage.store", "storage.testing.contract"])
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    jobs = survivors = full = 0
    for number in range(KILLS):
        place = f"seed {seed}, kill {number}"
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(options, rng.random(), sender))
        process.start()
        sender.close()
        reports = []
        assert receiver.poll(60), place
        if rng.random() < 0.8:  # else it is killed while it opens
            assert receiver.recv() == ("open", []), place
            for _ in range(rng.randrange(6)):  # as far as this it comes on a slow machine too
                assert receiver.poll(60), place
                reports.append(receiver.recv())
            time.sleep(rng.random() ** 2 * 0.25)
        else:
            time.sleep(rng.random() * 0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, place
        try:
            while receiver.poll():
                reports.append(receiver.recv())
        except EOFError:
            pass
        jobs += len(reports)
        assert not [report for report in reports if report[0] == "wrong"], place

        with DiskStore.open(options) as store:
            rows = store.open_rows(IDENTITY, ROW_BYTES)
            keys = rows.keys()
            buffers = aligned_rows(len(keys), ROW_BYTES)
            assert rows.read(keys, buffers).outcomes == [OK] * len(keys), place
            for key, buffer in zip(keys, buffers, strict=True):
                assert bytes(buffer) == row_of(key, ROW_BYTES), place
            # The last report's rows were the most recent: at most the write that was cut off
            # can have evicted some, and there was room for the rest.
            last = reports[-1] if reports else ("", [])
            if last[0] == "stored":
                assert {key_of(n) for n in last[1]} <= set(keys), place
            pool = rows.pool
            free = sum(pool[n].free_count for n in pool.numbers)
            assert free + len(rows) == 4 * len(pool.numbers), place
            usage = store.usage()
            assert bytes_on_disk(options.root) <= usage.used_bytes <= usage.budget_bytes, place
            made = 65536 if rows.directory.exists() else 0
            assert usage.used_bytes == ROOT_OVERHEAD_BYTES + made + pool.charge_bytes * len(
                pool.numbers
            ), place
            assert not [name for name in files_under(options.root) if "partial" in name], place
            survivors += len(keys)
            full += len(pool.numbers) == CAPACITY // 4
    assert jobs > KILLS, "the child must get to work"
    assert survivors > KILLS * CAPACITY // 2
    assert full > KILLS // 2
