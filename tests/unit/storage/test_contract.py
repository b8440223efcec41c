"""The contract of a store of rows, for the store on each kind of device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.codec import CODEC_NAMES, NO_CODEC
from storage.device import LocalDevice
from storage.testing.contract import RowStoreContract, StoreHarness
from storage.testing.faulty import BufferedDevice, FaultyDevice
from storage.testing.rows import row_of, soft_row_of


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


CODECS = [name for name in CODEC_NAMES if name != NO_CODEC]


class TestCodecsWithRowsThatShrink(RowStoreContract):
    @pytest.fixture(params=CODECS)
    def harness(self, direct_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreHarness]:
        harness = StoreHarness(
            direct_path / "root", 65536, 24, codec=request.param, row_of=soft_row_of
        )
        assert harness.store.direct
        yield harness
        counters = harness.rows.count()
        assert counters.rows_raw == 0
        assert counters.rows_encoded > 0 or counters.rows_written == 0
        harness.close()


class TestCodecsWithRowsThatDoNot(RowStoreContract):
    @pytest.fixture(params=CODECS)
    def harness(self, direct_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreHarness]:
        harness = StoreHarness(direct_path / "root", 65536, 24, codec=request.param, row_of=row_of)
        yield harness
        assert harness.rows.count().rows_encoded == 0
        harness.close()


class TestCodecsOfTinyRowsBuffered(RowStoreContract):
    @pytest.fixture(params=[4096, 8192])
    def harness(self, memory_path: Path, request: pytest.FixtureRequest) -> Iterator[StoreHarness]:
        harness = StoreHarness(
            memory_path / "root",
            request.param,
            24,
            BufferedDevice,
            codec="zstd",
            row_of=soft_row_of,
        )
        assert not harness.store.direct
        yield harness
        harness.close()
