"""`/v1/handovers`: what another server gets to answer a question, and who gets it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from safetensors.torch import load

from ragkv.api.middleware.keys import make_key
from ragkv.client import AsyncClient, Client, HandedQuestion, Refused
from tests.api.conftest import BRIDGE, HARBOUR, Service, serving, settings
from tests.api.test_bad_input import check_problem

QUESTION = "Who built the harbour of Tarn?"
ASK = {"question": QUESTION, "top_k": 2, "method": "reuse"}
RED, RED_PAIR = make_key("red", {"tokens": 400})
BLUE, BLUE_PAIR = make_key("blue")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two tenants, which have the same documents."""
    with serving(settings(tmp_path_factory.mktemp("house"), api_keys=f"{RED_PAIR}, {BLUE_PAIR}")) as running:
        for key in (RED, BLUE):
            with Client(running.url, key) as client:
                assert client.wait(client.send([HARBOUR, BRIDGE])).status == "completed"
        yield running


def named(handed: HandedQuestion, **changes: Any) -> dict[str, Any]:
    """What the connector sends for the rows of a hand-over."""
    assert handed.kv_transfer_params is not None
    return {**handed.kv_transfer_params["ragkv"], "cache_salt": handed.cache_salt, **changes}


def test_the_rows_of_a_hand_over_are_the_beginning_of_its_prompt(service: Service) -> None:
    with Client(service.url) as client:
        handed = client.hand_over(QUESTION, top_k=2, method="reuse")
        rows = load(client.handed_rows(named(handed)))
    count = named(handed)["rows"]
    assert rows["tokens"].tolist() == list(handed.prompt[:count])
    assert 0 < count < len(handed.prompt)
    assert rows["k"].shape == rows["v"].shape == (12, count, 2, 64)
    assert {citation.document_id for citation in handed.citations} == {"harbour", "bridge"}
    assert (handed.method, handed.stop) == ("reuse", ("\n",))


def test_the_asynchronous_client_gets_the_same(service: Service) -> None:
    async def ask() -> tuple[HandedQuestion, bytes]:
        async with AsyncClient(service.url) as client:
            handed = await client.hand_over(QUESTION, top_k=2, method="reuse")
            return handed, await client.handed_rows(named(handed))

    with Client(service.url) as client:
        handed = client.hand_over(QUESTION, top_k=2, method="reuse")
        assert asyncio.run(ask()) == (handed, client.handed_rows(named(handed)))


def test_a_hand_over_is_a_request_of_vllm(service: Service) -> None:
    with Client(service.url) as client:
        handed = client.hand_over(QUESTION, top_k=2, method="reuse")
        full = client.hand_over(QUESTION, top_k=2, method="full")
    body = handed.request("tiny", "key", max_tokens=4)
    assert body["kv_transfer_params"]["ragkv"]["api_key"] == "key"
    assert (body["prompt"], body["cache_salt"]) == (list(handed.prompt), handed.cache_salt)
    assert (body["model"], body["max_tokens"], body["stop"]) == ("tiny", 4, ["\n"])
    assert "api_key" not in handed.request("tiny")["kv_transfer_params"]["ragkv"]
    assert full.kv_transfer_params is None
    assert "kv_transfer_params" not in full.request("tiny", "key")
    messages = [{"role": "user", "content": QUESTION}]
    for each in (handed, full):
        chat = each.request("tiny", "key", messages)
        assert (chat["messages"], chat["kv_transfer_params"]["prompt_token_ids"]) == (messages, list(each.prompt))
        assert "prompt" not in chat


def test_earlier_turns_and_instructions_stand_behind_the_rows(service: Service) -> None:
    told = {"history": [{"question": "Where is Tarn?", "answer": "In the north"}], "instructions": "Be short."}
    with Client(service.url) as client:
        alone = client.hand_over("Where is the green bridge?", top_k=2, method="reuse")
        chat = client.hand_over("Where is the green bridge?", top_k=2, method="reuse", **told)
    model = service.engine_thread.submit(lambda engine: engine.model).result(60)
    rows = named(chat)["rows"]
    assert model.tokenizer.decode(chat.prompt[rows:]) == (
        "Be short.\nQuestion: Where is Tarn?\nAnswer: In the north\nQuestion: Where is the green bridge?\nAnswer:"
    )
    assert (chat.prompt[:rows], chat.cache_salt) == (alone.prompt[:rows], alone.cache_salt)


def test_a_method_that_recomputes_is_refused(service: Service) -> None:
    problem = check_problem(service.post("/v1/handovers", {**ASK, "method": "cacheblend"}), 422)
    assert "scout:repair=none" in problem["detail"]


@pytest.mark.parametrize(
    "body", [{**ASK, "question": ""}, {**ASK, "conversation_id": "one"}, {**ASK, "top_k": 0}, {"top_k": 1}]
)
def test_what_is_no_question_is_refused(service: Service, body: dict[str, Any]) -> None:
    check_problem(service.post("/v1/handovers", body), 422)


@pytest.mark.parametrize(
    "changes", [{"chunks": []}, {"chunks": [{"row": 1}]}, {"cache_salt": ""}, {"rows": 0}, {"more": 1}]
)
def test_rows_that_are_named_wrongly_are_refused(service: Service, changes: dict[str, Any]) -> None:
    with Client(service.url) as client:
        handed = client.hand_over(QUESTION, top_k=2, method="reuse")
    check_problem(service.post("/v1/handovers/rows", named(handed, **changes)), 422)


def test_a_tenant_gets_no_rows_of_another(house: Service) -> None:
    with Client(house.url, RED) as red, Client(house.url, BLUE) as blue:
        theirs, own = (
            red.hand_over(QUESTION, top_k=2, method="reuse"),
            blue.hand_over(QUESTION, top_k=2, method="reuse"),
        )
        assert theirs.prompt == own.prompt
        assert theirs.cache_salt != own.cache_salt
        for wrong in (
            named(theirs),
            named(theirs, cache_salt=own.cache_salt),
            named(own, cache_salt=theirs.cache_salt),
        ):
            with pytest.raises(Refused, match="salt") as refused:
                blue.handed_rows(wrong)
            assert refused.value.status == 422
        for body in (ASK, named(own)):
            path = "/v1/handovers/rows" if "chunks" in body else "/v1/handovers"
            assert house.post(path, body).status_code == 401
        assert blue.handed_rows(named(own))


def test_rows_of_a_removed_document_are_gone(house: Service) -> None:
    with Client(house.url, BLUE) as client:
        client.put("mill", "The mill of Orm was built by Ida Falk in 1931.", title="Orm")
        handed = client.hand_over("Who built the mill?", top_k=3, method="reuse")
        client.remove("mill")
        with pytest.raises(Refused, match="removed or replaced") as refused:
            client.handed_rows(named(handed))
        assert refused.value.status == 404


def test_tokens_of_a_prompt_count_against_the_limit_of_the_tenant(house: Service) -> None:
    red = {"X-API-Key": RED}
    for _ in range(20):
        answer = house.post("/v1/handovers", ASK, headers=red)
        if answer.status_code == 429:
            break
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) > 0
