"""What the demo of `make run` found, whether it is what was promised, and how that is said."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from scripts.demo_prompts import DemoPrompt
from scripts.models import MODELS, ModelPreset
from scripts.serving import Completion, Metrics

SPEEDUP_MIN = 2.0  # median cold over median warm time to the first token
DISK_SHARE_MIN = 0.9  # of a warm prompt: all but the question and a last, partial chunk

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the tokens of a prompt came from, by vLLM's counters."""

    computed: int
    device: int
    host: int
    disk: int

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> Sources:
        def grown(name: str, source: str) -> int:
            return int(after.value(name, source=source) - before.value(name, source=source))

        return cls(
            computed=grown(BY_SOURCE, "local_compute"),
            device=grown(CACHED_BY_SOURCE, "device"),
            host=grown(CACHED_BY_SOURCE, "host"),
            disk=grown(CACHED_BY_SOURCE, "disk"),
        )


@dataclass(frozen=True, slots=True)
class Drafts:
    """Tokens that the draft model proposed for one answer, and those of them that were right."""

    proposed: int
    accepted: int

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> Drafts:
        return cls(*(int(after.value(n) - before.value(n)) for n in (DRAFTED, ACCEPTED)))

    @classmethod
    def of(cls, run: Iterable[Answered]) -> Drafts:
        drafts = [answered.drafts for answered in run]
        return cls(sum(d.proposed for d in drafts), sum(d.accepted for d in drafts))


@dataclass(frozen=True, slots=True)
class Answered:
    prompt: DemoPrompt
    answer: Completion
    sources: Sources
    drafts: Drafts


@dataclass(frozen=True, slots=True)
class RowsOnDisk:
    """The rows array of one namespace, as its Zarr metadata describes it."""

    namespace: str
    slots: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Bytes of the root: kvtier's own gauges (None when it reports none), and what `stat` says."""

    used_bytes: int | None
    budget_bytes: int | None
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a demo found. `faults` is empty when it kept all its promises.

    The `cold` run is the first, also on a store that was not cold.
    """

    model: str
    tensor_parallel: tuple[int, int]
    """Ranks of the first run and of the second."""
    cold: Sequence[Answered]
    warm: Sequence[Answered]
    ready_s: tuple[float, float]
    disk: DiskUse
    rows_before: Sequence[RowsOnDisk]
    rows: Sequence[RowsOnDisk]
    """The model's namespaces before the first run, and after the second."""
    store_was_cold: bool
    row_bytes: int | None
    """What a row weighs if it holds every distinct byte once; None: not for us to say."""
    faults: Sequence[str] = ()

    @property
    def shares_rows(self) -> bool:
        """Whether the second run is to read what the first wrote."""
        return len(set(self.tensor_parallel)) == 1 or MODELS[self.model].is_portable

    @property
    def runs(self) -> tuple[str, str]:
        return names_of_runs(store_was_cold=self.store_was_cold)

    @property
    def ttft_cold_s(self) -> float:
        return median_ttft_s(self.cold)

    @property
    def ttft_warm_s(self) -> float:
        return median_ttft_s(self.warm)

    @property
    def speedup(self) -> float:
        return self.ttft_cold_s / self.ttft_warm_s


def names_of_runs(*, store_was_cold: bool) -> tuple[str, str]:
    return ("cold", "warm") if store_was_cold else ("first", "second")


def median_ttft_s(run: Iterable[Answered]) -> float:
    """Over the first question of each document: the later ones hit the device in either run."""
    return statistics.median(a.answer.ttft_s for a in run if a.prompt.number == 1)


def same_answer(cold: Answered, warm: Answered) -> bool:
    return cold.answer.token_ids == warm.answer.token_ids


# -- the verdict -------------------------------------------------------------


