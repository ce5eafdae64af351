"""An answer as the command line shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragkv.cli.common import out, printable
from ragkv.passages import page_name
from ragkv.report import NOT_HELD, describe_confidence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ragkv.passages import Citation
    from ragkv.report import Answer, Report

SENTENCE = 300
"""Characters that are shown of the sentence in which an answer stands."""


def show_answer(answer: Answer, with_question: bool) -> None:
    """Print an answer as text: the answer, citations, and one line about reuse."""
    from rich.text import Text

    console = out()
    if with_question:
        console.print(Text(printable(answer.question), style="dim"))
    console.print(Text(printable(answer.answer) or "(no answer)", style="bold"))
    if answer.report.held == 0 and not answer.report.abstained:
        console.print(Text(f"  {NOT_HELD}", style="yellow"))
    cited = list(enumerate(answer.citations, 1))
    holding = [(number, citation) for number, citation in cited if citation.marks]
    for number, citation in holding:
        title = printable(citation.title or citation.document_id)
        console.print(Text.assemble((f"  [{number}] ", "cyan"), title, (f"  {place_of(citation)}", "dim")))
        console.print(Text(f"      {sentence_of(citation, answer.question)}"))
    if others := _by_document((number, citation) for number, citation in cited if not citation.marks):
        console.print(Text(f"  {'also ' if holding else ''}read: {others}", style="dim"))
    console.print(Text(f"  {footer(answer)}", style="dim"))
    if with_question:
        console.print()


def place_of(citation: Citation) -> str:
    """Say where a passage stands: its document, and its page or heading."""
    heading = citation.heading if citation.heading != citation.title else None
    place = page_name(citation.document_id, citation.page) or heading
    return printable(", ".join(filter(None, (citation.document_id, place))))


def _by_document(cited: Iterable[tuple[int, Citation]]) -> str:
    """Name documents, each with the numbers of its passages before it."""
    numbers: dict[str, list[int]] = {}
    for number, citation in cited:
        numbers.setdefault(citation.document_id, []).append(number)
    return ", ".join(f"{''.join(f'[{number}]' for number in own)} {printable(id)}" for id, own in numbers.items())


def sentence_of(citation: Citation, question: str = "") -> str:
    """Return the sentence in which the answer stands, on one line and cut around the answer where it is long.

    Of several sentences it is the first that has most words of the question.
    """
    origin, mark = citation.start or 0, citation.best_mark(question)
    start, end = mark.sentence_start - origin, mark.sentence_end - origin
    if end - start > SENTENCE:
        start = max(start, (mark.start + mark.end - SENTENCE) // 2 - origin)
    shown = printable(" ".join(citation.text[max(0, start) : start + SENTENCE][: end - start].split()))
    left, right = start > mark.sentence_start - origin, start + SENTENCE < end
    return f"{'…' * left}{shown}{'…' * right}"


def footer(answer: Answer) -> str:
    """The report in one line."""
    report = answer.report
    if report.rule:
        return f"answered by a rule ({report.rule}), without documents or the model"
    found = report.cache.hits.gpu + report.cache.hits.host + report.cache.hits.store
    parts = [
        report.method,
        f"kept {report.ratios.sequence:.0%} of {report.tokens.context} tokens",
        f"recomputed {report.ratios.recompute:.0%}",
        f"loaded {report.ratios.load:.0%} of the KV",
        f"{found} of {report.cache.chunks} chunks from cache",
        f"first token {report.timings_ms.ttft:.0f} ms",
    ]
    if report.tokens.history:
        parts.insert(1, f"{report.tokens.history:.0f} tokens of earlier turns in the cache")
    if report.removed_turns:
        parts.insert(1, f"{report.removed_turns} earlier turns left out with documents that were deleted or replaced")
    parts[-1:-1] = policies_of(report)
    drafts = report.decoding.speculation
    if drafts is not None and drafts.drafted:
        parts.insert(-1, f"{drafts.accepted} of {drafts.drafted} drafted tokens accepted")
    if report.selection.promised is not None:
        parts.insert(-1, f"{report.selection.promised:.0%} of the evidence kept")
    if report.confidence is not None:
        parts.insert(-1, f"{describe_confidence(report.confidence)}{', withheld' if report.abstained else ''}")
    if report.cache.fallbacks:
        parts.insert(-1, f"{len(report.cache.fallbacks)} encoded again")
    return " · ".join(parts)


def policies_of(report: Report) -> list[str]:
    """What prefill and decode policies read, if any were at work, and what was read in place."""
    parts, reading, decoding = [], report.prefilling, report.decoding
    if reading.pairs_read is not None and reading.pairs_dense:
        share = f"read {reading.pairs_read / reading.pairs_dense:.0%} of {reading.pairs_dense} pairs"
        parts.append(reading.why_dense or f"{report.prefill} {share}")
    if report.decode != "dense" or "read everything" in decoding.why_dense:
        parts.append(decoding.why_dense or f"{report.decode} read {decoding.read:.0f} of {decoding.present:.0f} keys")
    if decoding.in_place:
        parts.append(f"{decoding.in_place:.0f} keys in place")
    if decoding.in_host:
        parts.append(f"{decoding.in_host:.0f} keys in host memory")
    return parts
