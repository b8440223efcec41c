"""lm_eval as a program in a venv of its own: its command line, and what it leaves in files.

It needs no torch and no tokenizer here: the server's tokenizer does the work.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.models import ROOT

LM_EVAL = ROOT / ".venv-eval" / "bin" / "lm_eval"
POLL_S = 0.3
LOG_LINES = 8  # enough for the reason of a failure


class EvalError(Exception):
    """lm_eval is not there or failed; the message says why."""


@dataclass(frozen=True, slots=True)
class EvalWork:
    """What lm_eval is to do. `fewshot` of None: as each task says; `limit` of None: all of it."""

    tasks: tuple[str, ...]
    concurrency: int = 8
    fewshot: int | None = None
    limit: int | None = None

    def command(
        self, url: str, model: str, length_tokens: int, tasks: Path, out: Path
    ) -> list[str]:
        arguments = {
            "base_url": f"{url}/v1/completions",
            "model": model,
            "tokenizer_backend": "None",
            "tokenized_requests": "False",
            "num_concurrent": self.concurrency,
            "max_retries": 1,
            "max_length": length_tokens,
        }
        command = [
            *(str(program()), "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
            *("--tasks", ",".join(self.tasks), "--include_path", str(tasks)),
            *("--output_path", str(out), "--log_samples"),
        ]
        if self.fewshot is not None:
            command += ["--num_fewshot", str(self.fewshot)]
        if self.limit is not None:
            command += ["--limit", str(self.limit)]
        return command


@dataclass(frozen=True, slots=True)
class Scored:
    """Over all tasks, each question counted once. `answers` are by task and question."""

    metric: str
    score: float
    stderr: float
    answers: dict[str, str]


def program() -> Path:
    """The installed lm_eval; `KVTIER_LM_EVAL` names another one. Raises `EvalError`."""
    path = Path(os.environ.get("KVTIER_LM_EVAL", LM_EVAL))
    if not path.is_file():
        raise EvalError(f"no {path}; run `make setup-eval` first")
    return path


def run_lm_eval(command: Sequence[str], log_path: Path, on_wait: Callable[[], None]) -> None:
    """Run it to its end, with its words in a log; `on_wait` is called several times a second.

    Raises `EvalError` with the end of the log when it fails.
    """
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "HF_DATASETS_OFFLINE": os.environ.get("HF_DATASETS_OFFLINE", "1"),
        "HF_HOME": os.environ.get("HF_HOME", str(log_path.parent / "hf")),
        "TOKENIZERS_PARALLELISM": "false",
        "OPENAI_API_KEY": "none",  # asked for, sent nowhere but to the server
        "NO_PROXY": "127.0.0.1,localhost",
    }
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                on_wait()
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-LOG_LINES:])
        raise EvalError(f"lm_eval ended with code {process.returncode}\n{tail}")


def read_scores(out: Path, tasks: Sequence[str]) -> Scored:
    """What one lm_eval run left below `out`. Raises `EvalError` if it is not what was asked for."""
    found = sorted(out.rglob("results_*.json"))
    if len(found) != 1:
        raise EvalError(f"{len(found)} results of lm_eval in {out}, where one should be")
    results = json.loads(found[0].read_text())["results"]
    answers: dict[str, str] = {}
    scores = []
    for task in tasks:
        if task not in results:
            raise EvalError(f"lm_eval has no result for the task {task}")
        own = answers_of(out, task)
        answers |= own
        scores.append((len(own), *metric_of(task, results[task])))
    count = sum(size for size, _, _, _ in scores)
    if not count:
        raise EvalError("lm_eval asked no question")
    score = sum(size * value for size, _, value, _ in scores) / count
    stderr = math.sqrt(sum((size * error) ** 2 for size, _, _, error in scores)) / count
    return Scored(scores[0][1], score, stderr, answers)


def metric_of(task: str, results: Mapping[str, Any]) -> tuple[str, float, float]:
    """(name, value, standard error) of a task's first metric; an error that is "N/A" is 0."""
    for name, value in results.items():
        metric, _, kind = name.partition(",")
        if isinstance(value, float | int) and kind and not metric.endswith("_stderr"):
            error = results.get(f"{metric}_stderr,{kind}")
            return metric, float(value), float(error) if isinstance(error, float | int) else 0.0
    raise EvalError(f"lm_eval has no metric for the task {task}")


def answers_of(out: Path, task: str) -> dict[str, str]:
    """The model's words for each question of a task, before any filter."""
    found = [p for p in out.rglob("samples_*.jsonl") if _task_of(p) == task]
    if len(found) != 1:
        raise EvalError(f"{len(found)} files of samples for {task} in {out}, where one should be")
    answers = {}
    for line in found[0].read_text().splitlines():
        sample = json.loads(line)
        answers[f"{task}/{sample['doc_id']}"] = str(sample["resps"][0][0])
    return answers


def _task_of(samples: Path) -> str:
    """Of `samples_<task>_<time>.jsonl`; a task's name may hold underscores, a time holds none."""
    return samples.stem.removeprefix("samples_").rpartition("_")[0]
