"""Two services ask while slots of their Redis Cluster move and nodes die: no wrong answer, and soon hits again."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from tests.redis_cluster import begin_move, end_move, move, name_of, redis_cluster
from tests.redis_server import RedisServer
from tests.scale.services import DOCUMENTS, SECONDS, Replicas, hits, misses, replicas

pytestmark = [pytest.mark.scale, pytest.mark.timeout(400)]

CHUNKS = len(DOCUMENTS)
FAILOVER = ("--cluster-node-timeout", "1500", "--cluster-allow-replica-migration", "no")
"""After so many milliseconds the nodes give up one that does not answer. A node whose slots have all moved away stays a
primary."""


Cluster = tuple[Replicas, RedisServer]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two services over three nodes, and a fourth node without slots."""
    with (
        redis_cluster(*FAILOVER) as cluster,
        cluster.another(*FAILOVER) as spare,
        replicas(tmp_path_factory.mktemp("two"), cluster, 2) as two,
    ):
        yield two, spare


def primaries(running: Cluster) -> list[RedisServer]:
    """Return the nodes that run and are no replicas, those with most entries first."""
    two, spare = running
    alive = [node for node in (*two.cluster.nodes, spare) if node.process.poll() is None]
    return sorted((node for node in alive if role(node) == "master"), key=lambda node: -len(slots_of(node)))


def role(node: RedisServer) -> str:
    with redis.Redis(port=node.port) as admin:
        return str(admin.info("replication")["role"])


@contextmanager
def asking(two: Replicas) -> Iterator[list[dict[str, Any]]]:
    """Ask both services without a pause. All answers are right, whatever happens meanwhile."""
    expected = two.ask()["answer"]
    answers: list[dict[str, Any]] = []
    ended, faults = threading.Event(), list[BaseException]()

    def ask(replica: int) -> None:
        try:
            while not ended.is_set():
                answers.append(two.ask(replica))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=ask, args=(replica,)) for replica in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not faults, faults
    assert len(answers) > 4
    assert {answer["answer"] for answer in answers} == {expected}
    reasons = {each["reason"] for answer in answers for each in answer["report"]["cache"]["fallbacks"]}
    assert reasons <= {"missing", "unavailable"}


def seconds_until_all_hit(two: Replicas) -> float:
    """Return the seconds until a question finds all chunks in both services."""
    began = time.monotonic()
    while hits([two.ask(0), two.ask(1)]) < 2 * CHUNKS:
        assert time.monotonic() < began + SECONDS
        time.sleep(0.05)
    return time.monotonic() - began


def wait_for_health(two: Replicas, beginning: str) -> None:
    until = time.monotonic() + SECONDS
    while not all(two.store_health(replica).startswith(beginning) for replica in (0, 1)):
        assert time.monotonic() < until, [two.store_health(0), two.store_health(1)]
        time.sleep(0.2)


def slots_of(node: RedisServer) -> list[int]:
    """Return the slots in which a node has entries."""
    with redis.Redis(port=node.port) as admin:
        return sorted({key_slot(name) for name in admin.scan_iter(match="*:head")})


def test_a_replica_takes_over_from_a_node_that_is_killed(running: Cluster) -> None:
    two, spare = running
    victim = primaries(running)[0]
    with redis.Redis(port=spare.port) as admin:
        admin.execute_command("CLUSTER", "REPLICATE", name_of(victim))
        until = time.monotonic() + SECONDS
        while admin.info("replication").get("master_link_status") != "up":
            assert time.monotonic() < until
            time.sleep(0.05)
    with asking(two) as answers:
        victim.process.kill()
        victim.process.wait()
        took = seconds_until_all_hit(two)
    print(f"\n{told(answers)}, all hits {took:.2f} s after the kill")
    assert slots_of(spare)
    wait_for_health(two, "ok")


def test_slots_move_while_questions_are_answered(running: Cluster) -> None:
    two, _ = running
    seconds_until_all_hit(two)
    moved = 0
    with asking(two) as answers:
        sources = primaries(running)
        for source, target in zip(sources, [*sources[1:], sources[0]], strict=True):
            for slot in slots_of(source)[:2]:
                begin_move(source, target, slot)
                time.sleep(0.2)
                left = 1
                while left:  # one value at a time, so that questions find a part of an entry here and a part there
                    with suppress(redis.ResponseError):
                        left = move(source, target, slot, at_once=1)
                    time.sleep(0.02)
                end_move(source, target, slot)
                moved += 1
        took = seconds_until_all_hit(two)
    print(f"\n{moved} slots, {told(answers)}, all hits {took:.2f} s after the last one")  # seen with -s
    assert moved >= 3
    wait_for_health(two, "ok")


def test_a_node_is_killed_and_comes_back_empty(running: Cluster) -> None:
    two, _ = running
    seconds_until_all_hit(two)
    victim = primaries(running)[0]
    again: subprocess.Popen[bytes] | None = None
    try:
        with asking(two) as answers:
            victim.process.kill()
            victim.process.wait()
            wait_for_health(two, "unavailable")
            again = subprocess.Popen(victim.process.args, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            took = seconds_until_all_hit(two)
        print(f"\n{told(answers)}, all hits {took:.2f} s after the restart")
        wait_for_health(two, "ok")
        assert slots_of(victim), "its entries are encoded again, and stored where they were"
    finally:
        if again is not None:
            again.kill()
            again.wait()


def told(answers: list[dict[str, Any]]) -> str:
    """Say how many answers missed how many chunks, and the longest time to a first token."""
    slowest = max(answer["report"]["timings_ms"]["ttft"] for answer in answers)
    return f"{len(answers)} answers, {misses(answers)} misses, first tokens within {slowest:.0f} ms"
