"""Confidence and abstention over HTTP: told in the report, and refused where the model was not measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.api.conftest import Service
from tests.api.streams import streamed
from tests.api.test_bad_input import check_problem

QUESTION = "Who built the harbour of Tarn?"
ASK = {"question": QUESTION, "method": "full"}


@contextmanager
def measured(service: Service, coefficients: tuple[float, ...]) -> Iterator[None]:
    """Give the model these coefficients inside the block."""

    def set_to(values: tuple[float, ...]) -> Any:
        def task(engine: Any) -> None:
            engine.model.profile = replace(engine.model.profile, confidence=values)

        return task

    service.engine_thread.submit(set_to(coefficients)).result(30)
    try:
        yield
    finally:
        service.engine_thread.submit(set_to(())).result(30)


def test_a_model_that_was_not_measured_tells_no_confidence_and_cannot_abstain(service: Service) -> None:
    report = service.post("/v1/answers", ASK).json()["report"]
    assert (report["confidence"], report["abstained"]) == (None, False)
    evidence = report["evidence"]
    assert evidence["least_log_probability"] <= evidence["mean_log_probability"] <= 0
    assert 0.3 < evidence["similarity"] <= 1
    problem = check_problem(service.post("/v1/answers", {**ASK, "abstain_below": 0.5}), 409)
    assert problem["code"] == "not_calibrated"
    assert "ragkv calibrate" not in problem["detail"], "clients cannot run commands"


def test_an_answer_below_the_confidence_becomes_unknown_and_cites_nothing(service: Service) -> None:
    with measured(service, (0.0, 0.0, 0.0, 0.0)):
        kept = service.post("/v1/answers", {**ASK, "abstain_below": 0.5}).json()
        withheld = service.post("/v1/answers", {**ASK, "abstain_below": 0.6}).json()
    assert (kept["answer"], kept["report"]["confidence"], kept["report"]["abstained"]) == ("Ada Brook", 0.5, False)
    assert (withheld["answer"], withheld["citations"]) == ("unknown", [])
    assert (withheld["report"]["confidence"], withheld["report"]["abstained"]) == (0.5, True)


def test_an_answer_that_is_unknown_already_is_not_told_as_abstained(service: Service) -> None:
    asked = {**ASK, "question": "How much does the Grey Heron weigh?", "abstain_below": 0.9}
    with measured(service, (0.0, 0.0, 0.0, 0.0)):
        answer = service.post("/v1/answers", asked).json()
    assert (answer["answer"], answer["report"]["abstained"]) == ("unknown", False)


@pytest.mark.parametrize(("least", "said"), [(0.4, "Ada Brook"), (0.6, "unknown")])
def test_a_stream_sends_no_text_that_is_withheld_later(service: Service, least: float, said: str) -> None:
    with measured(service, (0.0, 0.0, 0.0, 0.0)), streamed(service, QUESTION, abstain_below=least) as (_, events):
        received = list(events)
    assert [data["text"] for name, data in received if name == "token"] == [said]


def test_openai_clients_abstain_by_the_extension(service: Service) -> None:
    model = service.client.get("/v1/models").json()["data"][0]["id"]
    chat = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "ragkv": {"abstain_below": 0.6}}
    with measured(service, (0.0, 0.0, 0.0, 0.0)):
        made = service.post("/v1/chat/completions", chat).json()
    assert (made["choices"][0]["message"]["content"], made["ragkv"]["report"]["abstained"]) == ("unknown", True)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_tell_nothing_of_a_withheld_answer(service: Service, stream: bool) -> None:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "logprobs": True, "stream": stream}
    with measured(service, (0.0, 0.0, 0.0, 0.0)):
        kept = service.post("/v1/chat/completions", {**asked, "ragkv": {"abstain_below": 0.4}}).text
        withheld = service.post("/v1/chat/completions", {**asked, "ragkv": {"abstain_below": 0.6}}).text
    assert '"token":' in kept
    assert "unknown" in withheld
    assert "Ada" not in withheld.partition('"ragkv"')[0]
    assert '"token"' not in withheld


def test_a_conversation_shows_no_withheld_answer(service: Service) -> None:
    with measured(service, (0.0, 0.0, 0.0, 0.0)):
        service.post("/v1/answers", {**ASK, "abstain_below": 0.6, "conversation_id": "withheld"})
    turns = service.client.get("/v1/conversations/withheld").json()["turns"]
    assert [turn["answer"] for turn in turns] == ["unknown"]


@pytest.mark.parametrize("least", [-0.1, 1.1, "0.5", True])
def test_a_confidence_outside_its_range_is_refused(service: Service, least: Any) -> None:
    check_problem(service.post("/v1/answers", {**ASK, "abstain_below": least}), 422)
