"""Killed anywhere, or with no room left: catalogue, store and index agree afterwards, and nobody has to help."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ragkv.catalog import Catalog
from ragkv.cli.samples import samples_folder
from ragkv.ingest.pipeline import ingest
from ragkv.retrieval import Retriever
from ragkv.types import AskOptions
from tests.forked import run_forked
from tests.ingest.conftest import on_a_small_disk  # noqa: F401
from tests.ingest.reader import WordEmbedder, make_document
from tests.quick import quick_engine

pytestmark = pytest.mark.usefixtures("one_thread")


def crash(data: Path, root: Path, rounds: int, seed: int) -> dict[str, int]:
    """What tests/crash.py saw."""
    done = run_forked(["-m", "tests.crash", str(data), str(rounds), str(seed)], root, os.environ, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    seen: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert sum(seen.values()) == rounds
    assert len({state.split()[0] for state in seen}) > 2, f"the kills hit too few states to mean anything: {seen}"
    assert any("orphans" in state for state in seen), f"no kill hit the encoding: {seen}"
    return seen


def test_a_process_killed_anywhere_leaves_catalogue_store_and_index_in_agreement(tmp_path: Path, root: Path) -> None:
    crash(tmp_path, root, 20, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_so_it_is_a_hundred_times_over(tmp_path: Path, root: Path) -> None:
    crash(tmp_path, root, 100, seed=2)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_program_killed_while_it_ingests_can_be_run_again(tmp_path: Path, root: Path) -> None:
    """The whole program, with the bundled model. A collection and the doctor find nothing wrong after each kill."""
    pages, rng = sorted(samples_folder().glob("*.md"))[:6], random.Random(3)
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}

    def command(*arguments: object) -> list[str]:
        return [sys.executable, "-m", "ragkv.cli", *map(str, arguments), "--data", str(tmp_path / "data")]

    def run(*arguments: object) -> str:
        done = subprocess.run(command(*arguments), env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    documents = tmp_path / "pages"
    documents.mkdir()
    run("ingest", shutil.copy(pages[0], documents))
    killed = 0
    for step in range(10):
        for page in pages:
            (documents / page.name).write_text(page.read_text() + f"\nVersion {step}.\n")
        process = subprocess.Popen(command("ingest", documents), env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()  # the first document is in: from here on it works
        time.sleep(rng.uniform(0, 2))
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        assert "wrong" not in run("doctor", "--device", "cpu")
        run("gc", "--grace", 0)
        found = json.loads(run("gc", "--json", "--grace", 0))
        assert found["orphan"]["entries"] == found["foreign"]["entries"] == found["damaged"]["entries"] == 0
        catalog = Catalog.open(tmp_path / "data" / "catalog.sqlite")
        assert found["kept"] == len(catalog.keys())
        catalog.close()
    assert killed > 5, "it was too quick to be killed"


KILLED = """
import os, signal, sys
from pathlib import Path
from ragkv.catalog import Catalog
from ragkv.retrieval import Retriever
from tests.ingest.reader import WordEmbedder

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, sys.argv[2], die)
folder = Path(sys.argv[1])
retriever = Retriever(Catalog.open(folder / "catalog.sqlite"), WordEmbedder(), folder / "index")
retriever.views.refresh("default")
retriever.views.save()
"""


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_a_kill_while_the_index_is_written_leaves_the_old_one_and_the_next_start_goes_on(
    tmp_path: Path, root: Path, at: str
) -> None:
    with quick_engine(tmp_path) as engine:
        ingest(engine, make_document("a", words=60))
        engine.retriever.views.save()
        (index,) = (tmp_path / "index").iterdir()
        old = index.read_bytes()
        ingest(engine, make_document("b", words=60, seed=1))
        done = run_forked(["-c", KILLED, str(tmp_path), at], root, os.environ, timeout=100)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert index.read_bytes() == old
        assert len(list((tmp_path / "index").iterdir())) == 2, "the kill came too early"
        fresh = Retriever(engine.catalog, WordEmbedder(), tmp_path / "index")
        hits = fresh.search("title", "default", 1000)
        assert {hit.chunk.document_id for hit in hits} == {"a", "b"}
        assert len(hits) == engine.catalog.count()[1]
        fresh.views.save()
        assert list((tmp_path / "index").iterdir()) == [index]
        assert index.read_bytes() != old


FULL = """
import torch
from ragkv.ingest.pipeline import ingest
from ragkv.errors import StoreFull
from ragkv.types import AskOptions
from tests.ingest.reader import make_document
from tests.quick import quick_engine

def state():
    return engine.catalog.documents(), set(engine.store.keys())

torch.set_num_threads(1)
data = Path(sys.argv[1], "data")
engine, ballast = quick_engine(data), Ballast(sys.argv[1])
ingest(engine, make_document("a", words=60))
engine.retriever.views.save()
(index,) = (data / "index").iterdir()
for key in engine.store.keys():  # KV would give way to the catalogue
    engine.store.delete(key)
before, old = state(), index.read_bytes()
new = make_document("a", words=3000, seed=1)

ballast.fill(leaving=50_000)
try:
    ingest(engine, new)
    sys.exit("it fitted")
except StoreFull as error:
    print(error)
assert state() == before

ballast.drop()
assert ingest(engine, new).status == "replaced"
assert before[1].isdisjoint(engine.store.keys())
assert set(engine.store.keys()) == engine.catalog.keys()

ballast.fill()
engine.retriever.views.save()
assert index.read_bytes() == old and list(index.parent.iterdir()) == [index], "the old index, and no half of a new one"
answer = engine.answer("word1 word2", AskOptions(top_k=3))
assert answer.report.ratios.cache_hit == 1.0

ballast.drop()
engine.close()
with quick_engine(data) as engine:
    assert len(engine.retriever.search("title", "default", 1000)) == engine.catalog.count()[1]
assert index.read_bytes() != old
print("recovered")
"""


def test_a_full_disk_is_an_error_keeps_what_was_there_and_passes(
    on_a_small_disk: Callable[[str], str],  # noqa: F811
) -> None:
    printed = on_a_small_disk(FULL)
    assert "no space left for the catalogue" in printed
    assert printed.endswith("recovered\n")


def test_a_store_that_has_no_room_costs_time_only(tmp_path: Path) -> None:
    with quick_engine(tmp_path, store_bytes=1000) as engine:
        done = ingest(engine, make_document("a", words=60))
        assert engine.chunks.faults.refused == done.chunks
        for _ in range(2):
            answer = engine.answer("word1 word2", AskOptions(top_k=20))
            assert answer.report.cache.misses == done.chunks


def test_what_was_evicted_is_encoded_again_when_it_is_needed(tmp_path: Path) -> None:
    with quick_engine(tmp_path) as engine:
        done = ingest(engine, make_document("a", words=60))
        expected = engine.answer("word1 word2", AskOptions(top_k=20))
        size = sum(path.stat().st_size for path in (tmp_path / "kv").glob("??/*.kv"))
    with quick_engine(tmp_path, store_bytes=size // 2) as engine:
        for seed in range(3):
            answer = engine.answer("word1 word2", AskOptions(top_k=20))
            assert (answer.answer, answer.report.cache.chunks) == (expected.answer, done.chunks)
            ingest(engine, make_document("b", words=20, seed=seed, collection="other"))
        assert answer.report.cache.misses > 0
        assert all(fallback.reason == "missing" for fallback in answer.report.cache.fallbacks)
        assert sum(path.stat().st_size for path in (tmp_path / "kv").glob("??/*.kv")) <= size // 2
        assert set(engine.store.keys()) <= engine.catalog.keys()
