"""`ragkv serve` and `ragkv demo`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import Data, Device, Model, Store, check_model, err, settings_from

if TYPE_CHECKING:
    from ragkv.config import Settings


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on (127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on (8000); 0: any free one.")
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            metavar="N[-M]",
            help="Processes that answer, run by Ray Serve; 2-8: as many as the load needs. Needs ragkv[ray].",
        ),
    ] = None,
    data: Data = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Serve the HTTP API until SIGTERM or Ctrl-C. Running requests are finished first."""

    def read_settings() -> Settings:
        more = {"host": host, "port": port, "replicas": replicas}
        return settings_from(data, store, model, device, **more)

    settings = read_settings()
    if settings.replica_counts != (0, 0):
        from ragkv.api.replicas.run import serve_replicas

        serve_replicas(settings, read_settings, err())
        return 0
    check_model(settings)
    from ragkv.api.app import serve as serve_api

    if not serve_api(settings, err()):
        # The interpreter aborts if it shuts down while a thread computes. The data on the disk is consistent at any
        # moment, and ingestion of the current document continues at the next start.
        sys.stderr.flush()
        os._exit(0)
    return 0


def demo(data: Data = None, model: Model = None, device: Device = None) -> int:
    """Ingest sample documents, ask questions and compare the methods."""
    settings = settings_from(data, None, model, device)
    check_model(settings)
    from rich.console import Console

    from ragkv.cli.demo import run

    # A pipe has no width, and the default of 80 columns would cut the tables.
    run(settings, Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 100))
    return 0
