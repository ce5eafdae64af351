"""What every KV store promises, with real files and a real redis-server."""

from __future__ import annotations

import hashlib
import threading
import time
from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragkv.errors import EntryCorrupt, EntryMissing
from ragkv.store.base import KVStore, LeaseState, Range, StoreStats, Swept
from ragkv.types import Key
from tests.store.chunks import read_ranges

HEAD = b"the head"
BODY = (bytes(range(256)) * 20, b"second layer", bytes(5000))


def key_of(name: str) -> Key:
    return Key(hashlib.sha256(name.encode()).hexdigest())


KEY = key_of("a chunk")


def test_an_entry_that_was_put_can_be_read(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    assert store.head(KEY) == HEAD
    assert read_ranges(store, KEY, *(Range(layer, 0, len(data)) for layer, data in enumerate(BODY))) == b"".join(BODY)


def test_ranges_fill_the_buffer_in_the_order_given(store: KVStore) -> None:
    store.put(KEY, HEAD, [memoryview(layer) for layer in BODY])
    found = read_ranges(store, KEY, Range(1, 7, 5), Range(0, 3, 2), Range(0, 3, 2), Range(1, 0, 6), Range(0, 9, 0))
    assert found == b"layer" + bytes([3, 4, 3, 4]) + b"second"


def test_every_range_is_reported_once_when_its_bytes_have_arrived(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    ranges = [Range(0, 5, 4000), Range(1, 0, 6), Range(0, 0, 1), Range(2, 0, 0)]
    out = memoryview(bytearray(sum(part.size for part in ranges)))
    starts = list(accumulate((part.size for part in ranges), initial=0))
    reported: list[int] = []

    def arrived(number: int) -> None:
        part = ranges[number]
        assert out[starts[number] : starts[number + 1]] == BODY[part.layer][part.offset : part.offset + part.size]
        reported.append(number)

    store.read(KEY, ranges, out, arrived)
    assert sorted(reported) == [0, 1, 2, 3]


def test_an_error_of_the_callback_ends_the_read_and_the_store_keeps_working(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)

    def refuse(number: int) -> None:
        raise EntryCorrupt("refused by the callback")

    with pytest.raises(EntryCorrupt, match="refused by the callback"):
        store.read(KEY, [Range(0, 0, 100), Range(2, 0, 5000)], memoryview(bytearray(5100)), refuse)
    assert read_ranges(store, KEY, Range(1, 0, 6)) == b"second"


def test_no_ranges_read_nothing(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    assert read_ranges(store, KEY) == b""


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_entry_and_any_ranges_round_trip(store: KVStore, data: st.DataObject) -> None:
    body = data.draw(st.lists(st.binary(min_size=1, max_size=9000), min_size=1, max_size=5))
    head = data.draw(st.binary(max_size=6000))
    cuts = st.integers(0, len(body) - 1).flatmap(
        lambda layer: st.tuples(st.just(layer), st.integers(0, len(body[layer])), st.integers(0, len(body[layer])))
    )
    ranges = [Range(layer, min(a, b), abs(a - b)) for layer, a, b in data.draw(st.lists(cuts, max_size=150))]
    store.put(KEY, head, body)
    assert store.head(KEY) == head
    assert read_ranges(store, KEY, *ranges) == b"".join(body[r.layer][r.offset : r.offset + r.size] for r in ranges)


def test_a_layer_larger_than_any_buffer_round_trips(store: KVStore) -> None:
    layer = hashlib.shake_128(b"large").digest(5 * 2**20 + 7)
    store.put(KEY, HEAD, [layer, layer[:100]])
    assert read_ranges(store, KEY, Range(0, 0, len(layer)), Range(1, 0, 100)) == layer + layer[:100]


@pytest.mark.parametrize(
    "outside",
    [Range(1, 0, 13), Range(1, 12, 1), Range(1, 999, 4), Range(1, -3, 3), Range(3, 0, 1), Range(-1, 0, 1)],
)
def test_a_range_outside_the_body_is_corrupt(store: KVStore, outside: Range) -> None:
    store.put(KEY, HEAD, BODY)
    with pytest.raises(EntryCorrupt):
        read_ranges(store, KEY, Range(0, 0, 4), outside)


def test_a_buffer_of_another_size_than_the_ranges_is_refused(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    with pytest.raises(ValueError, match="bytes to fill"):
        store.read(KEY, [Range(0, 0, 4)], memoryview(bytearray(5)))


def test_an_unknown_key_is_missing(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    with pytest.raises(EntryMissing):
        store.head(key_of("another"))
    with pytest.raises(EntryMissing):
        read_ranges(store, key_of("another"), Range(0, 0, 1))


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 65, "0" * 63 + "\n", "*" * 64])
def test_a_malformed_key_is_refused(store: KVStore, name: str) -> None:
    for use in (store.head, store.delete, lambda key: store.put(key, HEAD, BODY)):
        with pytest.raises(ValueError, match="not a key"):
            use(Key(name))
    assert list(store.keys()) == []


def test_layers_returns_the_size_of_each_layer(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    assert store.layers(KEY) == tuple(map(len, BODY))
    with pytest.raises(EntryMissing):
        store.layers(key_of("another"))


def test_a_sweep_keeps_live_entries(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    for dry_run in (True, False):
        assert store.sweep(dry_run) == Swept(StoreStats(0, 0), StoreStats(0, 0))
    assert store.stats().entries == 1


def test_a_deleted_entry_is_completely_gone(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    assert store.delete(KEY)
    assert not store.delete(KEY)
    for use in (lambda: store.head(KEY), lambda: read_ranges(store, KEY, Range(0, 0, 1))):
        with pytest.raises(EntryMissing):
            use()
    assert store.stats() == StoreStats(0, 0)


def test_a_second_put_replaces_the_whole_entry(store: KVStore) -> None:
    store.put(KEY, HEAD, BODY)
    store.put(KEY, b"new", [b"one layer"])
    assert (store.head(KEY), read_ranges(store, KEY, Range(0, 0, 9))) == (b"new", b"one layer")
    for old in (Range(0, 0, 10), Range(1, 0, 1), Range(2, 0, 1)):
        with pytest.raises(EntryCorrupt):
            read_ranges(store, KEY, old)
    assert store.stats() == StoreStats(1, 3 + 9)
    store.delete(KEY)
    with pytest.raises(EntryMissing):
        read_ranges(store, KEY, Range(2, 0, 1))


def test_keys_and_stats_cover_all_entries(store: KVStore) -> None:
    assert (list(store.keys()), store.stats()) == ([], StoreStats(0, 0))
    names = {key_of(str(number)) for number in range(150)}
    for name in names:
        store.put(name, HEAD, BODY)
    listed = list(store.keys())
    assert set(listed) == names
    assert len(listed) == len(names)
    assert store.stats() == StoreStats(150, 150 * (len(HEAD) + sum(map(len, BODY))))


def test_the_store_answers(store: KVStore) -> None:
    store.ping()


def test_a_reader_sees_the_old_entry_or_the_new_one(store: KVStore) -> None:
    """Two writers replace and delete an entry while a reader reads it. Each read returns bytes of one version only."""
    stop = threading.Event()
    faults: list[Exception] = []

    def write(letter: bytes) -> None:
        try:
            while not stop.is_set():
                store.put(KEY, letter * 3000, [letter * 70_000, letter * 100])
                if letter == b"b":
                    store.delete(KEY)
        except Exception as error:
            faults.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for writer in writers:
        writer.start()
    reads_done = 0
    until = time.monotonic() + 20
    try:
        while reads_done < 200 and time.monotonic() < until and not faults:
            for read in (lambda: store.head(KEY), lambda: read_ranges(store, KEY, Range(0, 5, 60_000))):
                try:
                    data = read()
                except EntryMissing:
                    continue
                reads_done += 1
                assert len(set(data)) == 1
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert not faults
    assert reads_done >= 200


def test_one_of_many_who_miss_an_entry_gets_the_lease(store: KVStore) -> None:
    found: list[LeaseState] = []

    def take(owner: str) -> None:
        found.append(store.leases.take(KEY, owner, 60))

    threads = [threading.Thread(target=take, args=(f"owner-{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["held"] * 11 + ["taken"]
    assert store.leases.take(key_of("another"), "owner-0", 60) == "taken"


def test_a_put_ends_the_lease_of_its_entry(store: KVStore) -> None:
    assert store.leases.take(KEY, "first", 60) == "taken"
    store.put(KEY, HEAD, BODY)
    assert store.leases.take(KEY, "second", 60) == "stored"
    assert not store.leases.renew(KEY, "first", 60)
    store.delete(KEY)
    assert store.leases.take(KEY, "third", 60) == "taken"


def test_a_lease_ends_when_its_time_has_passed_unless_it_is_renewed(store: KVStore) -> None:
    assert store.leases.take(KEY, "first", 0.4) == "taken"
    assert store.leases.renew(KEY, "first", 1.2)
    time.sleep(0.5)
    assert store.leases.take(KEY, "second", 60) == "held"
    time.sleep(0.8)
    assert not store.leases.renew(KEY, "first", 60)
    assert store.leases.take(KEY, "second", 60) == "taken"


def test_only_its_owner_releases_and_renews_a_lease(store: KVStore) -> None:
    assert store.leases.take(KEY, "first of all", 60) == "taken"
    store.leases.release(KEY, "second")
    assert not store.leases.renew(KEY, "second", 60)
    assert store.leases.take(KEY, "second", 60) == "held"
    store.leases.release(KEY, "first of all")
    assert store.leases.take(KEY, "second", 60) == "taken"


def test_a_lease_is_no_entry(store: KVStore) -> None:
    store.leases.take(KEY, "first", 60)
    assert (list(store.keys()), store.stats()) == ([], StoreStats(0, 0))
    assert store.sweep(dry_run=False) == Swept()
    with pytest.raises(EntryMissing):
        store.head(KEY)
    with pytest.raises(ValueError, match="not a key"):
        store.leases.take(Key("../elsewhere"), "first", 60)
