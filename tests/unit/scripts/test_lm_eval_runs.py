"""The evaluation without servers: what is asked of lm_eval, what is read from it, the verdict."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest
from rich.console import Console

from scripts import lm_eval_runs
from scripts.evals import harness, runner, watch
from scripts.evals.documents import DOCUMENTS
from scripts.evals.harness import EvalError, EvalWork, answers_of, metric_of, read_scores
from scripts.evals.plans import FS, KVTIER, NO_DEDUP, PLAN, PRESETS, TAMPERED_PLAN, ExactWork, Side
from scripts.evals.records import Records, RunRecord, WrongDirectory
from scripts.evals.report import EvalReport, markdown, table, verdict_lines, write
from scripts.evals.runner import Between, Evaluation
from scripts.evals.tasks import RECALL, RECALL_PROMPTS, local_tasks, question_count, write_tasks
from scripts.evals.verdict import Bounds, faults_of
from scripts.evals.watch import moved, quantile
from scripts.serving import Metrics
from tiering.config import Config

COLD = RunRecord(
    side=KVTIER,
    number=1,
    kind="cold",
    metric="exact_match",
    score=0.99,
    stderr=0.007,
    answers={f"{RECALL}/{i}": f" v{i % 16}" for i in range(200)},
    wall_s=40.0,
    server_started_s=1.8e9,
    ready_s=50.0,
    ttft_p50_s=0.1,
    ttft_p99_s=0.3,
    tokens_computed=13_000,
    tokens_device=0,
    tokens_region=0,
    tokens_disk=0,
    bytes_written=9_830_400,
    bytes_read=0,
    disk_used_bytes=14_000_000,
    disk_budget_bytes=10**9,
    state_changes=0,
    rows_corrupt=0,
)
WARM = msgspec.structs.replace(
    COLD, number=2, kind="warm", tokens_computed=200, tokens_disk=12_800, bytes_read=9_830_400
)
BOUNDS = Bounds(tolerance=0.01, differing_max=0.01)


def test_a_warm_run_with_the_same_answers_from_disk_has_no_fault() -> None:
    assert faults_of([COLD, WARM], BOUNDS) == []


def _with_other_answers(count: int) -> dict[str, str]:
    names = list(COLD.answers)
    return {**COLD.answers, **dict.fromkeys(names[:count], " other")}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"score": 0.9799}, "0.9799 instead of 0.9900, off by more than 0.01"),
        ({"score": 1.0001}, "1.0001 instead of 0.9900"),
        ({"answers": _with_other_answers(3)}, "3 of 200 answers differ"),
        ({"tokens_disk": 0}, "did not come from disk"),
        ({"tokens_computed": 1500}, "did not come from disk: 1500 tokens computed (13000 in"),
        ({"bytes_read": 8_800_000}, "8800000 of 9830400 bytes read"),
        ({"disk_used_bytes": 10**9 + 1}, "past the budget"),
        ({"rows_corrupt": 1}, "1 corrupt rows"),
    ],
    ids=str,
)
def test_each_broken_promise_is_a_fault(change: dict[str, Any], fault: str) -> None:
    [found] = faults_of([COLD, msgspec.structs.replace(WARM, **change)], BOUNDS)
    assert fault in found
    kept = {"score": 0.9801, "answers": _with_other_answers(2), "bytes_read": 8_850_000}
    assert faults_of([COLD, msgspec.structs.replace(WARM, **kept)], BOUNDS) == []


def test_a_first_run_that_was_not_cold_is_a_fault() -> None:
    cold = msgspec.structs.replace(COLD, tokens_disk=64)
    [fault] = faults_of([cold, WARM], BOUNDS)
    assert "run 1 was not cold: 64 tokens" in fault


# -- what lm_eval is asked, and what it leaves -----------------------------------------------


def leave_results(out: Path, task: str, answers: list[str], right: list[bool]) -> None:
    """Files as lm_eval 0.4.13 names and fills them."""
    directory = out / "recall-mla"
    directory.mkdir(parents=True, exist_ok=True)
    share = sum(right) / len(right)
    results = {
        "alias": task,
        "sample_len": len(right),
        "exact_match,strip": share,
        "exact_match_stderr,strip": math.sqrt(share * (1 - share) / (len(right) - 1)),
    }
    time = "2026-11-29T21-48-36.123456"
    file = directory / f"results_{time}.json"
    whole = json.loads(file.read_text()) if file.exists() else {"results": {}}
    whole["results"][task] = results
    file.write_text(json.dumps(whole))
    (directory / f"samples_{task}_{time}.jsonl").write_text(
        "".join(
            json.dumps({"doc_id": i, "resps": [[answer]], "filtered_resps": [answer.strip()]})
            + "\n"
            for i, answer in enumerate(answers)
        )
    )


def test_scores_of_several_tasks_count_each_question_once(tmp_path: Path) -> None:
    leave_results(tmp_path, "long_task", [" a"] * 30, [True] * 15 + [False] * 15)
    leave_results(tmp_path, "long_task_2", [" b"] * 10, [True] * 10)
    scored = read_scores(tmp_path, ("long_task", "long_task_2"))
    assert scored.metric == "exact_match"
    assert scored.score == pytest.approx(25 / 40)
    assert scored.stderr == pytest.approx(math.sqrt(0.25 / 29) * 30 / 40)
    assert len(scored.answers) == 40
    assert scored.answers["long_task_2/9"] == " b"
    assert len(answers_of(tmp_path, "long_task")) == 30


def test_results_that_are_not_those_asked_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EvalError, match="0 results of lm_eval"):
        read_scores(tmp_path, (RECALL,))
    leave_results(tmp_path, "other", [" a"] * 2, [True] * 2)
    with pytest.raises(EvalError, match=f"no result for the task {RECALL}"):
        read_scores(tmp_path, (RECALL,))


def test_the_first_metric_counts_and_a_missing_error_is_none() -> None:
    results = {"alias": "t", "sample_len": 5, "f1,none": 0.5, "f1_stderr,none": "N/A", "em,x": 1.0}
    assert metric_of("t", results) == ("f1", 0.5, 0.0)
    with pytest.raises(EvalError, match="no metric"):
        metric_of("t", {"alias": "t", "sample_len": 5})


def test_the_command_line_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_LM_EVAL", sys.executable)
    work = EvalWork(("a", "b"), concurrency=4, fewshot=2, limit=7)
    command = work.command("http://127.0.0.1:1", "tiny", 2048, tmp_path, tmp_path / "out")
    said = " ".join(command)
    assert "--model local-completions" in said
    assert "base_url=http://127.0.0.1:1/v1/completions,model=tiny,tokenizer_backend=None" in said
    assert "num_concurrent=4" in said
    assert "--tasks a,b --include_path" in said
    assert said.endswith("--log_samples --num_fewshot 2 --limit 7")
    plain = EvalWork(("a",)).command("http://x", "m", 1, tmp_path, tmp_path)
    assert not {"--limit", "--num_fewshot"} & set(plain)


def test_without_lm_eval_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_LM_EVAL", "/nowhere/lm_eval")
    with pytest.raises(EvalError, match="run `make setup-eval` first"):
        harness.program()


def test_a_program_that_fails_is_quoted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('no such task'); raise SystemExit(3)"]
    with pytest.raises(EvalError, match="ended with code 3\nno such task"):
        harness.run_lm_eval(command, tmp_path / "log", lambda: None)


# -- tasks ------------------------------------------------------------------------------------


def test_tasks_are_whole_and_need_no_hub(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    for name in local_tasks():
        task = json.loads((tmp_path / f"{name}.yaml").read_text())
        assert task["task"] == name
        assert task["dataset_path"] == "json"
        assert task["output_type"] == "generate_until"  # the only kind that reads the prefix cache
        [line, *_] = Path(task["dataset_kwargs"]["data_files"]["test"]).read_text().splitlines()
        assert json.loads(line)["answer"]
    assert question_count([RECALL], None) == RECALL_PROMPTS
    assert question_count([RECALL], 40) == 40
    assert question_count([*local_tasks()], 5) == 5 * len(local_tasks())
    assert question_count([RECALL, "gsm8k"], None) is None


def test_every_document_goes_on_as_its_answers_say() -> None:
    for document in DOCUMENTS:
        text = document.text()
        assert len(text) > 4000, document.name
        for question, answer in document.questions:
            # And the stops of the task end the answer where it ends.
            assert any(f"{question} {answer}{stop}" in text for stop in ",.;"), (question, answer)
            assert not {",", ".", ";"} & set(answer)


# -- counters ---------------------------------------------------------------------------------


def counters(**values: float) -> Metrics:
    """`/metrics` with counters by name, and a histogram of times to the first token."""
    lines = []
    for name, value in values.items():
        if name.startswith("le_"):
            continue
        lines += [f"# TYPE {name} counter", f'{name}_total{{engine="0"}} {value}']
    lines.append("# TYPE vllm:time_to_first_token_seconds histogram")
    for bound in ("0.1", "0.5", "+Inf"):
        count = values.get(f"le_{bound}", 0)
        lines.append(f'vllm:time_to_first_token_seconds_bucket{{le="{bound}"}} {count}')
    return Metrics("\n".join(lines) + "\n")


def test_quantiles_of_a_histogram_are_of_what_was_added() -> None:
    before = counters(**{"le_0.1": 10, "le_0.5": 10, "le_+Inf": 10})
    after = counters(**{"le_0.1": 15, "le_0.5": 20, "le_+Inf": 20})
    name = "vllm:time_to_first_token_seconds"
    assert quantile(before, after, name, 0.25) == pytest.approx(0.05)
    assert quantile(before, after, name, 0.75) == pytest.approx(0.3)
    assert quantile(before, before, name, 0.5) is None
    beyond = counters(**{"le_0.1": 10, "le_0.5": 10, "le_+Inf": 12})
    assert quantile(before, beyond, name, 0.5) == 0.5


def test_a_side_without_states_or_checksums_has_none_to_show() -> None:
    stock = counters(**{"vllm:kv_offload_tiering_read_bytes": 7})
    found = moved(counters(), stock, stock)
    assert (found.bytes_read, found.bytes_written) == (7, 0)
    assert (found.state_changes, found.rows_corrupt, found.disk_budget_bytes) == (None, None, None)


# -- sides, records, plan ---------------------------------------------------------------------


def test_every_preset_of_kvtier_is_a_valid_configuration(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        for name in (KVTIER, NO_DEDUP):
            side = Side(name, preset.region, preset.budget)
            extra = side.transfer_config(tmp_path)["kv_connector_extra_config"]
            assert Config.parse(extra).dedup is (name == KVTIER)
    extra = Side(FS, "16MiB", "1GB").transfer_config(tmp_path)["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 16 << 20
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path)}]


def test_records_of_other_settings_are_never_taken(tmp_path: Path) -> None:
    records = Records(tmp_path, {"tp": 2})
    assert records.find(KVTIER, 1) is None
    records.save(COLD)
    assert Records(tmp_path, {"tp": 2}).find(KVTIER, 1) == COLD
    with pytest.raises(WrongDirectory, match="another tp: name another --out"):
        Records(tmp_path, {"tp": 1})


def test_runs_that_are_finished_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(_self: Evaluation, *arguments: Any) -> RunRecord:
        _, root, step, number, *_ = arguments
        root.mkdir(parents=True, exist_ok=True)
        ran.append(number)
        if len(ran) == 2:
            raise EvalError("interrupted")
        return msgspec.structs.replace(WARM, number=number, kind=step.kind)

    monkeypatch.setattr(Evaluation, "_run", run)
    evaluation = Evaluation(
        EvalWork((RECALL,)),
        Records(tmp_path, {}),
        PLAN,
        Between(),
        say=lambda _: None,
        progress=lambda *_: None,
    )
    side = Side(KVTIER, "16MiB", "1GB")
    with pytest.raises(EvalError):
        evaluation.run(side)
    assert (tmp_path / "store" / KVTIER).is_dir(), "the second run finds the first one's rows"
    runs = evaluation.run(side)
    assert ran == [1, 2, 2, 3]
    assert [run.kind for run in runs] == ["cold", "warm", "warm"]
    assert not (tmp_path / "store" / KVTIER).exists()


def test_a_tampered_plan_damages_before_each_run_but_the_cold_one() -> None:
    assert [step.damage is None for step in TAMPERED_PLAN] == [True, False, False]


def test_random_prompts_share_no_prefix() -> None:
    texts = ExactWork(4, 100).texts()
    assert len({text[:16] for text in texts}) == 4
    assert texts == ExactWork(4, 100).texts()


# -- output -----------------------------------------------------------------------------------


def report() -> EvalReport:
    damaged = {"kind": "rows changed places", "score": 0.06, "rows_damaged": 800}
    stock = {"side": FS, "disk_budget_bytes": None, "state_changes": None, "rows_corrupt": None}
    runs = [COLD, WARM, msgspec.structs.replace(WARM, number=3, **damaged)]
    runs.append(msgspec.structs.replace(COLD, **stock))
    return EvalReport("recall", runs, BOUNDS, faults_of(runs[:3], BOUNDS))


def test_table_markdown_json_and_picture(tmp_path: Path) -> None:
    console = Console(width=lm_eval_runs.TABLE_COLUMNS, record=True)
    console.print(table(report()))
    text = console.export_text()
    for figure in ("0.9900", "0.0070", "12800", "14.0 / 1000", "2 warm", "0.0600"):
        assert figure in text
        assert figure in markdown(report())
    assert "within 0.01 of the cold one" in verdict_lines(report())[0]
    assert verdict_lines(report())[1].startswith("FAILED: kvtier, run 3")
    write(report(), tmp_path)
    assert (tmp_path / "report.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "report.json").read_text())
    assert [run["side"] for run in found["runs"]] == [KVTIER, KVTIER, KVTIER, FS]
    assert len(found["faults"]) == 1


# -- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "recal"], "--preset: expected one of recall-mla-tp2"),
        (["--preset", "recall-gqa", "--model", "gpt"], "--model: expected one of"),
        (["--preset", "recall-gqa", "--tp", "3"], "--tp: expected 1 to 2"),
        (["--preset", "recall-gqa", "--tasks", ","], "--tasks: expected names"),
        (["--preset", "recall-gqa", "--budget", "10XB"], "--budget: expected"),
        (["--preset", "exact-mla", "--tasks", "gsm8k"], "takes no --tasks"),
        (["--preset", "exact-mla", "--url", "http://127.0.0.1:1"], "--url: the exact presets"),
        (["--preset", "recall-gqa", "--url", "http://127.0.0.1:1", "--kill"], "need a server"),
        (["--preset", "recall-gqa", "--url", "http://127.0.0.1:1"], "GET http://127.0.0.1:1/v1"),
        (["--preset", "recall-gqa", "--limit", "none"], "--limit"),
        (["--preset", "recall-gqa", "--wrong"], "--wrong"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KVTIER_LM_EVAL", sys.executable)
    assert lm_eval_runs.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1, error


def test_only_root_drops_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    work = ExactWork()
    runner.check_work(work, has_url=False, between=Between())
    with pytest.raises(runner.CannotEvaluate, match="only root"):
        runner.check_work(work, has_url=False, between=Between(drop_caches=True))


# -- all of it, on a server that only counts --------------------------------------------------


class FakeServer(ThreadingHTTPServer):
    """Counts like a vLLM that computes at first, and reads from disk after each restart.

    It "restarts" when it is asked for its models after questions were answered.
    """

    daemon_threads = True

    def __init__(self, right: Sequence[int], restored: int) -> None:
        """`right[i]` answers of run i are right; warm runs restore `restored` tokens."""
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.right, self.restored = right, restored
        self.run, self.was_asked = 0, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def metrics(self) -> str:
        disk = self.restored if self.run and self.was_asked else 0
        computed = 13_000 - disk if self.was_asked else 0
        samples = {
            'vllm:prompt_tokens_by_source_total{source="local_compute"}': computed,
            'vllm:prompt_tokens_cached_by_source_total{source="disk"}': disk,
            "kvtier:write_bytes_total": 0 if self.run else 9_000_000 * self.was_asked,
            "kvtier:read_bytes_total": 9_000_000 if disk else 0,
            "process_start_time_seconds": 1.8e9 + self.run,
            "kvtier:disk_budget_bytes": 10**9,
            "kvtier:disk_used_bytes": 10**6,
        }
        return "".join(f"{name} {value}\n" for name, value in samples.items())


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(self.server.metrics())
            return
        if self.server.was_asked:
            self.server.run, self.server.was_asked = self.server.run + 1, False
        self._answer(json.dumps({"data": [{"id": "model", "max_model_len": 2048}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "questions" in body:
            self.server.was_asked = True
        self._answer(json.dumps({"right": self.server.right[self.server.run]}))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "restored", "code", "said"),
    [
        ([199, 199, 199], 12_800, 0, "kept by every run"),
        ([199, 199, 150], 12_800, 1, "run 3 (warm): exact_match 0.7500 instead of 0.9950"),
        ([199, 199, 199], 9_000, 1, "did not come from disk: 4000 tokens computed"),
    ],
    ids=["the same", "another score", "computed again"],
)
def test_three_runs_on_a_server_that_is_restarted_by_others(
    right: list[int],
    restored: int,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "lm_eval"
    fake = Path(__file__).with_name("fake_lm_eval.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("KVTIER_LM_EVAL", str(program))
    monkeypatch.setattr(watch, "DRAIN_QUIET_S", 0.1)
    with FakeServer(right, restored) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        arguments = ["--preset", "recall-gqa", "--url", server.url, "--out", str(tmp_path / "out")]
        assert lm_eval_runs.main(arguments) == code
        output = capsys.readouterr().out
        assert said in " ".join(output.split())
        assert server.run == 2
        # Everything is there: nobody is asked again.
        assert lm_eval_runs.main(arguments) == code
        assert server.run == 2
        server.shutdown()
    assert (tmp_path / "out" / "report.png").exists()
