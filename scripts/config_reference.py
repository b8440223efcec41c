"""Writes docs/configuration.md from the settings' own types and docstrings.

python -m scripts.config_reference
python -m scripts.config_reference --check      # exit code 1 if the file is not up to date
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from scripts.generated import bring_up_to_date
from tiering.config import DiskSettings, SecondaryTierSettings, Settings

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "configuration.md"

_HEAD = """\
# Configuration

<!-- Written by `python -m scripts.config_reference`: edit the docstrings of tiering/config.py. -->

kvtier is configured where vLLM takes its connector: in `--kv-transfer-config`, under
`kv_connector_extra_config`. A complete one, `configs/deployments/single-node.json`:

```json
{example}
```

Sizes are bytes, or text with a unit: `"500GB"` and `"500G"` are 500 x 10^9 bytes, `"500GiB"` is
500 x 2^30. As dotted flags (`--kv-transfer-config.kv_connector_extra_config.disk.root PATH`) or in
the file of `--config` they mean the same, but that vLLM itself reads a dotted `500G` as 500 x 2^30.
A setting that is unknown, of another type or that can't work is one line at start,
which names it and what was expected, before anything is changed.
"""


_TIERS = """\
A list in the order in which tiers are asked. Each is a store with a root, a budget and a process of
its own, and is given every chunk; a prompt's chunks come from the first tier that has them, and
those of a later tier are given to the earlier ones once they were used. A tier that fails or stands
still costs its rows and nothing else. Drives that are alike are better one tier with several
`roots`: that holds each row once.

```json
{"kv_connector": "KvtierConnector", "kv_role": "kv_both",
 "kv_connector_module_path": "tiering.vllm.connector",
 "kv_connector_extra_config": {"cpu_bytes_to_use": "64GiB", "secondary_tiers": [
   {"type": "disk", "name": "nvme", "root": "/mnt/nvme/kvtier", "budget": "1TB"},
   {"type": "disk", "name": "hdd", "root": "/mnt/hdd/kvtier", "budget": "20TB"}]}}
```

Each has all settings of `disk`, and these.
"""


def reference() -> str:
    """The text of docs/configuration.md."""
    example = (ROOT / "configs" / "deployments" / "single-node.json").read_text().rstrip()
    parts = [
        _HEAD.replace("{example}", example),
        "## `kv_connector_extra_config`\n",
        *_settings(Settings, ""),
        "## `disk`\n",
        (inspect.getdoc(DiskSettings) or "").split(": ", 1)[1].capitalize() + "\n",
        *_settings(DiskSettings, "disk."),
        "## `secondary_tiers`\n",
        _TIERS,
        *_settings(SecondaryTierSettings, "secondary_tiers[]."),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _settings(kind: type[msgspec.Struct], prefix: str) -> list[str]:
    """A heading, the type with the default, and the docstring of each setting."""
    texts = _docstrings(kind)
    lines = []
    for field in msgspec.structs.fields(kind):
        if field.name not in texts:  # it is another's
            continue
        kinds, text = texts[field.name]
        lines += [
            f"### `{prefix}{field.encode_name}`\n",
            f"{_type_in_words(field.name, kinds)}; {_default_in_words(field)}.\n",
            textwrap.fill(" ".join(text.split()), 100, break_on_hyphens=False) + "\n",
        ]
    return lines


def _docstrings(kind: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """name -> (annotation, the string below it, which fields may share that follow each other)."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, tuple[str, str]] = {}
    waiting: dict[str, str] = {}
    for statement in body.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                waiting[name] = ast.unparse(annotation)
            case ast.Expr(value=ast.Constant(value=str(text))):
                found |= {name: (kinds, text) for name, kinds in waiting.items()}
                waiting = {}
    assert not waiting, f"{kind.__name__}.{next(iter(waiting))} has no docstring"
    return found


_TYPES = {
    "str | int": "Size",
    "str": "Text",
    "int": "Whole number",
    "bool": "`true` or `false`",
    "DiskSettings": "Object",
    "list[RootSettings]": "List of objects",
    "list[SecondaryTierSettings]": "List of objects",
}


def _type_in_words(name: str, annotation: str) -> str:
    plain = annotation.removesuffix(" | None")
    if plain == "float":
        return "Seconds" if name.endswith("_s") else "Number"
    return _TYPES[plain]


def _default_in_words(field: Any) -> str:
    if field.required:
        return "required"
    if field.default is None:
        return "not set by default"
    return f"default `{msgspec.json.encode(field.default).decode()}`"


def main(
    check: Annotated[bool, typer.Option("--check", help="Compare, and write nothing.")] = False,
) -> None:
    """Write docs/configuration.md."""
    bring_up_to_date(REFERENCE, reference(), "scripts.config_reference", check=check)


if __name__ == "__main__":
    typer.run(main)
