"""Speculation over HTTP: asked for in a request, told in the report, counted in the metrics; the answer is the same."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ragkv.engine import speculation
from ragkv.engine.drafting import Drafter, DraftParams
from tests.api.conftest import Service
from tests.api.streams import streamed
from tests.api.test_bad_input import check_problem

QUESTION = "Who built the harbour of Tarn?"
ASK = {"question": QUESTION, "method": "full", "max_tokens": 60}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts after a single token already: the answers are short."""
    params = DraftParams(shortest=1, first=4, pause=1)
    monkeypatch.setattr(speculation, "Drafter", lambda texts, never: Drafter(texts, never, params))


@pytest.fixture(scope="module", autouse=True)
def endless(service: Service) -> Iterator[None]:
    """Answers without stop tokens: the small model then repeats itself and its prompt, which can be drafted."""

    def replace_stops(stops: frozenset[int]) -> Any:
        def task(engine: Any) -> frozenset[int]:
            before, engine.model.stop_ids = engine.model.stop_ids, stops
            return before

        found: frozenset[int] = service.engine_thread.submit(task).result(30)
        return found

    before = replace_stops(frozenset())
    yield
    assert replace_stops(before) == frozenset()


def counters(service: Service) -> dict[str, float]:
    """Draft tokens of /metrics, by kind."""
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    found = (sample for family in families for sample in family.samples)
    return {each.labels["kind"]: each.value for each in found if each.name == "ragkv_draft_tokens_total"}


def answered(service: Service, **options: Any) -> dict[str, Any]:
    response = service.post("/v1/answers", {**ASK, **options})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_an_answer_is_the_same_takes_fewer_passes_and_is_counted(service: Service) -> None:
    plain, before = answered(service, speculation=False), counters(service)
    drafted, after = answered(service, speculation=True), counters(service)
    told = drafted["report"]["decoding"]["speculation"]
    assert plain["report"]["decoding"]["speculation"] is None
    assert (drafted["answer"], drafted["citations"]) == (plain["answer"], plain["citations"])
    assert drafted["report"]["tokens"] == plain["report"]["tokens"]
    assert 0 < told["accepted"] <= told["drafted"]
    assert drafted["report"]["decoding"]["steps"] < plain["report"]["decoding"]["steps"]
    counted = {kind: after[kind] - before[kind] for kind in after}
    assert counted == {kind: told[kind] for kind in ("drafted", "accepted")}


def test_without_the_field_the_setting_decides(service: Service) -> None:
    assert answered(service)["report"]["decoding"]["speculation"] is not None, "on a CPU it is on"


def test_answers_with_and_without_drafts_are_decoded_together(service: Service) -> None:
    asked = [(question, drafts) for question in (QUESTION, "Who built the bridge?") for drafts in (True, False)] * 2
    with ThreadPoolExecutor(len(asked)) as clients:
        pending = [
            clients.submit(answered, service, question=question, speculation=drafts) for question, drafts in asked
        ]
        found = [(question, each.result()["answer"]) for (question, _), each in zip(asked, pending, strict=True)]
    assert len(set(found)) == 2


def test_a_stream_sends_the_same_text(service: Service) -> None:
    plain = answered(service, speculation=False)["answer"]
    options = {name: value for name, value in ASK.items() if name != "question"}
    with streamed(service, QUESTION, **options, speculation=True) as (_, events):
        received = list(events)
    assert "".join(data["text"] for name, data in received if name == "token") == plain
    (done,) = (data for name, data in received if name == "done")
    assert done["answer"] == plain
    assert done["report"]["decoding"]["speculation"]["accepted"] > 0


def test_openai_clients_choose_by_the_extension_also_when_they_sample(service: Service) -> None:
    model = service.client.get("/v1/models").json()["data"][0]["id"]
    chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
    for sampled in ({}, {"temperature": 0.8, "seed": 7, "stop": ["1889"]}):
        said = []
        for drafts in (False, True):
            body = {**chat, **sampled, "ragkv": {"speculation": drafts, "method": "full"}}
            made = service.post("/v1/chat/completions", body).json()
            assert (made["ragkv"]["report"]["decoding"]["speculation"] is not None) == drafts
            said.append((made["choices"][0]["message"], made["choices"][0]["finish_reason"], made["usage"]))
        assert said[0] == said[1]


def test_another_value_is_refused(service: Service) -> None:
    check_problem(service.post("/v1/answers", {**ASK, "speculation": "sometimes"}), 422)
