"""The settings of our disk among the `secondary_tiers` of an engine's own tiering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import ConfigError
from storage.options import StoreOptions
from tiering.config import DISK_TIER, DP_RANK, disk_options

_OF_ENGINE = frozenset({"type", "module_path", "backpressure"})  # not a tier's own settings


def check_tiers(
    tiers: Sequence[Any], where: str, dp_rank: int = 0, engines: int = 1
) -> StoreOptions | None:
    """Our tier's settings, checked, for the engine of `dp_rank`, one of `engines` on this node.
    None if our tier is not among `tiers`; what the others are is the engine's affair.

    Raises `ConfigError`, also for a second one: an engine gives every row to each of its tiers, and
    two disks would hold the same bytes twice.
    """
    options = None
    for number, raw in enumerate(tiers):
        if not isinstance(raw, Mapping) or raw.get("type") != DISK_TIER:
            continue
        place = f"{where}[{number}]"
        if options is not None:
            raise ConfigError(
                f"{place}.type", f"one {DISK_TIER!r}, with several drives as its `roots`", "another"
            )
        own = {key: value for key, value in raw.items() if key not in _OF_ENGINE}
        options = disk_options(own, place, dp_rank)
        if engines > 1:
            _refuse_same_root(options, disk_options(own, place, dp_rank + 1), engines, place)
    return options


def _refuse_same_root(first: StoreOptions, second: StoreOptions, engines: int, where: str) -> None:
    for root in second.roots:
        if root in first.roots:
            raise ConfigError(
                f"{where}.root",
                f"a root for each of the {engines} data-parallel engines of this node, each with "
                f'the budget that is given: "{root}/{DP_RANK}"',
                str(root),
            )
