"""`ragkv bench …`: measurements, printed as aligned text and written as JSON with --json."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.bench_decode import decode
from ragkv.cli.bench_dialogues import dialogues
from ragkv.cli.bench_ingest import ingest
from ragkv.cli.bench_kernels import kernels
from ragkv.cli.bench_prefill import prefill
from ragkv.cli.bench_retrieval import retrieval
from ragkv.cli.bench_scale import scale
from ragkv.cli.bench_serve import serve
from ragkv.cli.bench_sets import Chunks, Fit, LongBench, MaxTokens, Questions, Sets, longbench_questions
from ragkv.cli.bench_stages import stages
from ragkv.cli.bench_ttft import ttft
from ragkv.cli.common import Device, Json, Model, Store, out, progress, settings_from, tell, write_json

if TYPE_CHECKING:
    from ragkv.bench.sets import QuestionSet
    from ragkv.bench.store import StoreResult
    from ragkv.bench.table import Row
    from ragkv.model.decoder import DecoderModel

bench = typer.Typer(help="Measure on this machine.", rich_markup_mode=None)
bench.command("decode")(decode)
bench.command("dialogues")(dialogues)
bench.command("ingest")(ingest)
bench.command("scale")(scale)
bench.command("serve")(serve)
bench.command("stages")(stages)
bench.command("kernels")(kernels)
bench.command("prefill")(prefill)
bench.command("retrieval")(retrieval)
bench.command("ttft")(ttft)


@bench.callback()
def _bench() -> None:
    pass


@bench.command("store")
def store_(
    file: Json = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed loads of each reader.")] = 100,
    layer_mib: Annotated[int, typer.Option(min=4, max=512, help="Size of each of the entry's 8 layers, MiB.")] = 16,
    store: Store = None,
) -> int:
    """Sparse loads from disk and Redis, compared with other readers; starts a redis-server unless --store names one."""
    settings = settings_from(None, store, None, None)
    from ragkv.bench.store import StoreParams
    from ragkv.bench.store import store as measure

    params = StoreParams(layer_bytes=layer_mib * 2**20, repeat=repeat)
    with progress() as report:
        result = measure(settings.store, settings.store_timeout, params, report)
    write_json(file, dataclasses.asdict(result))
    _show_store(result)
    return 0


@bench.command("quality")
def quality(
    file: Json = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", help="NAME or NAME:FIELD=VALUE,…; again for more. Default: all.")
    ] = None,
    natural: Annotated[bool, typer.Option("--natural", help="Ask about the natural documents.")] = False,
    longbench: LongBench = None,
    fit: Fit = False,
    chunks: Chunks = 8,
    sets: Sets = 4,
    questions: Questions = 25,
    seed: Annotated[int, typer.Option(min=0, help="Of the contexts.")] = 1,
    max_tokens: MaxTokens = 24,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="Append every answer to this JSONL file; continue from what it holds."),
    ] = None,
    table: Annotated[Path | None, typer.Option("--table", help="Write the table to this Markdown file.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw F1 over TTFT into this .png or .svg file.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with a table and a plot for each set to this file.")
    ] = None,
    body: Annotated[str | None, typer.Option("--body", help="How the store holds K and V: exact, int8 or fp8.")] = None,
    model: Model = None,
    device: Device = None,
) -> int:
    """Every method on questions with known answers: answers, blocks found, tokens kept and recomputed, times."""
    if natural and longbench:
        raise typer.BadParameter("give --natural or --longbench, not both", param_hint="--longbench")
    settings = settings_from(None, None, model, device, store_body=body)
    from ragkv.bench.evidence import set_evidence
    from ragkv.bench.plot import check_plot
    from ragkv.bench.plot import plot as draw
    from ragkv.bench.quality import NO_CONTEXT, QualityParams, ask_all
    from ragkv.bench.record import RunRecord
    from ragkv.bench.stored import disk
    from ragkv.bench.table import by_set, markdown, markdown_by_set, rows
    from ragkv.engine.open_model import load_model
    from ragkv.engine.registry import METHOD_NAMES
    from ragkv.retrieval import make_embedder

    if plot is not None:
        check_plot(plot)
    loaded = load_model(settings, tell)
    methods = tuple(dict.fromkeys(method or (*METHOD_NAMES, NO_CONTEXT)))
    asked = _sets(loaded, natural, longbench or [], chunks, (sets, questions, seed), max_tokens if fit else 0)
    record = RunRecord(out_file, loaded, asked, max_tokens, settings.prefix, settings.store_body) if out_file else None
    with disk(loaded, settings.store_body) as store, progress() as report:
        evidence = set_evidence(loaded, make_embedder(settings.embedder, str(loaded.device)))
        params = QualityParams(max_tokens, settings.prefix, store, evidence=evidence)
        if record is not None:
            params = dataclasses.replace(params, done=record.done, keep=record.keep)
        outcomes = ask_all(loaded, asked, methods, report, params)
    result = rows(outcomes)
    write_json(file, [dataclasses.asdict(row) for row in result])
    kind = "natural" if natural else "LongBench" if longbench else "generated"
    title = f"{loaded.name}: {result[0].questions} {kind} questions"
    if settings.store_body != "exact":
        title += f", {settings.store_body} bodies"
    out().print(title)
    _show_quality(result)
    names = [Path(each.name.rpartition(":")[0]).stem if longbench else kind for each in asked]
    by_name = by_set(outcomes, names)
    if table is not None:
        shown = markdown_by_set(by_name) if len(by_name) > 1 else markdown(result)
        table.write_text(f"{title}\n\n{shown}", encoding="utf-8")
    if plot is not None:
        draw(result, title, plot)
    if html is not None:
        from ragkv.bench.page import page

        html.write_text(page(title, by_name), encoding="utf-8")
    return 0


def _sets(
    model: DecoderModel,
    natural: bool,
    files: Sequence[Path],
    chunks: int,
    generated: tuple[int, int, int],
    fit: int,
) -> list[QuestionSet]:
    """generated: (sets, questions of each, seed). fit: room for the answer if contexts may be cut, else 0."""
    from ragkv.bench.answers import generated_sets
    from ragkv.bench.sets import natural_sets

    count, questions, seed = generated
    if natural:
        return natural_sets(chunks, seed)
    return longbench_questions(model, files, fit) if files else generated_sets(model, count, chunks, questions, seed)


def _show_quality(result: Sequence[Row]) -> None:
    """Print the figures as aligned text: shares, and F1's difference to full in points."""
    console = out()
    columns = (
        "em",
        "f1",
        "Δ f1 (95%)",
        "pgr",
        "recall",
        "by layer",
        "middle",
        "sequence",
        "recompute",
        "kv mib",
        "load",
        "ttft ms",
        "with load",
    )
    wide = max(16, *(len(row.method) for row in result))
    widths = (7, 7, 22, 7, 8, 10, 8, 10, 11, 9, 7, 9, 11)
    heads = "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True))
    console.print(f"{'method':<{wide}}{heads}", style="bold")
    for row in result:
        delta = "–"
        if row.delta is not None and row.low is not None and row.high is not None:
            delta = f"{100 * row.delta:+.1f} ({100 * row.low:+.1f} … {100 * row.high:+.1f})"
        shares = (row.pgr, row.recall, row.layer_recall, row.middle, row.sequence, row.recompute)
        cells = [f"{row.em:.3f}", f"{row.f1:.3f}", delta]
        cells += ["–" if share is None else f"{share:.3f}" for share in shares]
        cells += [f"{row.kv / 2**20:.1f}", "–" if row.load is None else f"{row.load:.3f}"]
        cells += [f"{row.ttft:.1f}", "–" if row.ttft_load is None else f"{row.ttft_load:.1f}"]
        line = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        console.print(f"{row.method:<{wide}}{line}")


def _show_store(result: StoreResult) -> None:
    """Print the figures as aligned text; GB are 10^9 bytes."""
    console = out()
    console.print(f"Redis: {result.server}; redis-py {'with' if result.hiredis else 'without'} hiredis")
    console.print(
        f"{result.cores} cores; {result.share:.0%} of the blocks of an entry of {result.entry_bytes / 2**20:.0f} MiB, "
        f"median of {result.repeat} loads"
    )
    console.print(f"{'range':<9}{'reader':<16}{'GB/s':>7}{'p50 ms':>9}{'p99 ms':>9}  checksums", style="bold")
    for row in sorted(result.rows, key=lambda row: row.range_bytes or row.bytes):
        size = f"{row.range_bytes // 1024} KiB" if row.range_bytes else "whole"
        checked = "verified" if row.verified else "none"
        console.print(f"{size:<9}{row.reader:<16}{row.gb_per_s:>7.2f}{row.p50:>9.1f}{row.p99:>9.1f}  {checked}")
    for one in result.comparisons:
        console.print(
            f"redis at {one.range_bytes // 1024} KiB: {one.to_get:.2f}x redis-py GET, {one.to_socket:.2f}x the best "
            f"plain socket, {one.to_whole:.3f} of the time for the whole entry"
        )
