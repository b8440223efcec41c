"""lm-eval three times on one store: cold, and twice warm after a restart of the server.

    python scripts/lm_eval_runs.py --preset recall-mla-tp2
    python scripts/lm_eval_runs.py --preset recall-mla-tp2 --tamper        # must fail
    python scripts/lm_eval_runs.py --preset recall-mla-tp2 --baseline fs   # beside vLLM's own tier
    python scripts/lm_eval_runs.py --preset enospc --out report/

A fresh server has nothing on its device and an empty region: what a warm run does not compute came
from the disk. Exits 0 only if every warm score stays within the stated tolerance of the cold one
and every warm run came from disk; 2 for what cannot be run as asked, with one line.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

if not __package__:  # started as a file: the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from scripts.evals.harness import EvalError, EvalWork
from scripts.evals.plans import FS, KVTIER, NO_DEDUP, PLAN, PRESETS, TAMPERED_PLAN, EvalPreset, Side
from scripts.evals.records import Records, WrongDirectory
from scripts.evals.report import EvalReport, table, verdict_lines, write
from scripts.evals.runner import Between, CannotEvaluate, Evaluation, check_work
from scripts.evals.tamper import CannotTamper
from scripts.evals.verdict import RESTORED_MIN, Bounds, faults_of
from scripts.make_model import ModelError, ensure_model
from scripts.models import MODELS, ROOT
from scripts.serve_demo import TP_MAX, DemoError, check_request
from scripts.serving import ServeConfig, ServeError
from storage.errors import ConfigError, StorageError
from storage.sizes import parse_size

ENOSPC = "enospc"
USAGE_ERROR = 2  # exit code of whatever was refused or could not be run
TABLE_COLUMNS = 150  # where the output is no terminal
_SEQS_MAX = 8  # requests that a server of ours holds at once
# `ClickException`: newer versions of typer have a click of their own, so it is found by its heirs.
_BadUsage: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Baseline(Enum):
    FS = FS


class Dedup(Enum):
    ON = "on"
    OFF = "off"
    BOTH = "both"


class Dtype(Enum):
    FP32 = "float32"
    BF16 = "bfloat16"


@app.command()
def evaluate(
    preset: Annotated[str, typer.Option(help=f"One of: {', '.join([*PRESETS, ENOSPC])}.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where records, JSON, Markdown and picture go; runs that are finished"
            " there are not repeated. Default: .cache/evals, emptied first."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"One of: {', '.join(MODELS)}.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks, 1 or 2.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV.")] = Dtype.FP32,
    tasks: Annotated[str | None, typer.Option(help="Tasks of lm_eval, by commas.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions per task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples per prompt.")] = None,
    num_concurrent: Annotated[int | None, typer.Option(min=1, help="Questions at once.")] = None,
    baseline: Annotated[
        Baseline | None, typer.Option(help="Run the same on vLLM's own fs tier as well.")
    ] = None,
    dedup: Annotated[
        Dedup, typer.Option(help="off: each rank's copy is stored; both: side by side.")
    ] = Dedup.ON,
    tamper: Annotated[
        bool,
        typer.Option(
            "--tamper",
            help="Damage the store before each warm run, past all checksums:"
            " the score must fall, and the command fail.",
        ),
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="End servers by kill -9.")] = False,
    drop_caches: Annotated[
        bool, typer.Option("--drop-caches", help="Drop the page cache between runs; needs root.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Ask a running server; the command waits for you to restart it between runs."
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Of the store, such as 20MB.")] = None,
    region: Annotated[str | None, typer.Option(help="Size of the CPU region.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="By how much a warm score may differ.")
    ] = None,
    differing: Annotated[
        float | None, typer.Option(min=0, max=1, help="Which share of answers may differ.")
    ] = None,
    restored: Annotated[
        float,
        typer.Option(min=0, max=1, help="Of what the cold run wrote, the share to read."),
    ] = RESTORED_MIN,
) -> None:
    """Evaluate cold, restart, evaluate warm, twice; one table at the end."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    try:
        if preset == ENOSPC:
            from scripts.evals.enospc import run_enospc

            raise typer.Exit(run_enospc(out, console))
        chosen = _chosen(preset, model, tp, tasks, limit, num_fewshot, num_concurrent)
        if region is not None or budget is not None:
            chosen = replace(chosen, region=region or chosen.region, budget=budget or chosen.budget)
        _check_sizes(chosen)
        bounds = Bounds(
            chosen.tolerance if tolerance is None else tolerance,
            chosen.differing_max if differing is None else differing,
            restored,
        )
        between = Between(kill=kill, drop_caches=drop_caches)
        if url is not None and (tamper or kill or baseline or tp or model or dedup is not Dedup.ON):
            raise CannotEvaluate(
                "--url: --tamper, --kill, --baseline, --dedup, --tp, --model need a server of ours"
            )
        check_work(chosen.work, has_url=url is not None, between=between)
        settings = {
            "preset": chosen.name,
            "model": chosen.model,
            "tp": chosen.tp,
            "dtype": dtype.value,
            "work": repr(chosen.work),
            "tamper": tamper,
            "kill": kill,
            "drop_caches": drop_caches,
            "budget": chosen.budget,
            "region": chosen.region,
            "url": url,
        }
        directory = _directory(out, chosen.name)
        sides = _sides(chosen, dedup, baseline)
        report = _evaluate(
            chosen,
            sides,
            settings,
            directory,
            bounds,
            between,
            dtype,
            console,
            url=url,
            is_tampered=tamper,
        )
        console.print(table(report))
        for line in verdict_lines(report):
            console.print(line, markup=False, highlight=False)
        write(report, directory)
        console.print(f"report.md, report.json and report.png are in {directory}", markup=False)
    except (
        CannotEvaluate,
        CannotTamper,
        DemoError,
        EvalError,
        ModelError,
        OSError,
        ServeError,
        StorageError,
        WrongDirectory,
    ) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(USAGE_ERROR) from error
    raise typer.Exit(1 if report.faults else 0)


