"""pgvector finds what an exact search finds: with filters, apart from other collections, and after every change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ragkv.catalog import Catalog, DocumentVersion, EmbedderIdentity, pgvector
from ragkv.errors import ConfigError
from ragkv.retrieval import Retrieval, Retriever, SearchScope
from ragkv.retrieval.freshness import Freshness
from ragkv.retrieval.pgvector import PgVectors
from ragkv.types import Chunk, Document, Filter, Key
from tests.ingest.reader import WordEmbedder
from tests.postgres_server import PostgresServer
from tests.retrieval.writer import put

pytestmark = pytest.mark.scale

DIMENSION, IDENTITY = 24, EmbedderIdentity("points", 24)
CHUNKS = 20
Kinds = Sequence[str]


@pytest.fixture
def catalog(postgres: PostgresServer) -> Iterator[Catalog]:
    opened = Catalog.open(postgres.database())
    yield opened
    opened.close()


def clustered(count: int, seed: int) -> NDArray[np.float32]:
    """Return unit vectors [count, DIMENSION] in forty clusters."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((40, DIMENSION))
    points = centres[rng.integers(0, 40, count)] + 0.5 * rng.standard_normal((count, DIMENSION))
    unit: NDArray[np.float32] = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    return unit


def fill(
    catalog: Catalog, collection: str, vectors: NDArray[np.float32], kinds: Kinds = ("all",), size: int = CHUNKS
) -> None:
    """Store documents of `size` chunks with these vectors; their kinds take turns."""
    for number, start in enumerate(range(0, len(vectors), size)):
        some = vectors[start : start + size]
        name = f"d{number}"
        texts = [Chunk(f"{name}#{i}", name, i, "Title", f"point {i}", (1,)) for i in range(len(some))]
        document = Document(name, "Title", "text", {"kind": kinds[number % len(kinds)]}, collection)
        keys = [Key(f"{collection} {name} {i}") for i in range(len(some))]
        catalog.put_document(DocumentVersion(document, "hash", texts, some, keys, IDENTITY))


class Exact:
    """Finds the nearest rows of a collection by comparing all vectors in memory."""

    def __init__(self, catalog: Catalog, collection: str):
        self._catalog, self._collection = catalog, collection
        self.rows, self._vectors = catalog.vectors(collection)

    def find(self, question: NDArray[np.float32], count: int, filter: Filter | None = None) -> list[int]:
        wanted = np.isin(self.rows, self._catalog.filtered_rows(self._collection, filter)[1])
        rows, vectors = self.rows[wanted], self._vectors[wanted]
        return [int(row) for row in rows[np.argsort(-(vectors @ question), kind="stable")[:count]]]


def found(
    vectors: PgVectors, question: NDArray[np.float32], count: int, collection: str, filter: Filter | None = None
) -> list[int]:
    return vectors.open(collection, DIMENSION).nearest(SearchScope(collection, filter), question, count)


def open_vectors(catalog: Catalog) -> PgVectors:
    return PgVectors(catalog, Freshness(catalog))


def test_few_vectors_are_compared_exactly(catalog: Catalog) -> None:
    vectors = open_vectors(catalog)
    fill(catalog, "ours", clustered(400, 0), ("old", "new", "odd"))
    fill(catalog, "theirs", clustered(100, 1))
    opened = vectors.open("ours", DIMENSION)
    assert (opened.size, opened.exact, opened.embedder) == (400, True, IDENTITY)
    exact = Exact(catalog, "ours")
    for question in clustered(20, 2):
        for filter in (None, {"kind": "old"}, {"kind": ["new", "odd"]}, {"kind": "none"}):
            assert found(vectors, question, 6, "ours", filter) == exact.find(question, 6, filter)
    named = opened.nearest(SearchScope("ours", None, ("d3",)), clustered(1, 3)[0], 100)
    assert sorted(named) == sorted(row for row in catalog.filtered_rows("ours", None, ["d3"])[1].tolist())
    assert found(vectors, clustered(1, 3)[0], 6, "unknown") == []


def test_many_vectors_are_searched_in_the_index_with_filters_and_collections(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgvector, "EXACT", 100)
    monkeypatch.setattr("ragkv.retrieval.pgvector.EXACT", 100)
    vectors = open_vectors(catalog)
    fill(catalog, "ours", clustered(3000, 0), ("old", "new", "new", "new", "new"), 100)
    fill(catalog, "theirs", clustered(3000, 0), size=100)
    opened = vectors.open("ours", DIMENSION)
    assert (opened.size, opened.exact) == (3000, False)
    plan = _plan(catalog)
    assert "searchable_vectors_24" in plan, plan
    exact = Exact(catalog, "ours")
    for filter in (None, {"kind": "old"}, {"kind": "new"}):
        shares = []
        for question in clustered(30, 2):
            near = found(vectors, question, 6, "ours", filter)
            assert len(near) == 6
            shares.append(len(set(near) & set(exact.find(question, 6, filter))) / 6)
        assert np.mean(shares) >= 0.95, (filter, np.mean(shares))
    many = found(vectors, clustered(1, 3)[0], 500, "ours", {"kind": "old"})
    assert set(many) <= set(catalog.filtered_rows("ours", {"kind": "old"})[1].tolist())
    assert len(many) == 500, "the search goes on until there are enough"


