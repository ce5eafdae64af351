"""`ragkv bench ttft`: time to first token, of the model that is set or of a shape with random weights.

With --shape it needs neither settings nor a catalogue: torch, transformers, typer and rich are enough, but for Redis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.common import Piece, random_weights, show
from ragkv.cli.common import Device, Json, Model, Store, out, progress, settings_from, tell, writable, write_json

if TYPE_CHECKING:
    from benchmarks.ttft import TtftParams, TtftResult
    from benchmarks.ttft_shape import ShapeParams

CHUNKS, CHUNK_TOKENS = 8, 512
SHAPE_CHUNKS, SHAPE_CHUNK_TOKENS = 16, 1024


def ttft(
    file: Json = None,
    chunks: Annotated[
        list[int] | None,
        typer.Option(
            "--chunks", min=1, max=1024, help="Chunks of the context; with --shape again for more. Default: 8; 16."
        ),
    ] = None,
    chunk_tokens: Annotated[
        int | None, typer.Option(min=64, help="Tokens of a chunk. Default: 512; with --shape 1024.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed questions per method; the median counts.")] = 10,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Random weights of this shape, e.g. llama-3.1-8b, not the model.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, help="With --shape: layers, if not the shape's.")
    ] = None,
    tier: Annotated[
        str | None,
        typer.Option("--tier", help="With --shape: where chunks lie: gpu, host, redis, disk. Default: host."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="NAME or NAME:FIELD=VALUE,…, or with --shape gated; again for more."),
    ] = None,
    prefill: Annotated[
        list[str] | None,
        typer.Option("--prefill", help="As for ask; again to time every method under each policy, e.g. dense, auto."),
    ] = None,
    block: Annotated[int | None, typer.Option("--block", min=8, help="With --shape: tokens of a block.")] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", callback=writable, help="With --shape: write the tables to this Markdown file."),
    ] = None,
    llama_server: Annotated[
        Path | None, typer.Option("--llama-server", help="Time this llama.cpp server, too, with the same prompts.")
    ] = None,
    gguf: Annotated[Path | None, typer.Option("--gguf", help="The model file for --llama-server.")] = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Time to first token of every method: through the whole engine, or with --shape of a model that is not here."""
    if shape is None:
        if layers or tier or block or table:
            raise typer.BadParameter(
                "--layers, --tier, --block and --table are of random weights", param_hint="--shape"
            )
        if (llama_server is None) != (gguf is None):
            raise typer.BadParameter("--llama-server and --gguf go together", param_hint="--gguf")
        if chunks and (len(chunks) > 1 or chunks[0] > 64):
            raise typer.BadParameter("give one number, 64 at most, or --shape", param_hint="--chunks")
        from benchmarks.ttft import TIMED, TtftParams

        methods = tuple(dict.fromkeys(("full", *method))) if method else TIMED
        number, size = chunks[0] if chunks else CHUNKS, chunk_tokens or CHUNK_TOKENS
        policies = tuple(dict.fromkeys(prefill or ()))
        params = TtftParams(number, size, repeat, methods, policies, llama_server=llama_server, gguf=gguf)
        _engine(file, params, (store, model, device))
        return 0
    if llama_server or gguf:
        raise typer.BadParameter("random weights are in no GGUF file: leave one of both out", param_hint="--shape")
    if model:
        raise typer.BadParameter("random weights are no model: leave one of both out", param_hint="--shape")
    if (tier == "redis") != bool(store):
        raise typer.BadParameter("--tier redis and --store redis://host:port/db go together", param_hint="--store")
    from benchmarks import ttft_shape
    from ragkv.engine.policies import DENSE

    shaped = ttft_shape.ShapeParams(
        chunk_tokens=chunk_tokens or SHAPE_CHUNK_TOKENS,
        tier=tier or "host",
        store=store or "",
        methods=tuple(method or ttft_shape.TIMED),
        prefills=tuple(prefill or (DENSE,)),
        repeat=repeat,
        block=block or 0,
    )
    _shape(file, shape, chunks or [SHAPE_CHUNKS], shaped, layers, table, device)
    return 0


def _shape(
    file: Path | None,
    shape: str,
    chunks: Sequence[int],
    params: ShapeParams,
    layers: int | None,
    table: Path | None,
    device: str | None,
) -> None:
    from benchmarks.ttft_shape import ttft_shape
    from benchmarks.ttft_table import notes, steps, times, title

    loaded = random_weights(shape, device, layers, plain=False)
    results, pieces = [], list[Piece]()
    for number in dict.fromkeys(chunks):
        with progress() as report:
            result = ttft_shape(loaded, dataclasses.replace(params, chunks=number), report)
        results.append(dataclasses.asdict(result))
        pieces += [(title(result), times(result), notes(result)), ("of which, ms, and floors, ms", steps(result), ())]
    write_json(file, results)
    show(pieces, table)


def _engine(file: Path | None, params: TtftParams, given: tuple[str | None, str | None, str | None]) -> None:
    """given: store, model and device, which override the settings."""
    store, model, device = given
    settings = settings_from(None, store, model, device)
    from benchmarks.ttft import ttft as measure

    with progress() as report:
        result = measure(settings, params, report, tell)
    write_json(file, dataclasses.asdict(result))
    _show(result)


def _show(result: TtftResult) -> None:
    """Print the figures as aligned text, the same on a terminal and in a pipe."""
    console = out()
    console.print(
        f"{result.model} on {result.device} ({result.dtype}), {result.threads} threads, store {result.store}: "
        f"{result.chunks} chunks, {result.context} tokens of context"
    )
    head = f"{'method':<16} {'ttft ms':>9} {'speedup':>8} {'search off':>10} {'speedup':>8}"
    console.print(f"{head} {'kept':>6} {'recomp.':>7} {'loaded':>7}  prefill", style="bold")
    for row in result.rows:
        gained = "" if row.prefill == result.rows[0].prefill else f" ({row.policy_speedup:.3f}x)"
        console.print(
            f"{row.method:<16} {row.ttft:>9.1f} {row.speedup:>7.2f}x {row.without_retrieval:>10.1f} "
            f"{row.speedup_without_retrieval:>7.2f}x {row.sequence:>6.1%} {row.recompute:>7.1%} {row.load:>7.1%}"
            f"  {row.prefill}{gained}"
        )
    steps = tuple(result.rows[0].steps)
    console.print(f"{'of which, ms':<16}" + "".join(f"{name:>10}" for name in steps), style="bold")
    for row in result.rows:
        console.print(f"{row.method:<16}" + "".join(f"{row.steps[name]:>10.1f}" for name in steps))
    if result.peer is not None:
        peer = result.peer
        console.print(
            f"{peer.name}: first token after {peer.ttft:.1f} ms, a full prefill of {peer.tokens} tokens "
            f"({1000 * peer.tokens / peer.prompt:.0f} tokens/s by its own clock)"
        )
        for name, ratio in peer.ratios.items():
            console.print(f"{name:<24} {ratio:>7.2f}x sooner than {peer.name}")
