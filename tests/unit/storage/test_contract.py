"""The contract of a store of rows, for the store on each kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.device import LocalDevice
from storage.testing.contract import RowStoreContract, StoreHarness
from storage.testing.faulty import BufferedDevice, FaultyDevice


class TestDirect(RowStoreContract):
    @pytest.fixture
    def harness(self, direct_path: Path) -> Iterator[StoreHarness]:
        harness = StoreHarness(direct_path / "root")
        assert harness.store.direct
        yield harness
        harness.close()


class TestBuffered(RowStoreContract):
    @pytest.fixture
    def harness(self, memory_path: Path) -> Iterator[StoreHarness]:
        harness = StoreHarness(memory_path / "root", device=BufferedDevice)
        assert not harness.store.direct
        yield harness
        harness.close()


class TestFaultyWithoutFaults(RowStoreContract):
    @pytest.fixture
    def harness(self, memory_path: Path) -> Iterator[StoreHarness]:
        harness = StoreHarness(memory_path / "root", device=lambda: FaultyDevice(LocalDevice()))
        yield harness
        harness.close()
