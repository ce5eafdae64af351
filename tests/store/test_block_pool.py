"""The block pool finds blocks, evicts the right ones, and never loses a slot or gives it away twice."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from ragkv.store.block_pool import BlockPool
from ragkv.types import Key

CPU = torch.device("cpu")
ONE, OTHER = Key("k"), Key("l")
A, B, C, D = range(4)
GRID, SLOTS = 6, 5


def pool_of(slots: int) -> BlockPool:
    return BlockPool(slots * 8 + 7, 8, CPU)


def put(pool: BlockPool, *cells: int, key: Key = ONE) -> NDArray[np.int64]:
    """Add blocks as a tier does. They stay pinned."""
    slots = pool.take(len(cells))
    assert slots is not None
    pool.name(key, np.array(cells), slots, GRID)
    return slots


def find(pool: BlockPool, *cells: int, key: Key = ONE) -> list[int]:
    return pool.find(key, np.array(cells)).tolist()


def test_the_budget_is_never_exceeded() -> None:
    pool = pool_of(3)
    assert pool.data.shape == (3, 8)
    assert BlockPool(7, 8, CPU).slots == 0


def test_the_least_recently_used_block_makes_room() -> None:
    pool = pool_of(3)
    pool.release(put(pool, A, B, C))
    pool.release(pool.find(ONE, np.array([A])))
    pool.release(put(pool, D))
    assert [slot < 0 for slot in find(pool, A, B, C, D)] == [False, True, False, False]
    assert pool.stats().evicted == 1


def test_a_pinned_block_stays() -> None:
    pool = pool_of(2)
    held = put(pool, A)
    pool.release(put(pool, B))
    assert pool.take(2) is None
    assert find(pool, A, B) == [held[0], 1 - held[0]]


def test_a_request_that_finds_no_room_changes_nothing() -> None:
    pool = pool_of(3)
    pool.release(put(pool, A))
    put(pool, B)
    before = pool.stats()
    assert pool.take(3) is None
    assert pool.stats() == before
    assert find(pool, A) != [-1]


def test_a_dropped_chunk_is_not_found_and_its_slot_is_free_after_its_release() -> None:
    pool = pool_of(1)
    slots = put(pool, A)
    pool.drop(ONE)
    assert find(pool, A) == [-1]
    assert pool.take(1) is None
    pool.release(slots)
    assert pool.take(1) == slots


class Model:
    """The same pool with dictionaries, one block at a time. `held` is in the order of use."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: dict[tuple[Key, int], int] = {}
        self.pins = [0] * slots

    def use(self, name: tuple[Key, int], slot: int) -> None:
        self.held.pop(name, None)
        self.held[name] = slot

    def find(self, key: Key, cells: list[int]) -> list[int]:
        found = [self.held.get((key, cell), -1) for cell in cells]
        for cell, slot in zip(cells, found, strict=True):
            if slot >= 0:
                self.use((key, cell), slot)
                self.pins[slot] += 1
        return found

    def take(self, count: int) -> list[int] | None:
        """Return the slots that the pool may take."""
        free = [slot for slot in range(self.slots) if not self.pins[slot] and slot not in self.held.values()]
        idle = [name for name, slot in self.held.items() if not self.pins[slot]]
        shortage = max(0, count - len(free))
        if shortage > len(idle):
            return None
        return free + [self.held.pop(name) for name in idle[:shortage]]


def test_the_order_of_use_holds_through_many_evictions() -> None:
    pool, model, random = pool_of(200), Model(200), Random(5)
    waiting: list[NDArray[np.int64]] = []
    for turn in range(150):
        key = Key(str(random.randrange(12)))
        cells = sorted(random.sample(range(40), random.randrange(1, 30)))
        slots = pool.find(key, np.array(cells))
        assert slots.tolist() == model.find(key, cells)
        missing = np.array(cells)[slots < 0]
        allowed, taken = model.take(len(missing)), pool.take(len(missing))
        assert taken is not None
        assert allowed is not None
        assert set(taken.tolist()) <= set(allowed)
        pool.name(key, missing, taken, 40)
        for cell, slot in zip(missing.tolist(), taken.tolist(), strict=True):
            model.use((key, cell), slot)
        pool.release(taken)
        waiting.append(slots[slots >= 0])  # pinned for some turns, as by slow questions
        if turn > 2:
            done = waiting.pop(0)
            pool.release(done)
            for slot in done.tolist():
                model.pins[slot] -= 1
    assert pool.stats().evicted > 1000


class Slots(RuleBasedStateMachine):
    """Runs find, take, name, release and drop in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.model = pool_of(SLOTS), Model(SLOTS)
        self.pins: list[int] = []
        self.unnamed: list[int] = []

    keys = st.sampled_from([ONE, OTHER])
    cells = st.integers(0, GRID - 1)

    @rule(key=keys, cells=st.lists(cells, max_size=4, unique=True))
    def find(self, key: Key, cells: list[int]) -> None:
        expected = self.model.find(key, cells)
        assert self.pool.holds(key, np.array(cells, dtype=np.int64)).tolist() == [slot >= 0 for slot in expected]
        assert self.pool.find(key, np.array(cells, dtype=np.int64)).tolist() == expected
        self.pins += [slot for slot in expected if slot >= 0]

    @rule(count=st.integers(0, SLOTS + 1))
    def take(self, count: int) -> None:
        allowed, taken = self.model.take(count), self.pool.take(count)
        assert (taken is None) == (allowed is None)
        if taken is not None and allowed is not None:
            slots = taken.tolist()
            assert len(set(slots)) == count
            assert set(slots) <= set(allowed)
            for slot in slots:
                self.model.pins[slot] += 1
            self.pins += slots
            self.unnamed += slots

    @precondition(lambda self: self.unnamed)
    @rule(key=keys, cell=cells)
    def name(self, key: Key, cell: int) -> None:
        if not self.pool.holds(key, np.array([cell])).all():
            slot = self.unnamed.pop()
            self.pool.name(key, np.array([cell]), np.array([slot]), GRID)
            self.model.use((key, cell), slot)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.pool.release(np.array([slot]))
        self.model.pins[slot] -= 1
        if slot in self.unnamed and slot not in self.pins:
            self.unnamed.remove(slot)

    @rule(key=keys)
    def drop(self, key: Key) -> None:
        self.pool.drop(key)
        self.model.held = {name: slot for name, slot in self.model.held.items() if name[0] != key}

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        stats = self.pool.stats()
        assert stats.pinned == len(set(self.pins))
        assert stats.used == len(set(self.pins) | set(self.model.held.values()))
        assert stats.used <= stats.slots == SLOTS

    def teardown(self) -> None:
        for slot in self.pins:
            self.pool.release(np.array([slot]))
        assert self.pool.stats().pinned == 0
        self.pool.drop(ONE)
        self.pool.drop(OTHER)
        assert self.pool.stats().used == 0


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
