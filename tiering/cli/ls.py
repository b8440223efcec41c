"""`kvtier ls`: the namespaces of a root, or the rows of one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from storage.survey import NamespaceSurvey, survey_root
from tiering.cli import words
from tiering.cli.choice import choose_namespace
from tiering.cli.console import console, print_json, print_warnings


def ls(
    root: Annotated[Path, typer.Argument(help="Root of a store.", metavar="ROOT")],
    namespace: Annotated[
        str | None,
        typer.Argument(help="List the rows of this one: its name, or enough of it."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Rows to list, most recently used first.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Namespaces of a root, or rows of a namespace.  Safe beside a running server."""
    survey = survey_root(root)
    out = console()
    if namespace is None:
        listed = [_summary(one, survey.taken_s) for one in survey.namespaces]
        if as_json:
            print_json(listed)
            return
        _print_columns(
            out,
            ("rows", "row", "groups", "on disk", "opened", "model", "namespace"),
            [
                (
                    words.count(one.row_count),
                    words.size(one.row_bytes or None),
                    ",".join(map(str, one.facts.groups)) or "all",
                    words.size(one.weight.allocated_bytes),
                    words.span(survey.taken_s - one.opened_s) if one.opened_s else "-",
                    one.model,
                    one.name,
                )
                for one in survey.namespaces
            ],
        )
    else:
        rows = _rows(choose_namespace(survey, namespace), limit)
        if as_json:
            print_json(rows)
            return
        titles = ("segment", "slot", "bytes", "used", "key")
        _print_columns(out, titles, [tuple(str(row[title]) for title in titles) for row in rows])
    print_warnings(out, map(str, survey.findings))


def _print_columns(out: Console, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The last column as long as it is: names and keys must be whole to be copied."""
    table = [titles, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(titles) - 1)]
    for row in table:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
        out.print("  ".join([*cells, row[-1]]), soft_wrap=True, style="bold" * (row is titles))


def _summary(one: NamespaceSurvey, now_s: float) -> dict[str, object]:
    return {
        "namespace": one.name,
        "model": one.model,
        "codec": one.codec_name,
        "rows": one.row_count,
        "row_bytes": one.row_bytes,
        "groups": list(one.facts.groups),
        "segments": len(one.segments),
        "disk_bytes": one.weight.allocated_bytes,
        "opened_age_s": now_s - one.opened_s if one.opened_s else None,
        "identity": one.identity.fields if one.identity else None,
    }


def _rows(namespace: NamespaceSurvey, limit: int) -> list[dict[str, object]]:
    """The `limit` rows used last."""
    candidates = []
    for segment in namespace.segments:
        uses = segment.entries["last_use"][segment.named]
        for position in np.argsort(uses)[::-1][: max(0, limit)].tolist():
            candidates.append((int(uses[position]), segment, int(segment.named[position])))
    candidates.sort(key=lambda candidate: candidate[0], reverse=True)
    return [
        {
            "key": segment.key(slot).hex(),
            "segment": segment.number,
            "slot": slot,
            "bytes": int(segment.entries["length"][slot]),
            "used": datetime.fromtimestamp(use / 1e6).isoformat(" ", "seconds"),
        }
        for use, segment, slot in candidates[: max(0, limit)]
    ]
