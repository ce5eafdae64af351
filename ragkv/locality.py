"""Locality: which replica of a service a request goes to, so that it meets what that replica keeps in memory.

A client names what its request is about in one header. Any proxy that hashes a header can keep requests with the same
value together, and so does the router of `ragkv serve --replicas` (api/replicas/router.py).

    X-Ragkv-Affinity: c-6b1f…     a conversation: its state is in the memory of the replica that had its last turn
    X-Ragkv-Affinity: d-90ae…     the documents of a collection: their blocks are in the host memory of a replica

Members are ranked by rendezvous hashing: Thaler, Ravishankar, "Using Name-Based Mappings to Increase Hit Rates",
IEEE/ACM Transactions on Networking 6(1), 1998. When a member leaves, only its own keys move. The load is bounded as in
Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

HEADER = "X-Ragkv-Affinity"
"""Name of the header."""
LONGEST = 128
"""Most characters of a value. A longer one is ignored."""
LOAD_FACTOR = 1.25
"""Most requests of a member, as a multiple of the mean."""
_CONVERSATION, _DOCUMENTS = "c-", "d-"


def affinity(credential: str, collection: str, conversation: str | None = None) -> str:
    """Return the value of the header. It is a hash, so a proxy that logs it learns no name.

    Args:
        credential: The API key of the tenant; "" for none.
        collection: Name of the collection.
        conversation: Name of the conversation; None for a request that belongs to none.
    """
    if conversation is not None:
        return _CONVERSATION + _digest(credential, collection, conversation)
    return _DOCUMENTS + _digest(credential, collection)


def belongs_to_conversation(key: str) -> bool:
    """Return whether a key stands for a conversation. Its turns follow one another, so it has one member only."""
    return key.startswith(_CONVERSATION)


def rank(key: str, members: Iterable[str]) -> list[str]:
    """Return the members in the order in which a key prefers them. The first is its home."""
    return sorted(members, key=lambda member: (_score(key, member), member), reverse=True)


def order_by_load(key: str, loads: Mapping[str, int], factor: float = LOAD_FACTOR) -> list[str]:
    """Return the members in the order in which a request should be offered to them.

    The home is first while it has fewer requests than `factor` times the mean, this request included. Otherwise the
    next member in the key's order that has fewer is first. It is the same one every time, so it soon holds the key's
    blocks, too (docs/results/scale.md). A conversation stays at its home.

    Args:
        key: What the request is about.
        loads: Ongoing requests of each member.
        factor: At least 1.
    """
    ranked = rank(key, loads)
    if not ranked or belongs_to_conversation(key):
        return ranked
    most = bound(loads, factor) - 1
    return sorted(ranked, key=lambda member: max(0, loads[member] - most))


def bound(loads: Mapping[str, int], factor: float = LOAD_FACTOR) -> int:
    """Return how many requests a member may have when one more comes."""
    return math.ceil(factor * (sum(loads.values()) + 1) / len(loads))


def _score(key: str, member: str) -> bytes:
    return hashlib.blake2b(f"{len(key)}:{key}{member}".encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _digest(*parts: str) -> str:
    hashed = hashlib.sha256()
    for part in parts:
        encoded = part.encode("utf-8", "surrogateescape")
        hashed.update(len(encoded).to_bytes(8, "big") + encoded)
    return hashed.hexdigest()[:32]
