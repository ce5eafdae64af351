"""A real service while 32 clients ask and others add, replace and delete documents: what was deleted is in no response.

Every version of a document has a word of its own. When the service has confirmed that a version is gone (the 204 of its
deletion, the 200 of its replacement), no response may hold that word:

    a response to a request that began later      never
    a response that was under way                 nothing of it that arrives LATE seconds later, or after that

The second limit is for what was sent before the confirmation and is read late: the clients share one process and, with
the service, a few cores.

tests/soak/test_deleted_means_gone.py runs this for ten minutes.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.program import served

ASKERS, WRITERS, NOTES = 32, 3, 4
"""Clients that ask, clients that write, and documents that each of these writes."""
LATE = 3.0
SECONDS = 16.0
WORD = re.compile(r"\bZ(?:[aeiou][bdfgklmnprstvz]){5}\b")
PARTS = [vowel + consonant for vowel in "aeiou" for consonant in "bdfgklmnprstvz"]
SETTINGS = {
    "RAGKV_CHUNK_TOKENS": "128",
    "RAGKV_TOP_K": "3",
    "RAGKV_MAX_TOKENS": "12",
    "RAGKV_HOST_BYTES": str(64 * 2**20),
    "RAGKV_CONVERSATION_BYTES": str(32 * 2**20),
    "RAGKV_DASHBOARD": "false",
}
BAD: tuple[dict[str, Any], ...] = (
    {"question": ""},
    {"question": "Who?", "method": "no-such-method"},
    {"question": "Who?", "top_k": 0},
    {"question": "Who?", "filter": {"kind": {"no": "scalar"}}},
    {"question": "Who? " * 20_000},
)


@dataclass(frozen=True)
class Footprint:
    """What the service takes: MiB of resident memory, descriptors, threads."""

    memory: float
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        status = Path(f"/proc/{pid}/status").read_text()
        memory, threads = (int(re.findall(rf"{name}:\s+(\d+)", status)[0]) for name in ("VmRSS", "Threads"))
        return cls(memory / 1024, len(os.listdir(f"/proc/{pid}/fd")), threads)


@dataclass
class World:
    """What was done to the service, and when. Shared by all threads."""

    client: httpx.Client
    until: float
    gone: dict[str, float] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    footprints: list[tuple[float, Footprint]] = field(default_factory=list)
    words: Iterator[str] = field(default_factory=lambda: _words(7))

    def over(self) -> bool:
        """The time is up, or something happened that may not."""
        return time.monotonic() > self.until or bool(self.faults)

    def check(self, text: str, began: float, what: str) -> None:
        """Look for words that are gone in a part of a response, which has just arrived."""
        now = time.monotonic()
        for word in set(WORD.findall(text)):
            self.counts["words read"] += 1
            gone = self.gone.get(word)
            if gone is not None and (began > gone or now > gone + LATE):
                since = f"asked {began - gone:.3f} s, read {now - gone:.3f} s after it was gone"
                self.faults.append(f"{what} holds {word}, {since}: {text[:1500]}")


def _words(seed: int) -> Iterator[str]:
    rng, used = random.Random(seed), set[str]()
    while True:
        word = "Z" + "".join(rng.choice(PARTS) for _ in range(5))
        if word not in used:
            used.add(word)
            yield word


class Asker:
    """Asks in all ways without end; comes back later when told to."""

    def __init__(self, world: World, number: int):
        self._world, self._client, self._number = world, world.client, number
        self._rng, self._conversations, self._turns = random.Random(number), 0, 0
        self._answered: list[str] = []
        self._ways: list[tuple[Callable[[], None], int]] = [
            *((self._ask, 8), (self._stream, 6), (self._search, 4), (self._talk, 8), (self._show_talk, 2)),
            *((self._chat, 3), (self._stream_chat, 2), (self._past, 3), (self._bad, 2), (self._hang_up, 3)),
        ]

    def run(self) -> None:
        ways, weights = zip(*self._ways, strict=True)
        while not self._world.over():
            self._rng.choices(ways, weights)[0]()

    def _question(self) -> dict[str, Any]:
        writer, note = self._rng.randrange(WRITERS), self._rng.randrange(NOTES)
        return {"question": f"Who keeps the lamp {NOTES * writer + note} of Tarn?"}

    def _post(self, path: str, body: dict[str, Any], also: tuple[int, ...] = (), **headers: str) -> httpx.Response:
        began = time.monotonic()
        response = self._client.post(path, json=body, headers=headers)
        self._told(path, response, also)
        self._world.check(response.text, began, path)
        if response.status_code == 200 and path != "/v1/search":
            self._world.took.append(time.monotonic() - began)
        return response

    def _told(self, what: str, response: httpx.Response, also: tuple[int, ...] = ()) -> None:
        """Count the response. It is one that was to be expected; also: further expected statuses."""
        self._world.counts[f"{what} {response.status_code}"] += 1
        changed = response.status_code == 503 and "document_changed" in response.text
        if response.status_code == 429:
            time.sleep(min(1.0, float(response.headers["retry-after"])))
        elif response.status_code != 200 and response.status_code not in also and not changed:
            self._world.faults.append(f"{what}: {response.status_code} {response.text[:500]}")

    def _ask(self) -> None:
        id = f"{self._number}-{len(self._answered)}"
        if self._post("/v1/answers", self._question(), **{"X-Request-ID": id}).status_code == 200:
            self._answered.append(id)

    def _search(self) -> None:
        self._post("/v1/search", {"query": self._question()["question"], "top_k": 4})

    def _talk(self) -> None:
        if self._turns == 5:
            self._conversations, self._turns = self._conversations + 1, 0
        name = f"talk-{self._number}-{self._conversations}"
        response = self._post("/v1/answers", {**self._question(), "conversation_id": name})
        if response.status_code == 200:
            self._turns += 1
            self._world.counts["turns told of"] += response.json()["report"].get("removed_turns", 0)
            self._world.counts["words answered"] += bool(WORD.search(response.json()["answer"]))

    def _show_talk(self) -> None:
        if self._turns:
            self._get(f"/v1/conversations/talk-{self._number}-{self._conversations}")

    def _past(self) -> None:
        self._get("/v1/answers")
        if self._answered:
            self._get(f"/v1/answers/{self._rng.choice(self._answered[-20:])}{self._rng.choice(('', '/map'))}")

    def _get(self, path: str) -> None:
        began = time.monotonic()
        response = self._client.get(path)
        self._told(path.split("/")[2] + " shown", response, (404,))
        self._world.check(response.text, began, path)

    def _chat(self) -> None:
        self._post("/v1/chat/completions", self._chat_body())

    def _chat_body(self) -> dict[str, Any]:
        return {"model": "tiny", "messages": [{"role": "user", "content": self._question()["question"]}]}

    def _stream(self) -> None:
        self._read("/v1/answers", {**self._question(), "stream": True})

    def _stream_chat(self) -> None:
        self._read("/v1/chat/completions", {**self._chat_body(), "stream": True})

    def _hang_up(self) -> None:
        self._read("/v1/answers", {**self._question(), "stream": True}, self._rng.randrange(4))

    def _read(self, path: str, body: dict[str, Any], most: int | None = None) -> None:
        """Read a stream line by line. most: hang up after so many events."""
        began = time.monotonic()
        with self._client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                self._told(f"{path} streamed", response)
                return
            events = 0
            for line in response.iter_lines():
                self._world.check(line, began, f"{path} streamed")
                events += line.startswith("data:")
                if most is not None and events > most:
                    self._world.counts["hung up"] += 1
                    return
                if '"document_changed"' in line:
                    self._world.counts[f"{path} streamed, broken off"] += 1
                    return
        self._world.counts[f"{path} streamed 200"] += 1
        self._world.took.append(time.monotonic() - began)

    def _bad(self) -> None:
        response = self._client.post("/v1/answers", json=self._rng.choice(BAD))
        self._told("bad", response, (422,))
        if response.status_code == 200:
            self._world.faults.append(f"a bad request was answered: {response.text[:300]}")


class Writer:
    """Adds, replaces and deletes its documents without end."""

    def __init__(self, world: World, number: int):
        self._world, self._client, self._number = world, world.client, number
        self._rng = random.Random(100 + number)
        self._holds: dict[int, str] = {}

    def start(self) -> None:
        """Add all documents together."""
        self._holds = {note: next(self._world.words) for note in range(NOTES)}
        documents = [{"id": f"lamp-{self._lamp(note)}", **self._content(note)} for note in self._holds]
        self._count("added", self._client.post("/v1/documents?wait=true", json={"documents": documents}), 200)

    def _content(self, note: int) -> dict[str, str]:
        word = self._holds[note]
        return {"title": f"Lamp of {word}", "text": f"The lamp {self._lamp(note)} of Tarn is kept by Ada {word}."}

    def run(self) -> None:
        while not self._world.over():
            note = self._rng.randrange(NOTES)
            if note in self._holds and self._rng.random() < 0.5:
                self._delete(note)
            else:
                self._put(note)
            time.sleep(0.05)

    def _delete(self, note: int) -> None:
        response = self._client.delete(f"/v1/documents/lamp-{self._lamp(note)}")
        self._world.gone[self._holds.pop(note)] = time.monotonic()
        self._count("deleted", response, 204)

    def _put(self, note: int) -> None:
        before, self._holds[note] = self._holds.get(note), next(self._world.words)
        path = f"/v1/documents/lamp-{self._lamp(note)}?wait=true"
        response = self._client.put(path, json=self._content(note))
        if before is not None:
            self._world.gone[before] = time.monotonic()
        self._count("replaced" if before else "added", response, 200)

    def _lamp(self, note: int) -> int:
        return NOTES * self._number + note

    def _count(self, what: str, response: httpx.Response, expected: int) -> None:
        self._world.counts[what] += 1
        if response.status_code != expected:
            self._world.faults.append(f"{what}: {response.status_code} {response.text[:500]}")


def watch(world: World, pid: int) -> None:
    """Look at what the service takes, once a second."""
    while not world.over():
        world.footprints.append((time.monotonic(), Footprint.of(pid)))
        time.sleep(1.0)


def run_together(world: World, *parts: Callable[[], None]) -> None:
    """Every part in a thread of its own; what one of them raises is a fault."""

    def noted(part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            world.faults.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=noted, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_deleted_means_gone(folder: Path, seconds: float, new_interpreter: bool) -> World:
    """Run everything for so long against a service, and check its responses; returns what was seen."""
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=100)
    with (
        served(folder, new_interpreter=new_interpreter, **SETTINGS) as (process, near),
        httpx.Client(base_url=near.base_url, timeout=120, limits=limits) as client,
    ):
        added = client.put("/v1/documents/harbour?wait=true", json={"text": "The harbour of Tarn was built in 1889."})
        assert added.status_code == 200, added.text
        world = World(client, 0.0)
        writers = [Writer(world, number) for number in range(WRITERS)]
        for writer in writers:
            writer.start()
        world.until = time.monotonic() + seconds
        run_together(
            world,
            *(Asker(world, number).run for number in range(ASKERS)),
            *(writer.run for writer in writers),
            lambda: watch(world, process.pid),
        )
        assert not world.faults, "\n".join(world.faults[:3])
        began = time.monotonic()
        for name in itertools.chain.from_iterable((f"talk-{n}-0", f"talk-{n}-1") for n in range(ASKERS)):
            world.check(client.get(f"/v1/conversations/{name}").text, began, name)
        world.check(client.get("/v1/answers?limit=100").text, began, "the list of answers")
        assert not world.faults, "\n".join(world.faults[:3])
        health = client.get("/healthz").json()
        assert (health["waiting"], health["running"]) == (0, 0)
    return world


def figures(world: World) -> dict[str, Any]:
    """What is reported of a run: times of answers in seconds, and what the service took at its beginning and end."""
    took = sorted(world.took)
    first, last = world.footprints[0][0], world.footprints[-1][0]

    def around(share: float) -> dict[str, float]:
        """The median of a tenth of the run, from this share of it on."""
        start = first + share * (last - first)
        found = [each for when, each in world.footprints if start <= when <= start + (last - first) / 10]
        return {name: statistics.median(getattr(each, name) for each in found) for name in Footprint.__annotations__}

    return {
        "answers": len(took),
        "p50": round(statistics.median(took), 3),
        "p99": round(took[int(len(took) * 0.99)], 3),
        "a fifth in": around(0.2),
        "half way": around(0.5),
        "at the end": around(0.9),
        "counts": dict(sorted(world.counts.items())),
    }


@pytest.mark.timeout(600)
def test_nothing_of_a_deleted_document_is_in_any_response_under_load(tmp_path: Path) -> None:
    world = check_deleted_means_gone(tmp_path, SECONDS, new_interpreter=False)
    print(json.dumps(figures(world), indent=1))  # seen with -s
    counts = world.counts
    assert min(counts["added"], counts["replaced"], counts["deleted"], counts["words read"]) >= 1, counts
    assert counts["/v1/answers 200"] >= 1
    assert counts["bad 422"] >= 1
