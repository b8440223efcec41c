"""Key-value recall: a task whose answers stand in the prompt alone, and tiny models trained for it.

A prompt gives every key a value, each once, in an order of its own, and then asks for one of them:
`k3v7 k41v2 ... k9` is to be answered with `v2`.  Nothing of it can be known beforehand, so a model
answers from its KV cache or guesses, and a guess is right once in 16 times.  A pair is one token:
one look by content answers the question, which two layers learn in half a minute on two cores.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

KEYS, VALUES = 64, 16
CHANCE = 1 / VALUES
ACCURACY_MIN = 0.98  # by transformers, of a model that is good enough to be saved

_SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
_FIRST_KEY = len(_SPECIAL)
_FIRST_VALUE = _FIRST_KEY + KEYS
_FIRST_PAIR = _FIRST_VALUE + VALUES
VOCABULARY = _FIRST_PAIR + KEYS * VALUES

_SEED = 0
_PAIRS_AT_FIRST = 4  # with more of them a fresh model learns nothing for long
_QUERIES_MAX = 32  # per training sequence, so that each teaches more than once
_TOKENS_PER_STEP = 2048
_LEARNING_RATE = 3e-3
_WARM_UP_STEPS = 50
_WINDOW_STEPS = 20  # over which accuracy is averaged
_LONGER_ABOVE = 0.93  # then prompts get longer
_DONE_ABOVE = 0.995  # over whole prompts: the last points cost seconds, and the score needs them
_TRAINING_LIMIT_S = 600.0  # of processor time: twenty times what it takes
_CHECK_SEED, _CHECK_PROMPTS = 1, 512


class Recall(NamedTuple):
    """One prompt of the task, and the one right answer."""

    prompt: str
    answer: str


class NotLearned(Exception):
    """Training ended below `ACCURACY_MIN`; the message is one line."""


def recalls(count: int, seed: int = 2) -> list[Recall]:
    """Prompts of `KEYS` + 1 tokens that share no prefix: the same ones each time."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        keys = rng.sample(range(KEYS), KEYS)
        values = {key: rng.randrange(VALUES) for key in keys}
        asked = rng.choice(keys)
        pairs = " ".join(f"k{key}v{values[key]}" for key in keys)
        made.append(Recall(f"{pairs} k{asked}", f"v{values[asked]}"))
    return made


def recall_tokenizer(max_tokens: int) -> Any:
    """One token per word, and none added."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [
        *_SPECIAL,
        *(f"k{key}" for key in range(KEYS)),
        *(f"v{value}" for value in range(VALUES)),
        *(f"k{key}v{value}" for key in range(KEYS) for value in range(VALUES)),
    ]
    assert len(words) == VOCABULARY
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=max_tokens,
    )


def _batch(prompts: int, pairs: int, queries: int) -> tuple[Any, Any]:
    """(token ids int64[prompts, pairs + queries], right answers int64[prompts, queries])."""
    import torch

    values = torch.randint(VALUES, (prompts, KEYS))
    keys = torch.rand(prompts, KEYS).argsort(1)[:, :pairs]
    said = _FIRST_PAIR + keys * VALUES + values.gather(1, keys)
    asked = keys.gather(1, torch.randint(pairs, (prompts, queries)))
    ids = torch.cat([said, _FIRST_KEY + asked], 1)
    return ids, _FIRST_VALUE + values.gather(1, asked)


def train(model: Any, say: Callable[[str], None] = print) -> None:
    """Teach `model`, a causal language model of transformers with random weights, to recall.

    Prompts grow from 4 pairs to `KEYS`.  Raises `NotLearned` when that takes far too long.
    """
    import torch
    from torch.nn import functional

    torch.manual_seed(_SEED)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    pairs, step, recent = _PAIRS_AT_FIRST, 0, list[float]()
    started, cpu_started = time.monotonic(), time.process_time()
    while True:
        step += 1
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1, step / _WARM_UP_STEPS)
        queries = min(pairs, _QUERIES_MAX)
        ids, right = _batch(_TOKENS_PER_STEP // (pairs + queries), pairs, queries)
        # The head alone costs as much as the layers: only where there is something to answer.
        logits = model.lm_head(model.model(ids).last_hidden_state[:, -queries:])
        loss = functional.cross_entropy(logits.flatten(0, 1), right.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append((logits.argmax(-1) == right).float().mean().item())
        accuracy = sum(recent[-_WINDOW_STEPS:]) / _WINDOW_STEPS
        if pairs < KEYS and accuracy > _LONGER_ABOVE:
            pairs, recent = min(KEYS, 2 * pairs), []
        elif accuracy > _DONE_ABOVE:
            break
        if time.process_time() - cpu_started > _TRAINING_LIMIT_S:
            raise NotLearned(
                f"recall: accuracy {accuracy:.3f} over {pairs} pairs after {step} steps"
            )
    say(f"trained: {step} steps in {time.monotonic() - started:.0f} s")


def accuracy_of(model: Any, tokenizer: Any, prompts: list[Recall]) -> float:
    """The share of prompts that `model` answers rightly, by transformers itself."""
    import torch

    ids = torch.tensor([tokenizer(recall.prompt)["input_ids"] for recall in prompts])
    assert ids.shape == (len(prompts), KEYS + 1), ids.shape
    with torch.no_grad():
        said = model(ids).logits[:, -1].argmax(-1).tolist()
    right = [tokenizer.convert_tokens_to_ids(recall.answer) for recall in prompts]
    count: int = sum(a == b for a, b in zip(said, right, strict=True))
    return count / len(prompts)


def make_recall(out: Path, model: Any, max_tokens: int) -> None:
    """Train `model`, check it on prompts that it never saw, and save it with its tokenizer."""
    tokenizer = recall_tokenizer(max_tokens)
    train(model)
    model.eval()
    accuracy = accuracy_of(model, tokenizer, recalls(_CHECK_PROMPTS, _CHECK_SEED))
    print(f"accuracy {accuracy:.4f} (chance {CHANCE:.4f})", flush=True)
    if accuracy < ACCURACY_MIN:
        raise NotLearned(f"recall: accuracy {accuracy:.3f} is below {ACCURACY_MIN}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
