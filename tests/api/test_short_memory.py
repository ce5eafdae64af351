"""A real service whose memory is limited for a while, so that allocations fail."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tests.program import served

ROOM = 4 * 2**20


def mapped(pid: int) -> int:
    """Bytes of address space of a process."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmSize")]
    return int(line.split()[1]) * 1024


@pytest.mark.timeout(600)
def test_short_memory_is_503_and_every_request_is_served_when_there_is_memory_again(tmp_path: Path) -> None:
    def text(sentences: int) -> str:
        told = "In chapter {n} the keeper counted {n} ships before the fog came down."
        return "\n\n".join(told.format(n=n) for n in range(sentences))

    with served(tmp_path) as (process, client):
        known = {"question": "Who built the harbour?", "max_tokens": 4}
        document = {"text": "The harbour of Tarn was built in 1889 by Ada Brook."}
        assert client.put("/v1/documents/tarn?wait=true", json=document).status_code == 200
        assert client.post("/v1/answers", json=known).status_code == 200
        unlimited = resource.prlimit(process.pid, resource.RLIMIT_AS)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (mapped(process.pid) + ROOM, unlimited[1]))
        long = {"question": "Who built the harbour of Tarn? " * 240, "method": "full", "max_tokens": 4}
        for refused in (
            client.put("/v1/documents/tale?wait=true", json={"text": text(120)}),
            client.post("/v1/answers", json=long),
        ):
            assert (refused.status_code, refused.json()["code"]) == (503, "out_of_memory"), refused.text
        assert int(refused.headers["Retry-After"]) > 0
        resource.prlimit(process.pid, resource.RLIMIT_AS, unlimited)
        assert client.post("/v1/answers", json=long).status_code == 200
        assert client.post("/v1/answers", json=known).status_code == 200
        assert client.put("/v1/documents/tale?wait=true", json={"text": text(8)}).status_code == 200
        assert client.get("/healthz").json()["status"] == "ok"
