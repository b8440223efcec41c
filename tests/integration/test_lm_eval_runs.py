"""lm-eval on a real server, short: the same score from disk, and another from a damaged store."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.evals.harness import EvalError, EvalWork, program
from scripts.evals.plans import KVTIER, PRESETS, Side, Step
from scripts.evals.records import Records
from scripts.evals.runner import Between, Evaluation
from scripts.evals.tamper import Damage
from scripts.evals.verdict import Bounds, differing, faults_of
from scripts.make_model import ensure_model
from scripts.models import MODELS
from scripts.recall import CHANCE, KEYS
from scripts.serving import ServeConfig
from tests.integration.conftest import needs_vllm

QUESTIONS = 40


def has_lm_eval() -> bool:
    try:
        program()
    except EvalError:
        return False
    return True


pytestmark = [
    needs_vllm,
    pytest.mark.skipif(not has_lm_eval(), reason="lm_eval is not installed: make setup-eval"),
    pytest.mark.timeout(1200),
]


def test_the_score_is_that_of_restored_kv_and_falls_with_it(tmp_path: Path) -> None:
    """Cold; killed and restarted, warm; then every row holds another's bytes, unseen."""
    preset = PRESETS["recall-mla"]
    ensure_model(preset.model)
    assert isinstance(preset.work, EvalWork)
    evaluation = Evaluation(
        EvalWork(preset.work.tasks, limit=QUESTIONS),
        Records(tmp_path, {}),
        (Step("cold"), Step("warm"), Step("swapped", Damage.SWAPPED)),
        Between(kill=True),
        say=print,
        progress=lambda *_: None,
        config=lambda transfer: ServeConfig(
            MODELS[preset.model], transfer, kv_cache_bytes=preset.kv_cache_bytes
        ),
    )
    cold, warm, swapped = evaluation.run(Side(KVTIER, preset.region, preset.budget))
    bounds = Bounds(preset.tolerance, preset.differing_max)

    assert len(cold.answers) == QUESTIONS
    assert cold.score >= 0.9, "of 40 questions to a model that is trained anew where the test runs"
    assert cold.tokens_disk == cold.tokens_region == cold.tokens_device == 0
    assert cold.bytes_written > 0
    assert faults_of([cold, warm], bounds) == []
    assert differing(cold, warm) == 0
    assert warm.tokens_disk == QUESTIONS * KEYS
    assert warm.bytes_read == cold.bytes_written

    # Checksums see nothing; the score does, and so does the verdict.
    assert swapped.rows_damaged * 12_288 == cold.bytes_written
    assert swapped.rows_corrupt == 0
    assert swapped.tokens_disk == warm.tokens_disk
    assert swapped.score < 5 * CHANCE
    faults = faults_of([cold, swapped], bounds)
    assert len(faults) == 2, faults
    assert "off by more than" in faults[0]
    assert "answers differ" in faults[1]
