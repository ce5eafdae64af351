"""`ragkv bench decode`: cost of a token under every decode policy, and the effect of the policies on answers.

Without --quality it needs no store. With --shape it needs no settings either: torch, transformers, typer and rich are
enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.commands.common import Piece, configured, device_for, random_weights, show
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
    import torch

    from benchmarks.decode import DecodeRow, Named
    from benchmarks.decode_speed import SpeedParams
    from benchmarks.grid import TextGrid
    from ragkv.model.decoder import DecoderModel
    from ragkv.model.profile import Profile

LAYER = (
    *("psa", "topk:count=64", "topk:count=64,digest=quest", "topk:count=64,digest=exact"),
    *("lfps:bypass=1", "lfps:bypass=1,heads=query", "loopserve:first=0"),
)
"""Policies of a synthetic layer."""
WHOLE = ("psa", "topk", "topk:digest=quest", "lfps", "loopserve:first=0")
"""Policies of a whole model."""


def decode(
    file: Json = None,
    keys: Annotated[int, typer.Option(min=64, help="Keys of the synthetic layer's context.")] = 65536,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", min=2, help="Time a whole model at this context length; again for more."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Requests that decode together; again for more.")
    ] = None,
    quality: Annotated[
        bool, typer.Option("--quality", help="Answer whole question sets; --seed and --longbench name others.")
    ] = False,
    early: Annotated[
        bool, typer.Option("--early", help="Of answers: the policies apply to the question's last token too.")
    ] = False,
    longbench: LongBench = None,
    fit: Fit = False,
    seed: GeneratedSeed = None,
    chunks: Chunks = 8,
    sets: Sets = 4,
    questions: Questions = 25,
    max_tokens: MaxTokens = 24,
    steps: Annotated[int, typer.Option(min=1, help="Timed tokens.")] = 20,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="As for ask --decode; again for more. Default: all.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Whose attention heads (llama-3.1-8b), or whose random weights.")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="With --length and --shape: layers.")] = None,
    pool: Annotated[
        float | None,
        typer.Option(
            "--pool",
            help="With --length and --batch: KV in host memory, with room for this share of it on the GPU; "
            "with --policy: that of PSA, beside the others.",
        ),
    ] = None,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="With --length: dense decoding with and without drafts.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of the synthetic layer.")] = "float32",
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the tables to this Markdown file.")
    ] = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """One layer of synthetic sparse attention; with --length a whole model; with --quality answers."""
    asked = SetOptions(longbench or (), fit, seed, chunks, sets, questions, max_tokens)
    quality = quality or asked.named
    if shape and (quality or model):
        raise typer.BadParameter("random weights answer no questions: leave --shape out", param_hint="--shape")
    if not length:
        for given, name in ((batch, "--batch"), (layers, "--layers"), (pool, "--pool")):
            if given is not None:
                raise typer.BadParameter("a whole model is timed with --length", param_hint=name)
    if speculation and (not length or quality or policy or batch or pool is not None):
        raise typer.BadParameter("lengths alone, of one request and without policies", param_hint="--speculation")
    if early and not quality:
        raise typer.BadParameter("of answers: add --quality, --seed or --longbench", param_hint="--early")
    if pool is not None and (quality or (not policy and len(length or ()) * len(batch or [1]) > 1)):
        raise typer.BadParameter("one length and one number of requests, or policies to compare", param_hint="--pool")
    if device == "spread" and (pool is not None or not (length or quality)):
        raise typer.BadParameter("a layer, and a pool, is on one GPU", param_hint="--device")
    pieces: list[Piece] = []
    figures: dict[str, Any] = {}
    if length and pool is not None and not policy:
        loaded = random_weights(shape, device, layers, False) if shape else configured(model, device)
        piece, figures["pool"] = _pooled(loaded, length[0], (batch or [1])[0], pool, steps, text=not shape)
        pieces.append(piece)
    elif length and speculation:
        loaded = random_weights(shape, device, layers, False) if shape else configured(model, device)
        piece, figures["speculation"] = _speculation(loaded, length, steps, text=not shape)
        pieces.append(piece)
    elif not (length or quality):
        piece, figures["layer"] = _layer(keys, steps, policy or LAYER, shape or "llama-3.1-8b", dtype, device)
        pieces.append(piece)
    else:
        loaded = random_weights(shape, device, layers, False) if shape else configured(model, device)
        named = _named(policy or WHOLE, loaded.profile, loaded.device)
        if length:
            from benchmarks.decode_speed import SpeedParams

            params = SpeedParams(tuple(length), tuple(batch or [1]), steps, pool=pool)
            if pool is not None:
                params = dataclasses.replace(params, warmup=32)  # the pool fills meanwhile
            piece, figures["speed"] = _speed(loaded, named, params, not shape)
            pieces.append(piece)
        if quality:
            piece, figures["quality"] = _quality(loaded, named, early, asked)
            pieces.append(piece)
    write_json(file, figures)
    show(pieces, table)
    return 0


def _named(specs: Sequence[str], profile: Profile, device: torch.device) -> list[Named]:
    from ragkv.engine.crossover import key_tier
    from ragkv.engine.policies import make_decode_policy

    made = [(spec, make_decode_policy(spec, profile, key_tier(device))) for spec in dict.fromkeys(specs)]
    return [(spec, each) for spec, each in made if each is not None]


def _layer(
    keys: int, steps: int, specs: Sequence[str], shape: str, dtype: str, device: str | None
) -> tuple[Piece, list[dict[str, Any]]]:
    import torch

    from benchmarks.decode import DecodeParams, measure
    from benchmarks.shapes import find_shape
    from ragkv.model.profile import Profile

    form, where = find_shape(shape), device_for(device)
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in kinds:
        raise typer.BadParameter(f"choose one of {', '.join(kinds)}", param_hint="--dtype")
    heads = {"q_heads": form.q_heads, "kv_heads": form.kv_heads, "head_dim": form.head_dim}
    params = DecodeParams(keys=keys, steps=steps, dtype=kinds[dtype], device=where, **heads)
    with progress() as report:
        rows = measure(params, _named(specs, Profile(decode_threshold=0), torch.device(where)), report)
    title = f"one layer of {shape} on {where}, {dtype}, {keys} keys, {torch.get_num_threads()} threads"
    return (title, _grid(rows), ()), [dataclasses.asdict(row) for row in rows]


def _speed(
    model: DecoderModel, named: Sequence[Named], params: SpeedParams, text: bool
) -> tuple[Piece, list[dict[str, Any]]]:
    import torch

    from benchmarks.answers import prose
    from benchmarks.decode_speed import grid, measure
    from benchmarks.shapes import random_tokens

    with progress() as report:
        rows = measure(model, params, named, report, prose if text else random_tokens)
    where = f"{model.name} on {model.device_names}, {torch.get_num_threads()} threads"
    pool = "" if params.pool is None else f"; psa from host memory, {params.pool:.0%} in the pool"
    title = f"{where}: decoding, cache-ready, {params.steps} tokens{pool}"
    return (title, grid(rows), ()), [dataclasses.asdict(row) for row in rows]


def _speculation(
    model: DecoderModel, lengths: Sequence[int], steps: int, text: bool
) -> tuple[Piece, list[dict[str, Any]]]:
    import torch

    from benchmarks.answers import prose
    from benchmarks.shapes import random_tokens
    from benchmarks.speculation import SpeculationParams, grid, measure

    with progress() as report:
        rows = measure(model, SpeculationParams(tuple(lengths), steps), report, prose if text else random_tokens)
    where = f"{model.name} on {model.device_names}, {torch.get_num_threads()} threads"
    title = f"{where}: answers of {steps} tokens with and without drafts"
    return (title, grid(rows), ()), [dataclasses.asdict(row) for row in rows]


def _pooled(
    model: DecoderModel, length: int, batch: int, share: float, steps: int, text: bool
) -> tuple[Piece, list[dict[str, Any]]]:
    from benchmarks.answers import prose
    from benchmarks.decode_pool import PoolParams, grid, measure
    from benchmarks.shapes import random_tokens

    with progress() as report:
        rows = measure(model, PoolParams(length, batch, share, steps=steps), report, prose if text else random_tokens)
    title = f"{model.name} on {model.device}: {batch} requests of {length} keys in host memory, {share:.0%} in the pool"
    return (title, grid(rows), ()), [dataclasses.asdict(row) for row in rows]


def _quality(
    model: DecoderModel, named: Sequence[Named], early: bool, asked: SetOptions
) -> tuple[Piece, dict[str, Any]]:
    from benchmarks.decode_answers import compare, grid

    with progress() as report:
        found = compare(model, named_sets(model, asked), named, report, early, asked.max_tokens)
    title = f"{model.name}: answers under each way to decode, percent" + ("; first token included" if early else "")
    return (title, grid(found), ()), {name: [dataclasses.asdict(row) for row in rows] for name, rows in found.items()}


def _grid(rows: Sequence[DecodeRow]) -> TextGrid:
    from benchmarks.grid import TextGrid, number

    heads = ("policy", "ms", "fastest", "× dense", "× top keys", "keys read", "covered", "worst head", "agree", "error")
    cells = [
        (
            row.policy,
            f"{row.ms:.2f}",
            f"{row.fastest:.2f}",
            f"{row.to_dense:.2f}",
            f"{row.to_topk:.2f}",
            f"{row.read:.1%}",
            *(number(share, ".3f") for share in (row.covered, row.worst, row.agree)),
            f"{row.error:.3f}",
        )
        for row in rows
    ]
    return TextGrid(heads, tuple(cells))
