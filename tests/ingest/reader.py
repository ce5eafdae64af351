"""A small engine for tests of ingest: the catalogue, the index and the files are real, the language model is not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragkv.admin.quota import Quota
from ragkv.catalog import Catalog, EmbedderIdentity
from ragkv.ingest.jobs import Jobs
from ragkv.retrieval import Retrieval, Retriever
from ragkv.retrieval.segments import embed_windows
from ragkv.types import Chunk, Document, EmbeddedPassages, Key

DIMENSION = 32


class WordEmbedder:
    """Embeds a text as a bag of hashed words: fast, and the same in every process."""

    def __init__(self, name: str = "words", dimension: int = DIMENSION):
        self.identity = EmbedderIdentity(name, dimension)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.full((len(texts), self.identity.dimension), 1e-3, np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            for word in re.findall(r"\w+", text.lower()):
                digest = hashlib.sha256(f"{self.identity.name} {word}".encode()).digest()
                vector[digest[0] % len(vector)] += 1
        unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def encode_queries(self, questions: Sequence[str]) -> NDArray[np.float32]:
        return self.encode(questions)

    def encode_passages(self, passages: Sequence[tuple[str, str]]) -> EmbeddedPassages:
        texts = [f"{title}\n{text}" for title, text in passages]
        return EmbeddedPassages(self.encode(texts), embed_windows(self.encode, passages))

    def count_tokens(self, texts: Sequence[str]) -> int:
        return sum(len(text.split()) for text in texts)


class WordPrompt:
    """The prompt piece of the bundled model, with one token per word or punctuation mark; no wrapper tokens."""

    def of(self, collection: str) -> WordPrompt:
        return self

    def reader(self, fingerprint: str) -> str:
        return fingerprint

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        words = re.findall(r"\w+|[^\w\s]|\n", f"Document: {title}\n{text}\n")
        return tuple(int.from_bytes(hashlib.sha256(word.encode()).digest()[:3]) for word in words)


@dataclass(frozen=True)
class WordModel:
    prompt: WordPrompt


class FileEngine:
    """Keeps the KV of a chunk as a file that holds its tokens.

    Attributes:
        group_tokens: Tokens of chunks that are encoded together; 1: every chunk alone.
        split_seconds: Seconds of processor time that splitting a MiB of text may take.
        together: Ids of the chunks that were encoded together.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str = "model",
        chunk_tokens: int = 64,
        embedder: str = "words",
        where: Path | str | None = None,
    ):
        """Open a data folder. where: of the catalogue; None: a file in the folder."""
        self.folder = folder
        self.fingerprint = fingerprint
        self.chunk_tokens = chunk_tokens
        self.model = WordModel(WordPrompt())
        self.catalog = Catalog.open(where or folder / "catalog.sqlite")
        self.retriever = Retriever(self.catalog, WordEmbedder(embedder), folder / "index", Retrieval())
        self.encoded = 0
        self.group_tokens = 1
        self.split_seconds = 30.0
        self.together: list[list[str]] = []
        self.quota = Quota(0, 1)
        (folder / "kv").mkdir(exist_ok=True)

    def key(self, chunk: Chunk, collection: str) -> Key:
        name = f"{self.fingerprint} {collection} {chunk.tokens}"
        return Key(hashlib.sha256(name.encode()).hexdigest())

    def encode_and_store_all(self, chunks: Iterable[tuple[Chunk, str]]) -> None:
        self.together.append([chunk.id for chunk, _ in chunks])
        for chunk, collection in chunks:
            path = self.folder / "kv" / self.key(chunk, collection)
            if not path.exists():
                self.encoded += 1
                try:
                    path.write_text(str(chunk.tokens))
                except OSError:  # as with the real store, a fault costs nothing but time later
                    path.unlink()

    def is_writing(self, keys: Iterable[Key]) -> bool:
        return False

    def finish_writes(self, keys: Iterable[Key]) -> None:
        pass

    def evict(self, keys: Iterable[Key], claim: int | None = None) -> None:
        with self.catalog.removing(keys, mine=claim) as free:
            for key in free:
                (self.folder / "kv" / key).unlink(missing_ok=True)

    def stored(self) -> set[str]:
        """Return the keys whose KV is stored."""
        return {path.name for path in (self.folder / "kv").iterdir()}

    def close(self) -> None:
        self.catalog.close()


def make_document(document_id: str, words: int = 200, seed: int = 0, collection: str = "default") -> Document:
    """Make a document of random sentences over a small vocabulary."""
    rng = np.random.default_rng(seed)
    sentences = []
    for start in range(0, words, 10):
        picked = " ".join(f"word{n}" for n in rng.integers(0, 500, min(10, words - start)))
        sentences.append(picked.capitalize() + ".")
    return Document(document_id, f"Title of {document_id}", " ".join(sentences), {}, collection)


def run_next(jobs: Jobs, engine: FileEngine, between: Callable[[], object] = lambda: None) -> str | None:
    """Ingest the next waiting document and call `between` after each step; returns the job's id, None without one."""
    steps = jobs.steps(engine)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            job_id: str | None = end.value
            return job_id
        between()
