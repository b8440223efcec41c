"""No panel and no alert may name a metric, a label or a value that nobody exports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from storage.service.messages import Usage
from tests.unit.tiering.fakes import FakeTier
from tiering.manager import TieringManager
from tiering.metrics import ALL, Kind, StoreFigures, collect
from tiering.primary import PrimaryTier
from tiering.rows import RowLayout
from tiering.topology import LayerFacts, Parallelism

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
DASHBOARD = json.loads((CONFIGS / "grafana" / "kvtier.json").read_text())
ALERTS = yaml.safe_load((CONFIGS / "prometheus" / "alerts.yaml").read_text())

# What vLLM puts on every metric, and what Prometheus adds as it scrapes.
ENGINE_LABELS = frozenset({"model_name", "engine", "instance", "job"})
EXPORTED = {
    metric.name + ("_total" if metric.kind is Kind.COUNTER else ""): metric for metric in ALL
}


def label_values() -> dict[tuple[str, str], set[str]]:
    """(metric, label) -> the values that it has when everything is collected."""
    layout = RowLayout.of([LayerFacts("mla", 4096, 1)], Parallelism(tp=2, world_size=2), 1)
    manager = TieringManager(PrimaryTier(4), {"disk": FakeTier()})
    found: dict[tuple[str, str], set[str]] = {}
    for sample in collect(manager, layout, {"disk": StoreFigures(Usage(), True, 0)}):
        for label, value in zip(sample.metric.labels, sample.labels, strict=True):
            found.setdefault((sample.metric.name, label), set()).add(value)
    return found


VALUES = label_values()
_SELECTOR = re.compile(r"(kvtier:\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def expressions() -> Iterator[tuple[str, str, str]]:
    """(where it stands, expression, text that may name labels)."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"], ""
    for rule in rules():
        yield f"alert {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values())


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def complaints(expression: str, text: str = "") -> list[str]:
    """What is wrong with an expression, by the metrics that are really exported."""
    found = []
    labels = set(ENGINE_LABELS)
    for name, matchers in _SELECTOR.findall(expression):
        metric = EXPORTED.get(name)
        if metric is None:
            found.append(f"no metric {name}")
            continue
        labels |= set(metric.labels)
        for label, operator, value in _MATCHER.findall(matchers):
            if label in ENGINE_LABELS:
                continue
            if label not in metric.labels:
                found.append(f"{name} has no label {label}")
                continue
            values = value.split("|") if "~" in operator else [value]
            known = VALUES.get((metric.name, label), set())
            found += [f"{name} has no {label}={v!r}" for v in values if v not in known]
    named = {word.strip() for words in _GROUPING.findall(expression) for word in words.split(",")}
    named |= set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
    found += [f"no label {label}" for label in sorted(named - labels - {""})]
    return found


@pytest.mark.parametrize(("where", "expression", "text"), list(expressions()))
def test_dashboard_names_only_what_is_exported(where: str, expression: str, text: str) -> None:
    assert _SELECTOR.search(expression), f"{where} shows no metric of ours"
    assert complaints(expression, text) == [], where


@pytest.mark.parametrize(
    ("expression", "text", "complaint"),
    [
        ("kvtier:disk_used_byte", "", "no metric kvtier:disk_used_byte"),
        ("kvtier:chunk_hits", "", "no metric kvtier:chunk_hits"),  # a counter ends in _total
        ("kvtier:disk_up_total", "", "no metric kvtier:disk_up_total"),
        ('kvtier:disk_up{kind="x"}', "", "kvtier:disk_up has no label kind"),
        ('kvtier:disk_state{state="broken"}', "", "kvtier:disk_state has no state='broken'"),
        ('kvtier:disk_state{state=~"full|ro"}', "", "kvtier:disk_state has no state='ro'"),
        ("sum by (colour) (kvtier:disk_up)", "", "no label colour"),
        ("kvtier:disk_up", "{{kind}}", "no label kind"),
    ],
)
def test_the_check_of_dashboards_can_fail(expression: str, text: str, complaint: str) -> None:
    assert complaints(expression, text) == [complaint]


def test_the_dashboard_has_panels_that_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


_OPERAND = re.compile(r"(?:sum without \(([^)]*)\)\s*\(\s*)?(?:\w+\()?(kvtier:\w+)")
_IGNORING = re.compile(r"ignoring \(([^)]*)\)")


def labels_left(expression: str) -> set[frozenset[str]]:
    """The labels by which the series of an expression are matched with each other."""
    ignored = {word.strip() for words in _IGNORING.findall(expression) for word in words.split(",")}
    return {
        frozenset(EXPORTED[name].labels) - {word.strip() for word in without.split(",")} - ignored
        for without, name in _OPERAND.findall(expression)
    }


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_compare_series_that_have_the_same_labels(rule: dict[str, Any]) -> None:
    """Prometheus finds nothing, and says nothing, where one side has a label more."""
    assert len(labels_left(rule["expr"])) == 1


def test_the_check_of_labels_can_fail() -> None:
    corrupt = "sum without (outcome) (increase(kvtier:rows_read_total[1h]))"
    assert len(labels_left(f"{corrupt} + increase(kvtier:disk_external_removals_total[1h])")) == 1
    assert len(labels_left(f"{corrupt} + increase(kvtier:chunk_misses_total[1h])")) == 2


def test_alerts_cover_what_an_operator_must_know() -> None:
    names = {rule["alert"] for rule in rules()}
    assert names >= {
        "KvtierDiskFullBelowBudget",
        "KvtierDiskTakesNoWrites",
        "KvtierCorruptRows",
        "KvtierHitRateFallsWhileFull",
        "KvtierStoreDown",
    }
    assert len(names) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
