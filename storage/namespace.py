"""Namespaces: the chunks that may share bytes, as Zarr groups named after one fingerprint.

Pure functions from an identity to names and to Zarr v3 metadata, and back.  Files are the store's.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from storage.codec import NO_CODEC, Codec
from storage.errors import ConfigError, CorruptRecord, LayoutMismatch
from storage.facts import FACTS, RowFacts, facts_of
from storage.header import MAX_SLOTS, SegmentGeometry
from storage.types import PAGE_BYTES

FORMAT_VERSION = 1  # of the files under a root; raised whenever an older reader would misread them
ROWS = "rows"  # name of a namespace's array
METADATA = "zarr.json"

NONCE = "nonce"  # in the identity of a namespace that outlives nobody

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """What shapes the bytes of a row or their meaning.

    `model` is for people and the directory's name; `fields` holds everything else, as JSON values
    that do not depend on dict order, hash seed or process.  Any difference, an added field
    included, is another namespace.

    `element_bytes` is the size of the KV's numbers, for the shuffles of codecs.  `codec` names the
    one that rows are stored with: rows of another codec are another array, so both are part of the
    identity, but for "none", which leaves no trace.
    """

    model: str
    fields: dict[str, Json]
    element_bytes: int = 1
    codec: str = NO_CODEC

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise ConfigError("model", "a name that is not empty", self.model)
        Codec.of(self.codec, self.element_bytes)

    def unrepeatable(self, nonce: str) -> Identity:
        """The same rows, in a namespace that is found again only by who knows `nonce`; to others it
        is worth nothing, and gives way before all others."""
        return replace(self, fields={**self.fields, NONCE: nonce})

    @property
    def row_codec(self) -> Codec | None:
        return Codec.of(self.codec, self.element_bytes)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all of it."""
        plain = {"format": FORMAT_VERSION, "model": self.model, "fields": self.fields}
        if self.row_codec is not None:
            plain["codec"] = self.row_codec.zarr_metadata
        encoded = msgspec.json.encode(plain, order="deterministic")
        return hashlib.sha256(encoded).hexdigest()[:32]

    @property
    def namespace(self) -> bytes:
        """The fingerprint as the 16 bytes that every key table of the namespace carries."""
        return bytes.fromhex(self.fingerprint)

    @property
    def directory(self) -> str:
        """`<model>-<fingerprint>`: safe as a file name whatever the model is called."""
        readable = re.sub(r"[^A-Za-z0-9._]+", "-", self.model).strip("-.")[-60:].lstrip("-.")
        return f"{readable or 'model'}-{self.fingerprint}"


class WantedRows(NamedTuple):
    """A namespace to open; `facts` replace those that it has."""

    identity: Identity
    row_bytes: int
    facts: RowFacts | None = None


_NAMESPACE_DIRECTORY = re.compile(r".+-[0-9a-f]{32}")


def is_namespace_directory(name: str) -> bool:
    """Whether a name under the root is one that `Identity.directory` makes."""
    return _NAMESPACE_DIRECTORY.fullmatch(name) is not None


def _encode(metadata: dict[str, Json]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2)


def root_metadata(owner: dict[str, Json]) -> bytes:
    """`zarr.json` of the root group.  `owner` says who has the store open, for error messages."""
    attributes: dict[str, Json] = {"format_version": FORMAT_VERSION, "owner": owner}
    return group_metadata({"kvtier": attributes})


def namespace_metadata(identity: Identity, facts: RowFacts | None = None) -> bytes:
    """`zarr.json` of a namespace's group; `facts` are for reports."""
    attributes: dict[str, Json] = {
        "format_version": FORMAT_VERSION,
        "model": identity.model,
        "fingerprint": identity.fingerprint,
        "identity": identity.fields,
    }
    if identity.row_codec is not None:
        attributes["codec"] = identity.codec
        attributes["element_bytes"] = identity.element_bytes
    if facts is not None:
        attributes[FACTS] = msgspec.to_builtins(facts)
    return group_metadata({"kvtier": attributes})


