"""Our adapter against the recorded signatures of every vLLM release it supports.

The records are written by scripts/vllm_signatures.py. The installed vLLM is compared with its own
record, so a record cannot drift from the code; our overrides are compared with all records, so an
argument that only the next release passes is seen before that release can be installed here.
"""

import ast
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

vllm = pytest.importorskip("vllm", reason="the vllm extra is not installed")

# torch warns of its own torch.jit while vLLM is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

Json = dict[str, Any]

RECORDS = Path(__file__).resolve().parent.parent / "vllm_signatures"
VERSIONS = tuple(sorted(path.stem for path in RECORDS.glob("*.json")))

# vLLM itself calls these constructors; it never calls those of managers and workers.
BUILT_BY_VLLM = frozenset({"OffloadingConnector", "OffloadingSpec", "SecondaryTierManager"})

OUR_CLASSES = (
    ("tiering.vllm.connector", "KvtierConnector"),
    ("tiering.vllm.spec", "KvtierSpec"),
    ("tiering.vllm.manager", "VllmManager"),
    ("tiering.vllm.selective", "SelectiveManager"),
    ("tiering.vllm.tier", "DiskTierManager"),
)
OUR_WORKERS = "tiering.vllm.worker"

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional_only",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional_or_keyword",
    inspect.Parameter.VAR_POSITIONAL: "var_positional",
    inspect.Parameter.KEYWORD_ONLY: "keyword_only",
    inspect.Parameter.VAR_KEYWORD: "var_keyword",
}
_POSITIONAL = frozenset({"positional_only", "positional_or_keyword"})
_BY_NAME = frozenset({"positional_or_keyword", "keyword_only"})
# To a caller a property and a cached property are one thing: an attribute it reads.
_ATTRIBUTES = frozenset({"property", "cached_property"})


@functools.cache
def record(version: str) -> Json:
    return cast(Json, json.loads((RECORDS / f"{version}.json").read_text(encoding="utf-8")))


def live(key: str) -> Any:
    """The object that a record's `module:name` stands for in the installed vLLM."""
    module, name = key.split(":")
    return getattr(importlib.import_module(module), name)


def kind_of(attribute: object) -> str:
    for wrapper, kind in (
        (classmethod, "classmethod"),
        (staticmethod, "staticmethod"),
        (property, "property"),
        (functools.cached_property, "cached_property"),
    ):
        if isinstance(attribute, wrapper):
            return kind
    return "method" if inspect.isfunction(attribute) else "value"


def function_of(attribute: Any) -> Callable[..., object]:
    if isinstance(attribute, classmethod | staticmethod):
        return attribute.__func__
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    if isinstance(attribute, property):
        assert attribute.fget is not None
        return attribute.fget
    return cast(Callable[..., object], attribute)


def parameters_of(function: Callable[..., object], *, bound: bool) -> list[Json]:
    """The arguments as a record writes them; `bound` leaves out `self` or `cls`."""
    parameters = list(inspect.signature(function).parameters.values())
    return [
        {
            "name": parameter.name,
            "kind": _KINDS[parameter.kind],
            "default": parameter.default is not inspect.Parameter.empty,
        }
        for parameter in parameters[bound:]
    ]


def described(attribute: object) -> Json:
    """A class attribute as a record writes it."""
    kind = kind_of(attribute)
    if kind == "value":
        return {"kind": kind, "abstract": False, "parameters": []}
    function = function_of(attribute)
    return {
        "kind": kind,
        "abstract": getattr(attribute, "__isabstractmethod__", False),
        "parameters": parameters_of(function, bound=kind != "staticmethod"),
    }


# The installed vLLM against its own record


def installed_version() -> str:
    """0.32.0+cpu -> 0.32.0."""
    version: str = vllm.__version__.split("+")[0]
    if version not in VERSIONS:
        pytest.fail(f"vllm {version} has no record: scripts/vllm_signatures.py SOURCES {version}")
    return version


def live_fields(cls: Any) -> list[Json]:
    if issubclass(cls, tuple):
        return [
            {
                "name": name,
                "default": name in cls._field_defaults,
                "init": True,
                "keyword_only": False,
            }
            for name in cls._fields
        ]
    own = inspect.get_annotations(cast(type, cls))
    return [
        {
            "name": field.name,
            "default": field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING,
            "init": field.init,
            "keyword_only": field.kw_only,
        }
        for field in dataclasses.fields(cls)
        if field.name in own
    ]


