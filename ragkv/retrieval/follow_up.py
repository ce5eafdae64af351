"""Follow-up questions: what is searched for when a question refers to earlier turns ("And when was it built?").

The words of such a question find any building. The latest question that stands alone is put before it, with its answer,
for the search alone: what the model reads keeps its turns. English, like the models that ship with ragkv.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ragkv.normalisation import folded
from ragkv.passages import is_unknown
from ragkv.types import Hit

LONGEST = 2000
"""Characters that are put before a question. A longer text is left out."""

_PRONOUN = re.compile(r"\b(he|him|his|she|hers?|it|its|they|them|theirs?)\b", re.IGNORECASE)
_NAMES_NOTHING = frozenset(
    "a about again and are but did do does else ever exactly far for from how in is long many more most much not of "
    "often old on or really since so soon still than that the then there this to was were what when where which who "
    "whom whose why with".split()
)
_WORD = re.compile(r"\w+")


def refers_back(question: str) -> bool:
    """Return whether a question has a pronoun, or no word that names anything ("And since when?")."""
    question = folded(question)
    words = _WORD.findall(question.lower())
    return _PRONOUN.search(question) is not None or _NAMES_NOTHING.issuperset(words)


def search_text(question: str, turns: Sequence[tuple[str, str]]) -> str:
    """Return what is searched for.

    Args:
        question: The question.
        turns: Earlier (question, answer), in order.
    """
    if not refers_back(question):
        return question
    alone = next((turn for turn in reversed(turns) if not refers_back(turn[0])), None)
    if alone is None:
        return question
    asked, answer = (each.strip() for each in alone)
    said = "" if is_unknown(answer) else answer
    before = " ".join(each if each[-1] in ".?!" else f"{each}." for each in (asked, said) if each)
    return f"{before} {question}" if len(before) <= LONGEST else question


def own_raised(hits: Sequence[Hit], own: Collection[str], most: int) -> list[Hit]:
    """Return the best `most` hits, after those of the conversation's own documents rose by half as many places.

    A document of its own so comes before one that is about something else with the same words, and not before the
    best of what is new.

    Args:
        hits: Best first, about twice as many as are wanted.
        own: Ids of the documents that earlier turns read.
        most: How many are wanted.
    """
    places = {id(hit): place - (most / 2 if hit.chunk.document_id in own else 0) for place, hit in enumerate(hits)}
    return sorted(hits, key=lambda hit: places[id(hit)])[:most]
