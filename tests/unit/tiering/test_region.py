"""The region: shared by processes, never larger than memory, gone with the last of them."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from storage.errors import LayoutMismatch
from tiering.region import (
    Region,
    RegionError,
    announce_layers,
    collect_layers,
    dead_regions,
    region_path,
    remove_dead_regions,
)
from tiering.rows import GroupLayer, RowLayout
from tiering.topology import LayerFacts, Parallelism

ROOT = Path(__file__).resolve().parents[3]


def layout(ranks: int = 1, page: int = 4096) -> RowLayout:
    facts = [LayerFacts("layer", page, max_tp_shards=1)]
    return RowLayout.of(facts, Parallelism(tp=ranks, world_size=ranks), 1)


def test_everyone_sees_the_same_bytes_and_a_late_joiner_too(memory_path: Path) -> None:
    made = Region.create("e", layout(2), 40_000, directory=memory_path)
    other = Region.attach("e", rank=1, expected=layout(2), directory=memory_path)
    made.row(3)[:4] = b"abcd"
    late = Region.attach("e", rank=None, directory=memory_path)
    late.wait_for_ranks(1)
    assert (made.row_count, late.row_count) == (9, 9)
    assert bytes(other.row(3)[:4]) == bytes(late.row(3)[:4]) == b"abcd"
    assert late.layout == layout(2)
    assert made.rows_offset % 4096 == 0
    inodes = {os.fstat(region.fd).st_ino for region in (made, other, late)}
    assert len(inodes) == 1
    assert stat.S_IMODE(os.fstat(made.fd).st_mode) == 0o600
    late.unlink()
    assert list(memory_path.iterdir()) == []
    for region in (made, other, late):
        region.close()


@pytest.mark.parametrize("directory", ["absent", "file", "of a long name"])
def test_shared_memory_that_cannot_be_had_is_one_line(memory_path: Path, directory: str) -> None:
    (memory_path / "file").write_text("")
    where = memory_path / directory if directory in ("absent", "file") else memory_path
    engine_id = "e" if where != memory_path else "e" * 300
    for make in (
        lambda: Region.create(engine_id, layout(), 40_000, directory=where),
        lambda: announce_layers(engine_id, 1, {}, directory=where).__enter__(),
        lambda: Region.attach(engine_id, rank=1, directory=where, timeout_s=0.05),
    ):
        with pytest.raises(RegionError, match=r"kvtier-e.*(expected shared|did not appear)"):
            make()


def test_a_region_larger_than_a_file_may_be_is_one_line_and_leaves_nothing(
    memory_path: Path,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(RegionError, match="File too large; expected shared memory"):
            Region.create("e", layout(), 40_000, directory=memory_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(memory_path.iterdir()) == []


def test_attaching_never_makes_a_region(memory_path: Path) -> None:
    with pytest.raises(RegionError, match="did not appear"):
        Region.attach("e", rank=1, directory=memory_path, timeout_s=0.05)
    assert list(memory_path.iterdir()) == []


def test_a_rank_may_come_before_the_region(memory_path: Path) -> None:
    found: list[Region] = []
    thread = threading.Thread(
        target=lambda: found.append(Region.attach("e", rank=1, directory=memory_path))
    )
    thread.start()
    made = Region.create("e", layout(2), 8192, directory=memory_path)
    thread.join(60)
    assert found[0].row_count == made.row_count
    found[0].close()
    made.close()


def test_missing_ranks_are_named(memory_path: Path) -> None:
    made = Region.create("e", layout(4), 8192, directory=memory_path)
    with pytest.raises(RegionError, match=r"rank\(s\) \[1, 2, 3\] of 4 did not attach"):
        made.wait_for_ranks(0.05)
    made.close()


def test_another_layout_is_refused_with_both_rows(memory_path: Path) -> None:
    made = Region.create("e", layout(2), 65536, directory=memory_path)
    with pytest.raises(
        LayoutMismatch, match=r"rank 1, layer .* of 4096 bytes .*rank 0.* of 8192 bytes"
    ):
        Region.attach("e", rank=1, expected=layout(2, page=8192), directory=memory_path)
    made.close()


def test_a_region_that_does_not_fit_is_refused_and_leaves_nothing(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiering.region._available", lambda _: 8 << 20)
    with pytest.raises(RegionError, match=r"cpu_bytes_to_use: a region of .* --shm-size"):
        Region.create("e", layout(), 64 << 20, directory=memory_path)
    assert list(memory_path.iterdir()) == []


def test_a_full_real_tmpfs(tmp_path: Path) -> None:
    mount = tmp_path / "shm"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(RegionError, match="does not fit"):
            Region.create("e", layout(), 64 << 20, directory=mount)
        assert list(mount.iterdir()) == []
        region = Region.create("e", layout(), 4 << 20, directory=mount)
        for slot in range(region.row_count):  # no SIGBUS
            region.row(slot)[:] = bytes(region.layout.row_bytes)
        region.close()
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_not_one_row_is_refused(memory_path: Path) -> None:
    with pytest.raises(RegionError, match="cpu_bytes_to_use: expected at least one row of 4096"):
        Region.create("e", layout(), 4095, directory=memory_path)


def test_one_engine_id_is_one_engine(memory_path: Path) -> None:
    made = Region.create("e", layout(), 8192, directory=memory_path)
    with pytest.raises(RegionError, match="belongs to a running engine"):
        Region.create("e", layout(), 8192, directory=memory_path)
    made.close()


def test_only_the_regions_own_name_is_dropped(memory_path: Path) -> None:
    old = Region.create("e", layout(), 8192, directory=memory_path)
    region_path("e", memory_path).unlink()
    successor = Region.create("e", layout(), 8192, directory=memory_path)
    old.unlink()
    assert region_path("e", memory_path).exists()
    old.close()
    successor.close()


_ENGINE = """
import sys, time
from pathlib import Path
from tests.unit.tiering.test_region import layout
from tiering.region import Region
region = Region.create(sys.argv[2], layout(), 8192, directory=Path(sys.argv[1]))
print("made", flush=True)
time.sleep(60)
"""


def test_what_a_killed_engine_left_is_removed_and_a_living_one_is_not(memory_path: Path) -> None:
    engines = []
    for name in ("dead", "alive"):
        engine = subprocess.Popen(
            [sys.executable, "-c", _ENGINE, str(memory_path), name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        engines.append(engine)
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"made\n"
    dead = engines[0]
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert list(dead_regions(memory_path)) == [region_path("dead", memory_path)]
        region = Region.create("next", layout(), 8192, directory=memory_path)
        assert sorted(path.name for path in memory_path.iterdir()) == [
            "kvtier-alive.region",
            "kvtier-next.region",
        ]
        assert remove_dead_regions(memory_path) == 0
        region.close()
    finally:
        for engine in engines:
            engine.kill()
            engine.communicate()


def in_group(number: int, facts: LayerFacts) -> dict[int, list[GroupLayer]]:
    return {number: [GroupLayer(facts, 0, 128)]}


def test_ranks_of_a_pipeline_tell_rank_0_their_layers(memory_path: Path) -> None:
    stages = {rank: in_group(3, LayerFacts(f"layer{rank}", 100 * rank, 1)) for rank in (1, 2)}
    attached = threading.Event()

    def rank_main(rank: int) -> None:
        with announce_layers("e", rank, stages[rank], directory=memory_path):
            attached.wait(60)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in stages]
    for thread in threads:
        thread.start()
    assert collect_layers("e", [1, 2], directory=memory_path, timeout_s=60) == stages
    remove_dead_regions(memory_path)
    assert len(list(memory_path.iterdir())) == 2, "those of living ranks stay"
    attached.set()
    for thread in threads:
        thread.join()
    assert not list(memory_path.iterdir())


def test_a_rank_that_says_nothing_is_named(memory_path: Path) -> None:
    with (
        announce_layers("e", 1, in_group(0, LayerFacts("a", 1)), directory=memory_path),
        pytest.raises(RegionError, match=r"rank 2 did not say in 0\.1 s which layers"),
    ):
        collect_layers("e", [1, 2], directory=memory_path, timeout_s=0.1)


def test_what_a_killed_rank_announced_is_removed(memory_path: Path) -> None:
    """Its lock went with it; the next start finds the file and nobody who holds it."""
    context = announce_layers("e", 1, in_group(0, LayerFacts("a", 1)), directory=memory_path)
    context.__enter__()
    [path] = memory_path.iterdir()
    kept = path.read_bytes()
    context.__exit__(None, None, None)
    path.write_bytes(kept)
    with announce_layers("e", 1, in_group(0, LayerFacts("b", 2)), directory=memory_path):
        found = collect_layers("e", [1], directory=memory_path, timeout_s=60)
    assert found == {1: in_group(0, LayerFacts("b", 2))}
