"""vLLM answers over the KV of a service: the same logits, under preemption, and for nobody who may not have it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from ragkv.api.middleware.keys import make_key
from ragkv.client import Client, HandedQuestion
from ragkv.engine.engine import Engine
from ragkv.model.agreement import centred, relative_error
from ragkv.types import AskOptions
from tests.api.conftest import Service, serving, settings

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
MODEL = ROOT / "models" / "tiny"
NAMES, BUILDERS = ("Tarn", "Mell", "Orm", "Arbo"), ("Ada Brook", "Otto Lindqvist", "Ida Falk", "Runa Vik")
QUESTIONS = [f"Who built the harbour of {name}?" for name in NAMES]
VOCABULARY = 12288
HITS = "external_prefix_cache_hits_total"
SELECTED = "scout:repair=none,cap=0.2,floor=6"
BLOCK, BLOCKS = 32, 32
"""Tokens of a block of vLLM's cache, and its blocks: three long answers do not fit together."""
RED, RED_PAIR = make_key("red", {})
BLUE, BLUE_PAIR = make_key("blue", {})


def document(number: int, name: str, builder: str) -> dict[str, Any]:
    """A document with one fact in the middle of other text."""
    filling = [
        f"In {1700 + 7 * number + year} the {name} mill was let to a miller of parish {year}." for year in range(9)
    ]
    text = " ".join([*filling[:5], f"The harbour of {name} was built in {1880 + number} by {builder}.", *filling[5:]])
    return {"id": name.lower(), "title": name, "text": text, "metadata": {"harbour": name}}


DOCUMENTS = [document(number, *pair) for number, pair in enumerate(zip(NAMES, BUILDERS, strict=True))]


@dataclass(frozen=True)
class Vllm:
    """A running server of vLLM.

    Attributes:
        http: Its client.
        log: What it writes.
    """

    http: httpx.Client
    log: Path

    def complete(self, handed: HandedQuestion, key: str, **options: Any) -> httpx.Response:
        """Answer a question that was handed over."""
        body = handed.request("tiny", key, **{"max_tokens": 8, "temperature": 0, **options})
        return self.http.post("/v1/completions", json=body)

    def count(self, metric: str) -> float:
        """Return a counter of vLLM."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{metric}"))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with two tenants, which have the same documents."""
    chosen = settings(
        tmp_path_factory.mktemp("service"), model=str(MODEL), api_keys=f"{RED_PAIR}, {BLUE_PAIR}", dtype="bfloat16"
    )
    with serving(chosen) as running:
        for key in (RED, BLUE):
            with Client(running.url, key) as client:
                assert client.wait(client.send(DOCUMENTS)).status == "completed"
        yield running


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def vllm(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """vLLM's own server with the connector, in its own environment."""
    if not PYTHON.exists():
        pytest.skip("vLLM has an environment of its own, which `make integrations` makes")
    folder, port = tmp_path_factory.mktemp("vllm"), free_port()
    transfer = {
        "kv_connector": "RagkvConnector",
        "kv_connector_module_path": "ragkv.integrations.vllm",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"url": service.url, "timeout": 30},
    }
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "900", "--max-num-seqs", "4", "--block-size", str(BLOCK)]
    command += ["--num-gpu-blocks-override", str(BLOCKS), "--logprobs-mode", "raw_logits", "--max-logprobs", "-1"]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    own |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            wait_for(http, process, folder / "log")
            yield Vllm(http, folder / "log")
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if http.get("/health").is_success:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise TimeoutError(log.read_text()[-4000:])


@pytest.fixture
def red(service: Service) -> Iterator[Client]:
    with Client(service.url, RED) as client:
        yield client


def own_logits(service: Service, question: str, method: str) -> torch.Tensor:
    """The logits [vocabulary] of the first token, as the service computes them for the same plan."""

    def ask(engine: Engine) -> torch.Tensor:
        return engine.prefill(question, AskOptions("red:default", top_k=4, method=method)).context.logits.float()

    return service.engine_thread.submit(ask).result(60)


def first_logits(vllm: Vllm, handed: HandedQuestion, key: str = RED) -> torch.Tensor:
    """The same, as vLLM computes them."""
    made = vllm.complete(handed, key, max_tokens=1, logprobs=VOCABULARY, return_tokens_as_token_ids=True).json()
    (logits,) = made["choices"][0]["logprobs"]["top_logprobs"]
    by_token = {int(name.removeprefix("token_id:")): value for name, value in logits.items()}
    return torch.tensor([by_token[token] for token in range(VOCABULARY)])


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return relative_error(centred(torch.stack(found)), centred(torch.stack(expected)))


def text_of(response: httpx.Response) -> str:
    assert response.is_success, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def refused(vllm: Vllm, response: httpx.Response, why: str) -> None:
    """vLLM failed the request, says why in its log, and goes on."""
    assert response.status_code == 500, response.text
    assert re.search(why, vllm.log.read_text()), vllm.log.read_text()[-2000:]
    assert vllm.http.get("/health").is_success


