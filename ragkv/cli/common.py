"""Shared parts of the commands: common options, output and error messages.

Results go to stdout. Errors, progress and hints go to stderr. An error is one line: `ragkv: what happened, what to do`.
"""

from __future__ import annotations

import datetime
import gc
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.errors import without_password

if TYPE_CHECKING:
    from rich.console import Console

    from ragkv.catalog import Catalog
    from ragkv.config import Settings
    from ragkv.engine.engine import Engine
    from ragkv.errors import NotFound

_SETTINGS = "Settings (also RAGKV_* and ragkv.toml)"
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of the catalogue, the index and the disk store.", rich_help_panel=_SETTINGS),
]
Store = Annotated[
    str | None, typer.Option("--store", help="KV store: disk, or redis://host:port/db.", rich_help_panel=_SETTINGS)
]
Model = Annotated[
    str | None, typer.Option("--model", help="Model folder, GGUF file or hub id.", rich_help_panel=_SETTINGS)
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, spread or auto.", rich_help_panel=_SETTINGS)
]
Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="Let the service at this address do it; its key is RAGKV_KEY.", rich_help_panel=_SETTINGS
    ),
]


def writable(file: Path | None) -> Path | None:
    """Return the file of an option; refuse one in no folder, before what is written to it takes minutes to measure."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}")
    return file


Json = Annotated[Path | None, typer.Option("--json", callback=writable, help="Write the figures to this file, too.")]
Collection = Annotated[str, typer.Option("--collection", "-c", help="Collection of the documents.")]

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def fail(error: Exception | str, code: int) -> int:
    """Print an error on stderr, in one line. Returns `code`."""
    print(f"ragkv: {printable(without_password(' '.join(str(error).split())))}", file=sys.stderr)
    return code


def tell(line: str) -> None:
    """Print a line about what is going on on stderr."""
    err().print(f"ragkv: {printable(line)}")


def printable(text: str) -> str:
    """`text` without control characters, so that text of documents cannot control the terminal."""
    return _UNSAFE.sub("\ufffd", text).encode("utf-8", "replace").decode()


def moment(seconds: float) -> str:
    """A point in time, given in Unix seconds, in local time."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def out() -> Console:
    """Console for results; plain text if stdout is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def err() -> Console:
    """Console for progress and hints."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the garbage collector back while things are loaded: it would visit again and again what all stays."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def opened(settings: Settings, asks: bool = True) -> Iterator[Engine]:
    """Open the engine. A terminal shows a status line while it loads. asks: as for `Engine.open`."""
    check_model(settings)
    console = err()
    with uncollected(), console.status("loading the model") if console.is_terminal else _nothing():
        from ragkv.engine.engine import Engine

        # Through the same console, so that the line and the status do not overwrite each other.
        engine = Engine.open(settings, lambda line: console.print(f"ragkv: {printable(line)}"), asks)
    with engine:
        yield engine


def check_model(settings: Settings) -> None:
    """Raise ModelNotFound where the settings name a path at which no model is. It takes no time, and loading does."""
    from ragkv.model.locations import check_locations

    check_locations(settings.model, settings.adapter)


def check_documents(settings: Settings, collection: str | None = None) -> None:
    """Raise NotFound if the collection, or the whole catalogue, has no documents, before a model is loaded."""
    from ragkv.catalog import Catalog
    from ragkv.errors import NotFound

    where, known = settings.catalog_address, False
    if isinstance(where, str) or where.exists():
        with closing(Catalog.open(where)) as catalog:
            known = bool(catalog.page(collection, None, 1) if collection else catalog.collections())
    if not known:
        place = settings.data if isinstance(where, Path) else "the catalogue"
        which = f"collection {collection!r} in {place} has" if collection else f"{place} has"
        raise NotFound(f"{which} no documents", "add some with `ragkv ingest`")


def no_document(catalog: Catalog, collection: str, document_id: str) -> NotFound:
    """Return the error that says that there is no such document, and which one may be meant."""
    from ragkv.catalog import DocumentOrder
    from ragkv.errors import NotFound

    near = catalog.page(collection, None, 1, order=DocumentOrder(words=document_id))
    hint = f"is it {near[0].id!r}?" if near else "`ragkv ls` lists them"
    return NotFound(f"collection {collection!r} has no document {document_id!r}", hint)


@contextmanager
def progress() -> Iterator[Progress]:
    """Show a progress bar on stderr; nothing if stderr is not a terminal."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = err()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)

        def report(what: str, done: int, total: int) -> None:
            bars.update(task, description=printable(what), completed=done, total=total)

        yield report


def write_json(file: Path | None, figures: Any) -> None:
    """Write the figures of a measurement to the file, if one is given."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def strange_variables() -> list[str]:
    """Return a line for each environment variable that looks like a setting and is none."""
    from ragkv.config import unknown_variables

    return [f"{name} is no setting and has no effect; {hint}" for name, hint in unknown_variables()]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def settings_from(
    data: Path | None = None, store: str | None = None, model: str | None = None, device: str | None = None, **more: Any
) -> Settings:
    """Load the settings of a command, and name what looks like a setting and is none.

    Options override environment and file. Raises ConfigError.
    """
    from ragkv.config import load_settings

    for line in strange_variables():
        tell(line)
    return load_settings(data=data, store=store, model=model, device=device, **more)
