"""How often a search finds the passage with the answer: by words, by vectors, and by both, as the service searches.

The passages of all contexts in files of LongBench's format form one collection, split as the service splits them. Only
the model's tokenizer takes part: nothing is encoded and nothing is generated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.grid import TextGrid, number
from ragkv.catalog import Catalog, DocumentVersion
from ragkv.errors import InputError
from ragkv.evaluation.score import normalise
from ragkv.evaluation.sets import SetQuestion
from ragkv.ingest.chunker import PromptPiece, split_steps
from ragkv.retrieval import Retriever, TextEmbedder
from ragkv.types import Document, Key

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""
COLLECTION = "recall"


@dataclass(frozen=True)
class RecallRow:
    """One number of passages: shares of the questions.

    Attributes:
        top_k: Passages that are retrieved.
        words: An accepted answer stands in one of the best by BM25.
        vectors: In one of the nearest by the embedder.
        both: In one of those that the service retrieves.
    """

    top_k: int
    words: float
    vectors: float
    both: float


@dataclass(frozen=True)
class Splitting:
    """How documents are split.

    Attributes:
        prompt: Makes the prompt piece of a chunk.
        limit: Most tokens of a chunk.
    """

    prompt: PromptPiece
    limit: int


def measure_recall(
    folder: Path,
    embedder: TextEmbedder,
    splitting: Splitting,
    collection: tuple[Sequence[Document], Sequence[SetQuestion]],
    top_k: Sequence[int],
    progress: Progress,
) -> list[RecallRow]:
    """Return a row for each number of passages.

    Args:
        folder: Where the collection is kept.
        embedder: Embeds passages and questions.
        splitting: How documents are split.
        collection: Documents and questions, as `read_collection` returns them.
        top_k: Numbers of passages.
        progress: Told how far it is.

    Raises:
        InputError: There are no questions.
    """
    documents, questions = collection
    if not questions:
        raise InputError("there are no questions")
    catalog = Catalog.open(folder / "catalog.sqlite")
    try:
        for done, document in enumerate(documents, 1):
            _add(catalog, embedder, document, splitting)
            progress("embed", done, len(documents))
        retriever = Retriever(catalog, embedder, folder / "index")
        rows, matrix = catalog.vectors(COLLECTION)
        texts = {row: normalise(chunk.text) for row, chunk in catalog.chunks(COLLECTION, rows.tolist()).items()}
        found = {count: np.zeros(3) for count in top_k}
        for done, question in enumerate(questions, 1):
            gold = [normalise(each) for each in question.gold]
            nearest = rows[np.argsort(-(matrix @ embedder.encode_queries([question.text])[0]), kind="stable")]
            words = [row for row, _ in catalog.match(COLLECTION, question.text, max(top_k))]
            for count in top_k:
                both = [hit.row for hit in retriever.search(question.text, COLLECTION, count)]
                lists = (words[:count], nearest[:count].tolist(), both)
                found[count] += [any(each in texts[row] for row in ranked for each in gold) for ranked in lists]
            progress("search", done, len(questions))
    finally:
        catalog.close()
    return [RecallRow(count, *(sums / len(questions)).tolist()) for count, sums in found.items()]


def _add(catalog: Catalog, embedder: TextEmbedder, document: Document, splitting: Splitting) -> None:
    steps = split_steps(document, splitting.prompt, splitting.limit)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            chunks = end.value
            break
    vectors = embedder.encode([f"{chunk.title}\n{chunk.text}" for chunk in chunks])
    keys = [Key(chunk.id) for chunk in chunks]
    own = Document(document.id, document.title, document.text, {}, COLLECTION)
    catalog.put_document(DocumentVersion(own, document.id, chunks, vectors, keys, embedder.identity))


def recall_grid(rows: Sequence[RecallRow]) -> TextGrid:
    """Shares in percent."""
    cells = [
        (str(row.top_k), *(number(share, ".1f", 100) for share in (row.words, row.vectors, row.both))) for row in rows
    ]
    return TextGrid(("passages", "words", "vectors", "both"), tuple(cells))
