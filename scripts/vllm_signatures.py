"""Record the signatures of vLLM that our adapter overrides or calls, from its sources.

vLLM is never imported: a version that cannot be installed here (its wheel wants CUDA) is
recorded from the unpacked wheel all the same. tests/integration/test_vllm_signatures.py holds
our classes against every record.

    pip download --no-deps --only-binary=:all: vllm==0.33.0 -d /tmp/wheel
    unzip -q /tmp/wheel/vllm-*.whl 'vllm/v1/*' 'vllm/distributed/*' -d /tmp/src
    python scripts/vllm_signatures.py /tmp/src/vllm 0.33.0
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

import typer

RECORDS = Path(__file__).resolve().parent.parent / "tests" / "vllm_signatures"

ParameterKind = Literal[
    "positional_only", "positional_or_keyword", "var_positional", "keyword_only", "var_keyword"
]
CallableKind = Literal[
    "function", "method", "classmethod", "staticmethod", "property", "cached_property"
]


class Parameter(TypedDict):
    """One argument; `self` and `cls` are left out."""

    name: str
    kind: ParameterKind
    default: bool


class Callable(TypedDict):
    """A function or a method as its `def` writes it; decorators that wrap are not followed."""

    kind: CallableKind
    abstract: bool
    parameters: list[Parameter]


class Field(TypedDict):
    """One field of a dataclass or of a NamedTuple."""

    name: str
    default: bool
    init: bool
    keyword_only: bool


class Class(TypedDict):
    """What one class body defines itself; what it inherits stands in the record of its base."""

    bases: list[str]
    complete: bool  # False: only the methods that we call are recorded
    methods: dict[str, Callable]
    fields: NotRequired[list[Field]]
    members: NotRequired[list[str]]


class Record(TypedDict):
    """One version of vLLM; the keys of both tables read `module:name`."""

    vllm: str
    classes: dict[str, Class]
    functions: dict[str, Callable]


CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOAD = "vllm.v1.kv_offload"

# What we subclass, build, or are handed. A name that a version lacks is an error, not a gap.
CLASSES: dict[str, tuple[str, ...]] = {
    f"{OFFLOAD}.base": (
        "OffloadingManager",
        "OffloadingSpec",
        "OffloadingWorker",
        "GPULoadStoreSpec",
        "BlockIDsLoadStoreSpec",
        "ReqContext",
        "RequestOffloadingContext",
        "ScheduleEndContext",
        "LookupResult",
        "OffloadPolicy",
        "PrepareStoreOutput",
        "OffloadingEvent",
        "OffloadingMetricMetadata",
        "OffloadingGaugeMetadata",
        "OffloadingHistogramMetadata",
        "CopyRun",
        "CanonicalPageMapping",
        "CanonicalKVCacheRef",
        "CanonicalKVCacheTensor",
        "CanonicalKVCaches",
        "TransferResult",
    ),
    f"{OFFLOAD}.config": (
        "OffloadingConfig",
        "OffloadingParallelConfig",
        "OffloadingCacheConfig",
        "OffloadingModelConfig",
        "OffloadingGroupConfig",
    ),
    f"{OFFLOAD}.factory": ("OffloadingSpecFactory",),
    f"{OFFLOAD}.cpu.gpu_worker": ("CPUOffloadingWorker",),
    f"{OFFLOAD}.cpu.shared_offload_region": ("SharedOffloadRegion",),
    f"{OFFLOAD}.cpu.spec": ("CPUOffloadingSpec",),
    f"{OFFLOAD}.tiering.base": ("SecondaryTierManager", "TransferJob", "JobResult"),
    f"{OFFLOAD}.tiering.factory": ("SecondaryTierFactory",),
    f"{OFFLOAD}.tiering.spec": ("TieringOffloadingSpec",),
    f"{CONNECTOR}.base": ("KVConnectorBase_V1", "KVConnectorHandshakeMetadata", "SupportsHMA"),
    f"{CONNECTOR}.offloading_connector": ("OffloadingConnector",),
    f"{CONNECTOR}.offloading.common": ("TransferJob",),
    f"{CONNECTOR}.offloading.metrics": ("OffloadPromMetrics", "OffloadingConnectorStats"),
    f"{CONNECTOR}.offloading.scheduler": (
        "OffloadingConnectorScheduler",
        "SchedulerOffloadConfig",
        "GroupOffloadConfig",
        "RequestGroupState",
    ),
    f"{CONNECTOR}.offloading.worker": ("OffloadingConnectorWorker",),
    "vllm.v1.kv_cache_interface": (
        "AttentionSpec",
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
        "KVCacheGroupSpec",
        "KVCacheConfig",
    ),
    "vllm.v1.kv_cache_layout": ("KVCacheLayout",),
}

# Of these classes we only call a few methods; the rest may change as it likes.
CALLED_ONLY: dict[str, frozenset[str]] = {
    "OffloadPromMetrics": frozenset({"__init__", "observe"}),
    "OffloadingConnectorScheduler": frozenset({"__init__", "_update_req_states"}),
    "SchedulerOffloadConfig": frozenset(),
    "GroupOffloadConfig": frozenset(),
    "RequestGroupState": frozenset(),
    "OffloadingConnectorWorker": frozenset({"__init__", "register_kv_caches"}),
    "CPUOffloadingSpec": frozenset({"__init__"}),
    "TieringOffloadingSpec": frozenset({"__init__", "get_manager"}),
    "AttentionSpec": frozenset({"page_size_bytes", "unpadded_page_size_bytes"}),
    "FullAttentionSpec": frozenset(),
    "SlidingWindowSpec": frozenset(),
    "UniformTypeKVCacheSpecs": frozenset(),
    "KVCacheGroupSpec": frozenset(),
    "KVCacheConfig": frozenset(),
    "KVCacheLayout": frozenset({"layer_view_order", "is_block_compact"}),
}

FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{OFFLOAD}.base": ("make_offload_key", "get_offload_block_hash", "get_offload_group_idx"),
    f"{CONNECTOR}.offloading.config": ("build_offloading_config", "get_offloading_group_ids"),
    f"{CONNECTOR}.offloading.canonical_mapping": ("derive_canonical_mappings",),
    "vllm.v1.kv_cache_interface": ("iter_layer_specs", "group_kernel_blocks"),
}

_DATACLASS_DECORATORS = frozenset({"dataclass"})
_ENUM_BASES = frozenset({"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"})
_WRAPPERS: dict[str, CallableKind] = {
    "classmethod": "classmethod",
    "staticmethod": "staticmethod",
    "property": "property",
    "cached_property": "cached_property",
}

# Python makes these class methods without a decorator.
_IMPLICIT_CLASSMETHODS = frozenset({"__init_subclass__", "__class_getitem__"})

Def = ast.FunctionDef | ast.AsyncFunctionDef


class Missing(Exception):
    """The sources lack a name that our adapter relies on."""


def _last_name(node: ast.expr) -> str:
    """`functools.cached_property(...)` -> `cached_property`; "" for anything unnamed."""
    if isinstance(node, ast.Call):
        return _last_name(node.func)
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _decorators(node: Def | ast.ClassDef) -> frozenset[str]:
    return frozenset(_last_name(decorator) for decorator in node.decorator_list)


def _parameters(arguments: ast.arguments) -> Iterator[Parameter]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required_count = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        yield Parameter(
            name=argument.arg,
            kind="positional_only"
            if index < len(arguments.posonlyargs)
            else "positional_or_keyword",
            default=index >= required_count,
        )
    if arguments.vararg is not None:
        yield Parameter(name=arguments.vararg.arg, kind="var_positional", default=False)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(name=argument.arg, kind="keyword_only", default=default is not None)
    if arguments.kwarg is not None:
        yield Parameter(name=arguments.kwarg.arg, kind="var_keyword", default=False)


def callable_of(node: Def, *, in_class: bool) -> Callable:
    decorators = _decorators(node)
    kind: CallableKind = "method" if in_class else "function"
    if in_class and node.name in _IMPLICIT_CLASSMETHODS:
        kind = "classmethod"
    for wrapper, wrapped_kind in _WRAPPERS.items():
        if wrapper in decorators:
            kind = wrapped_kind
    parameters = list(_parameters(node.args))
    if kind not in ("function", "staticmethod"):
        parameters = parameters[1:]
    return Callable(kind=kind, abstract="abstractmethod" in decorators, parameters=parameters)


def _keywords(node: ast.expr | None, of: str) -> dict[str, ast.expr]:
    """The keyword arguments of a call of `of`; none when `node` is something else."""
    if not isinstance(node, ast.Call) or _last_name(node) != of:
        return {}
    return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}


def _is_constant(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def _fields(node: ast.ClassDef) -> Iterator[Field]:
    all_keyword_only = any(
        _is_constant(_keywords(decorator, "dataclass").get("kw_only"), True)
        for decorator in node.decorator_list
    )
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if _last_name(statement.annotation) == "ClassVar":
            continue
        options = _keywords(statement.value, "field")
        is_field_call = isinstance(statement.value, ast.Call) and (
            _last_name(statement.value) == "field"
        )
        yield Field(
            name=statement.target.id,
            default=bool({"default", "default_factory"} & options.keys())
            if is_field_call
            else statement.value is not None,
            init=not _is_constant(options.get("init"), False),
            keyword_only=all_keyword_only or _is_constant(options.get("kw_only"), True),
        )


def class_of(node: ast.ClassDef) -> Class:
    bases = [_last_name(base) for base in node.bases]
    wanted = CALLED_ONLY.get(node.name)
    methods = {
        statement.name: callable_of(statement, in_class=True)
        for statement in node.body
        if isinstance(statement, Def) and (wanted is None or statement.name in wanted)
    }
    if wanted is not None and wanted - methods.keys():
        raise Missing(f"{node.name}: no method {sorted(wanted - methods.keys())}")
    found = Class(bases=bases, complete=wanted is None, methods=methods)
    if _decorators(node) & _DATACLASS_DECORATORS or "NamedTuple" in bases:
        found["fields"] = list(_fields(node))
    if _ENUM_BASES & set(bases):
        found["members"] = [
            target.id
            for statement in node.body
            if isinstance(statement, ast.Assign)
            for target in statement.targets
            if isinstance(target, ast.Name)
        ]
    return found


def _module_body(package: Path, module: str) -> list[ast.stmt]:
    path = package.joinpath(*module.split(".")[1:])
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return ast.parse(candidate.read_text(encoding="utf-8"), str(candidate)).body
    raise Missing(f"{module}: no such file under {package}")


def record_of(package: Path, version: str) -> Record:
    """Read the sources in `package`, the directory named `vllm`.

    Raises:
        Missing: a listed module, class, method or function is not there.
    """
    record = Record(vllm=version, classes={}, functions={})
    for module in sorted(CLASSES.keys() | FUNCTIONS.keys()):
        body = _module_body(package, module)
        classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
        functions = {node.name: node for node in body if isinstance(node, Def)}
        for name in CLASSES.get(module, ()):
            if name not in classes:
                raise Missing(f"{module}: no class {name}")
            record["classes"][f"{module}:{name}"] = class_of(classes[name])
        for name in FUNCTIONS.get(module, ()):
            if name not in functions:
                raise Missing(f"{module}: no function {name}")
            record["functions"][f"{module}:{name}"] = callable_of(functions[name], in_class=False)
    return record


def main(
    sources: Annotated[
        Path,
        typer.Argument(
            exists=True, file_okay=False, help="The directory named vllm, or its parent."
        ),
    ],
    version: Annotated[str, typer.Argument(help="The release these sources are, such as 0.33.0.")],
    out_dir: Annotated[Path, typer.Option(help="Where <version>.json goes.")] = RECORDS,
) -> None:
    """Write <version>.json for the sources of one vLLM release."""
    package = sources / "vllm" if (sources / "vllm").is_dir() else sources
    try:
        record = record_of(package, version)
    except Missing as missing:
        typer.echo(f"vllm {version}: {missing}", err=True)
        raise typer.Exit(code=1) from missing
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"{version}.json"
    path.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    typer.echo(f"{path}: {len(record['classes'])} classes, {len(record['functions'])} functions")


if __name__ == "__main__":
    typer.run(main)
