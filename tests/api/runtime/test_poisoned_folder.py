"""What a process cannot read or survive is set aside, also where an earlier version stored it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ragkv.catalog import Catalog
from ragkv.catalog.limits import MAX_TITLE, PRUNED
from ragkv.ingest.jobs import Jobs
from ragkv.types import Document
from tests.api.conftest import HARBOUR, LIMIT, serving, settings


def deep(levels: int) -> str:
    """JSON of metadata that is nested so deep."""
    return '{"a": ' + "[" * levels + "]" * levels + "}"


def poison(data: Path) -> str:
    """Write into the catalogue what the version before accepted. Returns the id of the job that waits."""
    catalog = Catalog.open(data / "catalog.sqlite")
    documents = [Document(name, name, f"The {name} of Orm is old.") for name in ("queued", "mill", "tower")]
    job_id = Jobs(catalog, LIMIT).submit(documents)
    with catalog.write() as transaction:
        payload = f'["queued", "The queue of Orm.", {deep(982)}]'
        transaction.exec_driver_sql("UPDATE job_documents SET payload = ? WHERE id = 'queued'", (payload,))
        stored = (deep(940), "T" * 100_000)
        transaction.exec_driver_sql("UPDATE documents SET metadata = ?, title = ? WHERE id = 'harbour'", stored)
        transaction.exec_driver_sql("UPDATE spans SET heading = ?", ("H" * 1_000_000,))
    catalog.close()
    return job_id


def test_a_folder_with_poison_of_the_version_before_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(settings(tmp_path)) as service:
        assert service.post("/v1/documents?wait=true", HARBOUR).json()["status"] == "completed"
    job_id = poison(tmp_path)
    with serving(settings(tmp_path)) as service:
        job = service.job(job_id)
        assert [each["status"] for each in job["documents"]] == ["failed", "completed", "completed"]
        assert job["documents"][0]["error"]["code"] == "unreadable"
        health = service.client.get("/healthz")
        assert (health.status_code, health.json()["replaced"]) == (200, 0)
        listed = {each["id"]: each for each in service.client.get("/v1/documents").json()["documents"]}
        assert set(listed) == {"harbour", "mill", "tower"}
        assert PRUNED in json.dumps(listed["harbour"]["metadata"])
        assert len(listed["harbour"]["title"]) == MAX_TITLE
        assert pages(service.client, "title") == ["harbour", "mill", "tower"]
        shown = service.client.get("/v1/documents/harbour", params={"text": True})
        assert shown.json()["text"] == HARBOUR["text"]
        found = service.post("/v1/search", {"query": HARBOUR["text"]})
        assert len(found.content) < 100_000
        asked = service.post("/v1/answers", {"question": "Who built the harbour of Tarn?", "max_tokens": 2})
        assert asked.status_code == 200, asked.text
    assert any("'queued'" in line.getMessage() and "set aside" in line.getMessage() for line in caplog.records)
    caplog.clear()
    with caplog.at_level(logging.WARNING), serving(settings(tmp_path)):
        pass
    assert any("1 documents are set aside" in line.getMessage() for line in caplog.records), "said at every start"


def pages(client: Any, sort: str) -> list[str]:
    """The ids of all documents, one on a page."""
    found, after = [], ""
    for _ in range(9):
        page = client.get("/v1/documents", params={"sort": sort, "limit": 1, "after": after}).json()
        found += [each["id"] for each in page["documents"]]
        if page["after"] is None:
            break
        after = page["after"]
    return found
