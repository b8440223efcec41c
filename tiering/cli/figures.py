"""What a store comes to, in figures: from a survey of its root.  Pure.

Bytes "on disk" are allocated ones (`st_blocks`).  None stands for what is not known: a store that
was never opened by an engine has no ranks, tokens or budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from storage.pool import charge_of
from storage.status import NamespaceStatus, StoreStatus
from storage.survey import NamespaceSurvey, RootSurvey
from storage.types import PAGE_BYTES
from tiering.cli import words

_RATE_WINDOW_S = 3600.0  # over which the present write rate is taken
_STATUS_AGE_S_MAX = 600.0  # a running store's figures are younger, unless nothing happens
_GROUP_BYTES = 4  # at the end of a row's key


@dataclass(frozen=True)
class NamespaceFigures:
    namespace: str
    model: str
    codec: str
    ranks: int | None
    replicas: int | None
    rows: int
    row_bytes: int
    row_bytes_without_dedup: int | None
    tokens: int | None
    """Of the KV-cache group that holds the most: the length of all prompts that stand here."""
    logical_bytes: int
    """Rows times `row_bytes`."""
    bytes_without_dedup: int | None
    disk_bytes: int
    apparent_bytes: int
    saved_by_dedup_bytes: int | None
    groups: list[int]
    """The KV-cache groups whose rows these are, where others of the engine stand elsewhere."""
    saved_by_groups_bytes: int | None
    """What the rows would take as large as the engine's largest, less what they take."""
    saved_by_codec_bytes: int
    """In slots: what the same rows would take without a codec, less what they take."""
    hits: int | None
    misses: int | None
    last_use_age_s: float | None
    opened_age_s: float | None
    segments: int
    segments_full: int
    segments_open: int
    """With rows and with free slots."""
    segments_free: int
    free_slots: int
    free_slot_bytes: int


@dataclass(frozen=True)
class RootFigures:
    root: str
    owner_pid: int | None
    state: str
    state_reason: str
    namespaces: list[NamespaceFigures]
    total: NamespaceFigures
    disk_bytes: int
    """Of everything under the root."""
    apparent_bytes: int
    charged_bytes: int
    """What counts against the budget."""
    foreign_bytes: int
    quarantine_bytes: int
    budget_bytes: int | None
    """Of the last opening, as the reserve."""
    reserve_bytes: int | None
    file_system_bytes: int
    available_bytes: int
    growth_bytes: int
    """What may still be allocated: within budget and free space, less the reserve."""
    newest_model: str | None
    """Of the namespace opened last, which `tokens_that_fit` and the times are about."""
    tokens_that_fit: int | None
    """Into free slots and growth, until rows must be evicted."""
    write_bytes_per_s: float | None
    """Of rows, over the last hour; None unless the store is running."""
    full_in_s: float | None
    turnover_s: float | None
    """Of a full store: in what time it overwrites all it holds."""
    warnings: list[str] = field(default_factory=list)


