"""`ragkv bench prefill`: dense prefill compared with the sparse policies.

With --shape it needs neither settings nor a store: torch, transformers, typer and rich are enough, so that it runs
without the other packages of the service.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.commands.common import Piece, configured, random_weights, show
from benchmarks.commands.sets import (
    Chunks,
    Fit,
    GeneratedSeed,
    LongBench,
    MaxTokens,
    Questions,
    SetOptions,
    Sets,
    named_sets,
)
from ragkv.cli.common import Device, Json, Model, progress, writable, write_json

if TYPE_CHECKING:
    from benchmarks.prefill import Named, PrefillResult
    from ragkv.model.decoder import DecoderModel

LENGTHS = (2048, 4096, 8192)


def prefill(
    file: Json = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", min=2, help="Tokens of the input; again for more. Default: 2048, 4096, 8192."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="NAME or NAME:FIELD=VALUE,…, besides dense; again for more. Default: all."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights of this shape, e.g. llama-3.1-8b, not the model.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Layers, if not the shape's.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Random weights whose attention is not made sparse by construction.")
    ] = False,
    stitched: Annotated[
        str,
        typer.Option(
            "--stitched",
            help="Stitch each length from chunks of 1,024 tokens by this method; time repair and question.",
        ),
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs of each; the median counts.")] = 3,
    backend: Annotated[
        str, typer.Option("--backend", help="Kernel of dense attention: flash or cudnn. Default: torch's choice.")
    ] = "",
    needles: Annotated[
        bool, typer.Option("--needles", help="Ask needle questions by depth; no times unless --length is given.")
    ] = False,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Ask whole question sets; --seed and --longbench name others. No times unless --length is given.",
        ),
    ] = False,
    longbench: LongBench = None,
    fit: Fit = False,
    seed: GeneratedSeed = None,
    chunks: Chunks = 8,
    sets: Sets = 4,
    questions: Questions = 25,
    max_tokens: MaxTokens = 24,
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the tables to this Markdown file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=writable, help="Draw speedups into this .png or .svg file.")
    ] = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Whole prefills, dense and sparse: times, what was read, errors, and what it does to answers."""
    asked = SetOptions(longbench or (), fit, seed, chunks, sets, questions, max_tokens)
    quality = quality or asked.named
    if shape and (needles or quality or model):
        raise typer.BadParameter("random weights answer no questions: leave --shape out", param_hint="--shape")
    if not shape and (layers or plain):
        raise typer.BadParameter("--layers and --plain are of random weights", param_hint="--shape")
    if stitched and (plot is not None or backend):
        raise typer.BadParameter("--plot and --backend are of whole prefills", param_hint="--stitched")
    if plot is not None:
        from benchmarks.plot import check_plot

        check_plot(plot)
    loaded = random_weights(shape, device, layers, plain) if shape else configured(model, device)
    policies = _policies(policy, loaded)
    pieces: list[Piece] = []
    figures: dict[str, Any] = {}
    if stitched:
        found = [_stitched(loaded, stitched, each, policies, repeat) for each in length or LENGTHS]
        pieces, figures["stitched"] = [piece for piece, _ in found], [rows for _, rows in found]
    elif length or not (needles or quality):
        lengths = tuple(length or (each for each in LENGTHS if each <= loaded.max_positions))
        result = _times(loaded, lengths, policies, repeat, backend, text=not shape)
        figures["times"] = dataclasses.asdict(result)
        pieces.append(_times_piece(result))
        if plot is not None:
            from benchmarks.plot import plot_prefill

            plot_prefill(result, f"{result.model} on {result.device}", plot)
    if needles:
        piece, figures["needles"] = _needles(loaded, policies)
        pieces.append(piece)
    if quality:
        piece, figures["quality"] = _quality(loaded, policies, asked)
        pieces.append(piece)
    write_json(file, figures)
    show(pieces, table)
    return 0


def _policies(specs: Sequence[str] | None, model: DecoderModel) -> list[Named]:
    from ragkv.engine.policies import DENSE, PREFILL_NAMES, make_prefill_policy

    made = [
        (spec, make_prefill_policy(spec, model.profile))
        for spec in dict.fromkeys(specs or PREFILL_NAMES)
        if spec != DENSE
    ]
    return [(spec, policy) for spec, policy in made if policy is not None]


def _times(
    model: DecoderModel, lengths: tuple[int, ...], policies: Sequence[Named], repeat: int, backend: str, text: bool
) -> PrefillResult:
    from benchmarks.answers import prose
    from benchmarks.prefill import PrefillParams, measure
    from benchmarks.shapes import random_tokens

    params = PrefillParams(lengths, tuple(policies), repeat=repeat, backend=backend)
    with progress() as report:
        return measure(model, params, report, prose if text else random_tokens)


def _stitched(
    model: DecoderModel, method: str, length: int, policies: Sequence[Named], repeat: int
) -> tuple[Piece, Any]:
    from benchmarks.stitched import StitchedParams, grid, measure

    usual = StitchedParams.chunk_tokens
    chunk = min(length, usual)
    params = StitchedParams(length // chunk, chunk, method, tuple(name for name, _ in policies), repeat)
    with progress() as report:
        rows = measure(model, params, report)
    title = f"{model.name}: {method} over {params.chunks} chunks of {chunk} tokens"
    return (title, grid(rows), ()), [dataclasses.asdict(row) for row in rows]


def _times_piece(result: PrefillResult) -> Piece:
    from benchmarks.prefill_table import backends, times, title

    return title(result), times(result), backends(result)


def _needles(model: DecoderModel, policies: Sequence[Named]) -> tuple[Piece, Any]:
    from benchmarks.answers import NeedleParams, needles_by_depth
    from benchmarks.prefill_table import by_depth

    with progress() as report:
        found = needles_by_depth(model, policies, NeedleParams(), report)
    title = f"{model.name}: exact match of generated questions by depth of the answer, percent (questions)"
    return (title, by_depth(found), ()), [dataclasses.asdict(row) for row in found]


def _quality(model: DecoderModel, policies: Sequence[Named], asked: SetOptions) -> tuple[Piece, Any]:
    from benchmarks.answers import compare
    from benchmarks.prefill_table import answers

    with progress() as report:
        found = compare(model, named_sets(model, asked), policies, report, asked.max_tokens)
    rows = {name: [dataclasses.asdict(row) for row in table] for name, table in found.items()}
    return (f"{model.name}: answers under each prefill, percent", answers(found), ()), rows
