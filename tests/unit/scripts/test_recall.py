"""The recall task: prompts that cannot be answered without their KV, always the same ones."""

from __future__ import annotations

from scripts.make_model import RECIPES
from scripts.models import MODELS
from scripts.recall import KEYS, VALUES, recalls


def test_a_prompt_names_every_key_once_and_the_answer_is_that_of_the_key_asked_for() -> None:
    for prompt, answer in recalls(50):
        *pairs, asked = prompt.split()
        values = dict(pair.split("v") for pair in pairs)
        assert len(pairs) == len(values) == KEYS
        assert answer == f"v{values[asked]}"


def test_prompts_are_always_the_same_and_share_no_prefix() -> None:
    prompts = recalls(200)
    assert prompts == recalls(200)
    assert prompts[:20] == recalls(20)
    assert prompts != recalls(200, seed=3)
    blocks = {tuple(prompt.split()[:16]) for prompt, _ in prompts}
    assert len(blocks) == 200, "a block of 16 tokens is of one prompt alone"


def test_no_answer_is_right_much_more_often_than_chance() -> None:
    answers = [answer for _, answer in recalls(1600)]
    counts = [answers.count(f"v{value}") for value in range(VALUES)]
    assert sum(counts) == 1600
    assert max(counts) < 1.5 * 1600 / VALUES


def test_every_model_has_a_recipe() -> None:
    assert RECIPES.keys() == MODELS.keys()
