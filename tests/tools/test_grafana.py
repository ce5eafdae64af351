"""The Grafana dashboard that is checked in is the one the tool writes, and fits its grid."""

from __future__ import annotations

import json

from tools.grafana.dashboard import FILE, WIDTH, dashboard


def test_the_file_is_what_the_tool_writes() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == dashboard(), "run python -m tools.grafana.dashboard"


def test_panels_fill_their_rows_and_lie_apart() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= WIDTH, panel["title"]
        taken |= cells
    assert len(taken) == WIDTH * (1 + max(line for _, line in taken)), "no holes"


def test_every_panel_says_what_one_sees() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"]), panel["title"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
