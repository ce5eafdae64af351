"""The page with its tabs: overview, ask, documents."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from nicegui import ui

from ragkv.api.dashboard.ask import AskPanel
from ragkv.api.dashboard.documents import DocumentsPage
from ragkv.api.dashboard.guard import ROOT
from ragkv.api.dashboard.overview import Overview
from ragkv.api.dashboard.viewer import DocumentViewer
from ragkv.api.runtime.callers import Caller
from ragkv.api.runtime.engine_thread import EngineThread
from ragkv.api.runtime.tenants import Tenant
from ragkv.errors import RagkvError

TABS = {"Ask": "forum", "Documents": "description", "Overview": "insights"}
BLUE = "#0072b2"
TICK = 1.0
"""Seconds between two updates of the page."""
STYLE = Path(__file__).with_name("style.css")
MODES = {None: "brightness_auto", False: "light_mode", True: "dark_mode"}
"""Icons of the colour modes: as the system, light, dark."""


def build_page(app: FastAPI, caller: Caller | None, prefix: str) -> None:
    """Build the page for one browser.

    Args:
        app: The application.
        caller: Who is logged in; None if the service is open to all.
        prefix: Path below which the browser sees the service.
    """
    engine_thread: EngineThread = app.state.engine_thread
    user = caller.tenant if caller is not None else None
    caller, tenant = caller or Caller(), user or Tenant()
    ui.add_css(STYLE)
    ui.colors(primary=BLUE, secondary=BLUE, accent=BLUE)
    status = _header(user, prefix)
    with ui.tabs().props("no-caps align=left inline-label") as tabs:
        for name, icon in TABS.items():
            ui.tab(name, icon=icon)

    async def open_answer(id: str) -> None:
        tabs.set_value("Ask")
        await ask.open(id)

    def add_documents() -> None:
        tabs.set_value("Documents")

    viewer = DocumentViewer(engine_thread, tenant, open_answer)
    with ui.tab_panels(tabs, value="Ask", animated=False).props("keep-alive").classes("panels"):
        with ui.tab_panel("Ask"):
            ask = AskPanel(app, tenant, viewer.open, add_documents)
        with ui.tab_panel("Documents"):
            documents = DocumentsPage(engine_thread, caller, viewer.open)
        with ui.tab_panel("Overview"):
            overview = Overview(app, user, caller, viewer.open)

    login = _Login(caller)

    async def refresh() -> None:
        try:
            if not login.end_if_expired():
                await refresh_tab()
        except RagkvError as error:  # the catalogue can be busy for a moment
            status.set_text(error.public)

    async def refresh_tab() -> None:
        health = engine_thread.health()
        status.set_text(f"{health.get('model', '')} · {health['status']}")
        shown = {"Ask": ask.refresh, "Documents": documents.refresh, "Overview": overview.refresh}
        await shown[tabs.value]()

    ui.timer(TICK, refresh)


class _Login:
    """Ends a page when what its caller showed has expired."""

    def __init__(self, caller: Caller):
        self._caller, self._client, self._reloaded = caller, ui.context.client, False

    def end_if_expired(self) -> bool:
        """Load the page anew if the login has expired, so that it asks for another. Returns whether it has."""
        if self._caller.expired and self._reloaded:
            self._client.delete()  # the browser did not follow; it takes no part any more
        elif self._caller.expired:
            self._reloaded = True
            ui.navigate.reload()
        return self._caller.expired


def _header(user: Tenant | None, prefix: str) -> ui.label:
    """Add the header; return the label that shows the state of the service."""
    with ui.header().classes("header"):
        ui.label("ragkv").classes("brand").props("role=heading aria-level=1")
        status = ui.label().classes("status").props("role=status")
        ui.space()
        _mode_button()
        if user is not None:
            ui.label(user.name).props(f'aria-label="Tenant {user.name}"')
            with ui.element("form").props(f'method=post action="{prefix}{ROOT}/logout"'):
                ui.button("Leave", icon="logout").props("flat dense no-caps type=submit color=inherit")
    return status


def _mode_button() -> None:
    """Add the button that switches between the colour modes."""
    dark = ui.dark_mode(None)

    def switch() -> None:
        order = list(MODES)
        dark.value = order[(order.index(dark.value) + 1) % len(order)]
        button.props(f"icon={MODES[dark.value]}")

    button = ui.button(on_click=switch).props(f"flat round dense color=inherit icon={MODES[None]}")
    button.props('aria-label="Light or dark"')
