"""The block pool: what is found, what makes room, and that no slot is ever lost or held twice."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ragkv.store.pool import BlockPool, Name
from ragkv.types import Key

CPU = torch.device("cpu")
A, B, C, D = ((Key("k"), 0, block) for block in range(4))


def pool_of(slots: int) -> BlockPool:
    return BlockPool(slots * 8 + 7, 8, CPU)


def put(pool: BlockPool, *names: Name) -> list[int]:
    """Bring blocks in as a tier does; they stay pinned."""
    slots = pool.take(len(names))
    assert slots is not None
    pool.name(names, slots)
    return slots


def test_the_budget_is_never_exceeded() -> None:
    pool = pool_of(3)
    assert pool.data.shape == (3, 8)
    assert BlockPool(7, 8, CPU).slots == 0


def test_the_least_recently_used_block_makes_room() -> None:
    pool = pool_of(3)
    pool.release(put(pool, A, B, C))
    (first,) = pool.find([A])
    assert first is not None
    pool.release([first])
    pool.release(put(pool, D))
    found = pool.find([A, B, C, D])
    assert [slot is None for slot in found] == [False, True, False, False]
    assert pool.stats().evicted == 1


def test_a_pinned_block_stays() -> None:
    pool = pool_of(2)
    held = put(pool, A)
    pool.release(put(pool, B))
    assert pool.take(2) is None
    assert pool.find([A, B]) == [held[0], 1 - held[0]]


def test_a_request_that_finds_no_room_changes_nothing() -> None:
    pool = pool_of(3)
    pool.release(put(pool, A))
    put(pool, B)
    before = pool.stats()
    assert pool.take(3) is None
    assert pool.stats() == before
    assert pool.find([A]) != [None]


def test_a_dropped_chunk_is_not_found_and_its_slot_is_free_once_nobody_uses_it() -> None:
    pool = pool_of(1)
    slots = put(pool, A)
    pool.drop(A[0])
    assert pool.find([A]) == [None]
    assert pool.take(1) is None
    pool.release(slots)
    assert pool.take(1) == slots


class Slots(RuleBasedStateMachine):
    """Any order of finding, taking, naming, releasing and dropping."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(4)
        self.pins: list[int] = []
        self.nameless: list[int] = []

    names = st.tuples(st.sampled_from([Key("k"), Key("l")]), st.integers(0, 1), st.integers(0, 2))

    @rule(names=st.lists(names, max_size=4, unique=True))
    def find(self, names: list[Name]) -> None:
        self.pins += [slot for slot in self.pool.find(names) if slot is not None]

    @rule(count=st.integers(0, 5))
    def take(self, count: int) -> None:
        taken = self.pool.take(count)
        if taken is not None:
            assert len(set(taken)) == count
            assert not set(taken) & set(self.pins)
            self.pins += taken
            self.nameless += taken

    @precondition(lambda self: self.nameless)
    @rule(name=names)
    def name(self, name: Name) -> None:
        if self.pool.find([name]) == [None]:
            self.pool.name([name], [self.nameless.pop()])
        else:
            self.pins.append(self.pool.find([name])[0] or 0)
            self.pool.release([self.pins[-1]])  # found twice here, kept once

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.pool.release([slot])
        if slot in self.nameless and slot not in self.pins:
            self.nameless.remove(slot)

    @rule(key=st.sampled_from([Key("k"), Key("l")]))
    def drop(self, key: Key) -> None:
        self.pool.drop(key)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        stats = self.pool.stats()
        assert stats.pinned == len(set(self.pins))
        assert stats.pinned <= stats.used <= stats.slots == 4

    def teardown(self) -> None:
        self.pool.release(self.pins)
        assert self.pool.stats().pinned == 0
        self.pool.drop(Key("k"))
        self.pool.drop(Key("l"))
        assert self.pool.stats().used == 0


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