def root_figures(survey: RootSurvey, stale_after_s: float) -> RootFigures:
    """Namespaces that nobody opened for `stale_after_s` are warned of."""
    status = survey.status
    known = status.namespaces if status else {}
    figures = [namespace_figures(n, known.get(n.name), survey.taken_s) for n in survey.namespaces]
    weight = survey.weight
    growth = max(0, survey.available_bytes - (status.reserve_bytes if status else 0))
    if status:
        growth = min(growth, max(0, status.budget_bytes - survey.charged_bytes))
    order = sorted(range(len(figures)), key=lambda i: survey.namespaces[i].opened_s)
    newest = survey.namespaces[order[-1]] if order else None
    together = _opened_with(newest, survey.namespaces) if newest else []
    tokens = _tokens_together([figures[survey.namespaces.index(one)].tokens for one in together])
    rate = _write_rate(status, survey.taken_s) if status else None
    room, full_in, turnover = _room(together, growth), None, None
    if newest and newest.row_bytes and rate:
        if room.rows >= 1:
            full_in = room.row_bytes / rate
        else:
            turnover = sum(one.row_count * one.row_bytes for one in together) / rate
    return RootFigures(
        root=str(survey.root),
        owner_pid=survey.owner_pid,
        state=status.state if status else "",
        state_reason=status.state_reason if status else "",
        namespaces=figures,
        total=_total(figures, _tokens_in_all(survey, figures)),
        disk_bytes=weight.allocated_bytes,
        apparent_bytes=weight.apparent_bytes,
        charged_bytes=survey.charged_bytes,
        foreign_bytes=survey.foreign.allocated_bytes
        + sum(n.foreign.allocated_bytes for n in survey.namespaces),
        quarantine_bytes=survey.quarantine.allocated_bytes,
        budget_bytes=status.budget_bytes if status else None,
        reserve_bytes=status.reserve_bytes if status else None,
        file_system_bytes=survey.file_system_bytes,
        available_bytes=survey.available_bytes,
        growth_bytes=growth,
        newest_model=newest.model if newest else None,
        tokens_that_fit=_tokens_in(together, tokens, room.rows) if newest else None,
        write_bytes_per_s=rate,
        full_in_s=full_in,
        turnover_s=turnover,
        warnings=_warnings(survey, figures, stale_after_s),
    )


def namespace_figures(
    survey: NamespaceSurvey, status: NamespaceStatus | None, now_s: float
) -> NamespaceFigures:
    """`status` is what the root remembers of it, `now_s` Unix time."""
    facts, weight, rows = survey.facts, survey.weight, survey.row_count
    slots = sum(len(segment.entries) for segment in survey.segments)
    full = sum(len(s.named) == len(s.entries) for s in survey.segments)
    empty = sum(len(s.named) == 0 for s in survey.segments)
    slot_bytes = sum(len(s.named) * s.geometry.stride for s in survey.segments)
    free_bytes = sum((len(s.entries) - len(s.named)) * s.geometry.stride for s in survey.segments)
    last_use = max(
        (int(s.entries["last_use"][s.named].max()) for s in survey.segments if len(s.named)),
        default=None,
    )
    logical = rows * survey.row_bytes
    without = rows * facts.row_bytes_without_dedup if facts.row_bytes_without_dedup else None
    return NamespaceFigures(
        namespace=survey.name,
        model=survey.model,
        codec=survey.codec_name,
        ranks=facts.ranks or None,
        replicas=facts.replicas or None,
        rows=rows,
        row_bytes=survey.row_bytes,
        row_bytes_without_dedup=facts.row_bytes_without_dedup or None,
        tokens=_tokens_held(survey),
        logical_bytes=logical,
        bytes_without_dedup=without,
        disk_bytes=weight.allocated_bytes,
        apparent_bytes=weight.apparent_bytes,
        saved_by_dedup_bytes=None if without is None else without - logical,
        groups=list(facts.groups),
        saved_by_groups_bytes=(
            rows * (facts.largest_row_bytes - survey.row_bytes) if facts.groups else None
        ),
        saved_by_codec_bytes=rows * (survey.row_bytes + PAGE_BYTES) - slot_bytes,
        hits=status.counters.rows_read if status else None,
        misses=status.counters.rows_missing if status else None,
        last_use_age_s=None if last_use is None else max(0.0, now_s - last_use / 1e6),
        opened_age_s=max(0.0, now_s - survey.opened_s) if survey.opened_s else None,
        segments=len(survey.segments),
        segments_full=full,
        segments_open=len(survey.segments) - full - empty,
        segments_free=empty,
        free_slots=slots - rows,
        free_slot_bytes=free_bytes,
    )


