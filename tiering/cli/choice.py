"""Names as people type them: a part of a namespace's or its model's name, digits of a key."""

from __future__ import annotations

from storage.errors import ConfigError
from storage.survey import NamespaceSurvey, RootSurvey, SegmentSurvey, places_of
from storage.types import SlotId

_SHOWN = 4  # of the names or keys that one could mean


def choose_namespace(survey: RootSurvey, name: str) -> NamespaceSurvey:
    """The one namespace whose name is `name`, or that or whose model's name holds it.  Raises
    `ConfigError`."""
    names = {one.name: one for one in survey.namespaces}
    if name in names:
        return names[name]
    part = name.lower()
    found = [n for n in survey.namespaces if part in n.name.lower() or part in n.model.lower()]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ConfigError("namespace", _one_of(sorted(names) or ["none is there"]), name)
    raise ConfigError("namespace", f"{_one_of([f.name for f in found])}, which all match", name)


def choose_row(survey: RootSurvey, key: str) -> list[tuple[NamespaceSurvey, SegmentSurvey, SlotId]]:
    """Where the one key of a root stands that begins with the hexadecimal digits `key`: in one
    namespace, or in several.  Raises `ConfigError` if there is none, or more than one such key.
    """
    digits = key.lower().removeprefix("0x")
    try:
        # Of an odd number of digits the last, half a byte, is compared afterwards.
        prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])
        int(digits, 16)
    except ValueError:
        raise ConfigError("key", "hexadecimal digits", key) from None
    found = [
        (namespace, segment, slot)
        for namespace in survey.namespaces
        for segment, slot in places_of(namespace, prefix)
        if segment.key(slot).hex().startswith(digits)
    ]
    keys = sorted({segment.key(slot).hex() for _, segment, slot in found})
    if not keys:
        raise ConfigError("key", "one that a row has", key)
    if len(keys) > 1:
        raise ConfigError("key", f"more digits; {_one_of(keys)} match", key)
    return found


def _one_of(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
