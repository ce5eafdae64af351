"""The queue over HTTP: order, deadlines, and what happens without a free place, time or memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import torch

from ragkv.api.middleware.keys import make_key
from ragkv.engine.engine import Engine
from ragkv.engine.passes import Passes
from ragkv.engine.request import Request
from ragkv.errors import Busy, Expired
from ragkv.model.layer_pass import Pass
from tests.api.conftest import HARBOUR, Service, serving, settings
from tests.api.runtime.test_answers_together import QUESTIONS, endless, until
from tests.api.streams import streamed
from tests.api.test_faults import held

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str]]]:
    """A service with a short queue and a short deadline, and the keys of two tenants."""
    made = {name: make_key(name) for name in ("acme", "zeta")}
    pairs = ",".join(pair for _, pair in made.values())
    chosen = settings(tmp_path_factory.mktemp("narrow"), api_keys=pairs, queue=6, deadline=3.0, batch=1)
    with serving(chosen) as service:
        keys = {name: key for name, (key, _) in made.items()}
        for key in keys.values():
            added = service.post("/v1/documents?wait=true", HARBOUR, headers={"X-API-Key": key})
            assert added.json()["status"] == "completed"
        yield service, keys


def test_one_tenant_leaves_room_for_the_other_and_they_take_turns(narrow: tuple[Service, dict[str, str]]) -> None:
    service, keys = narrow
    engine_thread, order = service.engine_thread, []

    def noted(tenant: str) -> Callable[[Engine], Any]:
        return lambda engine: order.append(tenant)

    with held(service):
        waiting = [engine_thread.submit(noted("acme"), tenant="acme") for _ in range(3)]
        with pytest.raises(Busy):
            engine_thread.submit(noted("acme"), tenant="acme")
        refused = service.post("/v1/answers", {"question": QUESTIONS[0]}, headers={"X-API-Key": keys["acme"]})
        waiting.append(engine_thread.submit(noted("zeta"), tenant="zeta"))
        assert engine_thread.health()["waiting"] == 4
    assert [future.result(30) for future in waiting] == [None] * 4
    assert order == ["acme", "zeta", "acme", "acme"]
    assert (refused.status_code, refused.json()["code"]) == (429, "busy")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert engine_thread.health()["refused"] >= 2


def test_a_place_in_the_queue_is_free_as_soon_as_its_client_has_left(narrow: tuple[Service, dict[str, str]]) -> None:
    engine_thread = narrow[0].engine_thread
    with held(narrow[0]):
        left = [engine_thread.submit(lambda engine: None, tenant="acme") for _ in range(3)]
        assert all(future.cancel() for future in left)
        stays = engine_thread.submit(lambda engine: "served", tenant="acme")
    assert stays.result(30) == "served"


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_question_expires_at_its_deadline(service: Service, stream: bool) -> None:
    before = service.engine_thread.health()["expired"]
    body = {"question": QUESTIONS[0], "deadline_s": 0.3, "stream": stream}
    with held(service):
        began = time.monotonic()
        late = service.post("/v1/answers", body)
        took = time.monotonic() - began
    assert (late.status_code, late.headers["content-type"], late.json()["code"]) == (504, PROBLEM, "deadline")
    assert 0.3 <= took < 5, "on time, although the engine is busy"
    until(lambda: service.engine_thread.health()["expired"] == before + 1)
    assert service.engine_thread.health()["waiting"] == 0


def test_a_running_answer_expires_at_its_deadline(service: Service) -> None:
    with endless(service.engine_thread):
        before = service.engine_thread.health()["expired"]
        late = service.post("/v1/answers", {"question": QUESTIONS[0], "max_tokens": 3000, "deadline_s": 1.0})
        assert (late.status_code, late.json()["code"]) == (504, "deadline")
        until(lambda: service.engine_thread.health()["running"] == 0)
        assert service.engine_thread.health()["expired"] == before + 1
        with streamed(service, QUESTIONS[0], max_tokens=3000, deadline_s=1.5) as (response, events):
            received = list(events)
    assert response.status_code == 200
    assert (received[0][0], received[-1][0], received[-1][1]["code"]) == ("retrieval", "error", "deadline")
    assert "done" not in dict(received)


def test_a_request_cannot_extend_the_deadline_of_the_service(narrow: tuple[Service, dict[str, str]]) -> None:
    service, keys = narrow
    with endless(service.engine_thread):
        began = time.monotonic()
        body = {"question": QUESTIONS[0], "max_tokens": 4000, "deadline_s": 1000.0}
        late = service.post("/v1/answers", body, headers={"X-API-Key": keys["acme"]})
        assert late.status_code == 504
        assert 3 <= time.monotonic() - began < 20


def test_the_engine_thread_checks_deadlines_itself(service: Service) -> None:
    with held(service):
        late = service.engine_thread.ask(QUESTIONS[0], deadline=time.monotonic())
        fine = service.engine_thread.ask(QUESTIONS[0], deadline=time.monotonic() + 60)
    with pytest.raises(Expired):
        late.result(30)
    assert fine.result(60).answer == "Ada Brook"


def exhausted(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("where", ["prefill", "decode", "finalize"])
def test_running_out_of_memory_fails_one_request_alone(service: Service, where: str) -> None:
    together: list[int] = []

    def spoil(engine: Engine) -> None:
        prefill, finalize, forward = engine.prefill_passes, engine.finalize, engine.model.forward
        asked = list(engine.model.prompt.question(QUESTIONS[0]))

        def without_room(passes: Sequence[Pass]) -> list[torch.Tensor]:
            together.append(len(passes))
            if any(each.tokens[-len(asked) :].tolist() == asked for each in passes):
                exhausted()
            return forward(passes)

        def spoiled(request: Request) -> Passes[Request]:
            del engine.prefill_passes
            state = yield from prefill(request)
            if where == "decode":
                state.sequence.attention = exhausted
            else:
                engine.finalize = lambda each: exhausted() if each is state else finalize(each)  # type: ignore[method-assign]
            return state

        if where == "prefill":
            engine.model.forward = without_room  # type: ignore[method-assign]
        else:
            engine.prefill_passes = spoiled  # type: ignore[method-assign]

    def restore(engine: Engine) -> tuple[int, int]:
        engine.__dict__.pop("finalize", None)
        engine.model.__dict__.pop("forward", None)
        return sum(pool.pinned for pool in engine.tiers.stats().values()), engine.catalog.count()[0]

    with ThreadPoolExecutor(3) as pool:
        with held(service):
            spoiling = service.engine_thread.submit(spoil)
            futures = [pool.submit(service.post, "/v1/answers", {"question": q}) for q in QUESTIONS[:3]]
            until(lambda: service.engine_thread.health()["waiting"] == 4)
        responses = [future.result(60) for future in futures]
    assert spoiling.result(30) is None
    pinned, documents = service.engine_thread.submit(restore).result(30)
    assert sorted(response.status_code for response in responses) == [200, 200, 503]
    assert where != "prefill" or max(together) > 1, "others were prefilled with it, and once more without it"
    (failed,) = (response for response in responses if response.status_code == 503)
    assert failed.json()["code"] == "out_of_memory"
    assert "CUDA" not in failed.text
    assert pinned == 0
    assert documents >= 2
    assert service.engine_thread.health()["running"] == 0
    again = service.post("/v1/answers", {"question": QUESTIONS[0]}).json()
    assert (again["answer"], again["report"]["cache"]["misses"]) == ("Ada Brook", 0)


def test_sixteen_clients_for_three_seconds_are_all_served(service: Service) -> None:
    load = generate_load(service.url, 16, 3.0)
    assert not load.faults
    assert not load.refused, "the queue has 32 places"
    assert len(load.took) >= 16
    assert max(load.took) < 60


@dataclass
class Load:
    """What the clients of a load test received.

    Attributes:
        took: Seconds of each answer.
        refused: Seconds after which each refused client was told to come back.
        faults: Responses that may not occur.
    """

    took: list[float] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def generate_load(url: str, clients: int, seconds: float) -> Load:
    """Let clients ask one question after another for `seconds`; refused ones come back when told to."""
    ends, load = time.monotonic() + seconds, Load()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while time.monotonic() < ends and not load.faults:
                began = time.monotonic()
                try:
                    response = client.post("/v1/answers", json={"question": QUESTIONS[number % 4], "max_tokens": 4})
                except httpx.HTTPError as error:
                    load.faults.append(repr(error))
                    return
                if response.status_code == 200:
                    load.took.append(time.monotonic() - began)
                elif response.status_code == 429 and response.headers.get("retry-after", "").isdigit():
                    load.refused.append(int(response.headers["retry-after"]))
                    time.sleep(max(0.0, min(load.refused[-1], ends - time.monotonic())))
                else:
                    load.faults.append(f"{response.status_code} {response.text}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return load