@pytest.mark.parametrize("key", sorted(record("0.32.0")["classes"]))
def test_the_installed_class_is_the_recorded_one(key: str) -> None:
    recorded = record(installed_version())["classes"][key]
    cls = live(key)

    found = {name: described(vars(cls)[name]) for name in recorded["methods"] if name in vars(cls)}
    assert found == recorded["methods"]
    if recorded["complete"]:
        defined = {name for name in vars(cls) if kind_of(vars(cls)[name]) != "value"}
        assert {name for name in defined if not name.startswith("_")} <= found.keys()
    if "fields" in recorded:
        assert live_fields(cls) == recorded["fields"]
    if "members" in recorded:
        assert issubclass(cls, enum.Enum)
        assert list(cls.__members__) == recorded["members"]


@pytest.mark.parametrize("key", sorted(record("0.32.0")["functions"]))
def test_the_installed_function_is_the_recorded_one(key: str) -> None:
    recorded = record(installed_version())["functions"][key]
    assert parameters_of(live(key), bound=False) == recorded["parameters"]


# Our overrides against every record


def refused_calls(ours: Json, theirs: Json) -> Iterator[str]:
    """The calls that the signature `theirs` allows and `ours` does not take."""
    if ours["kind"] != theirs["kind"] and not {ours["kind"], theirs["kind"]} <= _ATTRIBUTES:
        yield f"is a {ours['kind']}, not a {theirs['kind']}"
        return
    mine: list[Json] = ours["parameters"]
    by_name = {parameter["name"]: parameter for parameter in mine}
    positional = [parameter for parameter in mine if parameter["kind"] in _POSITIONAL]
    takes_any_position = any(parameter["kind"] == "var_positional" for parameter in mine)
    takes_any_name = any(parameter["kind"] == "var_keyword" for parameter in mine)

    for index, expected in enumerate(theirs["parameters"]):
        name, kind = expected["name"], expected["kind"]
        own = by_name.get(name)
        if kind == "var_positional" and not takes_any_position:
            yield f"takes no *{name}"
        elif kind == "var_keyword" and not takes_any_name:
            yield f"takes no **{name}"
        if kind in _POSITIONAL:
            if index >= len(positional):
                if not takes_any_position:
                    yield f"takes no position {index} ({name})"
            elif kind == "positional_or_keyword" and positional[index]["name"] != name:
                yield f"names position {index} {positional[index]['name']}, not {name}"
            elif expected["default"] and not positional[index]["default"]:
                yield f"requires {name}, which the caller may leave out"
        if kind in _BY_NAME:
            if own is None or own["kind"] not in _BY_NAME:
                if not takes_any_name:
                    yield f"takes no {name}="
            elif kind == "keyword_only" and expected["default"] and not own["default"]:
                yield f"requires {name}, which the caller may leave out"

    known = {parameter["name"] for parameter in theirs["parameters"]}
    position_count = sum(parameter["kind"] in _POSITIONAL for parameter in theirs["parameters"])
    for index, parameter in enumerate(positional):
        if index >= position_count and parameter["name"] not in known and not parameter["default"]:
            yield f"requires {parameter['name']}, which no caller passes"
    for parameter in mine:
        is_new = parameter["kind"] == "keyword_only" and parameter["name"] not in known
        if is_new and not parameter["default"]:
            yield f"requires {parameter['name']}=, which no caller passes"


def recorded_bases(cls: type, version: str) -> list[tuple[str, Json]]:
    """The recorded vLLM classes that `cls` inherits from, nearest first."""
    classes = record(version)["classes"]
    keys = (f"{base.__module__}:{base.__qualname__}" for base in cls.__mro__)
    return [(key.split(":")[1], classes[key]) for key in keys if key in classes]


def is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("tiering", "storage") or cls.__module__ == __name__


def resolved(cls: type, name: str) -> object | None:
    """What `cls.name` is, without binding it."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def assigned_on_self(cls: type) -> set[str]:
    """The names x of every `self.x = ...` in the body of `cls`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def broken_promises(cls: type, version: str) -> Iterator[str]:
    """Why `cls` would not serve as what it subclasses, in one release of vLLM."""
    ours = [base for base in cls.__mro__ if is_ours(base)]
    overridden = {name for base in ours for name in vars(base)}
    assigned = {name for base in ours for name in assigned_on_self(base)}
    nearest: dict[str, tuple[str, Json]] = {}
    for base_name, base in recorded_bases(cls, version):
        for name, method in base["methods"].items():
            nearest.setdefault(name, (base_name, method))

    for name, (base_name, method) in sorted(nearest.items()):
        where = f"vllm {version}: {cls.__name__}.{name} ({base_name})"
        if name == "__init__" and base_name not in BUILT_BY_VLLM:
            continue
        attribute = resolved(cls, name)
        if method["abstract"] and (
            attribute is None or getattr(attribute, "__isabstractmethod__", False)
        ):
            yield f"{where} is abstract and missing"
        if name in overridden:
            for refusal in refused_calls(described(attribute), method):
                yield f"{where} {refusal}"
        # A property of the base has no setter: the assignment would raise at run time.
        if method["kind"] == "property" and name in assigned and name not in overridden:
            yield f"{where} is a property there, and is assigned to here"


