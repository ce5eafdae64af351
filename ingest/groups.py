"""Embedding and encoding chunks of several open documents together.

A forward pass over a few long chunks is quicker than one pass each, so small documents wait for each other. Each runs
up to its first `embed` step, and their passages are embedded at once; then to its first `encode` step, and their groups
are encoded at once. What fails together is done again document by document, so that only the document at fault fails.

On a GPU the KV of a group is written while the next group is encoded, so its documents are committed after that.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ragkv.errors import InputError, InvalidDocument, RagkvError
from ragkv.ingest.engine_contract import IngestEmbedder, IngestEngine
from ragkv.ingest.outcomes import IngestOutcome
from ragkv.ingest.pipeline import EMBED_BATCH, ingest_steps
from ragkv.ingest.progress import ENDS, ChunkGroup, IngestProgress, IngestStep, PassageBatch
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
        joined: Whether the group or the passages of this step were done, or tried, together with others.
    """

    steps: Generator[IngestStep, None, T]
    step: IngestStep | None = None
    joined: bool = False

    @property
    def group(self) -> ChunkGroup | None:
        """Return the chunks that wait to be encoded; None where something else comes next."""
        return None if self.step is None or self.joined else self.step.group

    @property
    def passages(self) -> PassageBatch | None:
        """Return the passages that wait to be embedded; None where something else comes next."""
        return None if self.step is None or self.joined else self.step.passages

    @property
    def is_held(self) -> bool:
        """Whether it waits to be embedded or encoded together with others."""
        return self.group is not None or self.passages is not None

    @property
    def awaits_kv(self) -> bool:
        """Whether its next step commits it, once its KV is written."""
        return self.step is not None and self.step.writing is not None

    @property
    def is_writing(self) -> bool:
        """Whether its KV is still being written, so that its next step would wait."""
        return self.step is not None and self.step.writing is not None and self.step.writing()

    def run_step(self) -> IngestStep:
        """Do one unit of work. Raises StopIteration at the end, and what the ingest raises."""
        self.step, self.joined = next(self.steps), False
        return self.step


def waiting_tokens(documents: Iterable[OpenDocument[T]]) -> int:
    """Count the tokens that wait to be encoded, those of passages that are embedded before included."""
    return sum(part.tokens for each in documents if (part := each.group or each.passages) is not None)


def waiting_passages(documents: Iterable[OpenDocument[T]]) -> int:
    """Count the passages that wait to be embedded."""
    return sum(len(each.passages.passages) for each in documents if each.passages is not None)


