"""The page: figures, questions, documents."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from nicegui import ui

from api.dashboard.answers import LatestAnswers
from api.dashboard.ask import Ask
from api.dashboard.documents import DocumentsPage
from api.dashboard.guard import ROOT
from api.dashboard.tiles import Charts, Tiles
from api.runtime.tenants import Tenant
from ragkv.errors import RagkvError

TABS = {"Overview": "insights", "Ask": "forum", "Documents": "description"}
BLUE = "#0072b2"
TICK = 1.0
"""Seconds between two looks at what changes."""
STYLE = Path(__file__).with_name("style.css")
MODES = {None: "brightness_auto", False: "light_mode", True: "dark_mode"}
"""Light and dark: as the system has it, and either; with their icons."""


def draw(app: FastAPI, tenant: Tenant | None) -> None:
    """Draw the page of one browser. tenant: who looks, None where the service knows no tenants."""
    worker, series = app.state.worker, app.state.series
    whose = tenant or Tenant()
    ui.add_css(STYLE)
    ui.colors(primary=BLUE, secondary=BLUE, accent=BLUE)
    with ui.header().classes("header"):
        ui.label("ragkv").classes("brand").props("role=heading aria-level=1")
        status = ui.label().classes("status").props("role=status")
        ui.space()
        _mode()
        if tenant is not None:
            with ui.element("form").props(f'method=post action="{ROOT}/logout"'):
                ui.button("Leave", icon="logout").props("flat dense no-caps type=submit color=inherit")
    with ui.tabs().props("no-caps align=left inline-label") as tabs:
        for name, icon in TABS.items():
            ui.tab(name, icon=icon)
    with ui.tab_panels(tabs, value="Overview").props("keep-alive").classes("panels"):
        with ui.tab_panel("Overview"):
            tiles, charts, latest = Tiles(worker, series), Charts(series), LatestAnswers(worker, whose)
        with ui.tab_panel("Ask"):
            Ask(app, whose)
        with ui.tab_panel("Documents"):
            shelf = DocumentsPage(worker, whose)

    async def look() -> None:
        try:
            await look_at_tab()
        except RagkvError as error:  # the catalogue may be busy for a moment
            status.set_text(str(error))

    async def look_at_tab() -> None:
        health = worker.health()
        status.set_text(f"{health.get('model', '')} · {health['status']}")
        if tabs.value == "Overview":
            tiles.look()
            charts.look()
            await latest.look()
        elif tabs.value == "Documents":
            await shelf.look()

    ui.timer(TICK, look)


def _mode() -> None:
    """Light, dark, or as the system has it."""
    dark = ui.dark_mode(None)

    def turn() -> None:
        order = list(MODES)
        dark.value = order[(order.index(dark.value) + 1) % len(order)]
        button.props(f"icon={MODES[dark.value]}")

    button = ui.button(on_click=turn).props(f"flat round dense color=inherit icon={MODES[None]}")
    button.props('aria-label="Light or dark"')
