"""`kvtier export` and `kvtier import`: a namespace as one Zarr store, baked once and shipped."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from storage.device import LocalDevice, exists
from storage.errors import ConfigError
from storage.header import SegmentGeometry
from storage.options import StoreOptions
from storage.pool import charge_of
from storage.sizes import format_size, parse_size
from storage.space import NAMESPACE_OVERHEAD_BYTES
from storage.store import DiskStore
from storage.survey import RootSurvey, survey_root
from tiering.cli import words
from tiering.cli.choice import choose_namespace
from tiering.cli.console import console, print_json, progress_bar
from tiering.cli.owning import open_owned

if TYPE_CHECKING:  # it imports zarr, which takes longer than any other command
    from storage.export import Export


def export(
    root: Annotated[Path, typer.Argument(help="Root of a store.", metavar="ROOT")],
    namespace: Annotated[str, typer.Argument(help="Its name, or enough of it.")],
    destination: Annotated[Path, typer.Argument(help="A path where nothing is.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Write a namespace as one Zarr store, which any Zarr reader reads and `kvtier import` takes.

    Every row is verified; exit code 1 if some were damaged and left out.  Safe beside a running
    server.
    """
    from storage.export import export_namespace

    chosen = choose_namespace(survey_root(root), namespace)
    with progress_bar("exporting", chosen.row_count * chosen.row_bytes) as advance:
        report = export_namespace(chosen, destination, advance)
    if as_json:
        print_json(report)
    else:
        out = console()
        size = words.size(report.rows * chosen.row_bytes)
        out.print(f"{destination}: {words.count(report.rows)} rows, {size}", soft_wrap=True)
        if report.rows_gone:
            out.print(f"{report.rows_gone} rows were overwritten meanwhile")
        if report.rows_damaged:
            out.print(f"{report.rows_damaged} rows are damaged and not in it", style="red")
    if report.rows_damaged:
        raise typer.Exit(1)


def import_(
    source: Annotated[Path, typer.Argument(help="What `kvtier export` wrote.")],
    root: Annotated[Path, typer.Argument(help="Root of a store; may be new.", metavar="ROOT")],
    budget: Annotated[
        str | None,
        typer.Option(help='Of the root, such as "500GB".  Default: what it had last.'),
    ] = None,
    evict: Annotated[
        bool,
        typer.Option("--evict", help="Take room from other namespaces if need be."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Put the rows of an export into a root, where an engine of the same identity finds them.

    Every row is verified.  Exit code 1 if not all are there at the end.  Nobody may have the root
    open.
    """
    from storage.export import Export, import_rows

    archive = Export(source)
    budget_bytes = None if budget is None else parse_size(budget, "--budget")
    with _open(root, archive, budget_bytes, evict=evict) as store:
        rows = store.open_rows(archive.identity, archive.row_bytes, archive.facts)
        with progress_bar("importing", archive.row_count * archive.row_bytes) as advance:
            report = import_rows(archive, rows, advance)
    if as_json:
        print_json(report)
    else:
        out = console()
        out.print(
            f"{archive.identity.directory}: {report.rows_stored} rows stored, "
            f"{report.rows_there_already} were there, {report.rows_refused} refused; "
            f"{report.rows_resident} of {report.rows} are there now",
            soft_wrap=True,
        )
    if report.rows_resident < report.rows:
        raise typer.Exit(1)


def _open(root: Path, archive: Export, budget_bytes: int | None, *, evict: bool) -> DiskStore:
    is_new = not exists(LocalDevice(), root) or (root.is_dir() and not any(root.iterdir()))
    codec = archive.identity.codec
    if not is_new:
        survey = survey_root(root)
        if not evict:
            _check_room(survey, archive, budget_bytes)
        return open_owned(root, budget_bytes, codec)
    if budget_bytes is None:
        raise ConfigError("--budget", f"a size, since {root} is new", None)
    return DiskStore.open(StoreOptions(root, budget_bytes, codec=codec))


def _check_room(survey: RootSurvey, archive: Export, budget_bytes: int | None) -> None:
    """Refuse to import at the cost of other namespaces: to the owner of a root all that it has not
    open are stale.  Raises `ConfigError`."""
    budget = budget_bytes or (survey.status.budget_bytes if survey.status else 0)
    same = [n for n in survey.namespaces if n.name == archive.identity.directory]
    geometry = SegmentGeometry.choose(archive.row_bytes, budget or survey.charged_bytes)
    geometry = next((n.geometry for n in same if n.geometry), geometry)
    if archive.identity.row_codec is not None:
        geometry = geometry.size_classes()[-1]
    free = sum(len(s.entries) - len(s.named) for n in same for s in n.segments)
    there = {s.key(slot) for n in same for s in n.segments for slot in s.named.tolist()}
    missing = sum(key not in there for key in archive.keys) - free
    segments = max(0, -(-missing // geometry.slots_per_segment))
    needed = segments * charge_of(geometry) + (0 if same else NAMESPACE_OVERHEAD_BYTES)
    left = max(0, budget - survey.charged_bytes)
    if len(survey.namespaces) > len(same) and segments and needed > left:
        raise ConfigError(
            "--budget",
            f"{format_size(needed)} more than what is there, or --evict to take it from the other "
            "namespaces",
            format_size(left),
        )
