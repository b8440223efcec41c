"""Where commands print to, and what they have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from storage.errors import ConfigError


def console() -> Console:
    """Of stdout, as wide as the terminal, or 80 columns."""
    return Console(highlight=False, soft_wrap=False)


def print_json(value: object) -> None:
    """Dataclasses, structs and containers of them, as JSON on stdout."""
    encoded = msgspec.json.encode(value, enc_hook=_encode)
    typer.echo(msgspec.json.format(encoded, indent=2).decode())


def _encode(value: Any) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def print_warnings(out: Console, warnings: Iterable[str]) -> None:
    """One line each, however long: a path must be whole to be copied."""
    for warning in warnings:
        text = Text.assemble(("! ", "bold yellow"), (warning, "yellow"))
        out.print(text, soft_wrap=True)


@contextlib.contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if somebody looks; what it gives is told how much of `total` was done."""
    err = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=total or None)
        yield lambda count: progress.advance(task, count)


def short_name(namespace: str, width: int, model: str = "") -> str:
    """A namespace's name in `width` columns: the model, as people call it where that is known, and
    enough of the fingerprint to know it by where its end must go."""
    kind, fingerprint = namespace[:-33], namespace[-32:]
    if not kind:  # no namespace, but the sum of all
        return namespace
    model = model or kind
    if len(model) + 1 + len(fingerprint) <= width:
        return f"{model}-{fingerprint}"
    fingerprint = fingerprint[:6]
    room = width - len(fingerprint) - 1
    if len(model) > room:
        model = model[: room - 1] + "…"
    return f"{model}-{fingerprint}"


_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_span(value: str, field: str) -> float:
    """Seconds of "30d", "12h", "45m", "10s" or "2w".  Raises `ConfigError` naming `field`."""
    number, unit = value[:-1], value[-1:]
    try:
        seconds = float(number) * _SPANS[unit]
    except (KeyError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(field, 'an age such as "30d", "12h" or "45m"', value)
    return seconds
