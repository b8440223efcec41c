"""Commands that change a store own it while they do."""

from __future__ import annotations

from pathlib import Path

from storage.codec import NO_CODEC
from storage.options import StoreOptions
from storage.store import DiskStore
from storage.survey import survey_root

_LOCK_TIMEOUT_S = 1.0  # for a store that is just ending; a running one is not waited for


def open_owned(root: Path, budget_bytes: int | None = None, codec: str = NO_CODEC) -> DiskStore:
    """Take a root that is there.  Without a budget it is the one that the root had last, and in no
    case less than it holds: nothing is given back for being looked after.

    Raises `RootUnusable`, or `RootInUse` if somebody has it open.
    """
    survey = survey_root(root)
    if budget_bytes is None:
        last = survey.status.budget_bytes if survey.status else 0
        budget_bytes = max(last, survey.charged_bytes)
    return DiskStore.open(
        StoreOptions(root, budget_bytes, codec=codec, io_threads=2, lock_timeout_s=_LOCK_TIMEOUT_S)
    )