def loads(service: Service) -> float:
    """How often the service was asked for rows."""
    lines = httpx.get(f"{service.url}/metrics", headers={"X-API-Key": RED}).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if "/v1/handovers/rows" in line and "_total" in line)


@pytest.mark.parametrize("method", ["reuse", SELECTED])
def test_logits_are_those_of_the_service_for_the_same_plan(
    service: Service, vllm: Vllm, red: Client, method: str
) -> None:
    handed = [red.hand_over(question, top_k=4, method=method) for question in QUESTIONS]
    found = [first_logits(vllm, each) for each in handed]
    own = [own_logits(service, question, method) for question in QUESTIONS]
    full = [own_logits(service, question, "full") for question in QUESTIONS]
    assert distance(found, own) < 1e-2, "in bfloat16, whose rounding is 4e-3"
    assert distance(found, full) > 3e-2, "another plan has other logits"


def test_answers_are_read_from_the_rows(vllm: Vllm, red: Client) -> None:
    for question, builder in zip(QUESTIONS, BUILDERS, strict=True):
        handed = red.hand_over(question, top_k=4, method=SELECTED)
        assert text_of(vllm.complete(handed, RED)).strip() == builder
        assert any(builder in citation.text for citation in handed.citations)


def test_a_full_prefill_is_a_plain_prompt(vllm: Vllm, red: Client) -> None:
    handed = red.hand_over(QUESTIONS[0], top_k=4, method="full")
    assert handed.kv_transfer_params is None
    assert text_of(vllm.complete(handed, "")).strip() == BUILDERS[0]


def test_rows_are_loaded_once_and_only_as_far_as_vllm_lacks_them(service: Service, vllm: Vllm, red: Client) -> None:
    def loaded(question: str) -> tuple[float, float]:
        """Tokens that came from the service for a question about one document, and how often it was asked for them."""
        handed = red.hand_over(question, top_k=1, filter={"harbour": "Orm"}, method="reuse")
        assert handed.cache_salt == first.cache_salt
        tokens, asked = vllm.count(HITS), loads(service)
        text_of(vllm.complete(handed, RED))
        return vllm.count(HITS) - tokens, loads(service) - asked

    first = red.hand_over(QUESTIONS[2], top_k=1, filter={"harbour": "Orm"}, method="reuse")
    assert first.kv_transfer_params is not None
    rows = first.kv_transfer_params["ragkv"]["rows"]
    assert loaded(QUESTIONS[2]) == (rows, 1), "the whole context"
    assert loaded("Tell me: who built the harbour of Orm?") == (rows % BLOCK, 1), "vLLM has the whole blocks"
    long = f"{' '.join(['It is said to be large and old.'] * 8)} {QUESTIONS[2]}"
    assert loaded(long) == (rows % BLOCK, 1)
    assert loaded(long) == (0, 0), "vLLM has the context and more"


def test_vllms_chat_route_answers_too_and_streams(vllm: Vllm, red: Client) -> None:
    messages = [{"role": "user", "content": QUESTIONS[3]}]
    for method in (SELECTED, "full"):
        handed = red.hand_over(QUESTIONS[3], top_k=4, method=method)
        body = handed.request("tiny", RED, messages)
        extra = {name: body[name] for name in ("cache_salt", "kv_transfer_params")}
        with openai.OpenAI(base_url=str(vllm.http.base_url.join("/v1")), api_key="none", max_retries=0) as client:
            chat = client.chat.completions
            options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0}
            whole = chat.create(**options, extra_body=extra).choices[0].message.content
            pieces = [each.choices[0].delta.content for each in chat.create(**options, extra_body=extra, stream=True)]
        assert whole is not None
        assert whole.strip() == BUILDERS[3]
        assert "".join(piece or "" for piece in pieces) == whole


def test_rows_never_enter_the_cache_of_exact_prefixes(vllm: Vllm, red: Client) -> None:
    plain = red.hand_over(QUESTIONS[2], top_k=4, method="full")
    handed = red.hand_over(QUESTIONS[2], top_k=4, method="reuse")
    assert plain.prompt == handed.prompt
    before = first_logits(vllm, plain)
    reused = first_logits(vllm, handed)
    body = {"model": "tiny", "prompt": list(plain.prompt), "max_tokens": 1, "temperature": 0}
    assert vllm.http.post("/v1/completions", json=body).is_success, "without any salt"
    assert distance([first_logits(vllm, plain)], [before]) < 1e-2
    assert distance([reused], [before]) > 3e-2


