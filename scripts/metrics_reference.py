"""Writes docs/metrics.md from the metrics' own definitions.

python -m scripts.metrics_reference
python -m scripts.metrics_reference --check      # exit code 1 if the file is not up to date
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from scripts.generated import bring_up_to_date
from tiering.metrics import ALL, Kind

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"

_HEAD = """\
# Metrics

<!-- Written by `python -m scripts.metrics_reference`: edit the texts in tiering/metrics.py. -->

All stand in vLLM's `/metrics`, with its labels `model_name` and `engine` beside these. `tier` is
`region`, or the name of a disk: `disk`, or as in `secondary_tiers`. They move with the engine's
steps; while requests run, every two seconds. Counters count since the engine's start, over all
processes of a store; what a store process counted but had not told when it was killed is lost. Each
is held against a count of its own by `tests/unit/tiering/test_metrics_truth.py`.

"""

_FOOT = """
## What vLLM says itself

These are vLLM's, and are not told twice:

| metric | what |
|---|---|
"""

_OF_VLLM = {
    "kv_offload_load_bytes_total": "bytes copied from the region to the device",
    "kv_offload_load_time_total": "seconds that took",
    "kv_offload_store_bytes_total": "bytes copied from the device to the region",
    "kv_offload_store_time_total": "seconds that took",
    "prompt_tokens_cached_by_source_total": "prompt tokens that were not computed, by `source`: "
    "`device`, `host` (the region) or `disk`",
    "external_prefix_cache_hits_total": "prompt tokens that came from region or disk",
    "kv_offload_lookup_sync_delay_seconds": "histogram of the time of one request's lookup",
}


def reference() -> str:
    """The text of docs/metrics.md."""
    lines = ["| metric | kind | labels | what |", "|---|---|---|---|"]
    for metric in ALL:
        name = metric.name + ("_total" if metric.kind is Kind.COUNTER else "")
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{name}` | {metric.kind.value} | {labels} | {metric.help} |")
    others = [f"| `vllm:{name}` | {text} |" for name, text in _OF_VLLM.items()]
    return _HEAD + "\n".join(lines) + "\n" + _FOOT + "\n".join(others) + "\n"


def main(
    check: Annotated[bool, typer.Option("--check", help="Compare, and write nothing.")] = False,
) -> None:
    """Write docs/metrics.md."""
    bring_up_to_date(REFERENCE, reference(), "scripts.metrics_reference", check=check)


if __name__ == "__main__":
    typer.run(main)
