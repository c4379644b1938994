"""Test that dashboards, alerts and documents name metrics that are exported, and that all of them are documented."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from exposition import exported, labels_used, names_used

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "docker" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "docker" / "grafana" / "outrider.json"
ADDED = {"job", "instance", "le"}
"""Labels that Prometheus, or a histogram, adds."""
UNBOUNDED = {"session", "session_id", "tenant", "user", "prompt", "traffic_class", "class", "request", "draft"}
_ROW = re.compile(r"^\| `([\w:]+)` \| (\w+) \| ([^|]*) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def families() -> dict[str, Any]:
    return {family.name: family for group in exported().values() for family in group}


def sample_names() -> set[str]:
    return {name for family in families().values() for name in family.samples}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries(panels: list[dict[str, Any]]) -> list[str]:
    """Return the queries of a dashboard's panels, folded ones included."""
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return found + [query for panel in panels for query in queries(panel.get("panels", []))]


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return read


def expressions() -> list[str]:
    return [rule["expr"] for rule in alerts()] + queries(dashboard()["panels"])


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_uses_metrics_and_labels_that_are_exported(expression: str) -> None:
    own = {name for name in names_used(expression) if not name.startswith("process_")}
    assert own <= sample_names()
    labels = {name: {*family.labels, *ADDED} for family in families().values() for name in family.samples}
    assert [f"{name}.{label}" for name, label in labels_used(expression) if label not in labels.get(name, ADDED)] == []


def test_the_table_of_metrics_is_what_is_exported() -> None:
    rows = _ROW.findall((ROOT / "docs" / "metrics.md").read_text())
    documented = {name: (kind, tuple(re.findall(r"\w+", labels))) for name, kind, labels, _, _ in rows}
    assert len(documented) == len(rows)
    assert documented == {name: (family.kind, family.labels) for name, family in families().items()}


def test_no_label_is_something_that_users_or_tenants_make_up() -> None:
    labels = {label for family in families().values() for label in family.labels}
    assert labels & UNBOUNDED == set()
