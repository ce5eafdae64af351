"""Files that cost the most for their size are refused or stored, and the service answers meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from tests.ingest.worst_files import FILES
from tests.program import served

PAUSE = 0.02
"""Seconds between two looks at the service."""
STORED = ("brackets.md", "heading.md", "ideographs.txt")
STORED_SIZE = 8 * 1024
REFUSED = ("nested.html", "missing.pptx", "nested.eml", "quotes.csv")
REFUSED_SIZE = 256 * 1024
PATIENCE = 5.0
"""Seconds in which a service answers `/healthz`, on a machine that does much else."""


class Ingested(NamedTuple):
    """What came of a file.

    Attributes:
        name: Its name.
        size: Its bytes.
        outcome: `completed`, or the code of the fault; `cancelled` where it was removed while it was encoded.
        message: Of the fault.
        chunks: Chunks that are stored.
        seconds: From its upload to the end of its job, or to its removal.
        stall: The longest time that `/healthz` took meanwhile, in seconds.
    """

    name: str
    size: int
    outcome: str
    message: str
    chunks: int
    seconds: float
    stall: float


class Pulse:
    """Asks a service for its health again and again, in a thread of its own."""

    def __init__(self, url: str):
        self._url, self._ready, self._stop = url, threading.Event(), threading.Event()
        self._longest = self._asked = 0.0
        self._thread = threading.Thread(target=self._run, name="pulse")
        self._thread.start()
        assert self._ready.wait(60)

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=600) as client:
            client.get("/healthz")
            self._ready.set()
            while not self._stop.wait(PAUSE):
                self._asked = time.monotonic()
                assert client.get("/healthz").status_code == 200
                self._longest = max(self._longest, time.monotonic() - self._asked)
                self._asked = 0.0

    def take_longest(self) -> float:
        """Return the longest time an answer took since the last call, one that is still awaited included."""
        asked, longest = self._asked, self._longest
        self._longest = 0.0
        return max(longest, time.monotonic() - asked if asked else 0.0)

    def close(self) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()


@contextmanager
def pulse(url: str) -> Iterator[Pulse]:
    """Watch a service."""
    watched = Pulse(url)
    try:
        yield watched
    finally:
        watched.close()


def ingest_worst(
    client: httpx.Client, names: Iterable[str], size: int, budget: float, encoding: float = math.inf
) -> Iterator[Ingested]:
    """Upload worst files one after the other, each when the job of the one before has ended.

    Args:
        client: Of the service.
        names: Which files.
        size: Bytes of each, about.
        budget: Most seconds for parsing and splitting one.
        encoding: Seconds of embedding and encoding, in proportion to the text, after which one is removed.
    """
    with pulse(str(client.base_url)) as watched:
        for name in names:
            data = FILES[name](size)
            time.sleep(10 * PAUSE)  # making it took time of this process, whose threads share a lock
            watched.take_longest()
            started = time.monotonic()
            queued = client.post("/v1/documents", files={"files": (name, data)}, timeout=budget)
            assert queued.status_code == 202, queued.text
            split = math.inf
            while (found := client.get(f"/v1/jobs/{queued.json()['job_id']}?documents=all").json())["finished"] is None:
                (document,) = found["documents"]
                now = time.monotonic()
                split = min(split, now) if found["stage"] not in (None, "", "split") else split
                assert min(split, now) - started < budget, f"{name}: {found}"
                if now - split > encoding:
                    client.delete(f"/v1/documents/{document['id']}")
                time.sleep(0.1)
            yield _ended(client, found["documents"], (name, len(data)), time.monotonic() - started, watched)


def _ended(
    client: httpx.Client, documents: list[dict[str, Any]], file: tuple[str, int], seconds: float, watched: Pulse
) -> Ingested:
    (document,) = documents or [{"error": None, "status": "cancelled"}]
    outcome, message, chunks = document["status"], "", 0
    if document["error"]:
        outcome, message = document["error"]["code"], document["error"]["message"]
    elif outcome == "completed":
        chunks = client.get(f"/v1/documents/{document['id']}").json()["chunks"]
    return Ingested(*file, outcome, message, chunks, seconds, watched.take_longest())


def test_worst_files_are_refused_or_stored_and_the_service_answers_meanwhile(tmp_path: Path, root: Path) -> None:
    with served(tmp_path, RAGKV_MODEL=str(root / "models/tiny"), RAGKV_DASHBOARD="false") as (_, client):
        refused = [*ingest_worst(client, REFUSED, REFUSED_SIZE, 60)]
        stored = [*ingest_worst(client, STORED, STORED_SIZE, 60)]
    assert {item.outcome for item in refused} <= {"too_large", "invalid_document"}, refused
    assert {item.outcome for item in stored} == {"completed"}, stored
    assert all(item.chunks for item in stored)
    assert max(item.stall for item in [*refused, *stored]) < PATIENCE, [*refused, *stored]
