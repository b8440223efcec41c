"""The tasks that lm_eval runs offline: made here, always the same bytes, and given to it by path.

Every local task generates text: tasks that score the likelihood of given text ask for the
log-probabilities of a prompt, and vLLM computes those without its prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.evals.documents import DOCUMENTS, EXAMPLES
from scripts.recall import recalls

RECALL = "kvtier_recall"
RECALL_PROMPTS = 200
DOCUMENT_PREFIX = "kvtier_documents_"


@dataclass(frozen=True, slots=True)
class LocalTask:
    """A name, the questions as lm_eval's templates see them, and what its file adds to the rest."""

    name: str
    rows: Sequence[Mapping[str, str]]
    settings: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        """Its data and its task file, which is JSON, and so YAML too."""
        data = directory / f"{self.name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        task = {
            "task": self.name,
            "dataset_path": "json",  # the loader of `datasets` itself: no hub
            "dataset_kwargs": {"data_files": {"test": str(data.absolute())}},
            "test_split": "test",
            "output_type": "generate_until",
            "target_delimiter": " ",
            "num_fewshot": 0,
            "filter_list": [
                {
                    "name": "strip",
                    "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
                }
            ],
            "metadata": {"version": 1.0},
            **self.settings,
        }
        (directory / f"{self.name}.yaml").write_text(json.dumps(task, indent=2) + "\n")


def _exact_match(**more: bool) -> list[dict[str, Any]]:
    return [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, **more}]


def _generation(tokens_max: int, *until: str) -> dict[str, Any]:
    return {
        "until": ["\n", *until],
        "max_gen_toks": tokens_max,
        "do_sample": False,
        "temperature": 0,
    }


def recall_task() -> LocalTask:
    """`RECALL_PROMPTS` prompts; no two share a prefix, so each needs KV of its own."""
    return LocalTask(
        RECALL,
        [recall._asdict() for recall in recalls(RECALL_PROMPTS)],
        {
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": _generation(1),
            "metric_list": _exact_match(),
        },
    )


def document_tasks() -> list[LocalTask]:
    """One task per document, which stands before the examples and the sentence of each prompt."""
    tasks = []
    for document in DOCUMENTS:
        examples, asked = document.questions[:EXAMPLES], document.questions[EXAMPLES:]
        tasks.append(
            LocalTask(
                DOCUMENT_PREFIX + document.name,
                [question._asdict() for question in asked],
                {
                    "description": document.text() + "\n\n",
                    "doc_to_text": "Quotation: {{question}}",
                    "doc_to_target": "{{answer}}",
                    "num_fewshot": len(examples),
                    "fewshot_config": {
                        "sampler": "first_n",
                        "samples": [question._asdict() for question in examples],
                    },
                    "generation_kwargs": _generation(32, ",", ".", ";"),
                    "metric_list": _exact_match(ignore_case=True, ignore_punctuation=True),
                },
            )
        )
    return tasks


def local_tasks() -> dict[str, LocalTask]:
    """All of them, by name."""
    return {task.name: task for task in (recall_task(), *document_tasks())}


def write_tasks(directory: Path) -> None:
    """Make the directory for `lm_eval --include_path`."""
    directory.mkdir(parents=True, exist_ok=True)
    for task in local_tasks().values():
        task.write(directory)


def question_count(names: Iterable[str], limit: int | None) -> int | None:
    """How many questions tasks have, or None where one of them is not ours to know."""
    known = local_tasks()
    if any(name not in known for name in names):
        return None
    sizes = [len(known[name].rows) for name in names]
    return sum(size if limit is None else min(size, limit) for size in sizes)
