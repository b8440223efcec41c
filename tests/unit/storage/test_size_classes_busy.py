"""Many threads at once on a store whose size classes take segments from each other."""

from __future__ import annotations

import logging
import random
import threading
import time
from pathlib import Path

import pytest

from storage.testing.contract import MARK
from storage.testing.mixed import ROW_BYTES, MixedHarness, mixed_row_of
from storage.testing.rows import BudgetWatch, aligned_rows, filled_rows, key_of
from storage.types import STORED, RowOutcome

THREADS = 6
SECONDS = 4.0  # or, on a machine that does other things too, longer
EVICTIONS = 100
HANG_S = 120.0


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["blosc-lz4", "zstd"])
def test_no_row_is_wrong_however_busy_the_store_is(
    memory_path: Path, codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "kvtier.storage")
    harness = MixedHarness(memory_path / "root", codec, segments=7)
    rows = harness.rows
    keys = [key_of(number) for number in range(160)]
    end, last = time.monotonic() + SECONDS, time.monotonic() + HANG_S
    seen: list[set[RowOutcome]] = [set() for _ in range(THREADS)]
    wrong: list[str] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        buffers = aligned_rows(5, ROW_BYTES)
        while (now := time.monotonic()) < end or (
            now < last and rows.count().rows_evicted <= EVICTIONS
        ):
            # Each thread drifts over kinds of rows, so that classes wax and wane.
            some = rng.sample(keys[rng.randrange(120) :][:40], rng.randint(1, 5))
            what = rng.random()
            if what < 0.5:
                seen[number].update(
                    rows.write(some, filled_rows(some, ROW_BYTES, mixed_row_of)).outcomes
                )
            elif what < 0.9:
                for buffer in buffers:
                    buffer[:] = bytes([MARK]) * ROW_BYTES
                outcomes = rows.read(some, buffers[: len(some)]).outcomes
                for key, outcome, buffer in zip(some, outcomes, buffers, strict=False):
                    if outcome is RowOutcome.OK and buffer != mixed_row_of(key):
                        wrong.append(f"thread {number}: {key.hex()}")
                    if outcome not in (RowOutcome.OK, RowOutcome.MISSING):
                        wrong.append(f"thread {number}: {outcome.name}")
            elif what < 0.95:
                rows.remove(some)
            else:
                rows.flush(recency=True)

    with BudgetWatch(harness.options.root) as watch:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert not caplog.records, "an I/O task raised"
    assert watch.highest <= harness.options.budget_bytes
    # A class may have lost its last row to a reader's pin: then a write is declined, not failed.
    assert set().union(*seen) <= STORED | {RowOutcome.DECLINED}
    assert rows.count().rows_evicted > EVICTIONS
    harness.check()
    keys_now = rows.keys()
    harness.close()
    harness.open()
    assert harness.rows.keys() == keys_now
    harness.check()
    harness.close()
