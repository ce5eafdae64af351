"""The queries of the Grafana dashboard and of the docs use existing metrics and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import Service

_STRING = r'"[^"]*"'
_METRIC = re.compile(r"\b((?:ragkv|process)_[a-z0-9_]+)\s*(\{[^}]*\})?")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
OF_THE_TARGET = {"job", "instance"}
"""Labels that Prometheus adds itself."""


Known = dict[str, dict[str, set[str]]]
"""Values by label by metric."""


def check(expression: str, known: Known) -> None:
    """Assert that the metrics, labels and label values of a PromQL query exist."""
    named = _METRIC.findall(expression)
    assert named, expression
    labels: set[str] = set()
    for name, matchers in named:
        assert name in known, f"{name} in {expression}"
        labels |= known[name].keys()
        for label, values in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
            assert label in known[name], f"{label} of {name} in {expression}"
            assert set(values.split("|")) <= known[name][label], f"{values} in {expression}"
    for group in _GROUPED.findall(re.sub(_STRING, '""', expression)):
        asked = {label.strip() for label in group.split(",") if label.strip()}
        assert asked <= labels | OF_THE_TARGET, f"{asked} in {expression}"


@pytest.fixture(scope="module")
def known(service: Service) -> Known:
    """Metrics of a service that has answered a question."""
    assert service.post("/v1/answers", {"question": "Who built the harbour of Tarn?"}).status_code == 200
    found: Known = {}
    for family in text_string_to_metric_families(service.client.get("/metrics").text):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def test_every_query_of_the_grafana_dashboard_uses_existing_metrics(root: Path, known: Known) -> None:
    file = root / "deploy" / "grafana" / "dashboards" / "ragkv.json"
    panels = json.loads(file.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 25
    for query in queries:
        check(query, known)
    assert {name for query in queries for name, _ in _METRIC.findall(query)} >= {
        name for name in known if name.startswith("ragkv_") and name.endswith("_total")
    }, "every counter is shown somewhere"


def test_legends_use_labels_that_their_queries_keep(root: Path) -> None:
    file = root / "deploy" / "grafana" / "dashboards" / "ragkv.json"
    for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], panel["title"]


def test_the_queries_in_the_docs_use_existing_metrics(root: Path, known: Known) -> None:
    blocks = re.findall(r"```promql\n(.*?)```", (root / "docs" / "operations.md").read_text(), re.S)
    queries = [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]
    assert len(queries) >= 3
    for query in queries:
        check(query, known)


def test_a_query_for_an_unknown_metric_or_label_is_detected(known: Known) -> None:
    check('sum by (tier) (rate(ragkv_chunk_lookups_total{result="hit"}[1m]))', known)
    for wrong in (
        "rate(ragkv_lookups_total[1m])",
        'ragkv_tokens_total{sort="context"}',
        'ragkv_kv_bytes_total{source="context_kv"}',
        'ragkv_kv_bytes_total{source=~"heads|load"}',
        "sum by (tenant) (ragkv_answers_total)",
        "up",
    ):
        with pytest.raises(AssertionError):
            check(wrong, known)
