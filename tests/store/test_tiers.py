"""Tiers return the same rows from every tier, read each block once, and stay within their budgets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragkv.errors import EntryCorrupt, EntryMissing
from ragkv.store.base import Arrived, Range, ignore
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.head import Head, unpack_head
from ragkv.store.format.layout import BODIES, Layout
from ragkv.store.tier import TierBytes
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.types import ChunkKV, Key
from tests.store.chunks import (
    FINGERPRINT,
    SALT,
    SHAPE,
    finite_kv,
    packed,
    random_kv,
    read_blocks,
    same_bits,
    wanted_bytes,
)

BLOCK = 4
SLOT = Layout(SHAPE, BLOCK, BLOCK, torch.float32).layer_bytes
CPU = torch.device("cpu")
ALL = [[0, 1, 2, 3, 4, 5]] * 3


class CountingStore(DiskStore):
    """A disk store that counts the bytes it reads and can be made to wait."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes = 0
        self.gate = threading.Event()
        self.gate.set()
        self.read_started = threading.Event()

    def read(self, key: Key, ranges: Sequence[Range], out: memoryview, arrived: Arrived = ignore) -> None:
        self.read_started.set()
        self.gate.wait(10)
        self.bytes += out.nbytes
        super().read(key, ranges, out, arrived)


