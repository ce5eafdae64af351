"""`ragkv demo`: ingest sample documents, compare three methods, then sparse prefill and decoding on longer contexts."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ragkv.cli.common import tell
from ragkv.cli.samples import samples_folder
from ragkv.config import Settings
from ragkv.engine.engine import Engine
from ragkv.engine.registry import FULL
from ragkv.evaluation.score import exact_match, f1
from ragkv.ingest.loader import load
from ragkv.ingest.pipeline import ingest
from ragkv.report import Report
from ragkv.types import AskOptions, Document

METHODS = (FULL, "samkv-fusion", "scout")
LONG = 12
"""Chunks of a longer context, which holds all of their rows: the method is `reuse`."""
POLICIES = {
    "dense": ("dense", "dense"),
    "critiprefill": ("critiprefill", "dense"),
    "psa": ("dense", "psa"),
}
"""Prefill and decode policy of each row of the second table."""
COLLECTION = "demo"


@dataclass(frozen=True)
class DemoQuestion:
    """A line of the samples' questions.jsonl."""

    text: str
    gold: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class DemoAnswer:
    """One question answered by one method."""

    answer: str
    em: float
    f1: float
    report: Report


def run(settings: Settings, console: Console) -> None:
    """Ingest the samples into a separate data folder, ask with every method, and print the comparison."""
    own = settings.model_copy(update={"data": settings.data / "demo"})
    questions = chosen(read_questions(samples_folder() / "questions.jsonl"))
    with Engine.open(own, tell) as engine:
        read_samples(engine, samples_folder(), console)
        for method in METHODS:  # not measured: the first question loads the embedder
            engine.answer(questions[0].text, AskOptions(collection=COLLECTION, method=method, max_tokens=1))
        rows: dict[str, list[DemoAnswer]] = {method: [] for method in METHODS}
        for number, question in enumerate(questions, start=1):
            for method in METHODS:
                rows[method].append(ask(engine, question, AskOptions(COLLECTION, method=method)))
            console.print(_question_table(number, question, {method: rows[method][-1] for method in METHODS}))
        console.print(_summary(rows))
        console.print(_saving(rows), style="bold")
        console.print(_policy_table(ask_longer(engine, questions[::2])))
        console.print("`auto`, the default, reads contexts of this length densely; a request can name a policy.")


