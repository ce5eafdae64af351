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

import gc as garbage
import sys
from collections.abc import Sequence

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

app = typer.Typer(
    name="ragkv",
    help="Answers questions from your documents; reads every document once and reuses what the model computed.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ingest")(ingest)
app.command("ask")(ask)
app.command("search")(search)
app.command("ls")(ls)
app.command("show")(show)
app.command("rm")(rm)
app.command("reindex")(reindex)
app.command("doctor")(doctor)
app.command("gc")(gc)
app.command("backup")(backup)
app.command("restore")(restore)
app.command("serve")(serve)
app.command("mcp")(mcp)
app.command("top")(top)
app.command("key")(key)
app.command("demo")(demo)
app.command("calibrate")(calibrate)
app.command("tune")(tune)
app.command(
    "bench",
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
        return fail(error.format_message(), error.exit_code)
    except (ConfigError, CatalogCorrupt) as error:
        return fail(error, 2)
    except (RagkvError, OSError) as error:
        return fail(error, 1)


def main() -> None:
    """Entry point of the program."""
    garbage.set_threshold(OBJECTS_BEFORE_COLLECTION)
    sys.exit(run(sys.argv[1:]))
