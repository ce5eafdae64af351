"""`ragkv bench scale`: a cluster of any size, simulated from measured speeds; the simulation beside real services."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.common import show
from ragkv.cli.common import Collection, Json, progress, settings_from, writable, write_json

if TYPE_CHECKING:
    from benchmarks.scale_calibrate import CalibrationRound, ReplayParams
    from benchmarks.serve_plan import LoadParams
    from ragkv.client.models import Options
    from ragkv.config import Settings

GIB = 2**30
CALIBRATION_QUESTIONS = 48


def scale(
    file: Json = None,
    replicas: Annotated[
        list[int] | None, typer.Option("--replicas", min=1, help="Replicas; again for more. Default: 100.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="random, round-robin, least-loaded, hash, hash-fewest, passage, holders; again for more; all.",
        ),
    ] = None,
    speeds: Annotated[
        str, typer.Option("--speeds", help="What was measured: llama-3.1-8b (a GPU) or smollm2-135m (two CPU cores).")
    ] = "llama-3.1-8b",
    rate: Annotated[
        float, typer.Option("--rate", min=0.001, help="Questions a second that arrive for each replica (Poisson).")
    ] = 1.0,
    questions: Annotated[
        int | None,
        typer.Option("--questions", min=1, help="Questions that are counted. Default: 100000; 48 with --calibrate."),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup", min=0, help="Questions that fill the host tiers before. Default: three times as many."
        ),
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", min=1, help="Chunks of all collections.")] = 10**8,
    collections: Annotated[int, typer.Option("--collections", min=1, help="Collections, all of one size.")] = 1000,
    zipf: Annotated[float, typer.Option("--zipf", min=0, help="Exponent of the popularity of passages.")] = 1.0,
    collection_zipf: Annotated[
        float, typer.Option("--collection-zipf", min=0, help="Exponent of the popularity of collections.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", min=1, max=64, help="Chunks to retrieve.")] = 16,
    neighbours: Annotated[
        int, typer.Option("--neighbours", min=1, help="Chunks of a document that are retrieved together.")
    ] = 4,
    answer_tokens: Annotated[float, typer.Option("--answer-tokens", min=1, help="Tokens of an answer, mean.")] = 64.0,
    load: Annotated[
        float | None,
        typer.Option(
            "--load", min=0, help="Bytes that a question reads of a chunk over the chunk's KV. Default: measured."
        ),
    ] = None,
    host_gib: Annotated[float, typer.Option("--host-gib", min=0, help="Host memory for KV of a replica, GiB.")] = 64.0,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="Nodes of the store. Default: half the replicas, at least 3.")
    ] = None,
    node_gib: Annotated[
        float, typer.Option("--node-gib", min=0, help="Memory for KV of a node, GiB; 0: every chunk is stored.")
    ] = 0.0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="As RAGKV_BATCH.")] = 16,
    queue: Annotated[int, typer.Option("--queue", min=0, help="As RAGKV_QUEUE.")] = 32,
    spill: Annotated[
        int, typer.Option("--spill", min=1, help="Running questions from which a replica may pass questions on.")
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of everything that is drawn.")] = 1,
    calibrate: Annotated[
        list[str] | None,
        typer.Option("--calibrate", help="Address of a running service; again for more: predict them, and measure."),
    ] = None,
    utilisation: Annotated[
        float, typer.Option("--utilisation", min=0.01, help="Calibration: arrivals over what services answer in turn.")
    ] = 0.5,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Calibration: times that all is measured.")] = 4,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Calibration: longest answer.")] = 8,
    collection: Collection = "default",
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the tables to this Markdown file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=writable, help="Draw times and tiers into this .png or .svg file.")
    ] = None,
) -> int:
    """A cluster, simulated: hit ratio, TTFT, network and use of replicas by routing policy. Measures nothing itself."""
    if plot is not None:
        from benchmarks.plot import check_plot

        check_plot(plot)
    from benchmarks.scale_speeds import speeds_of

    found = speeds_of(speeds) if load is None else dataclasses.replace(speeds_of(speeds), load=load)
    _require_simpy()
    from benchmarks.scale import ClusterParams, simulate_all
    from benchmarks.scale_calibrate import ReplayParams
    from benchmarks.scale_load import ScaleLoad
    from benchmarks.scale_routing import POLICIES, SpillParams
    from benchmarks.scale_table import ScaleRow, figures, scale_grid
    from benchmarks.serve_plan import LoadParams

    if calibrate:
        asked = LoadParams(collection, questions or CALIBRATION_QUESTIONS, zipf=zipf, seed=seed)
        options: Options = {"collection": collection, "method": "scout", "top_k": top_k, "max_tokens": max_tokens}
        how = ReplayParams(rounds, utilisation, host_bytes=int(host_gib * GIB), seed=seed)
        _show_calibration(asyncio.run(_calibrate(settings_from(), calibrate, asked, options, how)), file, table)
        return 0
    count, rows = questions or 100_000, list[ScaleRow]()
    with progress() as report:
        for number in replicas or [100]:
            wide = nodes or max(3, -(-number // 2))
            cluster = ClusterParams(
                number, found, int(host_gib * GIB), wide, int(node_gib * GIB), batch, queue, SpillParams(least=spill)
            )
            asking = ScaleLoad(
                rate * number, count, 3 * count if warmup is None else warmup, collections, chunks, collection_zipf,
                zipf, top_k, neighbours, answer_tokens, seed=seed,
            )  # fmt: skip
            rows += [ScaleRow(number, each) for each in simulate_all(cluster, asking, policy or POLICIES, report)]
    title = (
        f"{speeds}, simulated: {chunks:,} chunks in {collections:,} collections, {top_k} a question, "
        f"{rate:g} questions a second for each replica; ms"
    )
    write_json(file, {"title": title, "rows": [figures(each) for each in rows]})
    show([(title, scale_grid(rows), ())], table)
    if plot is not None:
        from benchmarks.plot import plot_scale

        plot_scale(rows, title, plot)
    return 0


def _require_simpy() -> None:
    from ragkv.errors import ConfigError

    try:
        import simpy  # noqa: F401  # checks only whether it is installed
    except ImportError:
        raise ConfigError("`ragkv bench scale` needs simpy: pip install 'simpy>=4.1,<5'") from None


async def _calibrate(
    settings: Settings, urls: Sequence[str], asked: LoadParams, options: Options, how: ReplayParams
) -> list[CalibrationRound]:
    from benchmarks.scale_calibrate import calibrate
    from benchmarks.serve_plan import prepare
    from ragkv.client import AsyncClient

    key, timeout = settings.key.get_secret_value(), settings.deadline + 30
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(url, key, timeout, retries=0)) for url in urls]
        load = await prepare(clients[0], asked)
        with progress() as report:
            return await calibrate(clients, load.questions, options, how, report)


def _show_calibration(rounds: Sequence[CalibrationRound], file: Path | None, table: Path | None) -> None:
    from benchmarks.scale_calibrate import compare
    from benchmarks.scale_table import comparison_grid

    found, count = compare(rounds), len(rounds[0].predicted.busy)
    busy = sum(sum(each.predicted.busy) for each in rounds) / len(rounds) / count
    title = f"{count} services, {sum(len(each.together) for each in rounds)} questions; busy, as predicted: {busy:.0%}"
    write_json(file, {"title": title, "rows": [{**dataclasses.asdict(each), "error": each.error} for each in found]})
    show([(title, comparison_grid(found), ())], table)
