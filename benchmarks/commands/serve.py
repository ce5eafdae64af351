"""`ragkv bench serve`: the same load of questions for a service, once with each method."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.commands.common import Piece, show
from ragkv.cli.common import Collection, Data, Json, printable, progress, settings_from, writable, write_json

if TYPE_CHECKING:
    from httpx2 import AsyncBaseTransport

    from benchmarks.serve import LoadResult, ServiceFacts
    from benchmarks.serve_plan import LoadParams, ServeLoad
    from benchmarks.serve_table import LoadSummary
    from ragkv.client import AsyncClient
    from ragkv.client.models import Options
    from ragkv.config import Settings


def serve(
    file: Json = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=0.001, help="Open loop: questions that arrive a second (Poisson).")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help="Closed loop: questions that are kept in flight. Default: 1."),
    ] = None,
    questions: Annotated[int | None, typer.Option("--questions", min=1, help="Default: 32, or the trace's.")] = None,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Questions that each method answers before, uncounted.")
    ] = 1,
    questions_file: Annotated[
        Path | None,
        typer.Option(
            "--questions-file",
            help='JSON lines {"question", "documents"?, "at"?}: text, ids, seconds. Where each has `at`, and without '
            "--rate and --concurrency, it is a trace: questions arrive at these times. Default: questions that quote "
            "the documents.",
        ),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option("--documents", min=1, max=64, help="Ask each question over so many documents. Default: over all."),
    ] = None,
    zipf: Annotated[
        float,
        typer.Option(
            "--zipf", min=0, help="Exponent of the popularity of documents, or of a file's questions; 0: all are equal."
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, documents and questions.")] = 1,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="As for ask; again for more. Default: full and the service's own."),
    ] = None,
    prefill: Annotated[str | None, typer.Option("--prefill", help="As for ask.")] = None,
    decode: Annotated[str | None, typer.Option("--decode", help="As for ask.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, max=64, help="Chunks to retrieve.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")] = None,
    ttft_limit: Annotated[
        float | None,
        typer.Option("--ttft-limit", min=0, help="Goodput: questions whose first token comes within these seconds."),
    ] = None,
    collection: Collection = "default",
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the tables to this Markdown file.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", callback=writable, help="Draw the distributions of times into this .png or .svg file."),
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="Open the data folder here instead of asking a service: no HTTP in between."),
    ] = False,
    data: Data = None,
    url: Annotated[
        str | None, typer.Option(help="Address of the service (RAGKV_URL, else the port of the settings on 127.0.0.1).")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="API key. Others may see a command line: better set RAGKV_KEY.")
    ] = None,
) -> int:
    """`ragkv serve` under load, or --in-process: TTFT, time between tokens, throughput, goodput, reuse."""
    if rate is not None and concurrency is not None:
        raise typer.BadParameter(
            "an open loop has a rate, a closed one a concurrency: leave one out", param_hint="--rate"
        )
    if documents is not None and questions_file is not None:
        raise typer.BadParameter("the file's lines name their documents", param_hint="--documents")
    if in_process and url is not None:
        raise typer.BadParameter("--in-process asks no service", param_hint="--url")
    settings = settings_from(data, url=url, key=key)
    from benchmarks.serve_plan import LoadParams
    from benchmarks.serve_table import summary_of

    if plot is not None:
        from benchmarks.plot import check_plot

        check_plot(plot)
    params = LoadParams(collection, questions, warmup, questions_file, documents, zipf, rate, concurrency, seed)
    options: Options = {"collection": collection, "top_k": top_k, "max_tokens": max_tokens}
    options |= {"prefill": prefill, "decode": decode}
    service, load, results = asyncio.run(_measure(settings, params, options, method or (), in_process))
    found = [summary_of(each, load.concurrency, ttft_limit) for each in results]
    how = _how(load, params)
    write_json(file, _figures(service, how, found, results))
    show(_pieces(f"{service.model}: {how}", found, results), table)
    if plot is not None:
        from benchmarks.plot import plot_serve

        plot_serve(results, ttft_limit, f"{service.model}: {how}", plot)
    return 0 if all(each.answered for each in found) else 1


async def _measure(
    settings: Settings, params: LoadParams, options: Options, methods: Sequence[str], in_process: bool
) -> tuple[ServiceFacts, ServeLoad, list[LoadResult]]:
    """Ask the load with each method. Returns facts about the service, the load, and a result for each method."""
    from benchmarks.serve import ask_load, service_facts
    from benchmarks.serve_plan import prepare

    async with _service_here(settings) if in_process else _service_of(settings) as client:
        service = await service_facts(client)
        load = await prepare(client, params)
        with progress() as report:
            results = [
                await ask_load(client, load, {**options, "method": name}, partial(report, name))
                for name in dict.fromkeys(methods or ("full", service.method))
            ]
    return service, load, results


def _service_of(settings: Settings, transport: AsyncBaseTransport | None = None) -> AsyncClient:
    """Return a client of the service that the settings name."""
    from ragkv.client import AsyncClient

    address = settings.url or f"http://127.0.0.1:{settings.port}"
    key, timeout = settings.key.get_secret_value(), settings.deadline + 30  # the service refuses what exceeds its own
    return AsyncClient(address, key, timeout, retries=0, transport=transport)


@asynccontextmanager
async def _service_here(settings: Settings) -> AsyncIterator[AsyncClient]:
    """Open the service in this process, without a port; yield a client of it."""
    from benchmarks.in_process import InProcessTransport
    from ragkv.api.app import create_app
    from ragkv.api.observability.logs import configured_logging

    settings = settings.model_copy(update={"url": ""})
    with configured_logging(settings.log, "warning", sys.stderr):
        app = create_app(settings)
        async with app.router.lifespan_context(app), _service_of(settings, InProcessTransport(app)) as client:
            yield client


def _how(load: ServeLoad, params: LoadParams) -> str:
    """The load in words."""
    if load.concurrency is not None:
        arrivals = f"{load.concurrency} in flight"
    else:
        arrivals = "arrivals of a trace" if params.rate is None else f"Poisson arrivals, {params.rate:g} a second"
    over = f", {params.documents} documents each" if params.documents else ""
    return f"{len(load.questions)} questions{over}, {arrivals}, Zipf {params.zipf:g}, seed {params.seed}"


def _pieces(title: str, found: Sequence[LoadSummary], results: Sequence[LoadResult]) -> list[Piece]:
    from benchmarks.serve_table import failures, pool_grid, pool_note, reuse_grid, time_grid

    pieces: list[Piece] = [
        (f"{title}; ms", time_grid(found), [printable(line) for line in failures(results)]),
        ("Reuse, by the reports", reuse_grid(found), ()),
    ]
    if any(each.pool or (each.counters and each.counters.read) for each in found):
        pieces.append(("Pool of KV blocks", pool_grid(found), list(filter(None, map(pool_note, found)))))
    return pieces


def _figures(
    service: ServiceFacts, how: str, found: Sequence[LoadSummary], results: Sequence[LoadResult]
) -> dict[str, Any]:
    """Everything for --json: the summaries, and the times of every question without those of its tokens."""
    methods = []
    for summary, result in zip(found, results, strict=True):
        answers = [
            {
                "scheduled": each.scheduled,
                "sent": each.sent,
                "first": each.tokens[0] if each.tokens else None,
                "ended": each.ended,
                "tokens": each.report.tokens.generated if each.report else 0,
                "error": each.error,
            }
            for each in result.answers
        ]
        methods.append({**dataclasses.asdict(summary), "answers": answers})
    return {**dataclasses.asdict(service), "questions": how, "methods": methods}
