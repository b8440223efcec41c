"""What an evaluation promised and did not keep. Pure: from records to lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.evals.records import RunRecord

RESTORED_MIN = 0.9
"""Of the bytes that the cold run wrote, the share that each warm run reads; and of the prompts'
tokens, the share that it does not compute: what it does are last, partial chunks, never stored."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is still the same, and still from disk. Stated with every report."""

    tolerance: float
    differing_max: float
    restored_min: float = RESTORED_MIN

    def __str__(self) -> str:
        return (
            f"a warm score within {self.tolerance:g} of the cold one, at most"
            f" {self.differing_max:.1%} of answers other than the cold run's, and at least"
            f" {self.restored_min:.0%} of what the cold run wrote read, and of tokens not computed"
        )


def differing(cold: RunRecord, warm: RunRecord) -> int:
    """Answers that are not the cold run's, word for word."""
    assert cold.answers.keys() == warm.answers.keys(), "runs of the same questions"
    return sum(cold.answers[name] != warm.answers[name] for name in cold.answers)


def came_from_disk(cold: RunRecord, warm: RunRecord, share: float) -> bool:
    """Whether the warm run restored that share of what there was to restore."""
    return (
        warm.tokens_disk > 0
        and warm.bytes_read >= share * cold.bytes_written
        and warm.tokens_computed <= (1 - share) * warm.prompt_tokens
    )


def faults_of(runs: Sequence[RunRecord], bounds: Bounds) -> list[str]:
    """Every promise that one side's runs broke, one line each. The first run is the cold one."""
    cold, *others = runs
    faults = []
    if cold.tokens_disk or cold.tokens_region:
        faults.append(f"{cold.side}, run 1 was not cold: {cold.tokens_disk} tokens came from disk")
    for run in others:
        name = f"{run.side}, run {run.number} ({run.kind})"
        if abs(run.score - cold.score) > bounds.tolerance:
            faults.append(
                f"{name}: {run.metric} {run.score:.4f} instead of {cold.score:.4f},"
                f" off by more than {bounds.tolerance:g}"
            )
        count = differing(cold, run)
        if count > bounds.differing_max * len(cold.answers):
            faults.append(f"{name}: {count} of {len(cold.answers)} answers differ")
        if not came_from_disk(cold, run, bounds.restored_min):
            faults.append(
                f"{name} did not come from disk: {run.tokens_computed} tokens computed"
                f" ({cold.tokens_computed} in run 1), {run.bytes_read} of"
                f" {cold.bytes_written} bytes read"
            )
    for run in runs:
        if run.disk_budget_bytes is not None and run.disk_used_bytes > run.disk_budget_bytes:
            faults.append(f"{run.side}, run {run.number}: past the budget")
        if run.rows_corrupt:
            faults.append(f"{run.side}, run {run.number}: {run.rows_corrupt} corrupt rows")
    return faults
