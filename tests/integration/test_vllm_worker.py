"""The worker of CPU tensors, and vLLM's own for devices with the device emulated."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from scripts.bench import device_copies
from tests.integration.worker_contract import MLA, Ranks, WorkerContract

import tests.integration.quiet_vllm  # isort: skip  # noqa: F401

from vllm.v1.kv_offload.cpu import gpu_worker, host_register

from tiering.copy_queue import CopyFailed
from tiering.vllm.worker import CpuWorker


class TestCpuWorker(WorkerContract):
    """All of it as it runs here."""

    def test_it_is_what_cpu_tensors_get(self, ranks: Any) -> None:
        assert isinstance(ranks(MLA, 1, 1).ranks[0].worker, CpuWorker)

    def test_the_benchmark_of_devices_runs_here_too(self, memory_path: Path) -> None:
        figures = device_copies.run("cpu", 1 << 20, 1, memory_path)
        assert {figure.shape for figure in figures} == set(device_copies.SHAPES)
        assert all(figure.worker_gb_per_s > 0 for figure in figures)

    def test_a_copy_that_fails_ends_the_engine(
        self, ranks: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """vLLM knows no transfer that fails: it asserts success."""
        engine: Ranks = ranks(MLA, 1, 1)
        with pytest.raises(CopyFailed, match=r"copying for job 7 failed: .*slot: expected 0 to"):
            engine.submit("store", 7, [0], [99], 0)
        assert "copying for job 7 failed" in caplog.text


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda")


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


class Event:
    """Of a device that does everything at once."""

    def __init__(self, **_: Any) -> None: ...

    def record(self, _stream: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _other: Event) -> float:
        return 1.0


class Stream:
    def wait_stream(self, _other: Any) -> None: ...

    def wait_event(self, _event: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class Platform:
    """What vLLM's worker asks of its platform."""

    Stream = Stream

    def __init__(self, name: str) -> None:
        self.name = name

    def stream(self, stream: Stream) -> Stream:
        return stream

    def current_stream(self) -> Stream:
        return Stream()

    def is_xpu(self) -> bool:
        return self.name == "xpu"

    def is_rocm(self) -> bool:
        return False


def copy_batch(src: Any, dst: Any, sizes: Any, **_: Any) -> None:
    """vLLM's kernel: piece by piece between addresses."""
    for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


@pytest.mark.parametrize("platform", ["cuda", "xpu"])
class TestDeviceWorkerEmulated(WorkerContract):
    """vLLM's own worker over `RegionView`: its plans, its offsets, its pinning; no kernel."""

    rank_options: ClassVar[dict[str, Any]] = {"tensor_type": on_device}

    @pytest.fixture(autouse=True)
    def pinned(self, monkeypatch: pytest.MonkeyPatch, platform: str) -> dict[int, int]:
        """Address -> bytes that are registered with the device."""
        registered: dict[int, int] = {}

        def register(address: int, size: int) -> bool:
            assert address not in registered
            registered[address] = size
            return True

        monkeypatch.setattr(gpu_worker, "current_platform", Platform(platform))
        monkeypatch.setattr(gpu_worker.ops, "swap_blocks_batch", copy_batch)
        monkeypatch.setattr(gpu_worker.torch, "Event", Event)
        monkeypatch.setattr(gpu_worker, "HAS_TRITON", False)
        monkeypatch.setattr(gpu_worker, "host_register", register)
        monkeypatch.setattr(host_register, "host_unregister", registered.pop)
        monkeypatch.setattr(gpu_worker, "PIN_MEMORY", True)
        new_buffers = gpu_worker._new_descriptor_buffers

        def unpinned_buffers(count: int) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(gpu_worker, "PIN_MEMORY", False)
                return new_buffers(count)

        monkeypatch.setattr(gpu_worker, "_new_descriptor_buffers", unpinned_buffers)
        return registered

    def test_it_is_what_device_tensors_get(self, ranks: Any) -> None:
        assert isinstance(ranks(MLA, 1, 1).ranks[0].worker, gpu_worker.CPUOffloadingWorker)

    def test_all_rows_are_pinned_until_the_end(self, ranks: Any, pinned: dict[int, int]) -> None:
        engine: Ranks = ranks(MLA, 2, 1)
        size = engine.region.row_count * engine.layout.row_bytes
        assert list(pinned.values()) == [size, size], "each rank its own mapping"
        for rank in engine.ranks:
            rank.worker.shutdown()
        assert pinned == {}
        engine.ranks.clear()

    def test_rows_are_pinned_in_parts_of_whole_rows(
        self, ranks: Any, pinned: dict[int, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", 3 * 8192 + 1)
        engine: Ranks = ranks(MLA, 1, 1)
        assert engine.layout.row_bytes == 8192
        rows = [size // 8192 for size in pinned.values()]
        assert sum(rows) == engine.region.row_count
        assert set(rows[:-1]) == {3}
        assert not any(size % 8192 for size in pinned.values())
