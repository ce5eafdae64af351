"""A real Redis Cluster for tests: three primaries on 127.0.0.1, no replicas, stopped by their processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import redis
from redis.crc import key_slot

from tests.redis_server import RedisServer, free_port, redis_server

NODES = 3
SLOTS = 16384
START_SECONDS = 20.0


@dataclass(frozen=True)
class RedisCluster:
    """url: redis+cluster:// of all nodes · nodes[i] has every slot from i * 16384 / 3 on · bus: port where
    other nodes talk to the first one."""

    url: str
    nodes: tuple[RedisServer, ...]
    bus: int

    def of(self, key: str) -> RedisServer:
        """The node that began with the slot of this key."""
        return self.nodes[key_slot(key.encode()) * NODES // SLOTS]

    @contextmanager
    def another(self, *arguments: str) -> Iterator[RedisServer]:
        """One more node, without slots, that knows the others."""
        with redis_server(*_options(free_port()), *arguments) as node, redis.Redis(port=node.port) as admin:
            admin.execute_command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port, self.bus)
            until = time.monotonic() + START_SECONDS
            while len(admin.execute_command("CLUSTER", "SLOTS")) < NODES and time.monotonic() < until:
                time.sleep(0.02)
            yield node


def name_of(node: RedisServer) -> bytes:
    """The node's id in the cluster."""
    with redis.Redis(port=node.port) as admin:
        found: bytes = admin.execute_command("CLUSTER MYID")
        return found


def begin_move(source: RedisServer, target: RedisServer, slot: int) -> None:
    """Say that a slot migrates. Its keys are where they were."""
    with redis.Redis(port=target.port) as there, redis.Redis(port=source.port) as here:
        there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", name_of(source))
        here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", name_of(target))


def move(source: RedisServer, target: RedisServer, slot: int, at_once: int = 100) -> int:
    """Move keys of a slot that migrates; returns how many. Raises ResponseError while one of them changes."""
    with redis.Redis(port=source.port) as here:
        names = here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, at_once)
        if names:
            here.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *names)
        return len(names)


def end_move(source: RedisServer, target: RedisServer, slot: int) -> None:
    """Say that a slot has migrated. The third node learns it later."""
    for node in (target, source):
        with redis.Redis(port=node.port) as admin:
            admin.execute_command("CLUSTER", "SETSLOT", slot, "NODE", name_of(target))


@contextmanager
def redis_cluster(*arguments: str) -> Iterator[RedisCluster]:
    """Start the nodes, let them meet, wait until each knows all slots."""
    with ExitStack() as stack:
        buses = [free_port() for _ in range(NODES)]
        nodes = tuple(stack.enter_context(redis_server(*_options(bus), *arguments)) for bus in buses)
        admins = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        for number, admin in enumerate(admins):
            first, end = (-(-SLOTS * at // NODES) for at in (number, number + 1))
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            admin.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port, buses[0])
        _wait(admins)
        where = ",".join(f"127.0.0.1:{node.port}" for node in nodes)
        yield RedisCluster(f"redis+cluster://{where}", nodes, buses[0])


def _options(bus: int) -> list[str]:
    told = {"enabled": "yes", "port": str(bus), "require-full-coverage": "no"}
    words = [word for name, value in told.items() for word in (f"--cluster-{name}", value)]
    return [*words, "--repl-diskless-sync-delay", "0"]


def _wait(admins: Sequence[redis.Redis]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        slots = [admin.execute_command("CLUSTER", "SLOTS") for admin in admins]
        states = [str(admin.execute_command("CLUSTER", "INFO")) for admin in admins]
        if all(len(known) == NODES for known in slots) and all("cluster_state:ok" in state for state in states):
            return
        time.sleep(0.02)
    raise RuntimeError("the nodes of the Redis Cluster do not find each other")
