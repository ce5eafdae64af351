"""Run as a program: `python -m tests.ingest.crash FOLDER ROUNDS SEED`. Prints one JSON line of what was seen.

A child ingests, replaces and removes a document without end and is killed with SIGKILL at a random moment; another
child then opens what is left and checks that it is whole. Children are forked, so that a round costs milliseconds.
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
from pathlib import Path

from ingest.chunk import split
from ingest.pipeline import content_hash, ingest, remove
from tests.ingest.reader import FileReader, make_document

VERSIONS = [make_document("a", words=300 + 50 * seed, seed=seed) for seed in range(4)]
OTHER = make_document("b", words=100, seed=9)


def work(folder: Path) -> None:
    reader = FileReader(folder)
    ingest(reader, OTHER)
    for step in range(1_000_000):
        ingest(reader, VERSIONS[step % len(VERSIONS)])
        reader.retriever.save()
        if step % 3 == 2:
            remove(reader, "default", "a")


def check(folder: Path) -> str:
    """Which version is there. Raises AssertionError when what is there is no version."""
    reader = FileReader(folder)
    found = reader.catalog.find("default", "a")
    state, expected = "none", []
    if found:
        (state,) = (str(n) for n, v in enumerate(VERSIONS) if content_hash(v) == found.content_hash)
        expected = split(VERSIONS[int(state)], reader.model.prompt, reader.chunk_tokens)
        assert reader.catalog.chunks_of("default", "a") == expected
    others = reader.catalog.find("default", "b")
    rows, _ = reader.catalog.vectors("default")
    assert len(rows) == len(expected) + (others.chunks if others else 0)
    assert reader.catalog.keys() <= reader.stored(), "a chunk without KV"
    for chunk in expected:
        assert chunk in [hit.chunk for hit in reader.retriever.search(chunk.text, "default", 64)]
    assert len(reader.catalog.match("default", "title", 1000)) == len(rows)
    orphans = reader.stored() - reader.catalog.keys()
    reader.forget(reader.catalog.unreferenced(reader.stored()))  # type: ignore[arg-type]
    reader.close()
    return f"{state} with orphans" if orphans else state


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


def main(folder: Path, rounds: int, seed: int) -> None:
    rng, states, result = random.Random(seed), Counter[str](), folder / "result"
    for _ in range(rounds):
        worker = fork(lambda: work(folder))
        time.sleep(rng.uniform(0.001, 0.15))
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
