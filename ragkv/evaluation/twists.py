"""Questions that look answerable and are not: a name, a year or a verb of a real question exchanged for another."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ragkv.evaluation.clauses import dated, sentences
from ragkv.evaluation.drafts import Draft
from ragkv.evaluation.lexicon import (
    AUXILIARIES,
    DETERMINERS,
    INFLECTED,
    OTHERS,
    PREPOSITIONS,
    SUBORDINATORS,
    VERBS,
    regular,
)
from ragkv.evaluation.noun_phrases import organisation, person, proper

_LIGHT = (
    AUXILIARIES | DETERMINERS | PREPOSITIONS | SUBORDINATORS | {"many", "long", "year", "mean", "kind", "thing", "name"}
)
_WORD = re.compile(r"[\w'’+#-]+")


def content(text: str) -> set[str]:
    """Words of a question that say what it is about, shortened to their first six letters."""
    return {word.lower()[:6] for word in _WORD.findall(text) if word.lower() not in _LIGHT and len(word) > 1}


@lru_cache(maxsize=4096)
def _lines(text: str) -> tuple[str, ...]:
    return tuple(sentence.text.lower() for sentence in sentences(text))


def answers(draft: Draft, low: str, strict: bool = False) -> bool:
    """Whether a text may answer a question: its names stand there with most of its other words.

    Args:
        draft: The question.
        low: Title and text in lower case.
        strict: Whether a name next to the answer is enough.
    """
    names = [re.sub(r"^(?:the|an?) ", "", name.lower()) for name in draft.names if any(map(str.isupper, name))]
    if names and not any(name in low for name in names):
        return False
    if strict and (draft.answer.text.lower() in low or (names and draft.rule in ("stands", "entry", "define", "also"))):
        return True
    wanted = content(draft.text)
    return sum(word in low for word in wanted) >= max(1, (0.6 if strict else 0.7) * len(wanted))


def twist(rng: random.Random, draft: Draft, texts: Sequence[str], others: Sequence[str]) -> Draft | None:
    """The question with one thing exchanged, or none where the texts may answer that too."""
    ways = [_verb, _name, _year, _name]
    rng.shuffle(ways)
    for way in ways:
        new = way(rng, draft, others)
        if new and new.text != draft.text and not any(_told(new, draft, text) for text in texts):
            return new
    return None


def _told(new: Draft, old: Draft, text: str) -> bool:
    """Whether some sentence has most of the words of the new question."""
    wanted = content(new.text)
    fresh = wanted - content(old.text)
    for low in _lines(text):
        if fresh and all(word in low for word in fresh) and sum(word in low for word in wanted) >= 0.6 * len(wanted):
            return True
    return not fresh


def _name(rng: random.Random, draft: Draft, others: Sequence[str]) -> Draft | None:
    """Another name of the same type."""
    mine = [name for name in draft.names if _kind(name)]
    if not mine:
        return None
    name = rng.choice(mine)
    low = name.lower()
    fits = [
        new for new in others
        if _kind(new) == _kind(name) and new.lower() not in low and low not in new.lower() and len(new.split()) < 6
    ]  # fmt: skip
    return _swapped(draft, name, rng.choice(fits)) if fits else None


def _kind(name: str) -> str:
    if not proper(name) or dated(name):
        return ""
    return (
        "person"
        if person(name)
        else "organisation"
        if organisation(name)
        else "the"
        if name.startswith("the ")
        else "name"
    )


def _year(rng: random.Random, draft: Draft, _: Sequence[str]) -> Draft | None:
    found = re.search(r"\b1[5-9]\d\d\b|\b20[0-3]\d\b", draft.text)
    if not found:
        return None
    year = int(found[0]) + rng.choice((-1, 1)) * rng.randint(2, 40)
    return _swapped(draft, found[0], str(min(year, 2035)))


def _verb(rng: random.Random, draft: Draft, _: Sequence[str]) -> Draft | None:
    """A verb that says something else of the same things."""
    old = VERBS.get(draft.verb)
    if old is None or draft.verb not in OTHERS:
        return None
    base = rng.choice(OTHERS[draft.verb])
    new = INFLECTED.get(base) or regular(base)
    for before, after in (
        (old.participle, new.participle),
        (old.past, new.past),
        (old.third, new.third),
        (old.base, new.base),
    ):
        if re.search(rf"\b{before}\b", draft.text):
            return _swapped(draft, before, after)
    return None


def _swapped(draft: Draft, old: str, new: str) -> Draft | None:
    pattern = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
    if not pattern.search(draft.text):
        return None
    query = pattern.sub(lambda _: new, draft.query) if pattern.search(draft.query) else ""
    return replace(draft, text=pattern.sub(lambda _: new, draft.text, count=1), query=query)