def faults_of(report: Report) -> list[str]:
    """Every promise that the runs broke, one line each."""
    faults = []
    pairs = list(zip(report.cold, report.warm, strict=True))
    firsts = [(cold, warm) for cold, warm in pairs if cold.prompt.number == 1]
    differing = sum(not same_answer(cold, warm) for cold, warm in pairs)
    if differing:
        faults.append(f"{differing} of {len(pairs)} answers differ after the restart")
    differing = sum(cold.drafts != warm.drafts for cold, warm in pairs)
    if differing:
        faults.append(f"the draft model guessed otherwise in {differing} of {len(pairs)} answers")
    for cold, warm in firsts:
        if report.shares_rows and warm.sources.disk < DISK_SHARE_MIN * warm.answer.prompt_tokens:
            faults.append(
                f"{warm.prompt.document}: only {warm.sources.disk} of"
                f" {warm.answer.prompt_tokens} tokens came from the disk after the restart"
            )
        if not report.shares_rows and report.store_was_cold and warm.sources.disk:
            faults.append(
                f"{warm.prompt.document}: {warm.sources.disk} tokens came from rows of"
                f" TP {report.tensor_parallel[0]}, which are not good for another"
            )
        if report.store_was_cold and (cold.sources.disk or cold.sources.host):
            faults.append(f"{cold.prompt.document}: the cold run was not cold")
    is_judged = report.store_was_cold and report.shares_rows and MODELS[report.model].trained
    if is_judged and report.speedup < SPEEDUP_MIN:
        faults.append(
            f"median warm TTFT {report.ttft_warm_s * 1e3:.0f} ms is more than half of"
            f" cold {report.ttft_cold_s * 1e3:.0f} ms"
        )
    disk = report.disk
    if disk.budget_bytes is not None and disk.allocated_bytes > disk.budget_bytes:
        faults.append(f"{disk.allocated_bytes} bytes on disk, past the budget")
    return faults + row_faults(report)


def row_faults(report: Report) -> list[str]:
    """Of the namespaces that a run on a cold store made: how many, and how large their rows."""
    if report.row_bytes is None or not report.store_was_cold:
        return []
    faults = []
    expected = 1 if report.shares_rows else 2
    largest = report.rows
    if MODELS[report.model].row_layers:  # smaller rows of other groups have namespaces of their own
        largest = [r for r in report.rows if r.row_bytes >= report.row_bytes]
    if len(largest) != expected:
        faults.append(f"{len(largest)} namespaces where {expected} should be")
    for rows in largest:
        if rows.row_bytes != report.row_bytes:
            faults.append(
                f"a row takes {rows.row_bytes} bytes on disk, its distinct bytes {report.row_bytes}"
            )
    return faults


# -- output ------------------------------------------------------------------


def table_of(report: Report) -> Table:
    """The one table: a line per prompt."""
    first, second = report.tensor_parallel
    store = "cold" if report.store_was_cold else "on a store that was NOT cold"
    again = "restarted on its store" + ("" if first == second else f" at TP {second}")
    table = Table(title=f"{report.model}, TP {first}: {store}, then {again}", title_justify="left")
    table.add_column("document")
    table.add_column("question", justify="right")
    table.add_column("prompt\ntokens", justify="right")
    for run in report.runs:
        table.add_column(f"{run}\nTTFT ms", justify="right")
        table.add_column("com-\nputed", justify="right")
        table.add_column("from\ndevice", justify="right")
        if any(a.sources.host for a in (*report.cold, *report.warm)):
            table.add_column("from\nCPU", justify="right")
        table.add_column("from\ndisk", justify="right")
    table.add_column("same\nanswer")
    for cold, warm in zip(report.cold, report.warm, strict=True):
        cells = [cold.prompt.document if cold.prompt.number == 1 else "", str(cold.prompt.number)]
        cells.append(str(cold.answer.prompt_tokens))
        for answered in (cold, warm):
            source = answered.sources
            cells += [f"{answered.answer.ttft_s * 1e3:.0f}", str(source.computed)]
            cells.append(str(source.device))
            if any(a.sources.host for a in (*report.cold, *report.warm)):
                cells.append(str(source.host))
            cells.append(str(source.disk))
        cells.append("yes" if same_answer(cold, warm) else "NO")
        table.add_row(*cells, end_section=cold is report.cold[-1])
    table.caption = Text("\n".join(summary_of(report)), style="default")
    table.caption_justify = "left"
    return table


