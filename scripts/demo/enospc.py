"""The work of four models on a disk that is too small for it, with and without dedup.

    python scripts/demo/enospc.py --out report.png

Makes a small file system of its own (needs root), and on it runs simulated TP ranks, region, store
process and disk as an engine would: twice per model, the second time after a restart.  Without
dedup the larger works fill the file system: the engine goes on and misses.  With dedup they fit.
Exits 0 only if no byte was wrong, nothing failed, and every work fits with dedup.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

if not __package__:  # started as a file: the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import msgspec
import typer
from rich.console import Console

from scripts.demo.report import draw, plain, table
from scripts.demo.scaled_work import DISK_BYTES, SCALE, WORKS, Work, WorkResult, run_work
from scripts.demo.small_disk import FileSystem, small_disk
from storage.errors import ConfigError, StorageError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LEAST_SCALE = 20.0  # a disk of 9 GB; below that it is no demo
_MOST_SCALE = 3915.0  # above that not one chunk is left of the smallest work


@app.command()
def run(
    out: Annotated[Path | None, typer.Option(help="Where to draw the picture, a .png.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.")
    ] = None,
    file_system: Annotated[
        FileSystem, typer.Option(help="ext4 takes O_DIRECT, through a file and a loop device.")
    ] = FileSystem.TMPFS,
    scale: Annotated[float, typer.Option(help="By how much disk and work are smaller.")] = SCALE,
    only: Annotated[list[str] | None, typer.Option(help="Presets to run; default: all.")] = None,
) -> None:
    """Fill a small file system with and without dedup, restart, and see what is found again."""
    try:
        works = _chosen(only or [])
        if not _LEAST_SCALE <= scale <= _MOST_SCALE:
            raise ConfigError("--scale", f"{_LEAST_SCALE:g} to {_MOST_SCALE:g}", scale)
        if out is not None and out.suffix != ".png":
            raise ConfigError("--out", "a .png", str(out))
        for option, file in (("--out", out), ("--json", json_out)):
            if file is not None and not file.absolute().parent.is_dir():
                raise ConfigError(option, "a file in a directory that is there", str(file))
        results = _run_all(works, scale, file_system)
    except StorageError as exc:
        typer.echo(str(exc), err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("interrupted: the file system is removed", err=True)
        raise typer.Exit(130) from None
    Console(width=160).print(table(results, scale))
    if json_out is not None:
        figures = {
            "scale": scale,
            "file_system": file_system.value,
            "disk_bytes": DISK_BYTES,
            "rows": [plain(result, scale) for result in results],
        }
        json_out.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))
    if out is not None:
        draw(results, scale, out)
    good = all(result.wrong_bytes == 0 and result.errors == 0 for result in results)
    fits = all(result.hit_rate == 1 for result in results if result.dedup)
    raise typer.Exit(0 if good and fits else 1)


def _chosen(presets: Sequence[str]) -> list[Work]:
    known = [work.preset for work in WORKS]
    for name in presets:
        if name not in known:
            raise ConfigError("--only", f"one of {', '.join(known)}", name)
    return [work for work in WORKS if not presets or work.preset in presets]


def _run_all(works: Sequence[Work], scale: float, file_system: FileSystem) -> list[WorkResult]:
    signal.signal(signal.SIGTERM, _exit)
    # Ignored by whoever a shell started in the background: the mount must go all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    console = Console(stderr=True)
    results = []
    for work in works:
        for dedup in (False, True):
            console.print(f"{work.preset}, dedup {'on' if dedup else 'off'} ...", highlight=False)
            with small_disk(file_system, int(DISK_BYTES / scale)) as disk:
                results.append(run_work(work, disk, scale, dedup=dedup))
    return results


def _exit(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(143)  # so that SIGTERM, too, unmounts on its way out


if __name__ == "__main__":
    app()
