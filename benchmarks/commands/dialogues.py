"""`ragkv bench dialogues`: cost of a turn, its answer beside that after one dense prefill, and what policies read."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.common import show
from ragkv.cli.common import Device, Json, Model, progress, settings_from, tell, writable, write_json

if TYPE_CHECKING:
    from benchmarks.dialogues import DialogueFigures
    from benchmarks.grid import TextGrid


def dialogues(
    file: Json = None,
    count: Annotated[int, typer.Option("--dialogues", min=1, help="Dialogues of three turns.")] = 30,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="As for ask; again for more. Default: full and scout.")
    ] = None,
    prefill: Annotated[
        list[str] | None, typer.Option("--prefill", help="As for ask; again for more. Default: dense.")
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option("--decode", help="As for ask; again for more. Every method is asked under all combinations."),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, max=64, help="Chunks that a dialogue is about.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=128, help="Tokens of a chunk.")] = 512,
    sentences: Annotated[int, typer.Option(min=1, max=40, help="Sentences around every question.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the documents and texts.")] = 11,
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the tables to this Markdown file.")
    ] = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Generated dialogues, turn by turn: answers, what policies read, tokens prefilled, times."""
    given = settings_from(None, None, model, device)
    from benchmarks.dialogues import SENTENCES, DialogueParams, figures, fill, hold
    from benchmarks.stages import Stages
    from ragkv.engine.engine import Engine

    if sentences > len(SENTENCES):
        raise typer.BadParameter(f"there are {len(SENTENCES)} sentences", param_hint="--sentences")
    params = DialogueParams(
        dialogues=count,
        each=min(6, count),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        sentences=sentences,
        seed=seed,
    )
    asked = [
        Stages(*each) for each in product(method or ("full", "scout"), prefill or ("dense",), decode or ("dense",))
    ]
    with tempfile.TemporaryDirectory(prefix="ragkv-dialogues-") as folder, progress() as report:
        own = {"data": Path(folder), "store": "disk", "chunk_tokens": chunk_tokens}
        with Engine.open(given.model_copy(update=own), tell) as engine:
            made = fill(engine, params, report)
            found = [figures(each, hold(engine, made, each, params, report)) for each in asked]
    write_json(file, [dataclasses.asdict(each) for each in found])
    title = f"{count} dialogues about {chunks} chunks of at most {chunk_tokens} tokens"
    pieces = [(f"{title}: answers, and what was read, percent", _answers(found), ())]
    pieces.append((f"{title}; from nothing: the last turn when nothing is cached", _costs(found), ()))
    show(pieces, table)
    return 0


def _answers(found: Sequence[DialogueFigures]) -> TextGrid:
    from benchmarks.dialogues import PLACES
    from benchmarks.grid import TextGrid, number

    heads = ("method", "prefill", "decode", "as one prefill", "EM", *(f"EM, {place}" for place in PLACES))
    rows = [
        (
            each.method,
            each.prefill,
            each.decode,
            f"{each.agree} of {each.turns}",
            number(each.right / each.turns, ".1f", 100),
            *(number(share, ".1f", 100) for share in each.em),
            number(each.pairs, ".1f", 100),
            number(each.keys, ".1f", 100),
        )
        for each in found
    ]
    return TextGrid((*heads, "pairs read", "keys read"), tuple(rows), words=3)


def _costs(found: Sequence[DialogueFigures]) -> TextGrid:
    from benchmarks.grid import TextGrid

    rows = []
    for result in found:
        prefilled, ttft = (" ".join(f"{x:.0f}" for x in values) for values in (result.prefilled, result.ttft))
        names = (result.method, result.prefill, result.decode)
        rows.append((*names, prefilled, f"{result.over:.0f}", f"{result.share:.1%}", ttft))
    heads = ("method", "prefill", "decode", "prefilled by turn", "from nothing", "largest share", "ttft ms by turn")
    return TextGrid(heads, tuple(rows), words=3)
