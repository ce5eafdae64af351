"""The command line. `main` is the program `ragkv`. Each file holds a group of commands.

    ingest.py     ingest                       documents.py  ls, rm, reindex
    folder_sync.py  ingest --watch              ask.py     ask
    doctor*.py    doctor                       service.py serve, demo
    store.py      gc, backup, restore          bench.py    bench, in a checkout
    key.py        key                          top.py     top
    tune.py       tune                         show.py    show
    search.py     search                       calibrate.py  calibrate
    mcp.py        mcp

Heavy imports are inside the commands, so that `ragkv --help` does not wait for torch.
"""

from __future__ import annotations

import atexit
import gc as garbage
import os
import sys
import threading
from collections.abc import Callable, Sequence

import typer

from ragkv.cli.ask import ask
from ragkv.cli.bench import bench
from ragkv.cli.calibrate import calibrate
from ragkv.cli.common import fail
from ragkv.cli.doctor import doctor
from ragkv.cli.documents import ls, reindex, rm
from ragkv.cli.ingest import ingest
from ragkv.cli.key import key
from ragkv.cli.mcp import mcp
from ragkv.cli.search import search
from ragkv.cli.service import demo, serve
from ragkv.cli.show import show
from ragkv.cli.store import backup, gc, restore
from ragkv.cli.top import top
from ragkv.cli.tune import tune
from ragkv.errors import CatalogCorrupt, ConfigError, RagkvError

OBJECTS_BEFORE_COLLECTION = 10_000
"""How many objects are made before the garbage collector looks for cycles. With Python's 700 it looks hundreds of times
while the libraries are imported, and finds next to nothing."""

COMMANDS: dict[str, dict[Callable[..., object], str]] = {
    "Everyday": {
        ingest: "Read documents, so that questions can be asked about them.",
        ask: "Answer a question from the documents.",
        search: "Find passages, by words and by meaning.",
        ls: "List the documents.",
        show: "Show a document, with its text or its chunks.",
        rm: "Remove a document.",
        demo: "Ingest samples, ask questions and compare the methods.",
    },
    "Service": {
        serve: "Serve the HTTP API and the dashboard.",
        mcp: "Serve an MCP client over standard input and output.",
        doctor: "Check settings, model, stores and index, or a service.",
        top: "Watch a service: hits, ratios, times, rates.",
        key: "Make an API key for a tenant.",
    },
    "Maintenance": {
        reindex: "Embed again, and read again for another model.",
        gc: "Remove stored KV that is no longer needed.",
        backup: "Write catalogue, profiles and KV to one file.",
        restore: "Make a data folder from a backup.",
        calibrate: "Measure the model, and let it find evidence.",
        tune: "Teach a model to read stored chunks.",
    },
}
"""The commands as `ragkv --help` groups them, each with a line that fits into 80 columns."""

app = typer.Typer(
    name="ragkv",
    help="Answers questions from your documents; reads every document once and reuses what the model computed.",
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in COMMANDS.items():
    for command, summary in commands.items():
        app.command(command.__name__, short_help=summary, rich_help_panel=panel)(command)
app.command(
    "bench",
    short_help="Measure on this machine; needs a checkout.",
    rich_help_panel="Maintenance",
    add_help_option=False,  # `ragkv bench --help` and `ragkv bench ttft --help` are the benchmarks' own
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)(bench)


def _version(show: bool) -> None:
    if show:
        from ragkv import __version__

        typer.echo(f"ragkv {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code: 0 done, 1 a request failed, 2 settings or usage, 130 interrupted."""
    try:
        return int(app(list(arguments), prog_name="ragkv", standalone_mode=False) or 0)
    except KeyboardInterrupt:
        return 130
    except typer.TyperException as error:  # usage: unknown option, missing argument, value out of range
        message = error.format_message()
        if message.startswith("No such command"):
            context: typer.Context | None = getattr(error, "ctx", None)  # of its usage errors, a private class
            where = context.command_path if context else "ragkv"
            message = f"{message.rstrip('.')}; `{where} --help` lists all"
        return fail(message, error.exit_code)
    except (ConfigError, CatalogCorrupt) as error:
        return fail(error, 2)
    except (RagkvError, OSError) as error:
        return fail(error, 1)


def main() -> None:
    """Entry point of the program."""
    garbage.set_threshold(OBJECTS_BEFORE_COLLECTION)
    code = run(sys.argv[1:])
    if sys.argv[1:2] == ["ask"]:
        _end(code)
    sys.exit(code)


def _end(code: int) -> None:
    """End the process, unless a thread still works or the output is gone.

    The interpreter would take down the model and its libraries first: for more than a second, after the answer.
    """
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        return
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return
    os._exit(code)
