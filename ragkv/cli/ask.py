"""`ragkv ask`: answer one question or a file of questions, with citations and the report."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

from ragkv.cli.common import (
    Collection,
    Data,
    Device,
    Model,
    Store,
    Url,
    check_documents,
    fail,
    opened,
    out,
    printable,
    settings_from,
    uncollected,
)
from ragkv.errors import InputError, RagkvError
from ragkv.evaluation.score import exact_match, f1
from ragkv.report import NOT_HELD, describe_confidence
from ragkv.types import AskOptions

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.passages import Citation
    from ragkv.report import Answer, Report
    from ragkv.types import Filter, Scalar


SENTENCE = 300
"""Characters that are shown of the sentence in which an answer stands."""
MANY = 16
"""Questions from which on `ask` decodes as a service does."""


@dataclass(frozen=True)
class FileQuestion:
    """A question and its gold answers. place: "FILE:LINE: ", or empty."""

    question: str
    gold: tuple[str, ...] = ()
    place: str = ""


@dataclass
class Score:
    """Sums over the questions with gold answers. A question that failed counts as wrong."""

    questions: int = 0
    em: float = 0.0
    f1: float = 0.0

    def add(self, answer: str, gold: Sequence[str]) -> None:
        """Add one question."""
        self.questions += 1
        self.em += exact_match(answer, gold)
        self.f1 += f1(answer, gold)

    def summary(self) -> dict[str, Any]:
        """The means: {"questions", "em", "f1"}."""
        return {"questions": self.questions, "em": self.em / self.questions, "f1": self.f1 / self.questions}


@dataclass
class Printer:
    """Prints answers as JSON lines or as text."""

    as_json: bool
    several: bool
    stream: TextIO = field(default_factory=lambda: sys.stdout)

    def answer(self, answer: Answer) -> None:
        """Print one answer."""
        if self.as_json:
            self._line(dataclasses.asdict(answer))
        else:
            _show(answer, self.several)

    def summary(self, score: Score) -> None:
        """Print the scores of all questions with gold answers."""
        if self.as_json:
            self._line({"summary": score.summary()})
        else:
            means = score.summary()
            out().print(f"{means['questions']} questions · exact match {means['em']:.3f} · F1 {means['f1']:.3f}")

    def _line(self, content: dict[str, Any]) -> None:
        self.stream.write(json.dumps(content, ensure_ascii=False) + "\n")
        self.stream.flush()


def ask(
    question: Annotated[str | None, typer.Argument(help="The question.", show_default=False)] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help='JSON lines {"q": "…", "a": ["gold", …]}; - reads stdin.')
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How chunks become one context cache: NAME, or NAME:FIELD=VALUE,…")
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(help="What prefilled rows read: auto, dense, critiprefill or loopserve, NAME:FIELD=VALUE,…"),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(help="What each token reads: auto, dense, psa, lfps, loopserve or topk, NAME:FIELD=VALUE,…"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, max=64, help="Chunks to retrieve.")] = None,
    filters: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            metavar="KEY=VALUE",
            help="Only documents with this metadata. Several keys must all match; of several values of a key one must.",
        ),
    ] = None,
    collection: Collection = "default",
    conversation: Annotated[
        str | None, typer.Option(help="Continue the conversation of this name, or start it.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, max=4096, help="Longest answer, in tokens.")] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="Answer with JSON that follows the JSON schema in this file.")
    ] = None,
    abstain_below: Annotated[
        float | None, typer.Option(min=0, max=1, help="Answer `unknown` where the confidence is lower.")
    ] = None,
    speculation: Annotated[
        bool | None,
        typer.Option(
            "--speculation/--no-speculation",
            help="Draft what the answer quotes from its prompt and verify several tokens in a pass; default: the "
            "setting.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per question.")] = False,
    data: Data = None,
    store: Store = None,
    model: Model = None,
    device: Device = None,
    url: Url = None,
) -> int:
    """Answer a question from the documents, with citations and what the answer reused."""
    if (question is None) == (file is None):
        raise typer.BadParameter("give either a question or --file", param_hint="QUESTION")
    settings = settings_from(data, store, model, device, url=url)
    questions = list(read_questions(file)) if file is not None else [FileQuestion(_text(question or ""))]
    with uncollected():
        _check_names(method, prefill, decode)
        if conversation is not None:
            _check_conversation(method or settings.method)
    options = AskOptions(
        *(collection, conversation, top_k, parse_filter(filters or []), method, prefill, decode, max_tokens),
        answer_schema=read_schema(schema) if schema is not None else None,
        abstain_below=abstain_below,
        speculation=speculation,
    )
    with _answerer(settings, options, questions) as answer:
        return _answer_all(answer, questions, Printer(as_json, bool(file)))


@contextmanager
def _answerer(
    settings: Settings, options: AskOptions, questions: Sequence[FileQuestion]
) -> Iterator[Callable[[str], Answer]]:
    """Yield the function that answers: by the service of the settings, else by an engine in this process.

    Args:
        settings: Name the service, or what the engine loads.
        options: How questions are asked.
        questions: What will be asked. Where rules may answer all of it, there need be no documents.
    """
    if settings.url:
        from ragkv.cli.remote import connected
        from ragkv.client.models import Options

        given: Any = {name: value for name, value in vars(options).items() if name in get_type_hints(Options)}
        with connected(settings) as service:
            yield lambda question: service.ask(question, conversation_id=options.conversation, **given)
    else:
        from ragkv.engine.service_rules import rule_of

        if options.answer_schema is not None or not all(rule_of(each.question, True) for each in questions):
            check_documents(settings, options.collection)
        with opened(_for_few(settings) if len(questions) < MANY else settings) as engine:
            yield lambda question: engine.answer(question, options)


def _for_few(settings: Settings) -> Settings:
    """Return settings without the copy of the weights to decode by: making it takes longer than a few answers save."""
    return settings.model_copy(update={"weights": "exact"}) if settings.weights == "auto" else settings


def _check_names(method: str | None, prefill: str | None, decode: str | None) -> None:
    from ragkv.engine.registry import check_decode_policy, check_method, check_prefill_policy

    for option, check, name in (
        ("--method", check_method, method or "full"),
        ("--prefill", check_prefill_policy, prefill),
        ("--decode", check_decode_policy, decode),
    ):
        try:
            check(name or "dense")
        except InputError as error:
            raise typer.BadParameter(str(error), param_hint=option) from None


def _check_conversation(method: str) -> None:
    from ragkv.engine.registry import check_sessions

    try:
        check_sessions(method)
    except InputError as error:
        raise typer.BadParameter(str(error), param_hint="--conversation") from None


def parse_filter(given: Sequence[str]) -> Filter | None:
    """Parse KEY=VALUE options into a filter.

    A value that is also JSON for a number, true, false or null matches both the string and the JSON value.
    """
    from ragkv.catalog.limits import WHOLE_NUMBERS

    found: dict[str, list[Scalar]] = {}
    for option in given:
        key, equals, value = _text(option).partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{option!r} is not KEY=VALUE", param_hint="--filter")
        found.setdefault(key, []).append(value)
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            continue
        # Of more than 64 bits, only the text can be in metadata.
        if (
            read is None
            or (isinstance(read, int) and read in WHOLE_NUMBERS)
            or (isinstance(read, float) and math.isfinite(read))
        ):
            found[key].append(read)
    return found or None


def _answer_all(ask: Callable[[str], Answer], questions: Sequence[FileQuestion], printer: Printer) -> int:
    """Answer in order. A question that fails is reported and the others continue. Returns the exit code."""
    code, score = 0, Score()
    for item in questions:
        try:
            answer = ask(item.question)
        except RagkvError as error:
            if not printer.several:
                raise
            code, text = fail(f"{item.place}{error}", 1), ""
        else:
            printer.answer(answer)
            text = answer.answer
        if item.gold:
            score.add(text, item.gold)
    if score.questions:
        printer.summary(score)
    return code


def read_schema(path: Path) -> dict[str, Any]:
    """Return the JSON schema of a file. Raises InputError."""
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(schema, dict):
        raise InputError(f"{path}: a JSON schema is an object")
    return schema


def read_questions(path: Path) -> Iterator[FileQuestion]:
    """Questions of a JSON lines file. Raises InputError, which names the line."""
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        lines = content.decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    if not any(map(str.strip, lines)):
        raise InputError(f"{path}: there are no questions in it")
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line, f"{path}:{number}: ")


def _parse(line: str, place: str) -> FileQuestion:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}not JSON ({error})") from None
    if not isinstance(item, dict) or not isinstance(item.get("q"), str):
        raise InputError(f'{place}a line is {{"q": "question", "a": ["gold answer", …]}}; "q" must be a string')
    gold = item.get("a", [])
    gold = [gold] if isinstance(gold, str) else gold
    if not isinstance(gold, list) or not all(isinstance(alias, str) for alias in gold):
        raise InputError(f'{place}"a" must be a list of strings')
    return FileQuestion(_text(item["q"], place), tuple(gold), place)


def _text(question: str, place: str = "") -> str:
    """Return the question. Raises InputError if it contains NUL or bytes that are not UTF-8."""
    if "\0" in question or any("\ud800" <= letter <= "\udfff" for letter in question):
        raise InputError(f"{place}the question is not text: it holds NUL or is not UTF-8")
    return question


def _show(answer: Answer, with_question: bool) -> None:
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
        console.print(Text(f"      {sentence_of(citation)}"))
    others = [f"[{number}] {printable(citation.document_id)}" for number, citation in cited if not citation.marks]
    if others:
        console.print(Text(f"  {'also ' if holding else ''}read: {', '.join(others)}", style="dim"))
    console.print(Text(f"  {footer(answer)}", style="dim"))
    if with_question:
        console.print()


def place_of(citation: Citation) -> str:
    """Say where a passage stands: its document, and its page or heading."""
    heading = citation.heading if citation.heading != citation.title else None
    place = f"page {citation.page}" if citation.page is not None else heading
    return printable(", ".join(filter(None, (citation.document_id, place))))


def sentence_of(citation: Citation) -> str:
    """Return the sentence in which the answer stands, on one line and cut around the answer where it is long."""
    mark, origin = citation.marks[0], citation.start or 0
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
    return parts
