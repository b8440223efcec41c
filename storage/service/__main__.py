"""`python -m storage.service --fd N`: the private store process of the engine behind N."""

from __future__ import annotations

import logging
import resource
import signal
import socket
from typing import Annotated

import typer

from storage.service.server import serve

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    fd: Annotated[int, typer.Option(help="Descriptor of a connected Unix stream socket.")],
) -> None:
    """Serve one engine and end with it."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s kvtier-store[%(process)d] %(message)s"
    )
    # The engine decides when its store ends: by closing the socket, or by dying.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A segment is an open file, and a large budget has more of them than the usual soft limit.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    serve(socket.socket(fileno=fd))


if __name__ == "__main__":
    app()
