"""`vllm.general_plugins` entry point: runs first in every process of an engine."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from storage.errors import ConfigError
from tiering.config import DISK_TIER, Config, refuse_shared_root
from tiering.tier_config import check_tiers

log = logging.getLogger("kvtier.vllm")

_EXTRA = "kv_connector_extra_config"
_TRANSFER = "--kv-transfer-config"

# With one of these, some engines of `--data-parallel-size` may be elsewhere.
_SEVERAL_NODES = (
    *("--data-parallel-rank", "-dpn", "--data-parallel-external-lb", "-dpe", "--nnodes"),
    *("--data-parallel-multi-port-external-lb", "-dpm", "--data-parallel-hybrid-lb", "-dph"),
    *("--data-parallel-backend", "-dpb"),
)


def register() -> None:
    """Refuse bad settings, make our log lines look like vLLM's, and name our connector and our
    tier, so that no module path is needed."""
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
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if DISK_TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(DISK_TIER, "tiering.vllm.tier", "DiskTierManager")


def check_command_line(arguments: Sequence[str]) -> None:
    """Check kvtier's settings in a `vllm` command line: as one JSON value, as dotted flags, or in
    the file of `--config`.

    Raises `ConfigError`.  What is not for kvtier, or can't be read, is left to vLLM.
    """
    for config in _transfer_configs(arguments):
        raw = config.get("kv_connector_extra_config") or {}
        if not isinstance(raw, dict):
            continue
        if config.get("kv_connector") == "KvtierConnector":
            Config.parse(raw)
            refuse_shared_root(raw, _engines_of_this_node(arguments))
        elif isinstance(raw.get("secondary_tiers"), list):
            engines = _engines_of_this_node(arguments)
            check_tiers(raw["secondary_tiers"], f"{_EXTRA}.secondary_tiers", engines=engines)


def _transfer_configs(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    values: list[Any] = list(_values(arguments, _TRANSFER))
    for path in map(Path, _values(arguments, "--config")):
        if path.suffix not in (".yaml", ".yml"):  # vLLM takes no other
            continue
        with contextlib.suppress(OSError, ValueError, ImportError):  # vLLM will say
            whole = msgspec.yaml.decode(path.read_bytes(), type=dict[str, Any])
            values += [value for key, value in whole.items() if _dashed(f"--{key}") == _TRANSFER]
    values.append(_dotted(arguments))
    for value in values:
        config = value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                config = json.loads(value)
        if isinstance(config, dict):
            yield config


def _dotted(arguments: Sequence[str]) -> dict[str, Any]:
    """What flags such as `--kv-transfer-config.kv_connector_extra_config.disk.root PATH` add up to;
    of two for the same the last counts."""
    found: dict[str, Any] = {}
    for position, argument in enumerate(arguments):
        flag, is_joined, value = argument.partition("=")
        first, *keys = flag.split(".")
        if not keys or _dashed(first) != _TRANSFER:
            continue
        if not is_joined:
            value = arguments[position + 1] if position + 1 < len(arguments) else ""
        inside = found
        for key in keys[:-1]:
            inside = inside.setdefault(key, {})
            if not isinstance(inside, dict):
                return {}  # one flag for the whole, another for a part: vLLM's affair
        inside[keys[-1].removesuffix("+")] = (
            value.split(",") if keys[-1].endswith("+") else _dotted_value(value)
        )
    return found


def _dotted_value(text: str) -> Any:
    """As vLLM reads it: JSON, else a number with a unit, of 1000 if it is small, else text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT])", text):
        number, unit = match.groups()
        base = 1000 if unit.islower() else 1024
        return int(float(number) * base ** ("kmgt".index(unit.lower()) + 1))
    return text


def _engines_of_this_node(arguments: Sequence[str]) -> int:
    """As many data-parallel engines as the command line surely starts here."""
    local = _values(arguments, "--data-parallel-size-local", "-dpl")
    if not local and not _values(arguments, *_SEVERAL_NODES):
        local = _values(arguments, "--data-parallel-size", "-dp")
    return max((int(value) for value in local if value.isdecimal()), default=1) or 1


def _values(arguments: Sequence[str], *flags: str) -> list[str]:
    """What follows each of `flags`, in the same argument or in the next."""
    found = []
    for position, argument in enumerate(arguments):
        flag, is_joined, value = argument.partition("=")
        if _dashed(flag) in flags:
            if not is_joined:
                value = arguments[position + 1] if position + 1 < len(arguments) else ""
            found.append(value)
    return found


def _dashed(flag: str) -> str:
    """As vLLM reads a flag: `--kv_role` is `--kv-role`."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def configure_logging() -> None:
    """Send `kvtier` loggers where vLLM's go, unless somebody configured them."""
    ours, theirs = logging.getLogger("kvtier"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False
