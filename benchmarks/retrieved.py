"""Answers over a whole collection: retrieval is real, and every question is asked with several numbers of chunks.

The passages of all contexts in files of LongBench's format form one collection, so a question's own passages compete
with those of all others. Every question is asked by every method with every `top_k`, in turns, through the engine. The
time to the first token includes retrieval and loading from the store. The model, the store and the page cache are warm.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.grid import TextGrid, number, spread
from benchmarks.longbench import longbench_sets, passages_of
from ragkv.engine.engine import Engine
from ragkv.engine.registry import check_method
from ragkv.errors import InputError
from ragkv.evaluation.score import exact_match, f1, interval, normalise
from ragkv.evaluation.sets import SetQuestion
from ragkv.ingest.pipeline import ingest
from ragkv.types import AskOptions, Document

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""


@dataclass(frozen=True)
class RetrievedParams:
    """What is asked.

    Attributes:
        methods: As for `AskOptions`.
        top_k: Numbers of chunks to retrieve; the first one is what others are compared with.
        questions: The first so many questions; 0: all.
        max_tokens: Longest answer.
    """

    methods: tuple[str, ...] = ("full", "scout")
    top_k: tuple[int, ...] = (6, 24, 48)
    questions: int = 0
    max_tokens: int = 24


@dataclass(frozen=True)
class RetrievedAnswer:
    """One answer.

    Attributes:
        answer: Its text.
        em: Exact match.
        f1: Token F1.
        found: Whether an accepted answer stands in a retrieved document.
        context: Tokens of the retrieved chunks.
        kept: Tokens of them that the answer's tokens attended to, in the mean over layers.
        ttft: Milliseconds from the question to the first token.
        without_retrieval: The same without the search.
    """

    answer: str
    em: float
    f1: float
    found: bool
    context: int
    kept: float
    ttft: float
    without_retrieval: float


@dataclass(frozen=True)
class RetrievedRow:
    """One method with one number of chunks: means over the questions, medians of the times (ms).

    Attributes:
        delta: F1 minus that of the first row.
        low: Lower end of its 95% interval, by a paired bootstrap.
        high: Upper end.
        ttft_ratio: Median over the questions of `ttft` / that of the same method with the first `top_k`.
        answers: Of all questions, in order.
    """

    method: str
    top_k: int
    em: float
    f1: float
    delta: float
    low: float
    high: float
    found: float
    context: float
    kept: float
    ttft: float
    without_retrieval: float
    ttft_ratio: float
    answers: tuple[str, ...]


def read_collection(files: Sequence[Path]) -> tuple[list[Document], list[SetQuestion]]:
    """Return the passages of all contexts, each once, and the questions.

    Raises:
        InputError: A file cannot be read.
    """
    documents: dict[tuple[str, str], Document] = {}
    questions: list[SetQuestion] = []
    for path in files:
        for title, text in passages_of(path):
            documents.setdefault((title, text), Document(f"passage-{len(documents)}", title, text))
        sets = longbench_sets(path, lambda document: [(document.title, document.text)])
        questions += [question for each in sets for question in each.questions]
    return list(documents.values()), questions


def ask_collection(
    engine: Engine,
    documents: Sequence[Document],
    questions: Sequence[SetQuestion],
    params: RetrievedParams,
    progress: Progress,
) -> list[RetrievedRow]:
    """Ingest the documents, ask every question in every way, and return a row for each.

    A method whose context with some `top_k` does not fit the model has no row for that `top_k`.

    Raises:
        InputError: There is no such method, no context of the first row fits the model, or there are no questions.
    """
    if not questions:
        raise InputError("there are no questions")
    for method in params.methods:
        check_method(method)
    for done, document in enumerate(documents, 1):
        ingest(engine, document)
        progress("ingest", done, len(documents))
    asked = questions[: params.questions or len(questions)]
    cases = list(product(dict.fromkeys(params.methods), dict.fromkeys(params.top_k)))
    texts = {document.id: normalise(document.text) for document in documents}
    answers: dict[tuple[str, int], list[RetrievedAnswer]] = {case: [] for case in cases}
    for done, question in enumerate([asked[0], *asked]):  # the first one twice: nothing counts before all is warm
        for case in list(answers):
            try:
                found = _ask(engine, question, case, texts, params.max_tokens)
            except InputError:
                if case == cases[0]:
                    raise
                del answers[case]
                continue
            answers[case] += [found] if done else []
        progress("ask", done, len(asked))
    first = answers[cases[0]]
    fewest = {method: answers.get((method, cases[0][1]), []) for method, _ in cases}
    return [_row(case, found, first, fewest[case[0]] or found) for case, found in answers.items()]


def _ask(
    engine: Engine, question: SetQuestion, case: tuple[str, int], texts: dict[str, str], max_tokens: int
) -> RetrievedAnswer:
    method, top_k = case
    found = engine.answer(question.text, AskOptions(method=method, top_k=top_k, max_tokens=max_tokens))
    report = found.report
    retrieved = {chunk.document_id for chunk in report.chunks}
    gold = [normalise(each) for each in question.gold]
    return RetrievedAnswer(
        answer=found.answer,
        em=exact_match(found.answer, question.gold, question.language),
        f1=f1(found.answer, question.gold, question.language),
        found=any(each in texts[document] for document in retrieved for each in gold),
        context=report.tokens.context,
        kept=report.tokens.kept,
        ttft=report.timings_ms.ttft,
        without_retrieval=report.timings_ms.ttft - report.timings_ms.retrieve,
    )


def _row(
    case: tuple[str, int],
    answers: Sequence[RetrievedAnswer],
    first: Sequence[RetrievedAnswer],
    fewest: Sequence[RetrievedAnswer],
) -> RetrievedRow:
    """first: answers of the first row. fewest: of the same method with the first `top_k`."""
    differences = [mine.f1 - other.f1 for mine, other in zip(answers, first, strict=True)]
    low, high = interval(differences)
    return RetrievedRow(
        method=case[0],
        top_k=case[1],
        em=statistics.fmean(each.em for each in answers),
        f1=statistics.fmean(each.f1 for each in answers),
        delta=statistics.fmean(differences),
        low=low,
        high=high,
        found=statistics.fmean(each.found for each in answers),
        context=statistics.fmean(each.context for each in answers),
        kept=statistics.fmean(each.kept for each in answers),
        ttft=statistics.median(each.ttft for each in answers),
        without_retrieval=statistics.median(each.without_retrieval for each in answers),
        ttft_ratio=statistics.median(mine.ttft / other.ttft for mine, other in zip(answers, fewest, strict=True)),
        answers=tuple(each.answer for each in answers),
    )


def grid(rows: Sequence[RetrievedRow]) -> TextGrid:
    """Scores and shares in percent, times in ms."""
    heads = ("method", "top_k", "EM", "F1", "Δ F1 to the first (95%)", "answer found", "context", "kept")
    cells = [
        (
            row.method,
            str(row.top_k),
            number(row.em, ".1f", 100),
            number(row.f1, ".1f", 100),
            spread(row.delta, row.low, row.high),
            number(row.found, ".1f", 100),
            number(row.context, ".0f"),
            number(row.kept, ".0f"),
            number(row.ttft, ".0f"),
            number(row.without_retrieval, ".0f"),
            number(row.ttft_ratio, ".2f"),
        )
        for row in rows
    ]
    return TextGrid((*heads, "TTFT ms", "without search", "× first top_k"), tuple(cells))
