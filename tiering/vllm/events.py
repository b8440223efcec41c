"""KV events: what came to the region and to disk and what went, in vLLM's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

from storage.changes import Changes

_KEYS_PER_STEP = 512  # of each tier: vLLM takes about 3 us for each, on the scheduler's thread


class Followed(Protocol):
    """A tier that tells what it gains and loses, such as `PrimaryTier` and `StoreClient`."""

    def follow(self) -> None: ...

    @property
    def change_count(self) -> int: ...

    def take_changes(self, limit: int) -> Changes: ...


@dataclass(frozen=True, slots=True)
class _Announced:
    tier: Followed
    medium: Medium
    locality: Locality | None
    ownership: str | None


class EventStream:
    """The events of the tiers that were added; without any, there are none and nothing is kept.

    In each step a tier tells in one event what it lost and in one what it gained, 512 keys at most:
    a store that is opened with a million rows tells them over the next steps, behind all that
    happens meanwhile.
    """

    def __init__(self) -> None:
        self._tiers: list[_Announced] = []

    def add_region(self, region: Followed) -> None:
        self._add(_Announced(region, Medium.CPU, None, None))

    def add_disk(self, name: str, disk: Followed) -> None:
        """`name` tells apart several tiers of the same medium."""
        self._add(_Announced(disk, Medium.STORAGE, Locality.LOCAL, name))

    def _add(self, announced: _Announced) -> None:
        announced.tier.follow()
        self._tiers.append(announced)

    @property
    def is_pending(self) -> bool:
        """Whether `take` has something to give."""
        return bool(self._tiers) and any(announced.tier.change_count for announced in self._tiers)

    def take(self) -> list[OffloadingEvent]:
        """The events of this step."""
        events = []
        for of in self._tiers:
            if not of.tier.change_count:
                continue
            changes = of.tier.take_changes(_KEYS_PER_STEP)
            for keys, is_removed in ((changes.removed, True), (changes.stored, False)):
                if keys:
                    events.append(
                        OffloadingEvent(
                            keys=keys,
                            medium=of.medium,
                            removed=is_removed,
                            locality=of.locality,
                            ownership=of.ownership,
                            # So that vLLM keeps what it knows of the chunk until it is gone here.
                            removal_expected=of.medium is not Medium.CPU,
                        )
                    )
        return events
