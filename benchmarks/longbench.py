"""Question sets from files in LongBench's format: JSON lines with `input`, `context`, `answers` and `language`.

Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding" (2024). The passages of the
multi-document sets (2WikiMQA, MuSiQue, HotpotQA: "Passage 1:", title, text; DuReader: "文章1", "标题：…", text) become
documents, and documents become chunks as they do at ingest. Nothing is skipped: a line that cannot be used is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv.errors import InputError
from ragkv.evaluation.sets import GoldSpan, QuestionSet, SetQuestion
from ragkv.types import Document

_HEADING = re.compile(r"^[ \t]*(?:Passage|文章)[ \t]*\d+[ \t]*[:：]?[ \t]*(?:\n|$)", re.MULTILINE)
_TITLE = re.compile(r"^(?:标题|Title)[ \t]*[:：][ \t]*")

Split = Callable[[Document], Sequence[tuple[str, str]]]
"""(title, text) of every chunk of a document."""


def longbench_sets(path: Path, split: Split) -> list[QuestionSet]:
    """Return one set per line. Raises InputError, which names file and line."""
    return [_set(line, place, path.stem, split) for line, place in _lines(path)]


def passages_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (title, text) of the passages of all lines. Raises InputError, which names file and line."""
    for line, place in _lines(path):
        for title, text in passages(_row(line, place)["context"], path.stem):
            if text:
                yield title or path.stem, text


def shorten(each: QuestionSet, tokens: Callable[[QuestionSet], int], limit: int) -> QuestionSet:
    """Remove chunks from the middle of a set until `tokens` of it are at most `limit`.

    LongBench's own script shortens long contexts in the same way, but not in whole chunks.
    """
    while tokens(each) > limit and len(each.chunks) > 1:
        gone = len(each.chunks) // 2
        questions = tuple(replace(q, span=_moved(q.span, gone)) for q in each.questions)
        each = replace(each, chunks=each.chunks[:gone] + each.chunks[gone + 1 :], questions=questions)
    return each


def passages(context: str, name: str) -> Iterator[tuple[str, str]]:
    """(title, text) of every passage; a context without headings is one passage, called `name`."""
    starts = [(match.start(), match.end()) for match in _HEADING.finditer(context)]
    if not starts:
        yield name, context.strip()
        return
    if context[: starts[0][0]].strip():
        yield name, context[: starts[0][0]].strip()
    ends = [start for start, _ in starts[1:]] + [len(context)]
    for (_, start), end in zip(starts, ends, strict=True):
        title, _, text = context[start:end].strip().partition("\n")
        title = _TITLE.sub("", title.strip())
        yield (title, text.strip()) if text.strip() else (name, title)


def _lines(path: Path) -> list[tuple[str, str]]:
    """Return (line, its place for messages) of every line that is not empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    lines = enumerate(text.split("\n"), 1)  # not splitlines: JSON strings may hold U+2028
    found = [(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not found:
        raise InputError(f"{path}: there are no questions in it")
    return found


def _set(line: str, place: str, name: str, split: Split) -> QuestionSet:
    row = _row(line, place)
    documents = [
        Document(f"{name}-{number}", title or name, text)
        for number, (title, text) in enumerate(passages(row["context"], name))
        if text
    ]
    chunks = tuple(chunk for document in documents for chunk in split(document))
    if not chunks:
        raise InputError(f"{place}: `context` holds no text")
    question = SetQuestion(
        row["input"].strip(), tuple(row["answers"]), "", _find(chunks, row["answers"][0]), row.get("language", "en")
    )
    return QuestionSet(chunks, (question,), place)


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise InputError(f"{place}: a JSON object is wanted, not {type(row).__name__}")
    for field in ("input", "context"):
        if not isinstance(row.get(field), str) or not row[field].strip():
            raise InputError(f"{place}: `{field}` is {'empty' if row.get(field) == '' else 'missing or no text'}")
    answers = row.get("answers")
    if not isinstance(answers, list) or not answers or not all(isinstance(a, str) and a.strip() for a in answers):
        raise InputError(f"{place}: `answers` must be a list of texts, with at least one")
    if not isinstance(row.get("language", "en"), str):
        raise InputError(f"{place}: `language` must be text, like en or zh")
    return row


def _moved(span: GoldSpan | None, gone: int) -> GoldSpan | None:
    """The span after the removal of a chunk."""
    if span is None or span.chunk == gone:
        return None
    return replace(span, chunk=span.chunk - (span.chunk > gone))


def _find(chunks: Sequence[tuple[str, str]], answer: str) -> GoldSpan | None:
    """Place of the answer, if it occurs exactly once."""
    found = [(n, text) for n, (_, text) in enumerate(chunks) if answer in text]
    if len(found) != 1 or found[0][1].count(answer) != 1:
        return None
    start = found[0][1].index(answer)
    return GoldSpan(found[0][0], start, start + len(answer))
