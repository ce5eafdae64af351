"""Whole programs, as a user runs them: with a key, fed garbage, with a store or a network that is not there."""

from __future__ import annotations

import json
import re
import signal

import httpx
import pytest

from tests.libraries import ANSWER, QUESTION
from tests.program import LIGHT, ragkv, served, told_in_words
from tests.redis_server import redis_server
from tests.trap import set_trap


@pytest.mark.timeout(600)
def test_a_key_that_was_made_opens_the_service_and_is_in_no_output(tmp_path):
    made = ragkv("key", "acme", cwd=tmp_path)
    key, pair = (re.search(rf"^{name} +(\S+)$", made.stdout, re.M)[1] for name in ("key", "setting"))
    (tmp_path / "keys").write_text(pair + "\n")
    doctor = ragkv("doctor", cwd=tmp_path, RAGKV_API_KEYS=pair)
    with served(tmp_path, RAGKV_API_KEYS="keys", RAGKV_HOST="0.0.0.0") as (process, client):
        url = f"http://127.0.0.1:{client.base_url.port}"
        refused = httpx.get(f"{url}/v1/models", headers={"X-API-Key": f"{key}x"})
        assert refused.status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"X-API-Key": key}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        told, log = process.stderr.read(), (tmp_path / "log").read_text()
    assert "without a valid key" in log
    assert "WARNING" not in told
    for secret in (key, pair.partition("=")[2]):
        assert secret not in told + log + doctor.stdout + doctor.stderr + refused.text
    wrong = ragkv("serve", cwd=tmp_path, RAGKV_API_KEYS=f"acme={key}")
    assert (wrong.returncode, told_in_words(wrong)) == (2, True)
    assert key not in wrong.stderr
    assert ragkv("key", "a:b", cwd=tmp_path).returncode == 1


@pytest.mark.timeout(600)
def test_bad_files_are_refused_one_by_one_and_the_good_ones_go_in(tmp_path):
    bad = {
        "empty.txt": b"",
        "white.txt": b" \n\t\n",
        "binary.txt": bytes(range(256)) * 4,
        "huge.txt": b"A line of a very long tale.\n" * (50 * 2**20 // 28),
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "good.txt").write_text("The harbour of Tarn was built in 1889 by Ada Brook.")
    (tmp_path / "latin.txt").write_bytes("Käse".encode("latin-1"))  # is read, with a warning
    done = ragkv("ingest", *sorted(bad), "good.txt", "latin.txt", "missing.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert told_in_words(done)
    told = done.stderr.splitlines()
    for name in [*bad, "latin.txt", "missing.txt"]:
        assert sum(name in line for line in told) == 1, name
    assert "16777216" in done.stderr or "16 MiB" in done.stderr
    listed = ragkv("ls", cwd=tmp_path)
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["good.txt", "latin.txt"]


@pytest.mark.timeout(600)
def test_questions_that_cannot_be_asked_cost_nothing_but_an_exit_code(tmp_path):
    (tmp_path / "good.txt").write_text("The harbour of Tarn was built in 1889 by Ada Brook.")
    assert ragkv("ingest", "good.txt", cwd=tmp_path).returncode == 0
    (tmp_path / "q.jsonl").write_text(json.dumps({"q": "why " * 10_000}))
    done = ragkv("ask", "--file", "q.jsonl", cwd=tmp_path)
    assert done.returncode == 1
    assert told_in_words(done)
    assert "2048" in done.stderr
    unknown = ragkv("ask", "Who?", cwd=tmp_path, RAGKV_MODEL="/no/such/model")
    assert unknown.returncode == 2
    assert told_in_words(unknown)
    assert "/no/such/model" in unknown.stderr
    done = ragkv("ask", "Who built the harbour of Tarn?", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["answer"] == "Ada Brook"


@pytest.mark.timeout(600)
def test_a_redis_that_is_down_at_start_loses_nothing(tmp_path):
    with redis_server() as server:
        url, port = server.url, server.port
    down = {"RAGKV_STORE": url}
    done = ragkv("ingest", *LIGHT, cwd=tmp_path, **down)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    asked = ragkv("ask", QUESTION, "--json", cwd=tmp_path, **down)
    answer = json.loads(asked.stdout)
    assert answer["answer"] == ANSWER
    assert len(answer["report"]["cache"]["fallbacks"]) == answer["report"]["cache"]["chunks"]
    with redis_server(port=port):  # it comes back: what is encoded is stored, and found the next time
        (tmp_path / "twice.jsonl").write_text(2 * f"{json.dumps({'q': QUESTION})}\n")
        asked = ragkv("ask", "--file", "twice.jsonl", "--json", cwd=tmp_path, **down)
        again = json.loads(asked.stdout.splitlines()[-1])
    assert again["report"]["ratios"]["cache_hit"] == 1.0
    assert again["answer"] == ANSWER


def test_a_start_calls_nobody_and_a_model_that_is_not_here_is_named(tmp_path):
    with set_trap() as trap:
        names = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
        caught = {**dict.fromkeys(names, trap.url), "NO_PROXY": "", "no_proxy": "", "HF_HOME": str(tmp_path)}
        with served(tmp_path, new_interpreter=True, HF_HUB_OFFLINE="0", **caught) as (_, client):
            assert client.get("/readyz").status_code == 200
        assert not trap.called()
        refused = ragkv(
            "serve", "--port", "0", "--model", "nobody/nothing", cwd=tmp_path, new_interpreter=True, **caught
        )
        assert (refused.returncode, told_in_words(refused)) == (2, True)
        assert "nobody/nothing" in refused.stderr
        assert not trap.called(), "HF_HUB_OFFLINE is set here"
