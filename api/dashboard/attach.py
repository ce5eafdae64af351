"""Adds the dashboard to the application."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI, Request
from nicegui import core, ui

from ragkv.api.dashboard.examples import ExampleFinder
from ragkv.api.dashboard.guard import ROOT, DashboardHeadersMiddleware, prefix_of
from ragkv.api.dashboard.page import build_page
from ragkv.api.dashboard.series import PERIOD, Series
from ragkv.errors import ConfigError


def attach(app: FastAPI) -> None:
    """Serve the dashboard of `app`, whose state holds the engine thread.

    NiceGUI keeps its state in globals, so only one application of a process can have a dashboard.

    Raises:
        ConfigError: Another application of this process has a dashboard.
    """
    if core.app.config.has_run_config:
        raise ConfigError("this process has a dashboard already; set RAGKV_DASHBOARD=false for its other services")
    # At its start NiceGUI looks at every object of the process, old names of torch among them.
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)
    series = Series(app.state.engine_thread)
    app.state.series = series
    app.state.examples = ExampleFinder(app.state.engine_thread)

    @ui.page("/", title="ragkv", response_timeout=10)
    def page(request: Request) -> None:
        build_page(app, getattr(request.state, "caller", None), prefix_of(request.scope))

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
    app.add_middleware(DashboardHeadersMiddleware)
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            sampling = asyncio.create_task(_sample(series))
            try:
                yield
            finally:
                sampling.cancel()
                with suppress(asyncio.CancelledError):
                    await sampling

    app.router.lifespan_context = lifespan


async def _sample(series: Series) -> None:
    while True:
        await asyncio.sleep(PERIOD)
        series.sample()
