"""`ragkv bench dialogues`: cost of a turn, and whether its answer is that after one dense prefill."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.common import Device, Json, Model, out, progress, settings_from, tell, write_json

if TYPE_CHECKING:
    from ragkv.bench.dialogues import DialogueFigures


def dialogues(
    file: Json = None,
    count: Annotated[int, typer.Option("--dialogues", min=1, help="Dialogues of three turns.")] = 30,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="As for ask; again for more. Default: full and scout.")
    ] = None,
    prefill: Annotated[str, typer.Option(help="As for ask.")] = "dense",
    chunks: Annotated[int, typer.Option(min=1, max=64, help="Chunks that a dialogue is about.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=128, help="Tokens of a chunk.")] = 512,
    model: Model = None,
    device: Device = None,
) -> int:
    """Generated dialogues, turn by turn: answers against one dense prefill, tokens prefilled, times."""
    given = settings_from(None, None, model, device)
    from ragkv.bench.dialogues import DialogueParams, figures, fill, hold
    from ragkv.engine.engine import Engine

    params = DialogueParams(dialogues=count, each=min(6, count), chunks=chunks, chunk_tokens=chunk_tokens)
    with tempfile.TemporaryDirectory(prefix="ragkv-dialogues-") as folder, progress() as report:
        own = {"data": Path(folder), "store": "disk", "chunk_tokens": chunk_tokens, "prefill": prefill}
        with Engine.open(given.model_copy(update=own), tell) as engine:
            made = fill(engine, params, report)
            found = [figures(name, hold(engine, made, name, params, report)) for name in method or ("full", "scout")]
    write_json(file, [dataclasses.asdict(each) for each in found])
    _show(found)
    return 0


def _show(found: Sequence[DialogueFigures]) -> None:
    """Print the figures as aligned text."""
    from ragkv.bench.grid import TextGrid, aligned

    rows = []
    for each in found:
        prefilled, ttft = (" ".join(f"{x:.0f}" for x in values) for values in (each.prefilled, each.ttft))
        agree = f"{each.agree} of {each.turns}"
        rows.append((each.method, agree, str(each.right), prefilled, f"{each.over:.0f}", f"{each.share:.1%}", ttft))
    heads = (
        "method",
        "as one prefill",
        "right",
        "prefilled by turn",
        "from nothing",
        "largest share",
        "ttft ms by turn",
    )
    console = out()
    console.print(f"{found[0].dialogues} dialogues; from nothing: the last turn when nothing is cached")
    head, *lines = aligned(TextGrid(heads, tuple(rows)))
    console.print(head, style="bold")
    for line in lines:
        console.print(line)
