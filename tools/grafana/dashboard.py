"""The Grafana dashboard: `python -m tools.grafana.dashboard` writes deploy/grafana/dashboards/ragkv.json.

Colours are those of Okabe and Ito, which people who see few colours tell apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.grafana.panels import ROWS, SERIES, Panel, Query

FILE = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards" / "ragkv.json"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
WIDTH = 24
"""Columns of Grafana's grid."""
_SOURCE = {"type": "prometheus", "uid": "${source}"}

Json = dict[str, Any]


def dashboard() -> Json:
    """All of it, as Grafana reads it."""
    panels: list[Json] = []
    top = 0
    for title, row in ROWS:
        panels.append(
            {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(0, top, WIDTH, 1)}
        )
        drawn, top = _drawn(row, top + 1)
        panels += drawn
    source = {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "current": {},
        "hide": 0,
        "includeAll": False,
        "multi": False,
        "refresh": 1,
    }
    return {
        "uid": "ragkv",
        "title": "ragkv",
        "description": "What a ragkv reuses, how long it takes, and how it is.",
        "tags": ["ragkv"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [{**panel, "id": place} for place, panel in enumerate(panels, 1)],
    }


def _drawn(row: Sequence[Panel], top: int) -> tuple[list[Json], int]:
    """Panels side by side from a line on, and the first line below them."""
    drawn, left, below = [], 0, top
    for panel in row:
        if left + panel.width > WIDTH:
            left, top = 0, below
        drawn.append({**_panel(panel), "gridPos": _place(left, top, panel.width, panel.height)})
        left, below = left + panel.width, max(below, top + panel.height)
    return drawn, below


def _panel(panel: Panel) -> Json:
    stat = panel.kind == "stat"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": _SOURCE,
        "targets": [_target(query, place, stat) for place, query in enumerate(panel.queries)],
        **(_figure(panel) if stat else _lines(panel)),
    }


def _figure(panel: Panel) -> Json:
    defaults = {"unit": panel.unit, "noValue": "–", "color": {"mode": "fixed", "fixedColor": "text"}}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "none"},
    }


def _lines(panel: Panel) -> Json:
    drawn = {
        "lineWidth": 2,
        "fillOpacity": 30 if panel.stacked else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none"},
    }
    highest = {"max": 1} if panel.share else {}
    defaults = {"unit": panel.unit, "min": 0, **highest, "noValue": "–", "custom": drawn}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": _coloured(panel)},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _target(query: Query, place: int, instant: bool) -> Json:
    return {
        "refId": "ABCDEFGH"[place],
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expression,
        "legendFormat": query.legend,
        "instant": instant,
        "range": not instant,
    }


def _coloured(panel: Panel) -> list[Json]:
    """Colours of series, by the values their labels are known to have."""
    names = [name for query in panel.queries for name in SERIES.get(query.legend, (query.legend,))]
    return [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": COLOURS[place % len(COLOURS)]}}],
        }
        for place, name in enumerate(names)
    ]


def _place(left: int, top: int, width: int, height: int) -> Json:
    return {"x": left, "y": top, "w": width, "h": height}


def main() -> None:
    """Write the file."""
    FILE.write_text(json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
