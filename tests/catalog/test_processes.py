"""Several processes share a catalogue: no claimed KV is removed, and the feed misses nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from ragkv.catalog import Catalog
from tests.catalog.test_feed import Words

COMMON = """
import sys, time
from pathlib import Path
import numpy as np
from ragkv.catalog import Catalog, DocumentVersion, EmbedderIdentity
from ragkv.types import Chunk, Document, Key

where, folder, name, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
catalog = Catalog.open(where if where.startswith("postgresql") else Path(where))
until = time.monotonic() + seconds

def put(document_id, keys, claim=None):
    chunks = [Chunk(f"{document_id}#{i}", document_id, i, "t", f"{document_id} {k}", (1,)) for i, k in enumerate(keys)]
    vectors, embedder = np.ones((len(keys), 4), "f4"), EmbedderIdentity("e", 4)
    document = Document(document_id, "t", "x")
    catalog.put_document(DocumentVersion(document, "h", chunks, vectors, keys, embedder), claim)
"""
INGEST = """
keys, rounds = [Key("one"), Key("two")], 0
while time.monotonic() < until:
    claim = catalog.claim(keys, "model")
    for key in keys:
        (folder / key).touch()
    put(name, keys, claim)
    assert all((folder / key).exists() for key in keys), "KV of a stored document is gone"
    catalog.remove("default", name)
    rounds += 1
print(rounds)
"""
REMOVE = """
looked = 0
while time.monotonic() < until:
    with catalog.removing([Key("one"), Key("two")]) as free:
        looked += 1
        for key in free:
            (folder / key).unlink(missing_ok=True)
print(looked)
"""
CHANGE = """
rounds = 0
while time.monotonic() < until:
    put(f"{name}{rounds % 5}", [Key(f"{name} {rounds} {n}") for n in range(1 + rounds % 3)])
    if rounds % 4 == 3:
        catalog.remove("default", f"{name}{rounds % 5}")
    rounds += 1
print(rounds)
"""


def run(scripts: list[str], where: Path | str, folder: Path, root: Path, seconds: float) -> list[subprocess.Popen[str]]:
    processes = []
    for number, script in enumerate(scripts):
        command = [sys.executable, "-c", COMMON + script, str(where), str(folder), f"p{number}-", str(seconds)]
        processes.append(subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True))
    return processes


def counts(processes: list[subprocess.Popen[str]]) -> list[int]:
    found = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [int(text) for text in found]


def test_no_kv_is_removed_that_an_ingest_of_another_process_relies_on(
    catalog_address: Path | str, tmp_path: Path, root: Path
) -> None:
    """All three open the new catalogue at the same time, too."""
    (tmp_path / "kv").mkdir()
    done = counts(run([INGEST, INGEST, REMOVE], catalog_address, tmp_path / "kv", root, 3))
    assert all(done), "each of them was at work"


def test_a_word_index_misses_no_change_of_any_process(
    catalog: Catalog, catalog_address: Path | str, root: Path
) -> None:
    processes = run([CHANGE, CHANGE], catalog_address, Path("."), root, 2)
    index = Words()
    with catalog.listener() as listener:
        while any(process.poll() is None for process in processes):
            if listener.wait(0.2):
                index.refresh(catalog, limit=3)
    assert all(counts(processes))
    index.refresh(catalog)
    assert sorted(index.texts) == catalog.vectors("default")[0].tolist()
    assert index.texts == {row: chunk.text for row, chunk in catalog.chunks("default", list(index.texts)).items()}
    assert np.all(np.diff(sorted(index.texts)) > 0)