def _tokens_held(survey: NamespaceSurvey) -> int | None:
    tokens_per_row = survey.facts.tokens_per_row
    if not tokens_per_row:
        return None
    if len(tokens_per_row) == 1:
        return survey.row_count * tokens_per_row[0]
    rows = np.zeros(len(tokens_per_row), np.int64)
    for segment in survey.segments:
        groups = segment.key_endings(_GROUP_BYTES).view(">u4").ravel()
        rows += np.bincount(groups[groups < len(rows)], minlength=len(rows))
    return int((rows * tokens_per_row).max())


# Of the identities of an engine's namespaces, what tells them apart.
_OF_ONE_KIND = frozenset({"layers", "ranks", "row_of_groups"})


def _opened_with(
    one: NamespaceSurvey, namespaces: Sequence[NamespaceSurvey]
) -> list[NamespaceSurvey]:
    """The namespaces of one engine, whose KV-cache groups have rows of several sizes: `one` and
    those that differ in their rows alone."""

    def engine(of: NamespaceSurvey) -> object:
        if not of.facts.groups or of.identity is None:
            return of.name
        fields = {k: v for k, v in of.identity.fields.items() if k not in _OF_ONE_KIND}
        return (of.model, of.codec_name, repr(sorted(fields.items())))

    return [other for other in namespaces if engine(other) == engine(one)]


def _tokens_together(tokens: Iterable[int | None]) -> int | None:
    """Of an engine's namespaces, which hold the same tokens, each of other groups."""
    return max((count for count in tokens if count is not None), default=None)


def _tokens_in_all(survey: RootSurvey, figures: Sequence[NamespaceFigures]) -> int | None:
    tokens = {one.name: of.tokens for one, of in zip(survey.namespaces, figures, strict=True)}
    engines = {
        tuple(other.name for other in _opened_with(one, survey.namespaces))
        for one in survey.namespaces
    }
    found = [_tokens_together(tokens[name] for name in names) for names in engines]
    known = [count for count in found if count is not None]
    return sum(known) if known else None


class _Room(NamedTuple):
    """For how many more rows there is room, of the mean size, and for what bytes of rows."""

    rows: float
    row_bytes: float


def _room(together: Sequence[NamespaceSurvey], growth_bytes: int) -> _Room:
    """In free slots, and in new segments of `growth_bytes`, which an engine's namespaces share as
    they share what is there."""
    weights = [sum(len(s.entries) * s.geometry.stride for s in one.segments) for one in together]
    total = sum(weights)
    rows = row_bytes = 0.0
    for one, weight in zip(together, weights, strict=True):
        share = weight / total if total else 1 / len(together)
        slots = _room_slots(one, int(growth_bytes * share))
        rows += slots
        row_bytes += slots * one.row_bytes
    return _Room(rows, row_bytes)


