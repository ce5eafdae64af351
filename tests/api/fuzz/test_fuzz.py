"""No request stops the service, holds up others or is answered with an internal error, whatever is in it.

Every run begins with the requests that once did so (attacks.py). The others are made by hypothesis and schemathesis:
bodies of every route, uploads of every format, forms, queries, heads and frames. The real program serves them, and
is killed and started again on the same folder while jobs wait.

For each request:
- The status is below 500, or 503. Whoever sent a whole request gets a whole answer.
- Nobody who asks for health waits longer than 250 ms while a request of at most 64 KB is served. Any machine stops for
  a moment, so a request is at fault only if two repeats, at once, hold up others as well.
- Its jobs end without internal errors, and what it stored can be listed, shown and deleted.
- The process lives and its engine is well.

`make soak` sends more (tests/soak/test_fuzz.py). What is found is printed with a command line that sends it again to a
service with RAGKV_API_KEYS as in fuzzed.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.fuzz.attacks import ATTACKS
from tests.api.fuzz.fuzzed import FuzzedService, Seen
from tests.api.fuzz.requests import BODIES, headers_of
from tests.api.fuzz.run import fuzz
from tests.api.fuzz.wire import Request, assembled, send

CASES = 300
UNKNOWN = {"/v1/rerank": 409, "/v1/jobs/none/cancel": 404, "/v1/handovers/rows": 422}
"""What has no good answer here: there is no reranker and no such job, and nobody guesses the salt of rows."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedService]:
    service = FuzzedService(tmp_path_factory.mktemp("fuzzed"))
    yield service
    service.close()


def test_what_is_changed_works_unchanged(service: FuzzedService) -> None:
    """Otherwise all changes would be refused for the same reason, and nothing behind it would be reached."""
    for method, path, body in BODIES:
        wire = assembled(method, path.encode(), headers_of(path), json.dumps(body).encode())
        answer = send(service.port, Request("unchanged", wire))
        expected = (UNKNOWN[path],) if path in UNKNOWN else (404,) if method == "DELETE" else (200, 202)
        assert answer.status in expected, (method, path, answer)
        assert b'"isError":true' not in answer.body or b"delete_document" in wire, (path, answer)
        assert not service.drain()


@pytest.mark.timeout(600)
def test_300_hostile_requests_stop_nothing(tmp_path: Path) -> None:
    check_seen(fuzz(tmp_path, CASES, restarts=2), CASES)


def check_seen(seen: Seen, cases: int) -> None:
    """Every request was sent, most kinds of answers were seen, and nothing was at fault."""
    print(f"\n{dict(seen.statuses)}, longest wait {max(seen.waits):.3f} s")  # seen with -s
    assert not seen.faults, "\n\n".join([f"{len(seen.faults)} faults", *seen.faults.values()])
    assert seen.sent.total() == cases > 2 * len(ATTACKS)
    assert {200, 202, 400, 401, 404, 413, 422} <= set(seen.statuses)
