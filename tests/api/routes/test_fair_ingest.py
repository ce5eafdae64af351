"""Ingest of several tenants: nobody waits behind another's many documents."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ragkv.api.middleware.keys import make_key
from tests.api.conftest import Service, serving, settings

SENTENCES = [
    f"Barrel {n} of the cellar holds {n * 7 % 90} litres of dark vinegar from the year {1800 + n}." for n in range(60)
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, dict[str, str], dict[str, str]]]:
    """A service, and the headers of two tenants."""
    made = [make_key(name) for name in ("many", "one")]
    pairs = ",".join(pair for _, pair in made)
    with serving(settings(tmp_path_factory.mktemp("shared"), api_keys=pairs)) as service:
        many, one = ({"X-API-Key": key} for key, _ in made)
        yield service, many, one


def test_a_line_does_not_wait_behind_the_documents_of_another_tenant(
    shared: tuple[Service, dict[str, str], dict[str, str]],
) -> None:
    service, many, one = shared
    documents = [{"id": f"cellar{n}", "text": f"Cellar {n}. {' '.join(SENTENCES)}"} for n in range(12)]
    job_id = service.post("/v1/documents", {"documents": documents}, headers=many).json()["job_id"]
    line = {"text": "The mill of Harth was built in 1804."}
    answer = service.client.put("/v1/documents/mill?wait=true", json=line, headers=one)
    job = service.client.get(f"/v1/jobs/{job_id}", headers=many).json()
    assert answer.status_code in (200, 201), answer.text
    assert job["finished"] is None
    assert job["counts"]["done"] <= 3, "the line had its turn after a few units of work"
    assert service.post(f"/v1/jobs/{job_id}/cancel", {}, headers=many).status_code == 200
