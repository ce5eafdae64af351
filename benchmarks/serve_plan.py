"""Prepares a load for a running service: its documents are listed, and questions are made from their chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.load import (
    PlannedQuestion,
    arrive,
    distinguishing_key,
    draw,
    quoting_questions,
    read_questions,
    repeat,
)
from ragkv.client import AsyncClient, RemoteDocument
from ragkv.errors import InputError, NotFound
from ragkv.types import Filter, Scalar

QUESTIONS = 32
"""Questions of a load, unless a trace has another number."""


@dataclass(frozen=True)
class LoadParams:
    """What load is prepared.

    Attributes:
        collection: Collection of the documents.
        questions: Number of questions; None for all of a trace, else QUESTIONS.
        warmup: Number of questions that come before and are not counted.
        file: File of questions; None makes them from the documents.
        documents: Number of documents that a made question is asked over; None searches the whole collection.
        zipf: Exponent of the popularity of documents, or of the file's questions.
        rate: Poisson arrivals a second; None for a closed loop, or for a trace.
        concurrency: Questions that a closed loop keeps in flight; None for an open loop.
        seed: Of everything that is drawn.
    """

    collection: str = "default"
    questions: int | None = None
    warmup: int = 1
    file: Path | None = None
    documents: int | None = None
    zipf: float = 0.0
    rate: float | None = None
    concurrency: int | None = None
    seed: int = 1


@dataclass(frozen=True)
class ServeLoad:
    """A load that is ready to be asked.

    Attributes:
        questions: The questions. If they have arrival times, they are asked in an open loop.
        warmup: Questions that are asked before in a closed loop, and are not counted.
        concurrency: Questions that a closed loop keeps in flight; None for an open loop.
        key: Metadata key that tells documents apart; "" if no question names documents.
        values: Value of that key for each document that a question may name.
    """

    questions: tuple[PlannedQuestion, ...]
    warmup: tuple[PlannedQuestion, ...] = ()
    concurrency: int | None = 1
    key: str = ""
    values: Mapping[str, Scalar] = field(default_factory=dict)

    def filter(self, question: PlannedQuestion) -> Filter | None:
        """Return the filter that selects the documents of a question; None for all documents."""
        return {self.key: [self.values[id] for id in question.documents]} if question.documents else None


async def prepare(client: AsyncClient, params: LoadParams) -> ServeLoad:
    """Prepare a load. The same parameters and documents give the same load.

    Raises:
        InputError: The file holds no load, or the documents cannot be told apart by their metadata.
        NotFound: The collection has no documents, or not the ones that a question names.
        Refused: The service refuses to list its documents.
        Unreachable: There is no connection.
    """
    documents = [document async for document in client.documents(params.collection)]
    if not documents:
        raise NotFound(f"collection {params.collection!r} has no documents", "add some with `ragkv ingest`")
    read = [] if params.file is None else read_questions(params.file)
    if read and read[0].at is not None and params.rate is None and params.concurrency is None:
        asked, warmup = _trace(read, params)
    else:
        count = params.questions or QUESTIONS
        number = count + params.warmup
        drawn = (
            repeat(read, number, params.zipf, params.seed) if read else await _made(client, documents, params, number)
        )
        asked, warmup = [replace(each, at=None) for each in drawn[:count]], drawn[count:]
    if params.rate is not None:
        asked = list(arrive(asked, params.rate, params.seed))
    load = ServeLoad(tuple(asked), tuple(warmup), None if asked[0].at is not None else params.concurrency or 1)
    return _told_apart(load, documents)


def _trace(read: list[PlannedQuestion], params: LoadParams) -> tuple[list[PlannedQuestion], list[PlannedQuestion]]:
    if params.zipf:
        raise InputError("a trace is asked in its own order, so there is no popularity to draw by")
    asked = read[: params.questions]
    return asked, repeat(read[len(asked) :] or read, params.warmup, 0.0, params.seed)


async def _made(
    client: AsyncClient, documents: Sequence[RemoteDocument], params: LoadParams, number: int
) -> list[PlannedQuestion]:
    """Make questions that quote the first of the documents that are drawn for them."""
    drawn = draw(len(documents), number, params.documents or 1, params.zipf, params.seed)
    ids = [[documents[at].id for at in each] for each in drawn]
    texts = {id: [chunk.text async for chunk in client.chunks(id, params.collection)] for id in {one[0] for one in ids}}
    asked = quoting_questions([texts[first] for first, *_ in ids], params.seed)
    return [
        PlannedQuestion(text, tuple(some) if params.documents else ()) for text, some in zip(asked, ids, strict=True)
    ]


def _told_apart(load: ServeLoad, documents: Sequence[RemoteDocument]) -> ServeLoad:
    """Add what filters need to select the documents that the questions name."""
    named = {id for each in (*load.questions, *load.warmup) for id in each.documents}
    if not named:
        return load
    if unknown := named - {each.id for each in documents}:
        raise NotFound(f"there is no document {min(unknown)!r}")
    key = distinguishing_key([each.metadata for each in documents])
    return replace(load, key=key, values={each.id: each.metadata[key] for each in documents})
