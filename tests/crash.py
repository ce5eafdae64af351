"""Run as a program: `python -m tests.crash FOLDER ROUNDS SEED`. Prints one JSON line of what was seen.

A child ingests, replaces and removes documents, saves the index and collects garbage without end, and is killed with
SIGKILL at a random moment; another child then opens what is left and checks that everything agrees. The engine is the
real one with a model that reads quickly, and children are forked, so that a round costs a fraction of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ragkv.admin.gc import collect_garbage
from ragkv.engine.engine import Engine
from ragkv.ingest.chunker import split
from ragkv.ingest.pipeline import content_hash, ingest, remove
from ragkv.store.base import StoreStats
from ragkv.types import AskOptions
from tests.ingest.reader import make_document
from tests.quick import quick_engine, quick_model

VERSIONS = {
    "a": [make_document("a", words=40 + 30 * seed, seed=seed) for seed in range(4)],
    "b": [make_document("b", words=30, seed=9)],
}


def work(folder: Path, begin: int) -> None:
    engine = quick_engine(folder)
    ingest(engine, VERSIONS["b"][0])
    for step in range(begin, 1_000_000):
        ingest(engine, VERSIONS["a"][step % 4])
        engine.retriever.views.save()
        if step % 3 == 2:
            remove(engine, "default", "a")
            engine.retriever.views.save()
        if step % 4 == 1:
            collect_garbage(engine.store, engine.catalog, grace=0)


def check(folder: Path) -> str:
    """Which version is there. Raises AssertionError where catalogue, store and index do not agree."""
    with quick_engine(folder) as engine:
        chunks, state = [], "none"
        for document in engine.catalog.documents():
            versions = [v for v in VERSIONS[document.id] if content_hash(v) == document.content_hash]
            assert len(versions) == 1, "the catalogue holds what was never sent"
            expected = split(versions[0], engine.model.prompt, engine.chunk_tokens)
            assert engine.catalog.chunks_of("default", document.id) == expected, "chunks of more than one version"
            chunks += expected
            if document.id == "a":
                state = str(VERSIONS["a"].index(versions[0]))
        rows, _ = engine.catalog.vectors("default")  # raises where a chunk has no vector
        assert len(rows) == len(chunks)
        assert len(engine.catalog.match("default", "title", 1000)) == len(chunks), "words of every chunk and no other"
        engine.retriever.views.refresh("default")
        found = {hit.chunk.id for hit in engine.retriever.search("title", "default", 1000)}
        assert found == {chunk.id for chunk in chunks}, "the index finds what the catalogue holds"
        check_store(engine, chunks)
        orphans = len(set(engine.store.keys()) - engine.catalog.keys())
        assert collect_garbage(engine.store, engine.catalog, grace=0).orphan.entries == orphans
        assert set(engine.store.keys()) == engine.catalog.keys(), "after a collection both hold the same"
        assert collect_garbage(engine.store, engine.catalog, grace=0).orphan == StoreStats(0, 0)
    return f"{state} with orphans" if orphans else state


def check_store(engine: Engine, chunks: list) -> None:  # type: ignore[type-arg]
    """Every chunk has its KV, whole; a question finds it."""
    store = engine.chunks.store("default")
    for chunk in chunks:
        key = store.key(chunk.tokens)
        head, _ = store.head(key, len(chunk.tokens))
        engine.tiers.load(key, head, [range(head.layout.blocks)] * head.layout.shape.layers)
    if chunks:
        answer = engine.answer("word1 word2", AskOptions(top_k=4))
        assert answer.report.cache.hits.store == answer.report.cache.chunks


def fork(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        body()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def pace(folder: Path) -> float:
    """Seconds that the engine takes here and now to open and to do some work: on a busy machine rounds last longer."""
    began = time.monotonic()
    with quick_engine(folder) as engine:
        for version in (*VERSIONS["b"], *VERSIONS["a"][:2]):
            ingest(engine, version)
            engine.retriever.views.save()
    return time.monotonic() - began


def main(folder: Path, rounds: int, seed: int) -> None:
    torch.set_num_threads(1)  # a forked child has no threads but its own
    quick_model()
    pace(folder / "warm")
    longest = 3 * pace(folder / "paced")
    rng, states, result = random.Random(seed), Counter[str](), folder / "result"
    for _ in range(rounds):
        begin = rng.randrange(12)  # on a busy machine a round is over after a step or two
        worker = fork(partial(work, folder, begin))
        time.sleep(rng.uniform(0.01, longest))
        os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
        if os.WIFEXITED(status):
            sys.exit("the worker ended by itself")
        _, status = os.waitpid(fork(lambda: result.write_text(check(folder))), 0)
        if status:
            sys.exit(f"not whole after {states}")
        states[result.read_text()] += 1
    print(json.dumps(states))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
