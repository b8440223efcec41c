"""`vllm.general_plugins` entry point: runs first in every process of an engine."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from storage.errors import ConfigError
from tiering.config import Config

log = logging.getLogger("kvtier.vllm")

_FLAG = "--kv-transfer-config"


def register() -> None:
    """Refuse bad settings, make our log lines look like vLLM's, and name our connector, so that no
    module path is needed."""
    try:
        check_command_line(sys.argv)
    except ConfigError as exc:
        # Before anything has started: one line and no traceback.  The connector checks again.
        sys.exit(f"kvtier: {exc}")
    configure_logging()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvtierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KvtierConnector", "tiering.vllm.connector", "KvtierConnector"
        )


def check_command_line(arguments: Sequence[str]) -> None:
    """Check kvtier's settings in a `vllm` command line, if they are there as one JSON value.

    Raises `ConfigError`.  What is not for kvtier, or not JSON, is left to vLLM.
    """
    for position, argument in enumerate(arguments):
        flag, is_joined, value = argument.partition("=")
        if flag.replace("_", "-") != _FLAG:
            continue
        if not is_joined:
            value = arguments[position + 1] if position + 1 < len(arguments) else ""
        try:
            config: Any = json.loads(value)
        except ValueError:
            continue
        if isinstance(config, dict) and config.get("kv_connector") == "KvtierConnector":
            Config.parse(config.get("kv_connector_extra_config") or {})


def configure_logging() -> None:
    """Send `kvtier` loggers where vLLM's go, unless somebody configured them."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