def read_questions(path: Path) -> list[DemoQuestion]:
    """Questions with gold answers, one JSON object a line."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [DemoQuestion(line["q"], tuple(line["a"]), line["kind"]) for line in lines]


def chosen(questions: Sequence[DemoQuestion]) -> list[DemoQuestion]:
    """Every fourth question that one document answers, and all others, to keep the demo short."""
    easy = [question for question in questions if question.kind == "one"]
    return easy[::4] + [question for question in questions if question.kind != "one"]


def read_samples(engine: Engine, samples: Path, console: Console) -> None:
    """Ingest the sample documents. Unchanged ones are skipped."""
    loaded = load([samples], engine.settings.max_document_bytes, COLLECTION, root=samples)
    documents = [document for document in loaded if isinstance(document, Document)]
    chunks = tokens = 0
    for document in track(documents, "reading documents", console=console, disable=not console.is_terminal):
        outcome = ingest(engine, document)
        chunks, tokens = chunks + outcome.chunks, tokens + outcome.tokens
    size = engine.store.stats().bytes / 2**20
    console.print(
        f"{len(documents)} documents, {chunks} chunks, {tokens} tokens were read once by {engine.model.name}; "
        f"their KV is {size:.0f} MiB in the {engine.settings.store.split(':')[0]} store.\n"
    )


def ask_longer(engine: Engine, questions: Sequence[DemoQuestion]) -> dict[str, list[DemoAnswer]]:
    """Answer every question over longer contexts, under each policy."""
    rows: dict[str, list[DemoAnswer]] = {name: [] for name in POLICIES}
    for question in questions:
        for name, (prefill, decode) in POLICIES.items():
            options = AskOptions(COLLECTION, top_k=LONG, method="reuse", prefill=prefill, decode=decode, max_tokens=8)
            rows[name].append(ask(engine, question, options))
    return rows


def ask(engine: Engine, question: DemoQuestion, options: AskOptions) -> DemoAnswer:
    """Answer and score one question."""
    answer = engine.answer(question.text, options)
    text = answer.answer
    return DemoAnswer(text, exact_match(text, question.gold), f1(text, question.gold), answer.report)


def _columns(table: Table) -> Table:
    for name in ("EM", "F1", "sequence", "recompute", "load", "TTFT ms"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _question_table(number: int, question: DemoQuestion, asked: dict[str, DemoAnswer]) -> Table:
    title = f"{number}. {question.text}   gold: {question.gold[0]} ({question.kind})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("method", no_wrap=True, min_width=12)
    table.add_column("answer", min_width=24, max_width=40)
    _columns(table)
    for method, row in asked.items():
        table.add_row(method, row.answer, *_figures([row]))
    return table


def _summary(rows: dict[str, list[DemoAnswer]]) -> Table:
    table = Table(title="\nAll questions (means; TTFT: median, retrieval and loading included)", title_justify="left")
    table.add_column("method", no_wrap=True)
    _columns(table)
    for method, asked in rows.items():
        table.add_row(method, *_figures(asked))
    return table


def _policy_table(rows: dict[str, list[DemoAnswer]]) -> Table:
    context = statistics.fmean(row.report.tokens.context for row in rows["dense"])
    title = (
        f"\nEvery second question again, over {LONG} chunks of {context:.0f} tokens, with `reuse` (means; query-key "
        "pairs of the prefill, keys of a decode step)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("policy", no_wrap=True)
    for name in ("EM", "F1", "pairs read", "of dense", "keys read", "of dense"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, asked in rows.items():
        em, score, *_ = _figures(asked)
        table.add_row(name, em, score, *_pairs(asked), *_keys(asked))
    return table


def _pairs(asked: Sequence[DemoAnswer]) -> tuple[str, str]:
    """Return the pairs that a prefill read, and their share of those of dense attention."""
    reports = [row.report.prefilling for row in asked]
    read = statistics.fmean(each.pairs_read or 0 for each in reports)
    dense = statistics.fmean(each.pairs_dense or 0 for each in reports)
    return (f"{read / 1e6:.1f} M", f"{read / dense:.0%}") if dense else ("all", "100%")


def _keys(asked: Sequence[DemoAnswer]) -> tuple[str, str]:
    """Return the keys that a decode step read, and their share of those of dense decoding."""
    reports = [row.report.decoding for row in asked if row.report.decoding.steps]
    if not reports:
        return "", ""
    read, present = (statistics.fmean(values) for values in zip(*((r.read, r.present) for r in reports), strict=True))
    return f"{read:.0f}", f"{read / present:.0%}"


def _figures(asked: Sequence[DemoAnswer]) -> list[str]:
    def mean(values: Sequence[float]) -> str:
        return f"{sum(values) / len(values):.2f}"

    ratios = [row.report.ratios for row in asked]
    return [
        mean([row.em for row in asked]),
        mean([row.f1 for row in asked]),
        mean([r.sequence for r in ratios]),
        mean([r.recompute for r in ratios]),
        mean([r.load for r in ratios]),
        f"{statistics.median(row.report.timings_ms.ttft for row in asked):.0f}",
    ]


def _saving(rows: dict[str, list[DemoAnswer]]) -> str:
    full, best = ([row.report for row in rows[method]] for method in (FULL, METHODS[-1]))
    times = [statistics.median(report.timings_ms.ttft for report in reports) for reports in (full, best)]
    kept = sum(report.ratios.sequence for report in best) / len(best)
    again = sum(report.ratios.recompute for report in best) / len(best)
    return (
        f"\n{METHODS[-1]} attends to {kept:.0%} of the context, recomputes {again:.0%} of it and gives the first token "
        f"{times[0] / times[1]:.1f} times sooner than full recompute."
    )
