"""`kvtier metrics`: a store's own figures for Prometheus, where no vLLM exports them."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Annotated

import typer
from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from storage.device import LocalDevice
from storage.errors import ConfigError, DeviceError, RootUnusable
from storage.namespace import METADATA, read_metadata
from tiering.exporter import StatusCollector

DEFAULT_PORT = 9497


def metrics(
    roots: Annotated[list[Path], typer.Argument(help="Directories of stores.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="To serve at.")] = DEFAULT_PORT,
    address: Annotated[str, typer.Option(help="To listen at.")] = "127.0.0.1",
    once: Annotated[
        bool, typer.Option("--once", help="Print the metrics and exit, for a textfile collector.")
    ] = False,
) -> None:
    """A store's own figures for Prometheus, where no vLLM exports them."""
    registry = registry_of(roots)
    if once:
        typer.echo(generate_latest(registry).decode(), nl=False)
        return
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as exc:
        raise ConfigError("--port", f"one that is free ({exc.strerror})", port) from exc
    typer.echo(f"http://{address}:{server.server_port}/metrics", err=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()
        thread.join()


def registry_of(roots: list[Path]) -> CollectorRegistry:
    """Collects from `roots` when asked.  Raises `StorageError` for one that is no store."""
    device = LocalDevice()
    for root in roots:
        path = root / METADATA
        try:
            read_metadata(device.read_file(path), str(path))
        except DeviceError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR):
                raise RootUnusable(f"{root}: not a kvtier store") from exc
            raise
    registry = CollectorRegistry()
    registry.register(StatusCollector([root.absolute() for root in roots]))
    return registry
