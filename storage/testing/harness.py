"""A store on a device that fails, and the check that a fault has left nothing behind."""

from __future__ import annotations

from pathlib import Path

from storage.device import LocalDevice
from storage.options import StoreOptions
from storage.space import NAMESPACE_OVERHEAD_BYTES, ROOT_OVERHEAD_BYTES
from storage.testing.contract import StoreHarness
from storage.testing.faulty import FaultyDevice
from storage.testing.rows import bytes_on_disk, files_under, row_of
from storage.types import RowKey, RowOutcome


class FaultyHarness(StoreHarness):
    """A store on a faulty device, with a clock that the test moves and one I/O thread."""

    def __init__(
        self,
        root: Path,
        device: FaultyDevice | None = None,
        capacity_rows: int = 16,
        row_bytes: int = 8192,
        options: StoreOptions | None = None,
    ) -> None:
        self.faulty = device or FaultyDevice(LocalDevice())
        self.now = 0.0
        super().__init__(root, row_bytes, capacity_rows, options=options)

    def open(self) -> None:
        self.open_on(self.faulty, lambda: self.now)

    def check(self, keys: set[RowKey]) -> None:
        """`keys` and no others are there and right, and nothing is held."""
        assert self.keys() == keys
        for key, (outcome, row) in zip(keys, self.read(list(keys)), strict=True):
            assert outcome is RowOutcome.OK
            assert row == row_of(key, self.row_bytes)
        assert self.rows.pin_count == 0
        self.check_nothing_leaked()

    def check_nothing_leaked(self) -> None:
        """Every slot is a row's or free, every byte charged, no file half-made, no key in limbo."""
        rows = self.rows
        slots = sum(rows.pool[number].free_count for number in rows.pool.numbers) + len(rows)
        assert slots == len(rows.pool.numbers) * rows.geometry.slots_per_segment
        assert rows.writing_count == 0
        assert not [name for name in files_under(self.options.root) if "partial" in name]
        usage = self.store.usage()
        on_disk = bytes_on_disk(self.options.root)
        assert on_disk <= usage.used_bytes <= usage.budget_bytes
        is_made = (rows.directory.parent / "zarr.json").exists()
        overhead = ROOT_OVERHEAD_BYTES + (NAMESPACE_OVERHEAD_BYTES if is_made else 0)
        assert usage.used_bytes <= overhead + rows.pool.charge_bytes * len(rows.pool.numbers)
