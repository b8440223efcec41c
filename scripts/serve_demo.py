"""Serve a real model twice on one kvtier store, and show what the second start did not compute.

`make run` runs this: `vllm serve` answers questions about long documents on an empty store, stops,
starts again on the same store, at the same number of ranks or at another, and answers the same
questions in the same order. Every figure comes from outside kvtier's own code: the clock of the
client, vLLM's `/metrics`, the file system. Exits 0 only when all answers are the same, the second
run took its documents from the disk, a row weighs what its distinct bytes weigh, and (for a model
whose prompts cost something to compute) the second run was at least twice as fast.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from scripts.demo_prompts import DemoPrompt, prompts
from scripts.make_model import ModelError, ensure_model
from scripts.models import MODELS, ROOT, ModelPreset
from scripts.serving import Completion, Metrics, ServeConfig, ServeError, VllmServer
from storage.testing.rows import bytes_on_disk

ANSWER_TOKENS = 24
SPEEDUP_MIN = 2.0  # median cold over median warm time to the first token
DISK_SHARE_MIN = 0.9  # of a warm prompt: all but the question and a last, partial chunk
TP_MAX = 2
CPU_BYTES = "512MiB"
BUDGET = "2GB"
METRICS_TIMEOUT_S = 5.0  # counters follow an answer by one step of the engine
DRAIN_TIMEOUT_S = 20.0  # far longer than writing the demo's 0.3 GB takes
DRAIN_QUIET_S = 1.0  # writes that pause for this long are done
TABLE_COLUMNS = 118  # where the output is no terminal

BY_SOURCE = "vllm:prompt_tokens_by_source_total"
CACHED_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
FINISHED = "vllm:request_success_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class DemoError(Exception):
    """The demo cannot run as asked; the message is one line."""


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


# -- the store, seen from outside --------------------------------------------


def rows_on_disk(root: Path, model: str | None = None) -> list[RowsOnDisk]:
    """The rows array of every namespace under `root`, or of those of the model of that name."""
    found = []
    for path in sorted(root.glob(f"*-{'[0-9a-f]' * 32}/rows/zarr.json")):
        namespace = path.parents[1]
        facts = json.loads((namespace / "zarr.json").read_text())["attributes"]["kvtier"]
        if model is None or facts.get("rows", {}).get("model_name") == model:
            slots, row_bytes = json.loads(path.read_text())["shape"]
            found.append(RowsOnDisk(namespace.name, slots, row_bytes))
    return found


def gauge(metrics: Metrics, name: str) -> int | None:
    return int(metrics.value(name)) if metrics.has(name) else None


# -- running -----------------------------------------------------------------


def kvtier_config(root: Path) -> dict[str, Any]:
    """The `--kv-transfer-config` that puts kvtier under vLLM."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "tiering.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": CPU_BYTES,
            "disk": {"root": str(root), "budget": BUDGET},
        },
    }


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not (finished := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return finished


def ask(server: VllmServer, prompt: DemoPrompt) -> Answered:
    """One request, and what the counters grew by around it. The server must be otherwise idle."""
    before = server.metrics()
    answer = server.complete(
        prompt.token_ids, ANSWER_TOKENS, ignore_eos=not server.config.preset.trained
    )
    wait_until(lambda: server.metrics().value(FINISHED) > before.value(FINISHED), METRICS_TIMEOUT_S)
    after = server.metrics()
    return Answered(prompt, answer, Sources.between(before, after), Drafts.between(before, after))


def written_bytes(metrics: Metrics) -> float:
    """All bytes that any tier says it wrote."""
    named = (name for name in metrics.names() if re.search(r"write|written", name))
    return sum(metrics.value(name) for name in named if name.endswith("bytes_total"))


def drain(server: VllmServer, root: Path) -> None:
    """Wait until nothing has been written for a moment, by the counters and by the file system."""
    last: tuple[float, int] | None = None
    quiet_since = time.monotonic()

    def quiet() -> bool:
        nonlocal last, quiet_since
        # Counters move when the engine steps: a request of one token makes it.
        server.complete("x", 1, ignore_eos=True)
        now = (written_bytes(server.metrics()), bytes_on_disk(root))
        if now != last:
            last, quiet_since = now, time.monotonic()
        return time.monotonic() - quiet_since > DRAIN_QUIET_S

    wait_until(quiet, DRAIN_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Phase:
    answered: Sequence[Answered]
    ready_s: float
    disk: DiskUse


def serve_once(
    run: str, config: ServeConfig, root: Path, count: int, say: Callable[[str], None]
) -> Phase:
    """Start a server, ask every question, let the writes drain, stop it."""
    say(f"{run}: starting vllm serve at TP {config.tensor_parallel} ...")
    log = ROOT / ".cache" / "demo" / f"{root.name}-{run}.log"
    with VllmServer(config, log) as server:
        say(f"{run}: ready in {server.ready_s:.0f} s; asking")
        # Start-up costs must not be counted as the first prompt's: an unrelated request pays them.
        server.complete("Warm up. " * 20, 4, ignore_eos=True)
        answered = [ask(server, p) for p in prompts(config.preset, count, server.tokenize)]
        if not answered:
            raise DemoError("no document on this machine is long enough for the demo")
        say(f"{run}: {len(answered)} answers; waiting for the disk, then stopping")
        drain(server, root)
        metrics = server.metrics()
        disk = DiskUse(
            gauge(metrics, "kvtier:disk_used_bytes"),
            gauge(metrics, "kvtier:disk_budget_bytes"),
            bytes_on_disk(root),
        )
    return Phase(answered, server.ready_s, disk)


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


# -- the command -------------------------------------------------------------


def ranks_of_runs(text: str) -> tuple[int, int]:
    """Of `--tp`: "2" is both runs, "2,1" the first and the second."""
    ranks = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if len(ranks) > 2 or not all(1 <= count <= TP_MAX for count in ranks):
        raise DemoError(f"--tp: expected 1 to {TP_MAX} ranks, or two such as 2,1, got {text!r}")
    return ranks[0], ranks[-1]


def check_request(preset: ModelPreset, ranks: Iterable[int]) -> None:
    config = preset.config()
    for count in ranks:
        if config["num_attention_heads"] % count:
            raise DemoError(
                f"{preset.name} has {config['num_attention_heads']} attention heads:"
                f" it cannot run at TP {count}"
            )


def fresh_root(root: Path | None, name: str, *, keep: bool) -> Path:
    """The root of the store. Only the demo's own default root is ever emptied."""
    if root is not None:
        if not keep and root.exists() and any(root.iterdir()):
            raise DemoError(f"{root} is not empty: name another --root, or --keep what is there")
        return root.resolve()
    root = ROOT / ".cache" / "demo" / name
    if not keep:
        shutil.rmtree(root, ignore_errors=True)
    return root


def demonstrate(
    preset: ModelPreset,
    ranks: tuple[int, int],
    root: Path,
    kv_transfer_config: Mapping[str, Any] | None,
    count: int,
    say: Callable[[str], None],
) -> Report:
    """Both runs, and their verdict. A configuration of None is kvtier's own."""
    store_was_cold = not (root.exists() and any(root.iterdir()))
    rows_before = rows_on_disk(root, preset.name)
    config = ServeConfig(preset, kv_transfer_config or kvtier_config(root))
    names = names_of_runs(store_was_cold=store_was_cold)
    first, second = (
        serve_once(run, replace(config, tensor_parallel=tp), root, count, say)
        for run, tp in zip(names, ranks, strict=True)
    )
    report = Report(
        model=preset.name,
        tensor_parallel=ranks,
        cold=first.answered,
        warm=second.answered,
        ready_s=(first.ready_s, second.ready_s),
        disk=second.disk,
        rows_before=rows_before,
        rows=rows_on_disk(root, preset.name),
        store_was_cold=store_was_cold,
        row_bytes=preset.row_bytes() if kv_transfer_config is None else None,
    )
    return replace(report, faults=faults_of(report))


def _stop_on_sigterm(signum: int, _frame: FrameType | None) -> NoReturn:
    """Leave through the context managers, so that the server is stopped too."""
    sys.exit(128 + signum)


def main(
    model: Annotated[str, typer.Option(help=f"One of: {', '.join(MODELS)}.")] = "smollm2",
    tp: Annotated[
        str, typer.Option(help="Tensor-parallel ranks, 1 or 2; 2,1: cold at 2, restarted at 1.")
    ] = "1",
    documents: Annotated[int, typer.Option(min=1, max=5, help="How many documents.")] = 3,
    root: Annotated[Path | None, typer.Option(help="The store; default: .cache/demo.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep what the store holds.")] = False,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures.")] = None,
    kv_transfer_config: Annotated[
        str | None, typer.Option(help="JSON for another connector than kvtier's, to compare.")
    ] = None,
) -> None:
    """Serve a model cold, restart it, serve it warm from kvtier's disk, and compare."""
    signal.signal(signal.SIGTERM, _stop_on_sigterm)
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    started = time.monotonic()

    def say(text: str) -> None:
        console.print(
            f"[{time.monotonic() - started:5.1f} s] {text}", markup=False, highlight=False
        )

    try:
        if model not in MODELS:
            raise DemoError(f"no model named {model!r}; there are {', '.join(MODELS)}")
        preset = MODELS[model]
        if not preset.path.is_dir():
            say(f"making the model {model}")
        ensure_model(model)
        ranks = ranks_of_runs(tp)
        check_request(preset, ranks)
        store = fresh_root(root, model, keep=keep)
        config = json.loads(kv_transfer_config) if kv_transfer_config else None
        report = demonstrate(preset, ranks, store, config, documents, say)
        console.print(table_of(report))
        if json_out is not None:
            json_out.write_text(json.dumps(figures_of(report), indent=2) + "\n")
    except (DemoError, ModelError, ServeError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if report.faults:
        typer.echo(f"FAILED: {'; '.join(report.faults)}", err=True)
        raise typer.Exit(1)
    say("the same answers" + (", from the disk" if report.shares_rows else ", computed anew"))


if __name__ == "__main__":
    typer.run(main)
