"""`kvtier gc`: give back namespaces that nobody needs any more."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from storage.device import LocalDevice
from storage.errors import ConfigError, DeviceError
from storage.namespace import ROWS
from storage.root import remove_namespace, segment_numbers, take_root
from storage.segment import segment_path
from storage.survey import NamespaceSurvey, survey_root
from tiering.cli import words
from tiering.cli.console import console, parse_span, print_json, print_warnings


def gc(
    root: Annotated[Path, typer.Argument(help="Root of a store.", metavar="ROOT")],
    older_than: Annotated[
        str | None, typer.Option(help='Those that nobody opened for so long, such as "30d".')
    ] = None,
    name: Annotated[
        str | None, typer.Option(help='Those of this name, or pattern such as "Qwen*".')
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Remove namespaces by age, by their or their model's name, or both.  Nobody may have the root
    open.

    A running store does so itself when it needs the room: this is for giving it back sooner.
    """
    if older_than is None and name is None:
        raise ConfigError("gc", "--older-than, --name or both", "neither")
    age_s = parse_span(older_than, "--older-than") if older_than is not None else 0.0
    device = LocalDevice()
    survey = survey_root(root)
    lock_fd = None if dry_run else take_root(root, device, lock_timeout_s=1.0)
    problems: list[str] = []
    try:
        if lock_fd is not None:
            survey = survey_root(root)  # as it is now that nobody else changes it
        chosen = [
            one
            for one in survey.namespaces
            if survey.taken_s - one.opened_s >= age_s and (name is None or _is_meant(one, name))
        ]
        if lock_fd is not None:
            for one in chosen:
                problems += _remove(one, device)
    finally:
        if lock_fd is not None:
            device.close(lock_fd)
    removed = [
        {
            "namespace": one.name,
            "rows": one.row_count,
            "disk_bytes": one.weight.allocated_bytes,
            "opened_age_s": survey.taken_s - one.opened_s if one.opened_s else None,
        }
        for one in chosen
    ]
    if as_json:
        print_json({"dry_run": dry_run, "namespaces": removed, "problems": problems})
    else:
        out = console()
        for one in chosen:
            age = words.span(survey.taken_s - one.opened_s) if one.opened_s else "-"
            facts = f"{words.count(one.row_count)} rows, {words.size(one.weight.allocated_bytes)}"
            out.print(f"{one.name}: {facts}, opened {age} ago", soft_wrap=True)
        total = words.size(sum(one.weight.allocated_bytes for one in chosen))
        verb = "would go" if dry_run else "given back"
        out.print(f"{len(chosen)} of {len(survey.namespaces)} namespaces, {total}, {verb}")
        print_warnings(out, problems)
    if problems:
        raise typer.Exit(1)


def _is_meant(one: NamespaceSurvey, name: str) -> bool:
    return any(fnmatchcase(known, name) or known == name for known in (one.name, one.model))


def _remove(namespace: NamespaceSurvey, device: LocalDevice) -> list[str]:
    """Remove what is kvtier's, segments first, so that an end half-way leaves a smaller namespace.

    What could not be removed.
    """
    rows = namespace.directory / ROWS
    try:
        for number in segment_numbers(rows, device):
            device.remove(segment_path(rows, number))
        remove_namespace(namespace.directory, device)
    except DeviceError as exc:
        return [f"{namespace.name}: {exc}"]
    return []
