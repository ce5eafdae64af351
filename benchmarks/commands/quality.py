"""`ragkv bench quality`: every method on questions with known answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.commands.sets import Chunks, Fit, LongBench, MaxTokens, Questions, Sets, longbench_questions
from ragkv.cli.common import Device, Json, Model, out, progress, settings_from, tell, writable, write_json

if TYPE_CHECKING:
    from ragkv.evaluation.sets import QuestionSet
    from ragkv.evaluation.table import Row
    from ragkv.model.decoder import DecoderModel


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
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the table to this Markdown file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", callback=writable, help="Draw F1 over TTFT into this .png or .svg file.")
    ] = None,
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
    from benchmarks.plot import check_plot
    from benchmarks.plot import plot as draw
    from benchmarks.record import RunRecord
    from benchmarks.stored import disk
    from ragkv.engine.open_model import load_model
    from ragkv.engine.registry import METHOD_NAMES
    from ragkv.evaluation.evidence import set_evidence
    from ragkv.evaluation.quality import NO_CONTEXT, QualityParams, ask_all
    from ragkv.evaluation.table import by_set, markdown, markdown_by_set, rows
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
        from benchmarks.page import page

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
    from benchmarks.answers import generated_sets
    from benchmarks.natural import natural_sets

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
