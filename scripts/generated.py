"""Files of docs/ that are written from the code."""

from __future__ import annotations

from pathlib import Path

import typer


def bring_up_to_date(file: Path, text: str, module: str, *, check: bool) -> None:
    """Write `text` to `file` or, to `check`, end with exit code 1 and a line that names `module` if
    something else stands there."""
    if not check:
        file.write_text(text)
    elif file.read_text() != text:
        typer.echo(f"docs/{file.name}: run python -m {module}", err=True)
        raise typer.Exit(1)