def subclasses(cls: type) -> Iterator[type]:
    children: list[type] = cls.__subclasses__()
    for child in children:
        yield child
        yield from subclasses(child)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("module", "name"), OUR_CLASSES)
def test_our_class_takes_every_call(module: str, name: str, version: str) -> None:
    cls = getattr(importlib.import_module(module), name)
    assert recorded_bases(cls, version), f"{name} subclasses no recorded class of vllm {version}"
    assert list(broken_promises(cls, version)) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_our_workers_take_every_call(version: str) -> None:
    importlib.import_module(OUR_WORKERS)
    from vllm.v1.kv_offload.base import OffloadingWorker

    workers = [cls for cls in subclasses(OffloadingWorker) if cls.__module__.startswith("tiering.")]
    assert workers, f"{OUR_WORKERS} defines no OffloadingWorker"
    assert [broken for cls in workers for broken in broken_promises(cls, version)] == []


# The check itself: it must be able to fail


def signature(function: Callable[..., object]) -> Json:
    return described(function)


def refusals(ours: Callable[..., object], theirs: Callable[..., object]) -> list[str]:
    return list(refused_calls(signature(ours), signature(theirs)))


def _load(self: object, job_id: int, src: int, expedited: bool = False) -> None: ...
def _load_renamed(self: object, job: int, src: int, expedited: bool = False) -> None: ...
def _load_of_0_32(self: object, job_id: int, src: int) -> None: ...
def _load_required(self: object, job_id: int, src: int, expedited: bool) -> None: ...
def _load_swapped(self: object, src: int, job_id: int, expedited: bool = False) -> None: ...
def _load_extra(
    self: object, job_id: int, src: int, expedited: bool = False, *, deadline: int
) -> None: ...
def _load_more(
    self: object, job_id: int, src: int, expedited: bool = False, more: int = 0
) -> None: ...
def _load_any(self: object, *args: object, **kwargs: object) -> None: ...


@pytest.mark.parametrize("ours", [_load, _load_more, _load_any])
def test_a_signature_that_takes_every_call_passes(ours: Callable[..., object]) -> None:
    assert refusals(ours, _load) == []


@pytest.mark.parametrize(
    ("ours", "refusal"),
    [
        (_load_renamed, "names position 0 job, not job_id"),
        (_load_of_0_32, "takes no expedited="),
        (_load_required, "requires expedited, which the caller may leave out"),
        (_load_swapped, "names position 0 src, not job_id"),
        (_load_extra, "requires deadline=, which no caller passes"),
    ],
)
def test_a_signature_that_refuses_a_call_is_named(
    ours: Callable[..., object], refusal: str
) -> None:
    assert refusal in refusals(ours, _load)


def test_a_worker_of_0_32_is_refused_by_0_33() -> None:
    from vllm.v1.kv_offload.base import (
        GPULoadStoreSpec,
        LoadStoreSpec,
        OffloadingWorker,
        TransferResult,
    )

    class Stale(OffloadingWorker):  # type: ignore[misc]
        def submit_store(
            self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
        ) -> bool:
            raise NotImplementedError

        def submit_load(
            self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec
        ) -> bool:
            raise NotImplementedError

        def get_finished(self) -> list[TransferResult]:
            raise NotImplementedError

    assert list(broken_promises(Stale, "0.32.0")) == [
        "vllm 0.32.0: Stale.wait (OffloadingWorker) is abstract and missing"
    ]
    assert [broken for broken in broken_promises(Stale, "0.33.0") if "submit_load" in broken] == [
        "vllm 0.33.0: Stale.submit_load (OffloadingWorker) takes no position 3 (expedited)",
        "vllm 0.33.0: Stale.submit_load (OffloadingWorker) takes no expedited=",
    ]


def test_assigning_to_what_becomes_a_property_is_refused() -> None:
    from vllm.v1.kv_offload.base import OffloadingManager

    class Locked(OffloadingManager):  # type: ignore[misc]
        def __init__(self) -> None:
            self.lock = object()

    assert not any("lock" in broken for broken in broken_promises(Locked, "0.32.0"))
    assert (
        "vllm 0.33.0: Locked.lock (OffloadingManager) is a property there, and is assigned to here"
        in list(broken_promises(Locked, "0.33.0"))
    )