def _plan(catalog: Catalog) -> str:
    sql = (
        "EXPLAIN SELECT chunk FROM searchable_vectors WHERE dimension = 24 AND collection = 'ours'"
        " ORDER BY CAST(vector AS vector(24)) <#> CAST('[" + ",".join("1" * 24) + "]' AS vector(24)) LIMIT 6"
    )
    with catalog.write() as transaction:
        transaction.exec_driver_sql("ANALYZE searchable_vectors")
    with catalog.read() as transaction:
        return "\n".join(line for (line,) in transaction.exec_driver_sql(sql).fetchall())


def test_changes_are_found_in_the_transaction_that_makes_them(catalog: Catalog) -> None:
    vectors = open_vectors(catalog)
    points = clustered(60, 0)
    fill(catalog, "ours", points)
    rows = catalog.vectors("ours")[0]
    assert found(vectors, points[5], 1, "ours") == [rows[5]]
    catalog.remove("ours", "d0")
    assert rows[5] not in found(vectors, points[5], 60, "ours")
    assert len(found(vectors, points[5], 60, "ours")) == 40
    fill(catalog, "ours", points[:CHUNKS])
    assert found(vectors, points[5], 1, "ours") == [catalog.vectors("ours")[0][-CHUNKS + 5]]
    catalog.clear("ours")
    assert found(vectors, points[5], 60, "ours") == []


def test_vectors_from_before_are_copied_and_processes_with_faiss_add_theirs(
    catalog: Catalog, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pgvector, "BATCH", 7)
    points = clustered(60, 0)
    fill(catalog, "ours", points[:40])
    vectors = open_vectors(catalog)
    assert len(found(vectors, points[0], 60, "ours")) == 40
    fill(catalog, "ours", points)  # this catalogue knows nothing of the setting
    again = open_vectors(catalog)
    assert found(again, points[45], 6, "ours") == Exact(catalog, "ours").find(points[45], 6)


def test_a_changed_embedder_is_searched_when_its_vectors_are_complete(catalog: Catalog, tmp_path: Path) -> None:
    put(catalog, "a", "red boat", "tall mast")
    put(catalog, "b", "red boat", collection="theirs")
    other = WordEmbedder("other", 16)
    retriever = Retriever(
        catalog, other, tmp_path, Retrieval(vectors="pgvector"), open_earlier=lambda one: WordEmbedder(one.name)
    )

    def searched(collection: str) -> tuple[str, int, str]:
        result = retriever.find_passages("a boat", SearchScope(collection))
        return result.report.embedder, result.report.by_vector, result.passages[0].text

    catalog.aim_embedder(other.identity)
    assert searched("default") == ("words", 2, "red boat")
    passages = catalog.unembedded("default", 0, 9)
    texts = [each.text for each in passages]
    catalog.store_next_vectors([each.row for each in passages], other.encode(texts), other.identity)
    assert searched("default") == ("words", 2, "red boat")
    assert catalog.swap_vectors("default", other.identity)
    assert (searched("default"), searched("theirs")) == (("other", 2, "red boat"), ("words", 1, "red boat"))
    rows = [each.row for each in catalog.passages()]
    catalog.replace_vectors(rows, other.encode([each.text for each in catalog.passages()]), other.identity)
    assert (searched("default"), searched("theirs")) == (("other", 2, "red boat"), ("other", 1, "red boat"))
    retriever.close()


def test_settings_that_cannot_work_are_refused(catalog: Catalog, postgres: PostgresServer, tmp_path: Path) -> None:
    file = Catalog.open(tmp_path / "catalog.sqlite")
    with pytest.raises(ConfigError, match="needs a catalogue in PostgreSQL"):
        open_vectors(file)
    file.close()
    with pytest.raises(ConfigError, match="at most 2000 dimensions"):
        catalog.index_vectors(4096)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "does not have the extension pgvector"),
        (("0.7.4", None), "0.7.4 is too old"),
        (("0.8.0", "0.5.1"), "0.5.1"),
    ],
)
def test_a_server_without_pgvector_is_refused(row: tuple[str, str | None] | None, message: str) -> None:
    class Answer:
        def exec_driver_sql(self, sql: str) -> Answer:
            return self

        def fetchone(self) -> tuple[str, str | None] | None:
            return row

    with pytest.raises(ConfigError, match=message):
        pgvector._check_extension(Answer())  # type: ignore[arg-type]  # there is one server, and it has pgvector
