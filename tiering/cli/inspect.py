"""`kvtier inspect`: one row, by its key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from storage.errors import StorageError
from storage.inspection import RowInspector
from storage.survey import NamespaceSurvey, SegmentSurvey, survey_root
from storage.types import SlotId
from tiering.cli.choice import choose_row
from tiering.cli.console import console, print_json

_WHOLE, _GONE = "whole", "gone since"
_NEIGHBOURS = 2  # slots before and behind


@dataclass(frozen=True)
class RowReport:
    """What there is to know of one row; `zarr_index` is its place in the namespace's array."""

    key: str
    namespace: str
    state: str
    """"whole", "gone since" (overwritten while we looked), or what is wrong with it."""
    path: str
    segment: int
    slot: int
    zarr_index: int
    offset: int
    record_bytes: int
    slot_bytes: int
    row_bytes: int
    codec: str
    last_use: str
    checksum_table: str
    checksum_trailer: str
    checksum_content: str
    neighbours: dict[int, str]
    """Slot -> key, or "free", around it."""


def inspect(
    root: Annotated[Path, typer.Argument(help="Root of a store.", metavar="ROOT")],
    key: Annotated[str, typer.Argument(help="In hexadecimal, or the first digits of it.")],
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Where a row stands, whether it is whole, and what stands beside it.

    Exit code 1 if it is damaged.  Safe beside a running server.
    """
    reports = [_report(*place) for place in choose_row(survey_root(root), key)]
    if as_json:
        print_json(reports)
    else:
        out = console()
        for report in reports:
            _print(out, report)
    if any(report.state not in (_WHOLE, _GONE) for report in reports):
        raise typer.Exit(1)


def _print(out: Console, report: RowReport) -> None:
    shown: dict[str, object] = {
        "key": report.key,
        "namespace": report.namespace,
        "state": report.state,
        "place": f"segment {report.segment}, slot {report.slot}; row {report.zarr_index} for Zarr",
        "file": f"{report.path}, from byte {report.offset:,}",
        "size": f"{report.record_bytes:,} bytes in a slot of {report.slot_bytes:,}, for a row of "
        f"{report.row_bytes:,}; codec {report.codec}",
        "last use": report.last_use,
        "crc32c": f"table {report.checksum_table}, trailer {report.checksum_trailer}, "
        f"content {report.checksum_content}",
    }
    shown |= {f"slot {slot}": key for slot, key in report.neighbours.items()}
    for name, value in shown.items():
        style = "red" if name == "state" and report.state != _WHOLE else ""
        out.print(Text.assemble((f"{name:<10}", "dim"), (str(value), style)), soft_wrap=True)


def _report(namespace: NamespaceSurvey, segment: SegmentSurvey, slot: SlotId) -> RowReport:
    inspector = RowInspector(namespace)
    (row,) = inspector.rows(segment, [slot])
    state = row.fault or (_WHOLE if row.row is not None else _GONE)
    try:
        sums = [f"{number:08x}" for number in inspector.checksums(segment, slot)]
    except StorageError as exc:
        sums = [f"{int(segment.entries['checksum'][slot]):08x}", str(exc), str(exc)]
    entry, slots = segment.entries[slot], len(segment.entries)
    named = set(segment.named.tolist())
    around = range(max(0, slot - _NEIGHBOURS), min(slots, slot + _NEIGHBOURS + 1))
    return RowReport(
        key=row.key.hex(),
        namespace=namespace.name,
        state=state,
        path=str(segment.path),
        segment=segment.number,
        slot=slot,
        zarr_index=segment.number * slots + slot,
        offset=int(entry["offset"]),
        record_bytes=int(entry["length"]),
        slot_bytes=segment.geometry.stride,
        row_bytes=namespace.row_bytes,
        codec=namespace.codec_name,
        last_use=datetime.fromtimestamp(int(entry["last_use"]) / 1e6).isoformat(" ", "seconds"),
        checksum_table=sums[0],
        checksum_trailer=sums[1],
        checksum_content=sums[2],
        neighbours={
            other: segment.key(other).hex() if other in named else "free"
            for other in around
            if other != slot
        },
    )