def test_a_preempted_request_gets_its_rows_again(service: Service, vllm: Vllm, red: Client) -> None:
    with Client(service.url, BLUE) as blue:
        pairs = [
            (client.hand_over(QUESTIONS[3], top_k=4, method="reuse"), key) for client, key in ((red, RED), (blue, BLUE))
        ]
    long: dict[str, Any] = {"max_tokens": 240, "ignore_eos": True, "stop": None, "logprobs": 1}
    alone = [vllm.complete(handed, key, **long).json()["choices"][0] for handed, key in pairs]
    before, asked = vllm.count("num_preemptions_total"), loads(service)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(vllm.complete, handed, key, **long) for handed, key in pairs]
        together = [each.result().json()["choices"][0] for each in waiting]
    assert [each["logprobs"]["tokens"] for each in together] == [each["logprobs"]["tokens"] for each in alone]
    assert vllm.count("num_preemptions_total") > before
    assert loads(service) > asked + 2


def test_a_tenant_gets_no_rows_of_another(service: Service, vllm: Vllm, red: Client) -> None:
    handed = red.hand_over(QUESTIONS[0], top_k=3, method="reuse")
    refused(vllm, vllm.complete(handed, BLUE), "the salt is not that of these rows")
    refused(vllm, vllm.complete(handed, "wrong"), "401|key")
    with Client(service.url, BLUE) as blue:
        own = blue.hand_over(QUESTIONS[0], top_k=3, method="reuse")
        assert own.cache_salt != handed.cache_salt
        assert text_of(vllm.complete(own, BLUE)) == text_of(vllm.complete(handed, RED))


def test_what_is_not_the_hand_over_fails_and_says_why(vllm: Vllm, red: Client) -> None:
    handed = red.hand_over(QUESTIONS[0], top_k=1, method="reuse")
    other = replace(handed, prompt=(*handed.prompt[:5], handed.prompt[6], *handed.prompt[6:]))
    refused(vllm, vllm.complete(other, RED), "the prompt is not that of its hand-over")
    refused(vllm, vllm.complete(handed, RED, cache_salt=None), "salt")
    refused(vllm, vllm.complete(handed, RED, kv_transfer_params={"ragkv": "nothing"}), "cannot be loaded")
    assert text_of(vllm.complete(handed, RED)).strip() == BUILDERS[0]


def test_a_client_that_hangs_up_while_rows_are_loaded_leaves_nothing_behind(vllm: Vllm, red: Client) -> None:
    handed = [red.hand_over(question, top_k=3, method="reuse") for question in QUESTIONS * 2]
    for number, each in enumerate(handed):
        body = each.request("tiny", RED, max_tokens=200, temperature=0, ignore_eos=True)
        with pytest.raises(httpx.TimeoutException):
            vllm.http.post("/v1/completions", json=body, timeout=0.02 * (number + 1))
    assert text_of(vllm.complete(handed[0], RED)).strip() == BUILDERS[0]
    deadline = time.monotonic() + 30
    while vllm.count("kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "the blocks of those requests are not free"
        time.sleep(0.1)


SETTINGS = """
import sys

for service in ("sqlalchemy", "alembic", "faiss", "redis", "sentence_transformers", "nicegui"):
    sys.modules[service] = None  # vLLM's environment has none of these

from types import SimpleNamespace as Space
from ragkv.errors import ConfigError
from ragkv.integrations.vllm import RagkvConnector


def opened(policy="fail", workers=1, **extra):
    transfer = Space(kv_load_failure_policy=policy, get_from_extra_config=extra.get)
    parallel, cache = Space(world_size=workers), Space(block_size=32)
    try:
        RagkvConnector(Space(kv_transfer_config=transfer, parallel_config=parallel, cache_config=cache), None, None)
        print("opened")
    except ConfigError as error:
        print(error)


opened()
opened("recompute")
opened(workers=2)
opened(api_key_file="/no/such/file")
"""


def test_settings_that_cannot_work_end_the_start_and_the_connector_needs_little_of_ragkv() -> None:
    if not PYTHON.exists():
        pytest.skip("vLLM has an environment of its own, which `make integrations` makes")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(PYTHON), "-c", SETTINGS], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    said = [line for line in done.stdout.splitlines() if line.startswith(("opened", "kv_", "the conn", "api_"))]
    assert [line.split(" ")[0] for line in said] == ["opened", "kv_load_failure_policy", "the", "api_key_file"], said


def test_rows_of_a_removed_document_are_not_loaded(service: Service, vllm: Vllm) -> None:
    with Client(service.url, BLUE) as blue:
        handed = blue.hand_over(QUESTIONS[0], top_k=4, method=SELECTED)
        blue.remove("tarn")
        refused(vllm, vllm.complete(handed, BLUE), "removed or replaced")
        again = blue.hand_over(QUESTIONS[0], top_k=4, method=SELECTED)
        assert "tarn" not in {citation.document_id for citation in again.citations}
        assert BUILDERS[0] not in text_of(vllm.complete(again, BLUE))
