"""`ragkv bench …`: measurements, printed as aligned text and written as JSON with --json. Each file holds a command."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from benchmarks.commands.decode import decode
from benchmarks.commands.dialogues import dialogues
from benchmarks.commands.ingest import ingest
from benchmarks.commands.kernels import kernels
from benchmarks.commands.prefill import prefill
from benchmarks.commands.quality import quality
from benchmarks.commands.retrieval import retrieval
from benchmarks.commands.scale import scale
from benchmarks.commands.serve import serve
from benchmarks.commands.stages import stages
from benchmarks.commands.store import store
from benchmarks.commands.ttft import ttft

COMMANDS = (decode, dialogues, ingest, scale, serve, stages, kernels, prefill, retrieval, ttft, store, quality)

bench = typer.Typer(
    help="Measure on this machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    bench.command(command.__name__)(command)


def run(arguments: Sequence[str]) -> int:
    """Run one benchmark; returns the exit code.

    Raises:
        TyperException: The arguments are not understood.
        RagkvError: It failed.
    """
    return int(bench(list(arguments), prog_name="ragkv bench", standalone_mode=False) or 0)
