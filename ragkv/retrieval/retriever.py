"""Retriever: finds the chunks for a question by vector search and by BM25, and fuses the rankings.

There are three: by meaning, by words, and by words of the chunks that have every one. Without the third, a chunk that
is second by both comes before the only one that has all words (docs/lab-notes.md, "Passages with every word").

A reranker, where one is set, orders the best candidates of both anew. Vectors of an earlier embedder are searched with
that embedder until the next ones are complete (ragkv/catalog/embedders.py). Where it cannot be opened, BM25 alone
decides.

Reciprocal rank fusion: Cormack, Clarke, Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
Learning Methods", SIGIR 2009.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.config import ViewSettings
from ragkv.errors import NoReranker, NotFound, RagkvError
from ragkv.passages import FoundPassage, SearchReport, SearchResult, SearchTimings
from ragkv.retrieval.contract import DEFAULTS, OpenEarlier, PassageRanker, Retrieval, TextEmbedder
from ragkv.retrieval.question_vectors import QuestionVectors
from ragkv.retrieval.ranking import best_texts, fuse, similarity
from ragkv.retrieval.scope import SearchScope
from ragkv.retrieval.vectors import MAX_ATTEMPTS
from ragkv.retrieval.views import Views
from ragkv.types import Chunk, Filter, Hit

_NO_VECTOR = np.empty(0, np.float32)


def _ignore(chunks: Sequence[Chunk]) -> None:
    """The default of `early`: do nothing."""


def _open_none(identity: EmbedderIdentity) -> None:
    """The default of `open_earlier`: there is no other embedder."""


class Retriever:
    """Searches the collections of a catalogue. Thread-safe: one lock guards the indexes and the embedder.

    Attributes:
        views: The indexes that are searched.
    """

    def __init__(
        self,
        catalog: Catalog,
        embedder: TextEmbedder,
        folder: Path,
        parameters: Retrieval = DEFAULTS,
        reranker: PassageRanker | None = None,
        open_earlier: OpenEarlier = _open_none,
    ):
        """Create a retriever.

        Args:
            catalog: The catalogue to search.
            embedder: Embeds the questions.
            folder: Folder that keeps the indexes between runs. It may be deleted at any time.
            parameters: Parameters of retrieval.
            reranker: Orders the candidates anew; None leaves them in the order of the fusion.
            open_earlier: Opens the embedder of vectors that come from another one.
        """
        self.catalog = catalog
        self.reranker = reranker
        self.embedder = embedder
        self.parameters = parameters
        self.views = Views(catalog, folder, parameters, lambda: self.embedder.identity.dimension)
        self._lock = threading.Lock()
        self._questions = QuestionVectors(open_earlier)

    @staticmethod
    def parameters_of(settings: ViewSettings, catalog: Catalog) -> Retrieval:
        """Return the parameters of settings. A catalogue in a file of this machine is looked at by every search."""
        return Retrieval(staleness=0.0 if catalog.has_words else settings.staleness, vectors=settings.vectors)

    def search(
        self,
        question: str,
        collection: str = "default",
        top_k: int = 6,
        early: Callable[[Sequence[Chunk]], None] = _ignore,
        filter: Filter | None = None,
    ) -> list[Hit]:
        """Return the chunks that match a question best.

        Args:
            question: Text of the question.
            collection: Collection to search.
            top_k: Number of chunks to return.
            early: Called with the best `top_k` chunks of the full-text search, before the question is embedded, so
                that their KV can be prefetched.
            filter: Search only documents that match the filter.

        Returns:
            At most `top_k` hits, best first; [] for an empty collection.

        Raises:
            InputError: The filter is malformed.
        """
        return self._search(question, SearchScope(collection, filter), top_k, early)[0]

    def find_passages(self, query: str, scope: SearchScope, top_k: int = 6) -> SearchResult:
        """Search for passages and report how.

        Args:
            query: Text of the query.
            scope: Where to search.
            top_k: Number of passages.

        Raises:
            InputError: The filter is malformed.
            NotFound: The collection has no documents.
        """
        if not self.catalog.has_chunks(scope.collection):
            raise NotFound(f"collection {scope.collection!r} has no documents", "add some with `ragkv ingest`")
        hits, report = self._search(query, scope, top_k, _ignore)
        return SearchResult(query, tuple(map(FoundPassage.of, hits)), report)

    def embed_ahead(self, questions: Sequence[str]) -> None:
        """Embed questions together that are searched for next, which is quicker than one by one.

        Nothing is done where the first of them is embedded already, or stands alone.

        Raises:
            ModelNotFound: The embedder cannot be loaded.
        """
        with self._lock:
            self._questions.embed_ahead(self.embedder, questions)

    @property
    def identity(self) -> EmbedderIdentity:
        """Of the present embedder."""
        return self.embedder.identity

    def question_vector(self, question: str) -> NDArray[np.float32]:
        """Return the unit vector [dimension] of a question, by the present embedder."""
        with self._lock:
            return self._questions.vector(self.embedder, question)

    def segments(self, hits: Sequence[Hit]) -> list[NDArray[np.int8]]:
        """Return the segments of the chunks of hits, by the present embedder.

        Those that the catalogue lacks, because an earlier release or another embedder has read the chunk, are made now
        and stored.

        Raises:
            ModelNotFound: The embedder cannot be loaded.
        """
        found = self.catalog.segments_of((hit.row for hit in hits), self.embedder.identity)
        missing = [hit for hit in hits if hit.row not in found]
        if missing:
            with self._lock:
                made = self.embedder.encode_passages([(hit.chunk.title, hit.chunk.text) for hit in missing]).segments
            new = {hit.row: segments for hit, segments in zip(missing, made, strict=True)}
            with suppress(RagkvError):  # a full disk, or a catalogue that may not be written: they are made again
                self.catalog.store_segments(new, self.embedder.identity)
            found |= new
        return [found[hit.row] for hit in hits]

    def _search(
        self, question: str, scope: SearchScope, top_k: int, early: Callable[[Sequence[Chunk]], None]
    ) -> tuple[list[Hit], SearchReport]:
        count, collection = top_k * self.parameters.candidates, scope.collection
        from ragkv.timing import StepTimer  # imports torch, which who only describes a search does without

        timer = StepTimer()
        with timer.step("words"):
            by_words, by_every = self._word_rankings(scope, question, count)
        early(list(self.catalog.chunks(collection, list(by_words)[:top_k]).values()))
        for _ in range(MAX_ATTEMPTS):
            with self._lock:
                with timer.step("vectors"):
                    index = self.views.vectors.open(collection, self.embedder.identity.dimension)
                size, exact, vector, by_vector = index.size, index.exact, _NO_VECTOR, list[int]()
                embedder = self._questions.embedder_of(index.embedder or self.embedder.identity, self.embedder)
                if size and embedder is not None:
                    with timer.step("embed"):
                        vector = self._questions.vector(embedder, question)
                    with timer.step("vectors"):
                        by_vector = index.nearest(scope, vector, count)
            ranked = fuse([by_vector, list(by_words), list(by_every)], self.parameters.rank_constant)
            load, most = partial(self.catalog.chunks, collection), count if self.reranker else top_k
            there, chunks, are_current = best_texts(ranked, load, most)
            if not are_current:
                # Another process deleted or replaced a ranked chunk. Only a new search finds the new version.
                self.views.freshness.expire(collection)
            elif len(there) >= top_k or len(ranked) < count:
                break
            else:  # copies of one text took the places of others
                count *= self.parameters.candidates
            by_words, by_every = self._word_rankings(scope, question, count)
        with timer.step("rerank"):
            best = self._reranked(question, there, chunks)
        standing = self.catalog.standing(collection, (row for row, _ in best))  # a reranker takes its time
        best = [(row, score) for row, score in best if row in standing][:top_k]
        vectors = self.catalog.vectors_of(row for row, _ in best)
        found = by_every | by_words
        hits = [
            Hit(chunks[row], score, row, similarity(vector, vectors.get(row)), found.get(row)) for row, score in best
        ]
        taken = timer.elapsed
        steps = SearchTimings(taken("words"), taken("embed"), taken("vectors"), taken("rerank"), timer.total())
        name = embedder.identity.name if embedder is not None else ""
        reranker = self.reranker.source if self.reranker else None
        return hits, SearchReport(name, reranker, size, exact, len(by_words), len(by_vector), steps)

    def _word_rankings(
        self, scope: SearchScope, question: str, count: int
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return the BM25 scores of the best chunks, best first, and of the best that have every word."""
        match = self.views.words.match
        return dict(match(scope, question, count)), dict(match(scope, question, count, every=True))

    def _reranked(
        self, question: str, ranked: list[tuple[int, float]], chunks: Mapping[int, Chunk]
    ) -> list[tuple[int, float]]:
        """Return (row, score) in the order of the reranker, with its scores; without one as they are."""
        if self.reranker is None:
            return ranked
        texts = [f"{chunks[row].title}\n{chunks[row].text}" for row, _ in ranked]
        with self._lock:
            scores = self.reranker.scores(question, texts)
        found = [(row, score) for (row, _), score in zip(ranked, scores, strict=True)]
        return sorted(found, key=lambda each: -each[1])

    def embed(self, texts: Sequence[str], queries: bool) -> tuple[NDArray[np.float32], int]:
        """Embed texts that are no documents.

        Args:
            texts: What to embed.
            queries: Whether they are questions and not passages.

        Returns:
            Unit vectors [len(texts), dimension], and the number of tokens.

        Raises:
            ModelNotFound: The embedder cannot be loaded.
        """
        encode = self.embedder.encode_queries if queries else self.embedder.encode
        return encode(texts), self.embedder.count_tokens(texts)

    def rank(self, query: str, texts: Sequence[str]) -> tuple[list[float], int]:
        """Score texts that are no documents.

        Returns:
            A score for each text, and the number of tokens that were read.

        Raises:
            NoReranker: There is no reranker.
            ModelNotFound: The reranker cannot be loaded.
        """
        if self.reranker is None:
            raise NoReranker
        with self._lock:
            return self.reranker.scores(query, texts), self.reranker.count_tokens(query, texts)

    def open_earlier(self) -> bool:
        """Open the embedder of the stored vectors now, so that the first question does not wait for it.

        Returns:
            Whether these vectors can be searched; else words alone decide.
        """
        recorded = self.catalog.embedder()
        with self._lock:
            return recorded is None or self._questions.embedder_of(recorded, self.embedder) is not None

    def drop_earlier(self) -> None:
        """Forget earlier embedders: all vectors come from the present one."""
        with self._lock:
            self._questions.drop_earlier()

    def close(self) -> None:
        """Save the indexes and close their files. Call it before the catalogue is closed."""
        self.views.close()
