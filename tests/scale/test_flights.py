"""Three services over one Redis Cluster miss the same chunks at once: each chunk is encoded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.program import SERVE
from tests.redis_cluster import redis_cluster
from tests.scale.services import DOCUMENTS, Replicas, hits, misses, replicas

pytestmark = [pytest.mark.scale, pytest.mark.timeout(300)]

CHUNKS, ROUNDS = len(DOCUMENTS), 3
PATIENT = (
    "-c",
    "from ragkv.engine import chunk_flights; chunk_flights.WAIT_FACTOR = 1e4; from ragkv.cli import main; main()",
    *SERVE,
)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Three services. They wait long for each other: a busy machine must not end a wait."""
    with (
        redis_cluster() as cluster,
        replicas(tmp_path_factory.mktemp("three"), cluster, 3, PATIENT) as running,
    ):
        yield running


def test_documents_that_three_services_ingest_are_encoded_once(three: Replicas) -> None:
    assert hits([three.ask(replica) for replica in range(3)]) == 3 * CHUNKS
    assert three.flights_when(lambda counts: counts["led"] == CHUNKS) == {"led": CHUNKS}


def test_ten_questions_that_miss_six_chunks_on_three_services_encode_six(three: Replicas) -> None:
    """Nothing is encoded twice, because no wait ends before the entry is there."""
    expected, before = three.ask()["answer"], three.flights()
    for _ in range(ROUNDS):
        three.flush()
        answers = three.ask_together(10)
        assert {answer["answer"] for answer in answers} == {expected}
        assert hits(answers) + misses(answers) == 10 * CHUNKS
        assert misses(answers) >= CHUNKS, "questions of one service that wait for the same pass have all missed"
        assert {each["reason"] for answer in answers for each in answer["report"]["cache"]["fallbacks"]} == {"missing"}
    new = three.flights_when(lambda counts: (counts - before)["led"] == ROUNDS * CHUNKS) - before
    assert new["joined"] > 0, "questions have waited for another service"
    assert (new["expired"], new["alone"]) == (0, 0)
