"""Flipped bits and truncated values anywhere in a real store are detected, unless they are not content."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.cluster import RedisCluster

from ragkv.errors import EntryCorrupt, EntryMissing
from ragkv.store.base import KVStore
from ragkv.store.disk_entry import CHECK, PAGE, PREAMBLE
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.codec import offsets, unpack
from ragkv.store.format.head import FRAME, unpack_head
from ragkv.store.format.layout import block_ranges
from ragkv.store.format.seal import CHECKSUMS, Keyed, Seal
from ragkv.store.redis_entry import FRAME as REDIS_FRAME
from ragkv.store.tier import fetch_blocks
from ragkv.types import Key
from tests.redis_server import RedisServer
from tests.store.chunks import FINGERPRINT, SALT, finite_kv, packed
from tests.store.conftest import client_of

FLIPS = 1000
Read = Callable[[], tuple[bytes, bytes]]


@dataclass(frozen=True)
class Place:
    """A range of stored bytes.

    Attributes:
        value: A file, or the name of a Redis value.
        content: Whether a reader must detect damage here.
    """

    what: str
    value: Path | str
    start: int
    end: int
    content: bool = True


@dataclass(frozen=True)
class Entry:
    """A stored chunk.

    Attributes:
        read: Reads and verifies the head and all blocks.
        places: Where its bytes are.
        ends: In each value, where one part ends and the next begins.
    """

    read: Read
    locations: list[Place]
    ends: dict[Path | str, list[int]]
    client: redis.Redis | RedisCluster | None

    def bytes_of(self, value: Path | str) -> bytes:
        return value.read_bytes() if isinstance(value, Path) else self.client.get(value)

    def write(self, value: Path | str, data: bytes) -> None:
        if isinstance(value, Path):
            value.write_bytes(data)
        else:
            self.client.set(value, data)


@pytest.fixture(params=[("exact", CHECKSUMS), ("int8", Keyed("a secret of the tests"))], ids=["plain", "int8-sealed"])
def entry(request: pytest.FixtureRequest, store: KVStore, server: RedisServer) -> Iterator[Entry]:
    form, seal = request.param
    key, head, body = packed(finite_kv(), form=form, seal=seal)
    store.put(key, head, body)
    layout = unpack_head(head, key, FINGERPRINT, seal.salt(SALT), seal).layout
    inside = [layout.range(0, block).offset for block in range(layout.blocks)]
    read = reader(store, key, seal)
    if isinstance(store, DiskStore):
        yield on_disk(store, key, read, len(head), [len(layer) for layer in body], inside)
        return
    with client_of(store, server.url) as client:
        name = f"ragkv:{{{key}}}:"
        frame = REDIS_FRAME.size
        places = [
            Place("magic", f"{name}head", 0, 4),
            Place("sizes", f"{name}head", 4, frame, content=False),
            Place("head", f"{name}head", frame, frame + len(head)),
        ]
        ends: dict[Path | str, list[int]] = {f"{name}head": [0, 4, 8, frame, frame + FRAME.size, frame + len(head)]}
        for layer, data in enumerate(body):
            places.append(Place("body", f"{name}body:{layer}", 0, len(data)))
            ends[f"{name}body:{layer}"] = [*inside, len(data)]
        yield Entry(read, places, ends, client)


def on_disk(store: DiskStore, key: Key, read: Read, head: int, layers: list[int], inside: list[int]) -> Entry:
    file = store.root / key[:2] / f"{key}.kv"
    head_start = PREAMBLE.size + 8 * len(layers) + CHECK.size
    body_start = -(-(head_start + head) // PAGE) * PAGE
    size = body_start + sum(layers)
    assert file.stat().st_size == size
    places = [
        Place("preamble", file, 0, head_start),
        Place("head", file, head_start, head_start + head),
        Place("gap", file, head_start + head, body_start, content=False),
        Place("body", file, body_start, size),
    ]
    starts = [body_start + sum(layers[:layer]) for layer in range(len(layers))]
    ends = [0, 8, 12, 16, PREAMBLE.size, head_start - CHECK.size, head_start, head_start + FRAME.size]
    ends += [head_start + head, *(start + block for start in starts for block in inside), size]
    return Entry(read, places, {file: ends}, None)


def reader(store: KVStore, key: Key, seal: Seal) -> Read:
    def read() -> tuple[bytes, bytes]:
        data = store.head(key)
        head = unpack_head(data, key, FINGERPRINT, seal.salt(SALT), seal)
        found = block_ranges(head.layout, [range(head.layout.blocks)] * head.layout.shape.layers)
        raw = fetch_blocks(store, key, head, found)
        unpack(raw, offsets(found), found, head.layout)
        return data, raw.numpy().tobytes()

    return read


def outcome(entry: Entry, whole: tuple[bytes, bytes]) -> str:
    try:
        found = entry.read()
    except (EntryCorrupt, EntryMissing):
        return "detected"
    return "unchanged" if found == whole else "accepted with other content"


def flip(entry: Entry, value: Path | str, at: int, bit: int) -> None:
    if isinstance(value, Path):
        with value.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ bit]))
    else:
        (byte,) = entry.client.getrange(value, at, at)
        entry.client.setrange(value, at, bytes([byte ^ bit]))


def flips(entry: Entry, locations: list[Place], count: int) -> Iterator[tuple[str, str]]:
    """Flip `count` bits, one at a time, equally many in each place, and yield (where, outcome) for each."""
    whole, chance = entry.read(), random.Random(count)
    for number in range(count):
        place = locations[number % len(locations)]
        at, bit = chance.randrange(place.start, place.end), 1 << chance.randrange(8)
        flip(entry, place.value, at, bit)
        yield f"{place.what}, byte {at}, bit {bit}", outcome(entry, whole)
        flip(entry, place.value, at, bit)
    assert entry.read() == whole


def test_a_thousand_flipped_bits_are_a_thousand_found_out(entry: Entry) -> None:
    found = list(flips(entry, [place for place in entry.locations if place.content], FLIPS))
    assert len(found) == FLIPS
    assert [(where, what) for where, what in found if what != "detected"] == []


def test_a_flipped_bit_outside_the_content_does_not_change_what_is_read(entry: Entry) -> None:
    found = list(flips(entry, [place for place in entry.locations if not place.content], 100))
    assert [(where, what) for where, what in found if what == "accepted with other content"] == []


def test_what_is_cut_short_anywhere_is_a_miss(entry: Entry) -> None:
    """Truncate at every boundary and beside it. Files are not memory-mapped, so a short file cannot kill a reader."""
    whole = entry.read()
    for value, ends in entry.ends.items():
        data = entry.bytes_of(value)
        assert ends[-1] == len(data)
        for size in sorted({near for end in ends for near in (end - 1, end, end + 1) if 0 <= near < len(data)}):
            entry.write(value, data[:size])
            assert outcome(entry, whole) == "detected", f"cut to {size} of {len(data)} bytes"
        entry.write(value, data)
        assert entry.read() == whole
