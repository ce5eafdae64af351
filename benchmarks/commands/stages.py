"""`ragkv bench stages`: answers of stitched requests under prefill and decode policies."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands.common import configured, show
from ragkv.cli.common import Device, Json, Model, progress, writable, write_json

DEFAULTS = (
    ("full", "critiprefill", "dense"),
    ("full", "loopserve", "dense"),
    ("reuse", "critiprefill", "dense"),
    ("reuse", "loopserve", "dense"),
    ("scout", "critiprefill", "psa"),
    ("scout", "dense", "psa"),
    ("scout", "dense", "lfps"),
    ("scout", "dense", "loopserve"),
)


def stages(
    file: Json = None,
    combination: Annotated[
        list[str] | None,
        typer.Option(
            "--stages",
            metavar="METHOD|PREFILL|DECODE",
            help="Each part as for ask, with its fields; again for more. Default: eight combinations.",
        ),
    ] = None,
    sets: Annotated[int, typer.Option(min=1, help="Sets of documents.")] = 20,
    questions: Annotated[int, typer.Option(min=1, help="Questions of a set.")] = 5,
    chunks: Annotated[int, typer.Option(min=1, max=64, help="Documents of a set, one chunk each.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a chunk; 0: those of the model's profile.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first set.")] = 201,
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the table to this Markdown file.")
    ] = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Generated needle questions over stitched KV, under each policy beside dense attention: F1, what was read."""
    from benchmarks.stages import Stages, compare_stages, stage_grid
    from ragkv.evaluation.sets import needle_sets

    chosen = [Stages(*parts) for parts in (map(_parts, combination) if combination else DEFAULTS)]
    loaded = configured(model, device)
    size = (chunk_tokens or loaded.profile.chunk_tokens) - 32
    asked = needle_sets(sets, chunks, size, questions, seed, lambda text: len(loaded.prompt.plain(text)))
    with progress() as report:
        found = compare_stages(loaded, asked, chosen, report)
    title = (
        f"{loaded.name}: {sets * questions} needle questions, {chunks} chunks of at most {size + 32} tokens, percent"
    )
    write_json(file, [dataclasses.asdict(each) for each in found])
    show([(title, stage_grid(found), ())], table)
    return 0


def _parts(text: str) -> tuple[str, str, str]:
    parts = text.split("|")
    if len(parts) != 3 or not all(parts):
        raise typer.BadParameter("METHOD|PREFILL|DECODE, for example reuse|critiprefill|psa", param_hint="--stages")
    return parts[0], parts[1], parts[2]
