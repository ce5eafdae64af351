"""`ragkv bench …`: measurements, shown as aligned text and written as JSON if asked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.common import Device, Model, Store, out, progress, settings_from

if TYPE_CHECKING:
    from ragkv.bench.ttft import TtftResult

bench = typer.Typer(help="Measure on this machine.", rich_markup_mode=None)
Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file, too.")]


@bench.callback()
def _bench() -> None:
    pass


@bench.command("ttft")
def ttft(
    file: Json = None,
    chunks: Annotated[int, typer.Option(min=1, max=64, help="Chunks of the context.")] = 8,
    chunk_tokens: Annotated[int, typer.Option(min=64, help="Tokens of a chunk.")] = 512,
    repeat: Annotated[int, typer.Option(min=1, help="Timed questions per method; the median counts.")] = 10,
    store: Store = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Time to first token of every method, through the whole engine."""
    settings = settings_from(None, store, model, device)
    from ragkv.bench.ttft import TtftParams
    from ragkv.bench.ttft import ttft as measure

    with progress() as told:
        result = measure(settings, TtftParams(chunks=chunks, chunk_tokens=chunk_tokens, repeat=repeat), told)
    _write(file, dataclasses.asdict(result))
    _show(result)
    return 0


@bench.command("quality")
def quality(
    file: Json = None,
    natural: Annotated[bool, typer.Option("--natural", help="Ask about the natural documents instead.")] = False,
    chunks: Annotated[int, typer.Option(min=2, max=24, help="Chunks in the prompt.")] = 8,
    sets: Annotated[int, typer.Option(min=1, help="Generated sets.")] = 4,
    questions: Annotated[int, typer.Option(min=1, max=60, help="Questions about each generated set.")] = 25,
    model: Model = None,
    device: Device = None,
) -> int:
    """Every method on questions with known answers: answers, blocks found, tokens kept and recomputed."""
    settings = settings_from(None, None, model, device)
    from ragkv.bench import quality as measure
    from ragkv.bench.sets import natural_sets, needle_sets
    from ragkv.methods import NAMES
    from ragkv.model import DecoderModel

    profiles = settings.data / "profiles"
    loaded = DecoderModel.load(settings.model_source, settings.device, settings.dtype, profiles)
    usable = tuple(name for name in NAMES if name != "scout" or loaded.profile.retrieval_heads)
    size = loaded.profile.chunk_tokens - 32
    asked = (
        natural_sets(chunks)
        if natural
        else needle_sets(sets, chunks, size, questions, 1, lambda text: len(loaded.prompt.plain(text)))
    )
    with progress() as told:
        rows = measure.rows(measure.ask_all(loaded, asked, usable, told))
    _write(file, [dataclasses.asdict(row) for row in rows])
    names = ("em", "f1", "recall", "middle", "sequence", "recompute")
    console = out()
    kind = "natural" if natural else "generated"
    console.print(f"{loaded.name}: {rows[0].questions} {kind} questions, {chunks} chunks in the prompt")
    console.print(f"{'method':<16}" + "".join(f"{name:>10}" for name in names), style="bold")
    for row in rows:
        console.print(f"{row.method:<16}" + "".join(f"{getattr(row, name):>10.3f}" for name in names))
    return 0


def _write(file: Path | None, figures: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _show(result: TtftResult) -> None:
    """The figures as aligned text, the same on a terminal and in a pipe."""
    console = out()
    console.print(
        f"{result.model} on {result.device}, {result.threads} threads, store {result.store}: "
        f"{result.chunks} chunks, {result.context} tokens of context"
    )
    head = f"{'method':<16} {'ttft ms':>9} {'speedup':>8} {'search off':>10} {'speedup':>8}"
    console.print(f"{head} {'kept':>6} {'recomp.':>7} {'loaded':>7}", style="bold")
    for row in result.rows:
        console.print(
            f"{row.method:<16} {row.ttft:>9.1f} {row.speedup:>7.2f}x {row.without_retrieval:>10.1f} "
            f"{row.speedup_without_retrieval:>7.2f}x {row.sequence:>6.1%} {row.recompute:>7.1%} {row.load:>7.1%}"
        )
    steps = tuple(result.rows[0].steps)
    console.print(f"{'of which, ms':<16}" + "".join(f"{name:>10}" for name in steps), style="bold")
    for row in result.rows:
        console.print(f"{row.method:<16}" + "".join(f"{row.steps[name]:>10.1f}" for name in steps))
