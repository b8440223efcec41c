"""What a person wants to know of a namespace's rows, and the store itself does not."""

from __future__ import annotations

from typing import Any

import msgspec


class RowFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Told by who opens a namespace, kept in its metadata for reports; not part of its identity.

    0 and empty mean unknown.
    """

    tokens_per_row: tuple[int, ...] = ()
    """Of a chunk, per KV-cache group: row keys end in the group's number, 4 bytes, big-endian."""
    ranks: int = 0
    """TP (or pipeline) ranks of the engine that opened the namespace last."""
    replicas: int = 0
    """Consecutive ranks that hold identical KV for every layer."""
    row_bytes_without_dedup: int = 0
    """What a row would weigh with every rank's pages in it."""
    model_name: str = ""
    """What people call the model, where the identity only says what kind it is."""
    groups: tuple[int, ...] = ()
    """The KV-cache groups whose rows stand here, where others of the engine are of another size
    and stand in a namespace of their own."""
    largest_row_bytes: int = 0
    """Then, of the engine's largest row: what each of them would weigh if all were as large."""


def facts_of(attributes: dict[str, Any]) -> RowFacts | None:
    """The facts in the `kvtier` attributes of a namespace; None without, or if they are damaged."""
    try:
        return msgspec.convert(attributes[FACTS], RowFacts)
    except (KeyError, msgspec.ValidationError):
        return None


FACTS = "rows"  # among a namespace's attributes
