"""Questions made from a page's own sentences: the words around a value ask for it, as users type in a hurry.

They train the model to find a place by its words in any sentence, and there are as many of them as values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tools.demo_model.dice import Dice

_SENTENCE = re.compile(r'(?<=[.!?"])\s+(?=[A-Z"“])|\n+')
_TOKEN = re.compile(r"[\w'’-]+")
_PHRASE = re.compile(r"\b(?:the|a|an|his|her|their|its|some|two|three) ((?:[a-z'-]+ ){0,3}[a-z'-]+)")
_PREPOSITIONS = frozenset(
    "in on at by of for from with to into under over behind near after before during since until".split()
)
LIGHT = _PREPOSITIONS | frozenset(
    "a an the and or but as that which who whom whose it its he she his her him they their them this these those is "
    "was were are be been being had has have not no so if when while where there than then also only just up out off "
    "down will would can could may might must did does do i we you my our your me us".split()
)
"""Words that are not enough for a question."""
_WHO, _WHERE, _WHEN = ("Who", "Which person"), ("Where", "Which place"), ("When",)
OPENINGS: Mapping[str, Sequence[str]] = {
    "person": _WHO, "firstname": _WHO, "surname": _WHO, "company": ("Which company", "Who", "Which firm"),
    "city": (*_WHERE, "Which town"), "region": _WHERE, "country": ("Which country", "Where"), "street": _WHERE,
    "year": ("When", "Which year", "What year"), "date": (*_WHEN, "What date"), "day": (*_WHEN, "Which day"),
    "time": (*_WHEN, "What time"), "weekday": (*_WHEN, "Which day"), "month": (*_WHEN, "Which month"),
    "number": ("How many",), "small": ("How many",), "money": ("How much", "What price", "What sum"),
    "duration": ("How long",), "length": ("How long", "How far", "How high"), "weight": ("How heavy", "What weight"),
    "group": ("Who",), "things": ("What",),
    "age": ("How old",), "temperature": ("How hot", "What temperature"), "percent": ("What percentage", "How much"),
}  # fmt: skip
"""First words of a question for a value, by the type of its slot."""


@dataclass(frozen=True)
class Gap:
    """A value in the text of a page. kind: its slot's type, or "" · piece, start: where it stands."""

    value: str
    kind: str
    piece: int
    start: int


def gaps(pieces: Sequence[str], values: Mapping[str, str]) -> Iterator[Gap]:
    """Values that occur only once, and short phrases after an article. values: by slot or label."""
    whole = "\n".join(pieces)
    for name, value in values.items():
        if value and whole.count(value) == 1 and len(value.split()) <= 8:
            piece = next(n for n, text in enumerate(pieces) if value in text)
            yield Gap(value, name.rstrip("0123456789"), piece, pieces[piece].find(value))
    for piece, text in enumerate(pieces):
        for phrase in _PHRASE.finditer(text):
            words = phrase[1].split()
            size = next((n for n, word in enumerate(words) if word in LIGHT), len(words))
            value = " ".join(words[:size])
            if size and len(value) > 3 and whole.count(value) == 1:
                yield Gap(value, "", piece, phrase.start(1))


def ask(v: Dice, text: str, gap: Gap) -> str:
    """A question for a gap of this piece; "" if there are too few words around it."""
    start, end = _bounds(text, gap.start)
    left = _TOKEN.findall(text[start : gap.start])[-v.whole(1, 9) :]
    right = _TOKEN.findall(text[gap.start + len(gap.value) : end])[: v.whole(0, 7)]
    before = left[-1].lower() if left else ""
    while left and left[-1].lower() in ("the", "a", "an"):
        left.pop()
    left, right = _thin(v, left), _thin(v, right)
    if sum(word.lower() not in LIGHT for word in (*left, *right)) < 2:
        return ""
    opening = v.one(OPENINGS.get(gap.kind, ("What", "Which", "What")))
    if left and left[-1].lower() in _PREPOSITIONS and before in _PREPOSITIONS and v.chance(0.5):
        opening = f"{left.pop()} {opening.lower()}"
    u = v.rng.random()
    if u < 0.4:
        words = [opening, *left, *right]
    elif u < 0.65:
        words = [*left, opening.lower(), *right]
    elif u < 0.8:
        words = [opening, *right, *left]
    else:
        words = [word for word in (*left, *right) if word.lower() not in LIGHT]
        v.rng.shuffle(words)
        words = [opening, *words] if v.chance(0.6) else [*words, opening.lower()]
    return f"{' '.join(words)}?"


def _bounds(text: str, at: int) -> tuple[int, int]:
    """The sentence that holds a place."""
    start = 0
    for sentence in _SENTENCE.finditer(text):
        if sentence.start() > at:
            return start, sentence.start()
        start = sentence.end()
    return start, len(text)


def _thin(v: Dice, words: list[str]) -> list[str]:
    return [word for word in words if not v.chance(0.35 if word.lower() in LIGHT else 0.2)]
