"""Phrases of the word lists: things, lists of things, jobs, offices."""

from __future__ import annotations

from tools.demo_model.dice import Dice
from tools.demo_model.inflect import gerund, past, plural


def thing(v: Dice) -> str:
    """A noun phrase without an article."""
    u = v.rng.random()
    if u < 0.3:
        return v.pick("noun")
    return (
        f"{v.pick('adj')} {v.pick('noun')}"
        if u < 0.7
        else f"{v.pick('material')} {v.pick('noun')}"
        if u < 0.85
        else f"{v.pick('noun')} {v.pick('noun')}"
    )


def things(v: Dice) -> str:
    """A plural noun phrase."""
    return plural(thing(v))


def listing(v: Dice) -> str:
    """Several things: lamps, nails and copper wire."""
    items = [things(v) if v.chance(0.5) else plural(v.pick("noun")) for _ in range(v.whole(2, 3))]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def foods(v: Dice) -> str:
    """Several foods."""
    items = [v.pick("food") for _ in range(v.whole(2, 4))]
    return f"{', '.join(items[:-1])} and {items[-1]}"


def verbed(v: Dice) -> str:
    """A past tense."""
    return past(v.pick("verb"))


def verbing(v: Dice) -> str:
    """A gerund."""
    return gerund(v.pick("verb"))


def group(v: Dice) -> str:
    """People of a kind."""
    return v.pick("people") if v.chance(0.8) else f"{v.pick('adj')} {v.pick('people')}"


def job(v: Dice) -> str:
    """A profession."""
    return (
        v.pick("trade")
        if v.chance(0.8)
        else f"{v.pick('noun')} {v.one(('engineer', 'maker', 'merchant', 'teacher', 'dealer', 'designer'))}"
    )
