"""A real service whose embedder has changed, with a thousand documents and under load: no question fails."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from ragkv.retrieval.embedder import _packaged_folder
from tests.api.conftest import Service, serving, settings

DOCUMENTS = 1000
ASKERS = 4
COLLECTIONS = ("default", "second")
TRADES = ("baker", "cooper", "weaver", "mason", "tanner", "miller", "fisher", "joiner")


def text(number: int) -> str:
    return f"The {TRADES[number % 8]} of house {number} in Tarn is Ada Brook, who came in {1700 + number % 300}."


def fill(service: Service) -> None:
    for collection in COLLECTIONS:
        documents = [
            {"id": f"house-{number}", "text": text(number), "collection": collection}
            for number in range(DOCUMENTS // len(COLLECTIONS))
        ]
        job = service.post("/v1/documents", {"documents": documents}).json()["job_id"]
        while (found := service.client.get(f"/v1/jobs/{job}").json())["finished"] is None:
            time.sleep(0.5)
        assert found["status"] == "completed", found


class Load:
    """Askers and searchers until `stop`; what they saw.

    Attributes:
        faults: Answers that are no success.
        embedders: How many searches used which embedder.
    """

    def __init__(self, service: Service):
        self.url, self.stop = service.url, threading.Event()
        self.faults, self.embedders, self.answers = list[str](), Counter[str](), 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(ASKERS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, seed: int) -> None:
        number = seed
        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self.stop.is_set():
                number = (number * 7 + 13) % (DOCUMENTS // len(COLLECTIONS))
                collection = COLLECTIONS[number % len(COLLECTIONS)]
                question = f"Who is the {TRADES[number % 8]} of house {number}?"
                answered = client.post("/v1/answers", json={"question": question, "collection": collection, "top_k": 2})
                body = {"query": question, "collection": collection}
                searched = client.post("/v1/search", json=body)
                with self._lock:
                    for response in (answered, searched):
                        if response.status_code != 200:
                            self.faults.append(response.text)
                    if searched.status_code == 200:
                        self.embedders[searched.json()["report"]["embedder"]] += 1
                        named = {each["document_id"] for each in searched.json()["passages"]}
                        if f"house-{number}" not in named:
                            self.faults.append(f"{question}: {sorted(named)}")
                    self.answers += 1


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_no_question_fails_while_a_thousand_documents_are_embedded_again(tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(_packaged_folder())
    data = tmp_path / "data"
    with serving(settings(data, queue=64)) as service:
        fill(service)
    changed = settings(data, embedder=str(tmp_path / "other"), queue=64)
    began = time.monotonic()
    with serving(changed) as service, Load(service) as before:  # stopped in the middle, and taken up again
        until_embedded(service, DOCUMENTS // 5)
    with serving(changed) as service, Load(service) as load:
        first = service.client.get("/healthz").json()["reembedding"]
        assert first["done"] >= DOCUMENTS // 5, "a restart goes on where the service stopped"
        assert service.client.get("/readyz").status_code == 200
        assert service.post("/v1/documents?wait=true", {"id": "late", "text": "The late lamp is lit."}).is_success
        until_embedded(service, None)
        until = load.answers + 20
        while load.answers < until:
            time.sleep(0.1)
    print(f"{time.monotonic() - began:.0f} s, {load.answers} answers, {dict(load.embedders)}")
    assert before.faults + load.faults == []
    assert load.embedders["all-MiniLM-L6-v2"] > 0
    assert load.embedders["other"] > 0
    assert set(load.embedders) == {"all-MiniLM-L6-v2", "other"}


def until_embedded(service: Service, done: int | None) -> None:
    """Wait until so many chunks are embedded again, or all of them (None)."""
    while True:
        change = service.client.get("/healthz").json().get("reembedding")
        if change is None if done is None else change is not None and change["done"] >= done:
            return
        time.sleep(0.2)
