"""The two kinds of buttons. Their colours come from style.css, which has enough contrast in both colour modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nicegui import ui


def main_button(text: str, on_click: Callable[..., Any], icon: str | None = None) -> ui.button:
    """Add a filled button, for what most users do next."""
    return ui.button(text, on_click=on_click, icon=icon, color=None).props("no-caps unelevated").classes("main")


def quiet_button(text: str, on_click: Callable[..., Any], icon: str | None = None) -> ui.button:
    """Add a button without a background."""
    return ui.button(text, on_click=on_click, icon=icon, color=None).props("no-caps flat").classes("quiet")
