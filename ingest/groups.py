"""Encoding chunks of several open documents together.

A forward pass over a few long chunks is quicker than one pass each, so small documents wait for each other: each runs
up to its first `encode` step, and their groups are encoded at once. What fails together is encoded again document by
document, so that only the document at fault fails.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ingest.pipeline import IngestEngine, IngestOutcome, ingest_steps
from ingest.progress import ChunkGroup, IngestProgress, IngestStep
from ragkv.errors import InputError
from ragkv.types import Document

logger = logging.getLogger(__name__)

MOST_TOGETHER = 64
"""Documents that wait for each other at most. Each holds its text, its chunks and their vectors."""

T = TypeVar("T")


@dataclass(eq=False)
class OpenDocument(Generic[T]):
    """The ingest of a document that is under way.

    Attributes:
        steps: Its steps.
        step: The latest step; None before the first.
        joined: Whether the group of this step was encoded, or tried, together with others.
    """

    steps: Generator[IngestStep, None, T]
    step: IngestStep | None = None
    joined: bool = False

    @property
    def group(self) -> ChunkGroup | None:
        """Return the chunks that wait to be encoded; None where something else comes next."""
        return None if self.step is None or self.joined else self.step.group

    def run_step(self) -> IngestStep:
        """Do one unit of work. Raises StopIteration at the end, and what the ingest raises."""
        self.step, self.joined = next(self.steps), False
        return self.step


def waiting_tokens(documents: Iterable[OpenDocument[T]]) -> int:
    """Count the tokens that wait to be encoded."""
    return sum(each.group.tokens for each in documents if each.group is not None)


def encode_together(engine: IngestEngine, documents: Sequence[OpenDocument[T]]) -> list[OpenDocument[T]]:
    """Encode the waiting groups of documents in one pass, as many as the engine encodes together.

    A fault is not raised: each document meets it, or not, when it encodes its group by itself.

    Args:
        engine: Encodes.
        documents: Open documents, those that must not be left out first.

    Returns:
        The documents whose groups were in the pass, at least the first that waits.
    """
    taken, tokens = list[OpenDocument[T]](), 0
    for each in documents:
        if each.group is not None and (not taken or tokens + each.group.tokens <= engine.group_tokens):
            taken.append(each)
            tokens += each.group.tokens
    groups = [each.group for each in taken if each.group is not None]
    for each in taken:
        each.joined = True
    if len(groups) > 1:
        try:
            engine.encode_and_store_all([chunk for group in groups for chunk in group.chunks])
        except Exception:
            logger.info("%d documents are encoded one by one: together they failed", len(groups), exc_info=True)
        else:
            for group in groups:
                group.encoded = True
    return taken


def ingest_all(
    engine: IngestEngine, documents: Iterable[Document], progress: IngestProgress
) -> Iterator[tuple[Document, IngestOutcome | InputError]]:
    """Ingest documents in order without a pause, small ones together.

    Args:
        engine: The engine that encodes.
        documents: They must have passed `ingest.loader.checked`. Of two with one id the later one stays.
        progress: Called with the steps of whichever document is worked on.

    Yields:
        Each document in order, with its outcome or the reason why it was refused.
    """
    window = dict[tuple[str, str], tuple[Document, OpenDocument[IngestOutcome]]]()
    ended = dict[tuple[str, str], IngestOutcome | InputError]()

    def run(name: tuple[str, str], to_end: bool) -> None:
        opened = window[name][1]
        try:
            while name not in ended and (to_end or opened.group is None):
                step = opened.run_step()
                progress(step.stage, step.done, step.total)
        except StopIteration as end:
            ended[name] = end.value
        except InputError as error:
            ended[name] = error

    def end_window() -> Iterator[tuple[Document, IngestOutcome | InputError]]:
        encode_together(engine, [opened for _, opened in window.values()])
        for name, (document, _) in window.items():
            run(name, to_end=True)
            yield document, ended.pop(name)
        window.clear()

    try:
        for document in documents:
            name = (document.collection, document.id)
            if name in window:
                yield from end_window()
            window[name] = (document, OpenDocument(ingest_steps(engine, document)))
            run(name, to_end=False)
            if (
                waiting_tokens(each for _, each in window.values()) >= engine.group_tokens
                or len(window) >= MOST_TOGETHER
            ):
                yield from end_window()
        yield from end_window()
    finally:
        for _, unfinished in window.values():
            unfinished.steps.close()
