"""The command line `kvtier`: one module per command, registered here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from storage.errors import StorageError
from tiering.cli.du import du
from tiering.cli.export import export, import_
from tiering.cli.gc import gc
from tiering.cli.inspect import inspect
from tiering.cli.ls import ls
from tiering.cli.metrics import metrics
from tiering.cli.plan import plan
from tiering.cli.verify import verify
from tiering.cli.watch import watch

USAGE_ERROR = 2  # exit code of whatever was refused before anything was changed

# `ClickException`: newer versions of typer have a click of their own, so it is found by its heirs.
_BadUsage: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="kvtier",
    help="See and steer a disk-tiered KV cache.",
    no_args_is_help=True,
    add_completion=False,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(version("kvtier"))
        raise typer.Exit


@app.callback()
def kvtier(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """See and steer a disk-tiered KV cache."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `arguments` (default: those of the process); its exit code.

    Bad input of every kind, be it an option, a setting or a store that can't be used, is one line
    on stderr and `USAGE_ERROR`.  A command raises `StorageError` for it, before it changes
    anything, and `typer.Exit(code)` to end with a code of its own.
    """
    try:
        code = app(args=arguments, standalone_mode=False)
    except _BadUsage as exc:
        if message := exc.format_message():  # empty where help was printed instead
            _refuse(message)
    except typer.Abort:
        return 130  # as a shell reports an interrupt
    except BrokenPipeError:  # such as `kvtier du | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (StorageError, OSError) as exc:
        _refuse(str(exc))
    else:
        return code if isinstance(code, int) else 0
    return USAGE_ERROR


def _refuse(message: str) -> None:
    typer.echo(f"kvtier: {' '.join(message.split())}", err=True)


for command in (du, ls, inspect, verify, gc, export, watch, plan, metrics):
    app.command()(command)
app.command("import")(import_)


if __name__ == "__main__":
    sys.exit(main())
