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
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from scripts.demo_prompts import DemoPrompt, prompts
from scripts.make_model import ModelError, ensure_model
from scripts.models import MODELS, ROOT, ModelPreset
from scripts.serve_report import (
    Answered,
    DiskUse,
    Drafts,
    Report,
    RowsOnDisk,
    Sources,
    faults_of,
    figures_of,
    names_of_runs,
    table_of,
)
from scripts.serving import Metrics, ServeConfig, ServeError, VllmServer
from storage.testing.rows import bytes_on_disk

ANSWER_TOKENS = 24
TP_MAX = 2
CPU_BYTES = "512MiB"
BUDGET = "2GB"
METRICS_TIMEOUT_S = 5.0  # counters follow an answer by one step of the engine
DRAIN_TIMEOUT_S = 20.0  # far longer than writing the demo's 0.3 GB takes
DRAIN_QUIET_S = 2.5  # writes that pause for longer than metrics may lag (2 s) are done
TABLE_COLUMNS = 118  # where the output is no terminal

FINISHED = "vllm:request_success_total"


class DemoError(Exception):
    """The demo cannot run as asked; the message is one line."""


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


def waiting_writes(metrics: Metrics) -> float:
    """Chunks that kvtier has yet to write, as far as it says."""
    return sum(metrics.value(f"kvtier:cascades_{what}") for what in ("waiting", "under_way"))


def drain(server: VllmServer, root: Path) -> None:
    """Wait until nothing has been written for a moment, by the counters and by the file system."""
    last: tuple[float, int] | None = None
    quiet_since = time.monotonic()

    def quiet() -> bool:
        nonlocal last, quiet_since
        # Counters move when the engine steps: a request of one token makes it.
        server.complete("x", 1, ignore_eos=True)
        metrics = server.metrics()
        now = (written_bytes(metrics), bytes_on_disk(root))
        if now != last or waiting_writes(metrics):
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
