"""`ragkv ask`: answer one question or a file of questions, with citations and the report."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

from ragkv.cli.answer_text import show_answer
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
    settings_from,
    uncollected,
)
from ragkv.cli.questions_file import FileQuestion, parse_filter, read_questions, read_schema, valid_text
from ragkv.errors import InputError, RagkvError
from ragkv.evaluation.score import exact_match, f1
from ragkv.types import AskOptions

if TYPE_CHECKING:
    from ragkv.config import Settings
    from ragkv.report import Answer


MANY = 16
"""Questions from which on `ask` decodes as a service does."""


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
            show_answer(answer, self.several)

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
    questions = list(read_questions(file)) if file is not None else [FileQuestion(valid_text(question or ""))]
    with uncollected():
        _check_names(method, prefill, decode)
        if conversation is not None:
            _check_conversation(method or settings.method)
    options = AskOptions(
        collection=collection,
        conversation=conversation,
        top_k=top_k,
        filter=parse_filter(filters or []),
        method=method,
        prefill=prefill,
        decode=decode,
        max_tokens=max_tokens,
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
    from ragkv.engine.policies import check_decode_policy, check_prefill_policy
    from ragkv.engine.registry import check_method

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
