"""`kvtier verify`: is every row what was stored?"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from storage.findings import Trouble
from storage.inspection import RowInspector
from storage.sizes import parse_size
from storage.survey import NamespaceSurvey, RootSurvey, survey_root
from storage.types import RowKey
from tiering.cli import words
from tiering.cli.choice import choose_namespace
from tiering.cli.console import console, print_json, print_warnings, progress_bar
from tiering.cli.owning import open_owned

# Of these the rows that are left are whole, and nobody has to do anything.
_HARMLESS = frozenset({Trouble.FOREIGN, Trouble.LEFTOVER, Trouble.NAMED_TWICE})


@dataclass
class Damage:
    """One row that is not what was stored."""

    namespace: str
    key: str
    place: str
    reason: str


@dataclass
class Report:
    """`rows_gone` were overwritten by a running store before they could be read."""

    rows: int = 0
    rows_gone: int = 0
    bytes_read: int = 0
    damaged: list[Damage] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    rows_dropped: int = 0
    not_repaired: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not self.damaged and not self.findings


class Pace:
    """Sleeps so that no more than `bytes_per_s` are read; 0: as fast as it goes."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._next = time.monotonic()

    def read(self, size_bytes: int) -> None:
        if not self._bytes_per_s:
            return
        self._next = max(self._next, time.monotonic() - 1.0) + size_bytes / self._bytes_per_s
        time.sleep(max(0.0, self._next - time.monotonic()))


def verify(
    root: Annotated[Path, typer.Argument(help="Root of a store.", metavar="ROOT")],
    namespace: Annotated[
        str | None, typer.Option(help="Only this one: its name, or enough of it.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop what is damaged; nobody may have the root open.")
    ] = False,
    rate: Annotated[
        str | None, typer.Option(help='Bytes to read per second at most, such as "200MB".')
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Read every row, past the page cache; check it against its trailer and the key table.

    Exit code 1 if anything is damaged, 0 if all is well.  Safe beside a running server, but for
    --repair.
    """
    pace = Pace(parse_size(rate, "--rate") if rate is not None else 0)
    if repair:
        open_owned(root).close()  # a root that somebody has open is refused at once
    survey = survey_root(root)
    chosen = survey.namespaces if namespace is None else [choose_namespace(survey, namespace)]
    report = Report(findings=_damaging(survey, chosen))
    bad: dict[str, list[RowKey]] = {}
    total = sum(one.row_count * one.row_bytes for one in chosen)
    with progress_bar("verifying", total) as advance:
        for one in chosen:
            bad[one.name] = verify_namespace(one, report, pace, advance)
    if repair:
        for one in chosen:
            _repair(survey, one, bad[one.name], report)
    if as_json:
        print_json(report)
    else:
        _print(console(), root, report)
    if not report.is_clean:
        raise typer.Exit(1)


def _damaging(survey: RootSurvey, chosen: list[NamespaceSurvey]) -> list[str]:
    """Findings that cost rows, in the namespaces chosen or in no namespace."""
    others = {one.directory for one in survey.namespaces} - {one.directory for one in chosen}
    return [
        str(finding)
        for finding in survey.findings
        if finding.trouble not in _HARMLESS and not others & {finding.path, *finding.path.parents}
    ]


def verify_namespace(
    namespace: NamespaceSurvey, report: Report, pace: Pace, advance: Callable[[int], None]
) -> list[RowKey]:
    """Read all rows of a namespace, in the order of the disk; the keys of those damaged."""
    if namespace.geometry is None:
        return []
    inspector = RowInspector(namespace)
    bad = []
    for segment in namespace.segments:
        for row in inspector.rows(segment):
            report.rows += 1
            report.bytes_read += segment.geometry.stride
            if row.fault is not None:
                place = f"{segment.path} slot {row.slot}"
                report.damaged.append(Damage(namespace.name, row.key.hex(), place, row.fault))
                bad.append(row.key)
            elif row.row is None:
                report.rows_gone += 1
            advance(namespace.row_bytes)
            pace.read(segment.geometry.stride)
    return bad


def _repair(
    survey: RootSurvey, namespace: NamespaceSurvey, bad: list[RowKey], report: Report
) -> None:
    """Drop damaged rows, and let the store put the headers of the namespace in order.

    Nobody has the root while rows are read; one that was stored anew since is lost with the others,
    which is a miss.
    """
    is_hurt = any(namespace.directory in finding.path.parents for finding in survey.findings)
    if not bad and not is_hurt:
        return
    if namespace.identity is None or namespace.geometry is None:
        report.not_repaired.append(
            f"{namespace.name}: its metadata is lost; `kvtier gc` removes it"
        )
        return
    with open_owned(survey.root, codec=namespace.codec_name) as store:
        rows = store.open_rows(namespace.identity, namespace.row_bytes)
        report.rows_dropped += rows.remove(bad)


def _print(out: Console, root: Path, report: Report) -> None:
    gone = f", {report.rows_gone} overwritten meanwhile" if report.rows_gone else ""
    verdict = "all whole" if report.is_clean else f"{len(report.damaged)} damaged"
    read = f"{words.count(report.rows)} rows, {words.size(report.bytes_read)} read{gone}"
    out.print(f"{root}: {read}: {verdict}", soft_wrap=True)
    for damage in report.damaged:
        out.print(f"{damage.key}: {damage.place}: {damage.reason}", soft_wrap=True, style="red")
    print_warnings(out, report.findings)
    if report.rows_dropped:
        out.print(f"{report.rows_dropped} rows dropped")
    print_warnings(out, report.not_repaired)