def _chosen(
    name: str,
    model: str | None,
    tp: int | None,
    tasks: str | None,
    limit: int | None,
    fewshot: int | None,
    concurrency: int | None,
) -> EvalPreset:
    """The preset, with what was asked for on top. Raises `ConfigError`, `CannotEvaluate`."""
    if name not in PRESETS:
        raise ConfigError("--preset", f"one of {', '.join([*PRESETS, ENOSPC])}", name)
    chosen = PRESETS[name]
    if model is not None:
        if model not in MODELS:
            raise ConfigError("--model", f"one of {', '.join(MODELS)}", model)
        chosen = replace(chosen, model=model)
    if tp is not None:
        if not 1 <= tp <= TP_MAX:
            raise ConfigError("--tp", f"1 to {TP_MAX}", tp)
        chosen = replace(chosen, tp=tp)
    work = chosen.work
    if isinstance(work, EvalWork):
        names = work.tasks
        if tasks is not None:
            names = tuple(filter(None, (task.strip() for task in tasks.split(","))))
            if not names:
                raise ConfigError("--tasks", "names of tasks", tasks)
        work = replace(
            work,
            tasks=names,
            limit=limit,
            fewshot=fewshot,
            concurrency=concurrency or work.concurrency,
        )
    elif (tasks, fewshot, concurrency) != (None, None, None):
        raise CannotEvaluate(f"--preset {name} takes no --tasks, --num-fewshot, --num-concurrent")
    elif limit is not None:
        work = replace(work, prompts=min(limit, work.prompts))
    return replace(chosen, work=work)


def _sides(chosen: EvalPreset, dedup: Dedup, baseline: Baseline | None) -> list[Side]:
    names = []
    if dedup is not Dedup.OFF:
        names.append(KVTIER)
    if dedup is not Dedup.ON:
        names.append(NO_DEDUP)
    if baseline is not None:
        names.append(baseline.value)
    return [Side(name, chosen.region, chosen.budget) for name in names]


def _check_sizes(chosen: EvalPreset) -> None:
    for option, size in (("--region", chosen.region), ("--budget", chosen.budget)):
        parse_size(size, option)


def _directory(out: Path | None, name: str) -> Path:
    """Where the records go. Only the command's own default directory is ever emptied."""
    if out is not None:
        return out.absolute()
    directory = ROOT / ".cache" / "evals" / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def _evaluate(
    chosen: EvalPreset,
    sides: list[Side],
    settings: dict[str, Any],
    directory: Path,
    bounds: Bounds,
    between: Between,
    dtype: Dtype,
    console: Console,
    *,
    url: str | None,
    is_tampered: bool,
) -> EvalReport:
    """All runs of all sides, and what they did not keep."""
    records = Records(directory, settings)
    config = None
    if url is None:
        if not MODELS[chosen.model].path.is_dir():
            console.print(f"making the model {chosen.model}", highlight=False)
        ensure_model(chosen.model)
        served = replace(MODELS[chosen.model], dtype=dtype.value)
        check_request(served, [chosen.tp])

        def config(transfer: Any) -> ServeConfig:
            return ServeConfig(
                served, transfer, chosen.tp, chosen.kv_cache_bytes, seqs_max=_SEQS_MAX
            )

    runs, faults = [], []
    with _progress(console) as bar:
        task = bar.add_task("questions", total=None)

        def progress(done: int, total: int | None) -> None:
            bar.update(task, completed=done, total=total)

        for side in sides:
            evaluation = Evaluation(
                work=chosen.work,
                records=records,
                plan=TAMPERED_PLAN if is_tampered else PLAN,
                between=between,
                say=lambda text: bar.console.print(text, markup=False, highlight=False),
                progress=progress,
                config=config,
                url=url,
            )
            own = evaluation.run(side)
            runs += own
            faults += faults_of(own, bounds)
    where = f"at {url}" if url else f"{chosen.model}, TP {chosen.tp}, {dtype.value}"
    return EvalReport(f"{chosen.name}: {where}", runs, bounds, faults)


@contextmanager
def _progress(console: Console) -> Iterator[ProgressBar]:
    bar = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        yield bar


def _stop_on_sigterm(signum: int, _frame: FrameType | None) -> NoReturn:
    """Leave through the context managers, so that the server is stopped too."""
    sys.exit(128 + signum)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with `arguments` (default: those of the process); its exit code."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except _BadUsage as error:
        typer.echo(f"error: {' '.join(error.format_message().split())}", err=True)
        return USAGE_ERROR
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop_on_sigterm)
    sys.exit(main())