class Case:
    """A store with one chunk, and tiers over it with room for so many blocks."""

    def __init__(
        self, folder: Path, slots: int, seed: int = 0, form: str = "exact", gpu: int = 0, device: torch.device = CPU
    ) -> None:
        self.store, self.form = CountingStore(folder), form
        self.key, self.head = self.put(finite_kv(seed=seed) if form != "exact" else random_kv(seed=seed))
        layout = Layout(SHAPE, BLOCK, BLOCK, torch.float32, form)
        size = layout.full_bytes
        # One part in eight is for heads. The host pool has exactly `slots` slots.
        budgets = TierBudgets(host=-(-slots * size * 8 // 7), gpu=gpu * size)
        self.tiers = Tiers(self.store, layout, budgets, device)

    def put(self, kv: ChunkKV) -> tuple[Key, Head]:
        key, record, body = packed(kv, BLOCK, form=self.form)
        self.store.put(key, record, body)
        return key, unpack_head(record, key, FINGERPRINT, SALT)

    def load(self, requested: Sequence[Sequence[int]]) -> TierBytes:
        """Load blocks, compare them with those of the store, and return their bytes by tier."""
        loaded = self.tiers.load(self.key, self.head, requested)
        truth = read_blocks(DiskStore(self.store.root), self.key, self.head, requested)
        for (k, v), (true_k, true_v) in zip(loaded.rows, truth, strict=True):
            assert same_bits(k.cpu(), true_k)
            assert same_bits(v.cpu(), true_v)
        assert sum(loaded.tier_bytes.values()) == wanted_bytes(self.head.layout, requested)
        return +loaded.tier_bytes


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    return lambda slots, seed=0: Case(tmp_path / str(seed), slots, seed)


choices = st.lists(st.sets(st.integers(0, 5)).map(sorted), min_size=3, max_size=3)


@settings(max_examples=30, deadline=None)
@given(first=choices, second=choices, slots=st.integers(0, 20))
def test_rows_equal_those_of_the_store_whatever_is_cached(
    tmp_path_factory: pytest.TempPathFactory, first: list[list[int]], second: list[list[int]], slots: int
) -> None:
    held = Case(tmp_path_factory.mktemp("tiers"), slots)
    for requested in (first, second, first):
        held.load(requested)
    assert held.tiers.stats()["host"].pinned == 0


def test_a_block_that_was_read_once_comes_from_memory(case: Callable[..., Case]) -> None:
    it = case(18)
    assert it.load([[0, 1], [], [5]]) == {"store": 5 * SLOT // 2}
    read = it.store.bytes
    assert it.load([[1], [], [5]]) == {"host": 3 * SLOT // 2}
    assert it.store.bytes == read
    assert it.load([[1, 2], [], [5]]) == {"host": 3 * SLOT // 2, "store": SLOT}
    assert it.store.bytes == read + SLOT


def test_without_a_budget_everything_comes_from_the_store(case: Callable[..., Case]) -> None:
    it = case(0)
    assert it.load(ALL) == it.load(ALL) == {"store": it.head.layout.body_bytes}


def test_blocks_are_pinned_at_once_only_if_all_of_them_are_in_memory(case: Callable[..., Case]) -> None:
    held = case(18)
    held.load([[0, 1], [0, 1], [0, 1]])
    assert held.tiers.pin_held(held.key, held.head, [[0, 1, 2]] * 3) is None
    assert held.tiers.stats()["host"].pinned == 0
    found = held.tiers.pin_held(held.key, held.head, [[0, 1], [1], []])
    assert found is not None
    pinned, tier_bytes = found
    assert (pinned.layers.tolist(), pinned.blocks.tolist()) == ([0, 0, 1], [0, 1, 1])
    assert sum(tier_bytes.values()) == tier_bytes["host"] == wanted_bytes(held.head.layout, [[0, 1], [1], []])
    assert held.tiers.stats()["host"].pinned == 3
    pinned.release()
    assert held.tiers.stats()["host"].pinned == 0
    assert case(2, 1).tiers.pin_held(held.key, held.head, [[0]] * 3) is None, "the pool is too small"


def test_a_request_larger_than_the_pool_bypasses_it(case: Callable[..., Case]) -> None:
    it = case(4)
    it.load([[0], [], []])
    assert it.load(ALL) == {"store": it.head.layout.body_bytes}
    assert it.load([[0], [], []]) == {"host": SLOT}


def test_a_block_that_is_being_fetched_is_not_fetched_twice(case: Callable[..., Case]) -> None:
    it = case(18)
    it.store.gate.clear()
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(it.tiers.load, it.key, it.head, ALL) for _ in range(8)]
        assert it.store.read_started.wait(10)
        it.store.gate.set()
        loaded = [future.result(10) for future in asked]
    assert it.store.bytes == it.head.layout.body_bytes
    assert all(same_bits(one.rows[2][1], loaded[0].rows[2][1]) for one in loaded)
    assert it.tiers.stats()["host"].pinned == 0


def test_a_request_that_waited_for_a_failed_fetch_fetches_itself(case: Callable[..., Case]) -> None:
    it = case(18)
    it.store.gate.clear()
    record, body = packed(random_kv(), BLOCK)[1:]
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(it.tiers.load, it.key, it.head, ALL)
        assert it.store.read_started.wait(10)
        second = threads.submit(it.tiers.load, it.key, it.head, ALL)
        it.store.delete(it.key)
        it.store.gate.set()
        assert isinstance(first.exception(10), EntryMissing)
        assert isinstance(second.exception(10), EntryMissing)
    assert it.tiers.stats()["host"].used == 0
    it.store.put(it.key, record, body)
    it.load(ALL)


def test_a_damaged_block_is_not_kept(case: Callable[..., Case]) -> None:
    it = case(18)
    (file,) = it.store.root.glob("??/*.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(EntryCorrupt):
        it.tiers.load(it.key, it.head, ALL)
    stats = it.tiers.stats()["host"]
    assert (stats.used, stats.pinned) == (0, 0)


def test_a_dropped_chunk_is_read_again(case: Callable[..., Case]) -> None:
    it = case(18)
    it.load(ALL)
    it.tiers.drop(it.key)
    assert it.load(ALL) == {"store": it.head.layout.body_bytes}


def test_chunks_share_the_pool_and_the_least_recently_used_block_is_evicted_first(case: Callable[..., Case]) -> None:
    it = case(18)
    it.load(ALL)
    other, head = it.put(random_kv(tokens=8, seed=5))
    it.load([[5], [5], [5]])
    it.tiers.load(other, head, [[0, 1]] * 3)
    assert it.load([[5], [5], [5]]) == {"host": 3 * SLOT // 2}
    assert it.load([[0], [], []]) == {"store": SLOT}
    assert it.tiers.stats()["host"].evicted >= 6


def test_a_head_is_read_and_verified_once(case: Callable[..., Case]) -> None:
    it = case(1000)
    reads: list[int] = []

    def read() -> Head:
        reads.append(1)
        return it.head

    assert it.tiers.head(it.key, read) == (it.head, "store")
    assert it.tiers.head(it.key, read) == (it.head, "host")
    it.tiers.drop(it.key)
    assert it.tiers.head(it.key, read) == (it.head, "store")
    assert len(reads) == 2


def test_heads_beyond_their_budget_are_evicted(case: Callable[..., Case]) -> None:
    it = case(100)  # room for heads: 100 slots / 7
    names = [Key(f"{number:064x}") for number in range(50)]
    for name in names:
        it.tiers.head(name, lambda: it.head)
    kept = [name for name in names if it.tiers.head(name, lambda: it.head)[1] == "host"]
    assert len(kept) < len(names)


def test_a_failed_prefetch_is_only_logged(case: Callable[..., Case], caplog: pytest.LogCaptureFixture) -> None:
    it = case(18)
    it.store.delete(it.key)
    it.tiers.prefetch(lambda: it.load(ALL) and None)
    it.tiers.close()
    assert it.tiers.stats()["host"].used == 0
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize("form", BODIES)
def test_the_same_rows_come_from_store_host_and_gpu(tmp_path: Path, form: str) -> None:
    it = Case(tmp_path, 18, form=form, gpu=18, device=torch.device("cuda"))
    assert it.load([[0, 1], [], [5]]).keys() == {"store"}
    assert it.load([[1], [], [5]]).keys() == {"gpu"}
    assert it.load([[1, 2], [], [5]]).keys() == {"gpu", "store"}
    assert it.tiers.load(it.key, it.head, [[1], [], []]).rows[0][0].device.type == "cuda"
    it.tiers.drop(it.key)
    assert it.load(ALL).keys() == {"store"}


@on_a_gpu
def test_blocks_that_do_not_fit_on_the_gpu_stay_in_host_memory(tmp_path: Path) -> None:
    it = Case(tmp_path, 18, gpu=4, device=torch.device("cuda"))
    assert it.load(ALL).keys() == {"store"}
    assert it.load(ALL).keys() == {"host"}
    assert it.load([[0], [1], [2]]).keys() == {"host"}
    assert it.load([[0], [1], [2]]).keys() == {"gpu"}
    assert {name: pool.pinned for name, pool in it.tiers.stats().items()} == {"host": 0, "gpu": 0}
