"""All rules: each makes questions of one kind from a main clause, or nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from ragkv.evaluation.circumstances import when, where, why
from ragkv.evaluation.drafts import (
    CAUSES,
    Draft,
    Told,
    sound,
)
from ragkv.evaluation.what import count, stranded, thing
from ragkv.evaluation.who import agent, define, identify, subject


def drafts(rng: random.Random, told: Told) -> list[Draft]:
    """All questions that the rules make of a clause."""
    rules: Sequence[Callable[[random.Random, Told], Iterator[Draft]]] = (
        subject, thing, count, when, where, agent, why, define, identify, stranded,
    )  # fmt: skip
    if (
        told.clause.verb
        and told.clause.verb.base in CAUSES
        and (told.clause.goal or told.clause.verb.base in ("cause", "allow", "enable"))
    ):
        return []
    return [draft for rule in rules for draft in rule(rng, told) if sound(draft)]
