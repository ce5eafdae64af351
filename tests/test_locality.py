"""Which replica a request goes to: balanced, stable when replicas come and go, and bounded under load."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragkv.locality import LOAD_FACTOR, affinity, belongs_to_conversation, bound, order_by_load, rank

NAMES = st.lists(st.text("abcdefgh0123456789", min_size=1, max_size=8), min_size=1, max_size=12, unique=True)
KEYS = [affinity("", f"collection-{number}") for number in range(2000)]


@given(NAMES, st.text())
def test_every_proxy_ranks_the_members_alike(members: list[str], key: str) -> None:
    assert rank(key, members) == rank(key, reversed(members))
    assert sorted(rank(key, members)) == sorted(members)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_keys_are_spread_evenly(count: int) -> None:
    members = [f"replica-{number}" for number in range(count)]
    homes = Counter(rank(key, members)[0] for key in KEYS)
    mean = len(KEYS) / count
    assert max(homes.values()) < 1.25 * mean
    assert min(homes.values()) > 0.75 * mean


@given(NAMES, st.text())
def test_only_the_keys_of_a_member_that_leaves_move(members: list[str], key: str) -> None:
    ranked = rank(key, members)
    for gone in members:
        left = [each for each in members if each != gone]
        assert rank(key, left) == [each for each in ranked if each != gone]


def test_a_member_that_joins_takes_its_share_and_nothing_else_moves() -> None:
    before = [f"replica-{number}" for number in range(4)]
    moved = [key for key in KEYS if rank(key, before)[0] != rank(key, [*before, "new"])[0]]
    assert all(rank(key, [*before, "new"])[0] == "new" for key in moved)
    assert 0.15 < len(moved) / len(KEYS) < 0.25


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 50), min_size=1), st.text("xyz", max_size=4))
def test_the_first_choice_never_has_more_than_its_bound(loads: dict[str, int], key: str) -> None:
    first = order_by_load(key, loads)[0]
    assert loads[first] < bound(loads)
    assert first == rank(key, loads)[0] or loads[rank(key, loads)[0]] >= bound(loads)
    assert sorted(order_by_load(key, loads)) == sorted(loads)


@given(st.integers(1, 8), st.integers(1, 200))
def test_requests_for_one_key_that_never_end_fill_all_members(count: int, requests: int) -> None:
    loads = {f"replica-{number}": 0 for number in range(count)}
    for _ in range(requests):
        loads[order_by_load("d-popular", loads)[0]] += 1
    assert max(loads.values()) <= LOAD_FACTOR * requests / count + 1


def test_a_full_home_passes_on_to_the_next_in_the_order_of_the_key() -> None:
    for key in KEYS[:100]:
        home, second, third = rank(key, ["a", "b", "c"])
        assert order_by_load(key, {home: 9, second: 2, third: 0}) == [second, third, home]
        assert order_by_load(key, {home: 9, second: 8, third: 0}) == [third, second, home]


def test_a_key_that_is_alone_stays_at_home() -> None:
    loads = {"a": 0, "b": 0, "c": 0}
    for key in KEYS[:100]:
        assert order_by_load(key, loads) == rank(key, loads)


def test_a_conversation_stays_at_home_under_any_load() -> None:
    key = affinity("", "default", "a conversation")
    assert belongs_to_conversation(key)
    home = rank(key, ["a", "b", "c"])[0]
    assert order_by_load(key, {"a": 0, "b": 0, "c": 0, home: 1000})[0] == home


def test_a_key_names_nothing_and_differs_by_each_part() -> None:
    keys = {
        affinity("", "harbour"),
        affinity("", "harbour", ""),
        affinity("", "harbour", "talk"),
        affinity("key", "harbour"),
        affinity("", "keyharbour"),
        affinity("k", "eyharbour"),
    }
    assert len(keys) == 6
    assert not any("harbour" in key or "talk" in key for key in keys)
    assert all(key.isascii() and len(key) == 34 for key in keys)
