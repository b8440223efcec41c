"""`vllm.general_plugins` entry point: runs first in every process of an engine."""

from __future__ import annotations

import logging

log = logging.getLogger("kvtier.vllm")


def register() -> None:
    """Make our log lines look like vLLM's; name our connector, so that no module path is needed."""
    configure_logging()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvtierConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KvtierConnector", "tiering.vllm.connector", "KvtierConnector"
        )


def configure_logging() -> None:
    """Send `kvtier` loggers where vLLM's go, unless somebody configured them."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
