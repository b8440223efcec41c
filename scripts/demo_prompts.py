"""The prompts of the demo: real licence texts, each the shared prefix of a few questions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.models import ROOT, ModelPreset

LICENSES = Path("/usr/share/common-licenses")  # on every Debian
NAMES = ("GPL-3", "MPL-2.0", "LGPL-2.1", "Apache-2.0", "GPL-2")

# Long enough that computing a prompt takes seconds on two cores, short enough for a demo.
DOCUMENT_TOKENS = 1600
DOCUMENT_TOKENS_MIN = 1500
QUESTIONS = (
    "What is this text, and who published it?",
    "What does this text say about copying?",
)

# SmolLM2's chat format. Its first block of tokens already holds words of the document.
CHAT = ("<|im_start|>user\n", "\n\n", "<|im_end|>\n<|im_start|>assistant\n")
PLAIN = ("", "\n\n", "\n")

Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """`number` counts the questions of one document from 1; only the first meets a cold prefix."""

    document: str
    number: int
    question: str
    token_ids: tuple[int, ...]


def documents(count: int) -> dict[str, str]:
    """Up to `count` long texts of this machine, by name."""
    found = {name: LICENSES / name for name in NAMES if (LICENSES / name).is_file()}
    if not found and (ROOT / "LICENSE").is_file():
        found = {"LICENSE": ROOT / "LICENSE"}
    return {
        name: path.read_text(errors="replace").strip() for name, path in list(found.items())[:count]
    }


def prompts(preset: ModelPreset, count: int, tokenize: Tokenize) -> Iterator[DemoPrompt]:
    """Every question on each of `count` documents, cut to the same number of tokens.

    All questions of a document follow each other, so that the later ones find its blocks on the
    device. A document shorter than the cut is taken whole.
    """
    head, middle, tail = CHAT if preset.trained else PLAIN
    for name, text in documents(count).items():
        shared = [*tokenize(head), *tokenize(text)[:DOCUMENT_TOKENS]]
        if len(shared) < DOCUMENT_TOKENS_MIN:
            continue
        for number, question in enumerate(QUESTIONS, start=1):
            asked = tokenize(middle + question + tail)
            yield DemoPrompt(name, number, question, (*shared, *asked))