def embed_together(embedder: IngestEmbedder, documents: Iterable[OpenDocument[T]]) -> None:
    """Embed the waiting passages of documents. A fault is not raised: each document meets it by itself, or not."""
    waiting = [(each, each.passages) for each in documents if each.passages is not None]
    for document, _ in waiting:
        document.joined = True
    if len(waiting) < 2:
        return
    try:
        embedded = embedder.encode_passages([passage for _, batch in waiting for passage in batch.passages])
    except ENDS:
        raise
    except BaseException:
        logger.info("%d documents are embedded one by one: together they failed", len(waiting), exc_info=True)
        return
    at = 0
    for _, batch in waiting:
        batch.embedded = embedded.part(at, at + len(batch.passages))
        at += len(batch.passages)


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
    for document in documents:
        if document.group is not None and (not taken or tokens + document.group.tokens <= engine.group_tokens):
            taken.append(document)
            tokens += document.group.tokens
    groups = [each.group for each in taken if each.group is not None]
    for document in taken:
        document.joined = True
    if len(groups) > 1:
        try:
            engine.encode_and_store_all([chunk for group in groups for chunk in group.chunks])
        except ENDS:
            raise
        except BaseException:
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
        documents: They must have passed `ragkv.ingest.loader.checked`. Of two with one id the later one stays.
        progress: Called with the steps of whichever document is worked on.

    Yields:
        Each document in order, with its outcome or the reason why it was refused.

    Raises:
        RagkvError: A fault that is none of a document, such as a full disk.
    """
    window = Window(engine, progress)
    try:
        for document in documents:
            if window.holds(document):
                yield from window.end()
            window.open(document)
            if window.is_full():
                yield from window.encode()
        yield from window.end()
    finally:
        window.close()


_Opened = dict[tuple[str, str], tuple[Document, OpenDocument[IngestOutcome]]]


class Window:
    """The open documents of `ingest_all`, which wait for each other.

    Documents that were encoded before them are kept while their KV is being written.
    """

    def __init__(self, engine: IngestEngine, progress: IngestProgress):
        self._engine, self._progress = engine, progress
        self._open, self._encoded = _Opened(), _Opened()
        self._ended = dict[tuple[str, str], IngestOutcome | InputError]()

    def holds(self, document: Document) -> bool:
        """Whether a document with this id is open."""
        name = (document.collection, document.id)
        return name in self._open or name in self._encoded

    def open(self, document: Document) -> None:
        """Open a document and take it to the step at which its passages wait to be embedded.

        When enough passages wait, they are embedded, and their documents are taken to the next step at which they wait.
        """
        name = (document.collection, document.id)
        self._open[name] = (document, OpenDocument(ingest_steps(self._engine, document)))
        self._run(name)
        self._embed(EMBED_BATCH)

    def is_full(self) -> bool:
        """Whether as many documents or tokens wait as may be open."""
        documents = [opened for _, opened in self._open.values()]
        return waiting_tokens(documents) >= self._engine.group_tokens or len(documents) >= MOST_TOGETHER

    def encode(self) -> Iterator[tuple[Document, IngestOutcome | InputError]]:
        """Encode all open documents; yield the documents that are committed, each with its outcome or its refusal.

        These are, in order, those that were encoded before, and now encoded ones unless their KV is still written.
        """
        self._embed(1)
        documents = [opened for _, opened in self._open.values()]
        while any(each.group is not None for each in documents):
            encode_together(self._engine, documents)
            for name in self._open:
                self._run(name)
        yield from self._commit()
        self._encoded, self._open = self._open, _Opened()
        if not any(opened.is_writing for _, opened in self._encoded.values()):
            yield from self._commit()

    def end(self) -> Iterator[tuple[Document, IngestOutcome | InputError]]:
        """Take all documents to their end; yield them as `encode` does."""
        yield from self.encode()
        yield from self._commit()

    def close(self) -> None:
        """Give up the documents that have not ended."""
        for _, unfinished in (*self._encoded.values(), *self._open.values()):
            unfinished.steps.close()

    def _commit(self) -> Iterator[tuple[Document, IngestOutcome | InputError]]:
        """Take the encoded documents to their end and yield them."""
        for name, (document, opened) in list(self._encoded.items()):
            while name not in self._ended:
                self._step(name, opened)
            del self._encoded[name]
            yield document, self._ended.pop(name)

    def _embed(self, least: int) -> None:
        """Embed what waits while it is at least so many passages, and go on with its documents."""
        documents = [opened for _, opened in self._open.values()]
        while waiting_passages(documents) >= least:
            embed_together(self._engine.retriever.embedder, documents)
            for name in self._open:
                self._run(name)

    def _run(self, name: tuple[str, str]) -> None:
        """Run an open document up to a step at which it waits for others or for its KV, or to its end."""
        opened = self._open[name][1]
        while name not in self._ended and not (opened.is_held or opened.awaits_kv):
            self._step(name, opened)

    def _step(self, name: tuple[str, str], opened: OpenDocument[IngestOutcome]) -> None:
        """Do one unit of work. A fault ends the document alone, unless it is one of the catalogue or the store."""
        try:
            step = opened.run_step()
        except StopIteration as end:
            self._ended[name] = end.value
        except InputError as error:
            self._ended[name] = error
        except (RagkvError, *ENDS):
            raise
        except BaseException as error:
            logger.error("document %r of collection %r", name[1], name[0], exc_info=error)
            self._ended[name] = InvalidDocument(f"document {name[1]!r}: {type(error).__name__} while reading it")
        else:
            self._progress(step.stage, step.done, step.total)
