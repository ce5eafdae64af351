"""Retriever: finds the chunks for a question by vector search and by BM25, and fuses the two rankings.

A reranker, where one is set, orders the best candidates of both anew. Vectors of an earlier embedder are searched with
that embedder until the next ones are complete (ragkv/catalog/embedders.py). Where it cannot be opened, BM25 alone
decides.

Reciprocal rank fusion: Cormack, Clarke, Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
Learning Methods", SIGIR 2009.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.config import ViewSettings
from ragkv.errors import NoReranker, NotFound, RagkvError
from ragkv.passages import FoundPassage, SearchReport, SearchResult, SearchTimings
from ragkv.retrieval.contract import DEFAULTS, OpenEarlier, PassageRanker, Retrieval, TextEmbedder
from ragkv.retrieval.follower import ViewFollower, ViewStatus
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.pgvector import PgVectors
from ragkv.retrieval.question_vectors import QuestionVectors
from ragkv.retrieval.ranking import fuse, similarity, without_copies
from ragkv.retrieval.scope import SearchScope
from ragkv.retrieval.vectors import MAX_ATTEMPTS, FaissVectors, VectorSearch
from ragkv.retrieval.word_index import CatalogWords, ReplicaWords, WordIndex
from ragkv.types import Chunk, Filter, Hit

_NO_VECTOR = np.empty(0, np.float32)
UPDATE_PAUSE = 20.0
"""Pause between updates of a collection's views while it is ingested into, in times that an update takes."""


def _ignore(chunks: Sequence[Chunk]) -> None:
    """The default of `early`: do nothing."""


def _open_none(identity: EmbedderIdentity) -> None:
    """The default of `open_earlier`: there is no other embedder."""


class Retriever:
    """Searches the collections of a catalogue. Thread-safe: one lock guards the indexes and the embedder."""

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
        self.freshness = Freshness(catalog, parameters.staleness)
        self.vectors: VectorSearch
        if parameters.vectors == "pgvector":
            self.vectors = PgVectors(catalog, self.freshness)
        else:
            self.vectors = FaissVectors(catalog, folder, self.freshness, parameters.flat_limit)
        self.words: WordIndex = CatalogWords(catalog)
        if parameters.own_words or not catalog.has_words:
            self.words = ReplicaWords(catalog, folder / "words.sqlite", self.freshness)
        self._follower: ViewFollower | None = None
        self._lock = threading.Lock()
        self._behind = set[str]()
        self._update_again = dict[str, float]()
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
            by_words = dict(self.words.match(scope, question, count))
        early(list(self.catalog.chunks(collection, list(by_words)[:top_k]).values()))
        for _ in range(MAX_ATTEMPTS):
            with self._lock:
                with timer.step("vectors"):
                    index = self.vectors.open(collection, self.embedder.identity.dimension)
                size, exact, vector, by_vector = index.size, index.exact, _NO_VECTOR, list[int]()
                embedder = self._questions.embedder_of(index.embedder or self.embedder.identity, self.embedder)
                if size and embedder is not None:
                    with timer.step("embed"):
                        vector = self._questions.vector(embedder, question)
                    with timer.step("vectors"):
                        by_vector = index.nearest(scope, vector, count)
            ranked = fuse([by_vector, list(by_words)], self.parameters.rank_constant)
            chunks = self.catalog.chunks(collection, [row for row, _ in ranked])
            # A chunk that was deleted after the search is missing from `chunks`, and the next one takes its place.
            there = without_copies(ranked, chunks)
            if len(chunks) < len(ranked):
                # Another process deleted or replaced a ranked chunk. Only a new search finds the new version.
                self.freshness.expire(collection)
            elif len(there) >= top_k or len(ranked) < count:
                break
            else:  # copies of one text took the places of others
                count *= self.parameters.candidates
            by_words = dict(self.words.match(scope, question, count))
        with timer.step("rerank"):
            best = self._reranked(question, there[:count], chunks)
        standing = self.catalog.standing(collection, (row for row, _ in best))  # a reranker takes its time
        best = [(row, score) for row, score in best if row in standing][:top_k]
        vectors = self.catalog.vectors_of(row for row, _ in best)
        hits = [
            Hit(chunks[row], score, row, similarity(vector, vectors.get(row)), by_words.get(row)) for row, score in best
        ]
        taken = timer.elapsed
        steps = SearchTimings(taken("words"), taken("embed"), taken("vectors"), taken("rerank"), timer.total())
        name = embedder.identity.name if embedder is not None else ""
        reranker = self.reranker.source if self.reranker else None
        return hits, SearchReport(name, reranker, size, exact, len(by_words), len(by_vector), steps)

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

    def refresh(self, collection: str) -> None:
        """Update the views of a collection to the state of the catalogue."""
        self._behind.discard(collection)
        self.freshness.expire(collection)
        self.vectors.refresh(collection, self.embedder.identity.dimension)
        self.words.refresh(collection)

    def changed(self, collection: str) -> None:
        """Take note that a collection has changed. Every search sees the change.

        The views are updated now, so that no search has to, unless that has taken much of the time lately: an update
        reads which chunks the collection has, and one a document would make a long ingest quadratic.
        """
        self.freshness.expire(collection)
        self._behind.add(collection)
        started = time.monotonic()
        if started >= self._update_again.get(collection, 0.0):
            self.refresh(collection)
            ended = time.monotonic()
            self._update_again[collection] = ended + UPDATE_PAUSE * (ended - started)

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

    def save(self) -> None:
        """Write the changed indexes to disk, so that the next start does not have to rebuild them."""
        for collection in list(self._behind):
            self.refresh(collection)
        self.vectors.save()

    def start_follower(self) -> None:
        """Start to keep the views up to date in the background, until `close`.

        With the words in the catalogue nothing is started: its searches look at the catalogue anyway.
        """
        if self._follower is None and not isinstance(self.words, CatalogWords):
            self._follower = ViewFollower(self.catalog, self.freshness, self._view_generations, self._catch_up)
            self._follower.start()

    def status(self) -> ViewStatus | None:
        """Return how far the views are behind the catalogue; None where nothing follows it."""
        return self._follower.status() if self._follower else None

    def close(self) -> None:
        """Save the indexes and close their files. Call it before the catalogue is closed."""
        if self._follower is not None:
            self._follower.stop()
        self.save()
        self.words.close()

    def _catch_up(self, collection: str) -> None:
        """Bring the views of a collection up to date that are there. What was not searched is not loaded."""
        if collection in self.vectors.generations():
            self.vectors.refresh(collection, self.embedder.identity.dimension)
        if collection in self.words.generations():
            self.words.refresh(collection)

    def _view_generations(self) -> dict[str, int]:
        """Return the generation of each collection that was searched: of the oldest of its views."""
        generations = self.vectors.generations()
        for collection, generation in self.words.generations().items():
            generations[collection] = min(generation, generations.get(collection, generation))
        return generations
