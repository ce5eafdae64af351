"""Another process that changes a catalogue, and tells when each change was committed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ragkv.catalog import Catalog, DocumentVersion
from ragkv.types import Chunk, Document, Key
from tests.ingest.reader import WordEmbedder

ROOT = Path(__file__).resolve().parents[2]
EMBEDDER = WordEmbedder()


def put(catalog: Catalog, document_id: str, *texts: str, collection: str = "default", **metadata: object) -> None:
    """Store a document with a chunk for each text."""
    chunks = [Chunk(f"{document_id}#{i}", document_id, i, f"On {t[:9]}", t, (1, 2)) for i, t in enumerate(texts)]
    document = Document(document_id, "Title", "\n".join(texts), metadata, collection)
    keys = [Key(f"{document_id} {i}") for i in range(len(texts))]
    catalog.put_document(DocumentVersion(document, "hash", chunks, EMBEDDER.encode(texts), keys, EMBEDDER.identity))


class Writer:
    """The process. `stop` it."""

    def __init__(self, address: str):
        command = [sys.executable, "-m", "tests.retrieval.writer", address]
        self._process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, cwd=ROOT, bufsize=1)
        self._answer()

    def put(self, document_id: str, text: str) -> float:
        """Store a document and return when it was committed, on the monotonic clock of this machine."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{document_id}\t{text}\n")
        return float(self._answer())

    def stop(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


if __name__ == "__main__":
    written = Catalog.open(sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        put(written, *line.rstrip("\n").split("\t"))
        print(time.monotonic(), flush=True)
