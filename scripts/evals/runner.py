"""Runs an evaluation: the same questions on one store, a server anew for each run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.evals.harness import EvalWork, Scored, program, read_scores, run_lm_eval
from scripts.evals.plans import ExactWork, Side, Step
from scripts.evals.records import Records, RunRecord
from scripts.evals.tasks import question_count, write_tasks
from scripts.evals.watch import STARTED, Endpoint, Progress, await_restart, moved
from scripts.serving import ServeConfig, VllmServer
from storage.testing.rows import bytes_on_disk

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_WARM_UP_REQUESTS = 4
_START_TIMEOUT_S = 600.0  # on a machine that others use: losing the runs before costs more

Say = Callable[[str], None]
MakeConfig = Callable[[Mapping[str, object]], ServeConfig]
"""A server's configuration, given its `--kv-transfer-config`."""


class CannotEvaluate(Exception):
    """What was asked for cannot be done here; one line."""


@dataclass(frozen=True, slots=True)
class Between:
    """What is done between two runs, beside the restart."""

    kill: bool = False
    """End the server by kill -9 instead of asking it to stop."""
    drop_caches: bool = False
    """Drop the page cache of the machine, so that nothing comes from memory unseen."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All runs of one command. `url` of None: with servers of its own, made by `config`."""

    work: EvalWork | ExactWork
    records: Records
    plan: Sequence[Step]
    between: Between
    say: Say
    progress: Progress
    config: MakeConfig | None = None
    url: str | None = None

    def run(self, side: Side) -> list[RunRecord]:
        """Every run of one side, those that are finished already out of the records."""
        done: list[RunRecord] = []
        root = self.records.directory / "store" / side.name
        for number, step in enumerate(self.plan, start=1):
            record = self.records.find(side.name, number)
            if record is not None:
                self.say(f"{side.name}, run {number} ({record.kind}): finished before, kept")
            else:
                damaged = self._prepare(side, root, step, done)
                record = self._run(side, root, step, number, damaged, done)
                self.records.save(record)
            done.append(record)
        shutil.rmtree(root, ignore_errors=True)  # the records are whole: nothing asks for it
        return done

    def _prepare(self, side: Side, root: Path, step: Step, before_it: Sequence[RunRecord]) -> int:
        """Make store and machine what the run is to find; how many rows were damaged."""
        damaged = 0
        if not before_it:
            shutil.rmtree(root, ignore_errors=True)
        elif self.url is not None:
            self.say(f"now restart the server at {self.url}; waiting until it serves again")
            await_restart(self.url, before_it[-1].server_started_s)
        if step.damage is not None:
            damaged = side.damage(root, step.damage)
            self.say(f"{side.name}: {step.damage.value}, unseen by any checksum: {damaged} rows")
        if self.between.drop_caches:
            drop_caches()
        return damaged

    def _run(
        self,
        side: Side,
        root: Path,
        step: Step,
        number: int,
        damaged: int,
        before_it: Sequence[RunRecord],
    ) -> RunRecord:
        label = f"{side.name}, run {number} ({step.kind})"
        with self._serving(side, root, label, number) as (server, endpoint):
            for _ in range(_WARM_UP_REQUESTS):
                endpoint.step()  # what a first request costs is not the first question's
            before = endpoint.settle()
            started = time.monotonic()
            scored = self._ask(endpoint, server, f"{side.name}-{number}", before_it)
            wall_s = time.monotonic() - started
            asked = endpoint.settle()
            drained = endpoint.drain(root if server else None)
            found = moved(before, asked, drained)
            used = found.disk_used_bytes
            record = RunRecord(
                side=side.name,
                number=number,
                kind=step.kind,
                metric=scored.metric,
                score=scored.score,
                stderr=scored.stderr,
                answers=scored.answers,
                wall_s=wall_s,
                server_started_s=before.value(STARTED),
                ready_s=server.ready_s if server else 0.0,
                ttft_p50_s=found.ttft_p50_s,
                ttft_p99_s=found.ttft_p99_s,
                tokens_computed=found.sources.computed,
                tokens_device=found.sources.device,
                tokens_region=found.sources.host,
                tokens_disk=found.sources.disk,
                bytes_written=found.bytes_written,
                bytes_read=found.bytes_read,
                disk_used_bytes=bytes_on_disk(root) if used is None else used,
                disk_budget_bytes=found.disk_budget_bytes,
                state_changes=found.state_changes,
                rows_corrupt=found.rows_corrupt,
                rows_damaged=damaged,
            )
        self.say(f"{label}: {scored.metric} {scored.score:.4f} in {wall_s:.0f} s")
        return record

    @contextmanager
    def _serving(
        self, side: Side, root: Path, label: str, number: int
    ) -> Iterator[tuple[VllmServer | None, Endpoint]]:
        """A server for one run, gone afterwards, and how to speak with it."""
        if self.url is not None:
            endpoint = Endpoint(self.url)
            try:
                yield None, endpoint
            finally:
                endpoint.close()
            return
        assert self.config is not None
        self.say(f"{label}: starting vllm serve ...")
        log = self.records.directory / "logs" / f"{side.name}-{number}-serve.log"
        server = VllmServer(self.config(side.transfer_config(root)), log)
        with server.start(_START_TIMEOUT_S):
            self.say(f"{label}: ready in {server.ready_s:.0f} s; asking")
            endpoint = Endpoint(f"http://127.0.0.1:{server.port}")
            try:
                yield server, endpoint
            finally:
                endpoint.close()
            if self.between.kill:
                server.kill()

    def _ask(
        self,
        endpoint: Endpoint,
        server: VllmServer | None,
        name: str,
        before_it: Sequence[RunRecord],
    ) -> Scored:
        if isinstance(self.work, ExactWork):
            assert server is not None
            return self._ask_exactly(self.work, server, before_it)
        directory = self.records.directory
        tasks, out = directory / "tasks", directory / "lm_eval" / name
        write_tasks(tasks)
        shutil.rmtree(out, ignore_errors=True)  # of a run that did not end
        command = self.work.command(
            endpoint.url, endpoint.model, endpoint.length_tokens, tasks, out
        )
        total = question_count(self.work.tasks, self.work.limit)
        first = endpoint.finished()
        run_lm_eval(
            command,
            directory / "logs" / f"{name}-lm_eval.log",
            lambda: self.progress(endpoint.finished() - first, total),
        )
        return read_scores(out, self.work.tasks)

    def _ask_exactly(
        self, work: ExactWork, server: VllmServer, before_it: Sequence[RunRecord]
    ) -> Scored:
        """The score is the share of tokens that are those of the first run."""
        answers: dict[str, str] = {}
        for i, text in enumerate(work.texts()):
            tokens = server.complete(text, work.answer_tokens, ignore_eos=True).token_ids
            answers[f"prompt/{i}"] = " ".join(map(str, tokens))
            self.progress(i + 1, work.prompts)
        reference = before_it[0].answers if before_it else answers
        same = [
            a == b
            for name, answer in answers.items()
            for a, b in zip(answer.split(), reference[name].split(), strict=True)
        ]
        return Scored("same tokens", sum(same) / len(same), 0.0, answers)


def check_work(work: EvalWork | ExactWork, *, has_url: bool, between: Between) -> None:
    """Whether this machine can do that. Raises `CannotEvaluate` or `EvalError`."""
    if isinstance(work, EvalWork):
        program()
    elif has_url:
        raise CannotEvaluate("--url: the exact presets start servers of their own")
    if between.drop_caches and os.geteuid():
        raise CannotEvaluate("--drop-caches: only root may drop the page cache")


def drop_caches() -> None:
    """Raises `CannotEvaluate`."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3\n")
    except OSError as error:
        raise CannotEvaluate(f"--drop-caches: {error}") from error