def _room_slots(survey: NamespaceSurvey, growth_bytes: int) -> float:
    """How many more rows fit into free slots and into `growth_bytes` of new segments."""
    if survey.geometry is None:
        return 0.0
    if survey.codec is None:
        free = sum(len(s.entries) - len(s.named) for s in survey.segments)
        segments = growth_bytes // charge_of(survey.geometry)
        return float(free + segments * survey.geometry.slots_per_segment)
    classes = survey.geometry.size_classes()
    used = sum(len(s.named) for s in survey.segments)
    slot_bytes = sum(len(s.named) * s.geometry.stride for s in survey.segments)
    mean = slot_bytes / used if used else classes[-1].stride
    free_bytes = sum((len(s.entries) - len(s.named)) * s.geometry.stride for s in survey.segments)
    return float((free_bytes + growth_bytes) // mean)


def _tokens_in(together: Sequence[NamespaceSurvey], tokens: int | None, slots: float) -> int | None:
    """Of which so many more rows are, if they are like those that are there."""
    tokens_per_row = together[0].facts.tokens_per_row
    if not tokens_per_row:
        return None
    rows = sum(one.row_count for one in together)
    if tokens and rows:
        return int(slots * tokens / rows)
    groups = sum(1 for count in tokens_per_row if count)
    return int(slots * max(tokens_per_row) / max(1, groups))


def _write_rate(status: StoreStatus, now_s: float) -> float | None:
    """Bytes of rows per second."""
    if not status.is_open or now_s - status.written_s > _STATUS_AGE_S_MAX:
        return None
    begin = status.written_s - _RATE_WINDOW_S
    point = next((p for p in status.history if p.time_s >= begin), None)
    if point is None or status.written_s - point.time_s < 1:
        return None
    written = status.counters.bytes_written - point.bytes_written
    return max(0.0, written / (status.written_s - point.time_s))


def _total(figures: Sequence[NamespaceFigures], tokens: int | None) -> NamespaceFigures:
    def add(name: str) -> int:
        return sum(getattr(f, name) or 0 for f in figures)

    def add_known(name: str) -> int | None:
        return add(name) if any(getattr(f, name) is not None for f in figures) else None

    def least(name: str) -> float | None:
        known = [getattr(f, name) for f in figures if getattr(f, name) is not None]
        return min(known, default=None)

    return NamespaceFigures(
        namespace="total",
        model="total",
        codec="",
        ranks=None,
        replicas=None,
        rows=add("rows"),
        row_bytes=0,
        row_bytes_without_dedup=None,
        tokens=tokens,
        logical_bytes=add("logical_bytes"),
        bytes_without_dedup=add_known("bytes_without_dedup"),
        disk_bytes=add("disk_bytes"),
        apparent_bytes=add("apparent_bytes"),
        saved_by_dedup_bytes=add_known("saved_by_dedup_bytes"),
        groups=[],
        saved_by_groups_bytes=add_known("saved_by_groups_bytes"),
        saved_by_codec_bytes=add("saved_by_codec_bytes"),
        hits=add_known("hits"),
        misses=add_known("misses"),
        last_use_age_s=least("last_use_age_s"),
        opened_age_s=least("opened_age_s"),
        segments=add("segments"),
        segments_full=add("segments_full"),
        segments_open=add("segments_open"),
        segments_free=add("segments_free"),
        free_slots=add("free_slots"),
        free_slot_bytes=add("free_slot_bytes"),
    )


def _warnings(
    survey: RootSurvey, figures: Sequence[NamespaceFigures], stale_after_s: float
) -> list[str]:
    found = [str(finding) for finding in survey.findings]
    status = survey.status
    if status and status.budget_bytes:
        can_hold = survey.charged_bytes + max(0, survey.available_bytes - status.reserve_bytes)
        if status.budget_bytes > can_hold:
            found.append(
                f"budget: {words.size(status.budget_bytes)}, but the file system has room for "
                f"{words.size(can_hold)} of it"
            )
        if survey.charged_bytes > status.budget_bytes:
            over = survey.charged_bytes - status.budget_bytes
            found.append(f"budget: {words.size(over)} above it, which the next opening gives back")
    if status and status.health == "degraded":
        found.append(f"disk: {status.state}, {status.state_reason}")
    if status and status.is_open and survey.owner_pid is None:
        found.append("owner: killed before it closed the store, or out of sight of this system")
    for namespace in figures:
        age = namespace.opened_age_s
        if age is not None and age > stale_after_s and not _is_open(survey, namespace):
            found.append(
                f"stale: {namespace.namespace}: nobody opened it for {words.span(age)}, "
                f"{words.size(namespace.disk_bytes)}"
            )
    return found


def _is_open(survey: RootSurvey, namespace: NamespaceFigures) -> bool:
    """Whether the process that owns the root now opened it."""
    if survey.owner_pid is None or not survey.status or not survey.status.is_open:
        return False
    known = survey.status.namespaces
    newest = max((n.opened_s for n in known.values()), default=0.0)
    return namespace.namespace in known and known[namespace.namespace].opened_s == newest
