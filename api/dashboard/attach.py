"""Joins the dashboard to the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from nicegui import core, ui

from api.dashboard.guard import ROOT, DashboardGuard
from api.dashboard.page import draw
from api.dashboard.series import PERIOD, Series
from ragkv.errors import ConfigError


def attach(app: FastAPI) -> None:
    """Serve the dashboard of `app`, whose state has its worker. NiceGUI keeps what it knows in the process, so one
    service of a process can have it. Raises ConfigError for a second one."""
    if core.app.config.has_run_config:
        raise ConfigError("this process has a dashboard already; set RAGKV_DASHBOARD=false for its other services")
    series = Series(app.state.worker)
    app.state.series = series

    @ui.page("/", title="ragkv", response_timeout=10)
    def page(request: Request) -> None:
        draw(app, getattr(request.state, "tenant", None))

    ui.run_with(
        app,
        mount_path=ROOT,
        dark=None,
        language="en-US",
        tailwind=False,
        binding_refresh_interval=None,
        show_welcome_message=False,
        reconnect_timeout=10,
        message_history_length=100,
    )
    app.add_middleware(DashboardGuard)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            looking = asyncio.create_task(_look(series))
            try:
                yield
            finally:
                looking.cancel()
                with suppress(asyncio.CancelledError):
                    await looking

    app.router.lifespan_context = lifespan


async def _look(series: Series) -> None:
    while True:
        await asyncio.sleep(PERIOD)
        series.look()