def bytes_metadata(size_bytes: int, attributes: dict[str, Json]) -> bytes:
    """`zarr.json` of an array of plain bytes in one file, `c/0`."""
    return _encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [size_bytes],
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [size_bytes]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "bytes"}],
            "attributes": {"kvtier": attributes},
        }
    )


def group_metadata(attributes: dict[str, Json]) -> bytes:
    """`zarr.json` of a group."""
    return _encode({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def rows_metadata(
    geometry: SegmentGeometry, segment_count: int, codec: Codec | None = None
) -> bytes:
    """`zarr.json` of the array of rows: uint8[slots, row_bytes], one shard per segment."""
    slots, row_bytes = geometry.slots_per_segment, geometry.row_bytes
    coded = [codec.zarr_metadata] if codec is not None else []
    sharding: dict[str, Json] = {
        "chunk_shape": [1, row_bytes],
        "codecs": [{"name": "bytes"}, *coded, {"name": "crc32c"}],
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "start",
    }
    return _encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [segment_count * slots, row_bytes],
            "data_type": "uint8",
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [slots, row_bytes]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "dimension_names": ["slot", "byte"],
            "attributes": {"kvtier": {"format_version": FORMAT_VERSION}},
        }
    )


def read_metadata(raw: bytes, place: str) -> dict[str, Any]:
    """A `zarr.json` as a dict, its `kvtier` attributes checked for a version that we can read.

    Raises `CorruptRecord` for what is no metadata of ours, `LayoutMismatch` for a newer format.
    """
    try:
        metadata = msgspec.json.decode(raw, type=dict[str, Any])
        version = metadata["attributes"]["kvtier"]["format_version"]
    except (msgspec.DecodeError, KeyError, TypeError) as exc:
        raise CorruptRecord(place, "not the metadata of a kvtier store") from exc
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise LayoutMismatch(
            f"{place}: format_version",
            f"at most {FORMAT_VERSION} (a newer kvtier wrote this: upgrade, or use another root)",
            repr(version),
        )
    return metadata


def read_geometry(
    raw: bytes, place: str, codec: Codec | None = None
) -> tuple[SegmentGeometry, int]:
    """(geometry without a codec, segment count) from the `zarr.json` of an array under `codec`;
    raises like `read_metadata`."""
    metadata = read_metadata(raw, place)
    try:
        slots, row_bytes = map(int, metadata["chunk_grid"]["configuration"]["chunk_shape"])
        total = int(metadata["shape"][0])
    except (LookupError, TypeError, ValueError) as exc:
        raise CorruptRecord(place, "the array has not the shape of kvtier rows") from exc
    if row_bytes <= 0 or row_bytes % PAGE_BYTES or not 1 <= slots <= MAX_SLOTS or total < 0:
        raise CorruptRecord(place, "the array has not the shape of kvtier rows")
    geometry = SegmentGeometry(row_bytes, slots)
    segment_count = total // slots
    if metadata != msgspec.json.decode(rows_metadata(geometry, segment_count, codec)):
        raise CorruptRecord(place, "the array's codecs or chunks are not those of kvtier rows")
    return geometry, segment_count


def is_unrepeatable(raw: bytes, place: str) -> bool:
    """Whether the `zarr.json` of a namespace's group says that nobody will open it again; False if
    it is damaged."""
    try:
        return NONCE in read_metadata(raw, place)["attributes"]["kvtier"]["identity"]
    except (CorruptRecord, LayoutMismatch, KeyError, TypeError):
        return False


def facts_in(raw: bytes, place: str) -> RowFacts | None:
    """The facts in the `zarr.json` of a namespace's group; None without, or if it is damaged."""
    try:
        return facts_of(read_metadata(raw, place)["attributes"]["kvtier"])
    except (CorruptRecord, LayoutMismatch):
        return None
