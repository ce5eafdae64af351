"""The cache of head records: it holds the records that were used last, within its budget."""

from __future__ import annotations

from ragkv.store.format.head import Head, unpack_head
from ragkv.store.head_cache import HeadCache, _memory_bytes
from ragkv.types import Key
from tests.store.chunks import FINGERPRINT, SALT, packed, random_kv

KEYS = [Key(f"{number:064x}") for number in range(4)]


def record(tokens: int = 8) -> Head:
    key, head, _ = packed(random_kv(tokens, 4), 4)
    return unpack_head(head, key, FINGERPRINT, SALT)


def test_the_least_recently_used_record_makes_room() -> None:
    head = record()
    cache = HeadCache(2 * _memory_bytes(head))
    cache.put(KEYS[0], head)
    cache.put(KEYS[1], head)
    assert cache.get(KEYS[0]) is head  # now the other one was used longest ago
    cache.put(KEYS[2], head)
    assert [cache.get(key) is head for key in KEYS[:3]] == [True, False, True]


def test_a_record_that_is_put_again_counts_once() -> None:
    head = record()
    cache = HeadCache(2 * _memory_bytes(head))
    for key in (KEYS[0], KEYS[0], KEYS[0], KEYS[1]):
        cache.put(key, head)
    assert all(cache.get(key) is head for key in KEYS[:2])


def test_a_record_over_the_budget_is_not_kept() -> None:
    head = record()
    cache = HeadCache(_memory_bytes(head) - 1)
    cache.put(KEYS[0], head)
    assert cache.get(KEYS[0]) is None


def test_a_dropped_record_is_gone_and_its_room_is_free() -> None:
    head = record()
    cache = HeadCache(_memory_bytes(head))
    cache.put(KEYS[0], head)
    cache.drop(KEYS[0])
    cache.drop(KEYS[3])
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[1], head)
    assert cache.get(KEYS[1]) is head