def summary_of(report: Report) -> list[str]:
    """The lines under the table."""
    first, second = report.runs
    cold_ms, warm_ms = report.ttft_cold_s * 1e3, report.ttft_warm_s * 1e3
    lines = [
        f"median TTFT: {first} {cold_ms:.0f} ms, {second} {warm_ms:.0f} ms, {report.speedup:.1f}x",
        "  (of each document's first question: its prefix is nowhere, or on disk alone)",
    ]
    if not MODELS[report.model].trained:
        lines.append("  (few layers of random weights: the ratio is shown, not judged)")
    if not report.store_was_cold:
        lines.append(not_cold(report))
    if (drafts := Drafts.of(report.cold)).proposed:
        again = Drafts.of(report.warm)
        lines.append(
            f"draft tokens accepted: {first} {drafts.accepted} of {drafts.proposed},"
            f" {second} {again.accepted} of {again.proposed}"
        )
    disk = report.disk
    used = "not reported" if disk.used_bytes is None else f"{disk.used_bytes / 1e6:.1f} MB"
    budget = "not reported" if disk.budget_bytes is None else f"{disk.budget_bytes / 1e6:.0f} MB"
    lines.append(f"on disk: {used} of {budget} ({disk.allocated_bytes / 1e6:.1f} MB by st_blocks)")
    lines += row_lines(report)
    answer = report.cold[0].answer.text
    if MODELS[report.model].trained:
        lines.append(f"first answer: {' '.join(answer.split())!r}")
    return lines


def not_cold(report: Report) -> str:
    """What the first run found, on a store that others have written."""
    firsts = [answered for answered in report.cold if answered.prompt.number == 1]
    disk = sum(answered.sources.disk for answered in firsts)
    tokens = sum(answered.answer.prompt_tokens for answered in firsts)
    return (
        f"the store was NOT cold: it held {len(report.rows_before)} namespace(s) of this model;"
        f" the first run took {disk} of {tokens} tokens of first questions from disk"
    )


def row_lines(report: Report) -> list[str]:
    """What a row weighs, and which runs share it."""
    preset = MODELS[report.model]
    lines = []
    ranks = max(report.tensor_parallel)
    for row_bytes in sorted({rows.row_bytes for rows in report.rows}):
        if preset.row_layers and row_bytes < (report.row_bytes or 0):
            lines.append(f"one row of a smaller KV-cache group: {row_bytes} bytes")
            continue
        without = preset.row_bytes_without_dedup(ranks)
        line = f"one row on disk: {row_bytes} bytes, {without} without dedup at TP {ranks}"
        if row_bytes == report.row_bytes:
            line += f": every distinct byte once ({layers_of(preset, ranks)})"
        lines.append(line)
    first, second = report.tensor_parallel
    if first != second and report.shares_rows:
        lines.append(f"what TP {first} wrote, TP {second} read: {len(report.rows)} namespace(s)")
    elif first != second:
        lines.append(
            f"rows of this model depend on the number of ranks: TP {second} has a namespace of its"
            f" own, and computed everything ({len(report.rows)} namespaces)"
        )
    return lines


def layers_of(preset: ModelPreset, ranks: int) -> str:
    """How the layers of a model stand in a row: whole, or divided among ranks."""
    counts = Counter(min(shape.parts, ranks) for shape in preset.kv_shapes())
    return ", ".join(
        f"{count} layer(s) in {parts} part(s)" for parts, count in sorted(counts.items())
    )


def figures_of(report: Report) -> dict[str, Any]:
    """Everything measured, for `--json`."""

    def run(answered: Sequence[Answered]) -> list[dict[str, Any]]:
        return [
            {
                "document": a.prompt.document,
                "question": a.prompt.question,
                **asdict(a.answer),
                "sources": asdict(a.sources),
                "drafts": asdict(a.drafts),
            }
            for a in answered
        ]

    return {
        "model": report.model,
        "tensor_parallel": report.tensor_parallel,
        "ready_s": report.ready_s,
        "ttft_cold_s_median": report.ttft_cold_s,
        "ttft_warm_s_median": report.ttft_warm_s,
        "speedup": report.speedup,
        "disk": asdict(report.disk),
        "rows": [asdict(rows) for rows in report.rows],
        "rows_before": [asdict(rows) for rows in report.rows_before],
        "store_was_cold": report.store_was_cold,
        "row_bytes_expected": report.row_bytes,
        "cold": run(report.cold),
        "warm": run(report.warm),
        "faults": list(report.faults),
    }
