"""The two kinds of buttons, and the question before a deletion.

Their colours come from style.css, which has enough contrast in both colour modes.
"""

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


async def confirm_deletion(question: str) -> bool:
    """Ask in a dialog; return whether the user wants the deletion."""
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Delete", on_click=lambda: dialog.submit(True)).props("color=negative no-caps")
            quiet_button("Keep", lambda: dialog.submit(False))
    answer = await dialog
    dialog.delete()
    return bool(answer)
