"""What every engine and every service of a process would make anew, and alike: here it is made once.

Loading the packaged embedder and the bundled model, migrating a new catalogue, deriving the OpenAPI schema and reading
the signatures of the commands take most of the time in which the program starts, and the tests start it hundreds of
times. What differs is made as ever: models with adapters, profiles or other precision, apps with other routes, and
catalogues that are there already.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from starlette.routing import Mount

from ragkv.kernels import packed_products
from ragkv.model.source import ModelSource

TINY = Path(__file__).resolve().parent.parent / "models" / "tiny"

Make = Callable[..., Any]


def embedder_once(load: Make) -> Make:
    """Return a `load` of embedder.py that loads the packaged model once; others are loaded as ever."""

    @cache
    def packaged(device: str, bfloat16: bool) -> Any:
        model, lock = load("", device, True), threading.Lock()
        encode = model.encode

        def encode_alone(*given: Any, **named: Any) -> Any:
            with lock:  # each embedder locks itself only
                return encode(*given, **named)

        model.encode = encode_alone
        return model

    @wraps(load)
    def chosen(source: str, device: str, only_local: bool) -> Any:
        if source:
            return load(source, device, only_local)
        return packaged(device, packed_products.multiplies_bfloat16())

    return chosen


def checkpoint_once(load: Make) -> Make:
    """Return a `load_checkpoint` that reads the bundled model in float32 on the CPU once; others are read as ever."""

    @cache
    def bundled() -> Any:
        return load(str(TINY), "cpu", "float32", None)

    @wraps(load)
    def chosen(source: Any, device: str, dtype: str, profiles: Path | None = None, *more: Any) -> Any:
        named = ModelSource(source) if isinstance(source, str) else source
        bare = replace(named, note="", name="", model=str(Path(named.model).resolve()))
        on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
        calibrated = profiles is not None and profiles.exists()
        if bare == ModelSource(str(TINY)) and on_cpu and dtype == "float32" and not calibrated:
            return replace(bundled(), name=named.shown)
        return load(source, device, dtype, profiles, *more)

    return chosen


def catalogue_once(create: Make) -> Make:
    """Return a `create_tables` of sqlite_schema.py that migrates one empty catalogue; others are copies of it."""
    empty: list[bytes] = []

    @wraps(create)
    def chosen(path: Path) -> None:
        if not empty:
            create(path)
            empty.append(path.read_bytes())
            return
        temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
        temporary.write_bytes(empty[0])
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process created it first
        finally:
            temporary.unlink()

    return chosen


def schema_once(make: Make) -> Make:
    """Return a `get_openapi` of FastAPI that derives the schema of the same routes once."""
    made: dict[str, str] = {}

    @wraps(make)
    def chosen(**given: Any) -> Any:
        routes = [_identity(route) for route in given["routes"] if _described(route)]
        key = repr(sorted((given | {"routes": routes}).items()))
        if key not in made:
            made[key] = json.dumps(make(**given))
        return json.loads(made[key])  # callers change what they get

    return chosen


def _described(route: Any) -> bool:
    """Whether the schema may describe a route; it does not describe the mounted dashboard."""
    return not isinstance(route, Mount) and getattr(route, "include_in_schema", True)


def _identity(route: Any) -> tuple[Any, ...]:
    included = getattr(route, "original_router", None)
    if included is not None:
        return id(included), included._get_routes_version()
    return route.path, route.name, type(route).__name__


def command_once(make: Make) -> Make:
    """Return a `get_command` of typer that reads the signatures of the same commands once."""
    made: dict[tuple[int, int, int], Any] = {}

    @wraps(make)
    def chosen(program: Any) -> Any:
        key = id(program), len(program.registered_commands), len(program.registered_groups)
        if key not in made:
            made[key] = make(program)
        return made[key]

    return chosen


ONCE: dict[str, tuple[str, Callable[[Make], Make]]] = {
    "ragkv.retrieval.embedder": ("_load", embedder_once),
    "ragkv.model.decoder": ("load_checkpoint", checkpoint_once),
    "ragkv.catalog.sqlite_file": ("create_tables", catalogue_once),
    "fastapi.applications": ("get_openapi", schema_once),
    "typer.main": ("get_command", command_once),
}
"""By module: the function that makes something, and what keeps what it made."""


@contextmanager
def sharing() -> Iterator[None]:
    """Share what modules make that have been imported by now."""
    with ExitStack() as undone:
        for name, (function, once) in ONCE.items():
            module = sys.modules.get(name)
            if module is not None:
                make = getattr(module, function)
                setattr(module, function, once(make))
                undone.callback(setattr, module, function, make)
        yield


def make_all() -> None:
    """Make now what is shared, for programs that are forked from this process. It stays without other threads."""
    from ragkv.api.app import create_app
    from ragkv.cli import app
    from ragkv.config import load_settings
    from ragkv.engine.opening import open_parts

    folder = tempfile.TemporaryDirectory(prefix="ragkv-once-")
    with folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", lambda count: None)  # its pool of threads would be broken in a fork
        settings = load_settings(data=folder.name, model=str(TINY), dtype="float32", device="cpu", dashboard=False)
        parts = open_parts(settings, lambda line: None, reranks=False)
        parts.retriever.close()
        parts.store.close()
        parts.catalog.close()
        create_app(settings).openapi()
        typer.main.get_command(app)
