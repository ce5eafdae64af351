"""Replace words of a page: a word that text and questions share is replaced in both.

Training uses a page thousands of times. With "kettle" for "bell" everywhere, the answer can still be found but not
recalled from memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from tools.demo_model.dice import Dice

Shape = tuple[str, bool]  # ending, and whether it opens with a vowel: what may stand in for a word without harm
Pool = Mapping[Shape, Sequence[str]]

_WORD = re.compile(r"[A-Za-z]{4,}")
_STEM = 4  # words that begin alike may be forms of one word: they stay
_ENDINGS = ("ing", "ed", "ly", "s", "")
_KEPT = frozenset(
    "about above according after again against ago all almost alone along already also although always among another "
    "any anybody anyone anything are around away back be became because become been before began behind being below "
    "beside besides better between beyond both but call called came can cannot could date days did does doing done "
    "down during each early either else end ended enough ever every everybody everyone everything except far few "
    "first five following for former found four from full gave get give given going good got great had half has have "
    "having heavy height held help her here hers herself him himself his hour hours how however hundred into its "
    "itself just kept kind know known large last late later least leave left length less let like little long longer "
    "made make making many match matter may meant might mine miles minutes money month months more most much must "
    "name named near nearly need neither never next nine nobody none nothing number often old once one only onto other "
    "others our out over own part people person place price put rather reach reached same second seven several shall "
    "she should show since six size small some somebody someone something sometimes soon sort still stood such "
    "take taken tell ten than that the their theirs them themselves then there these they thing things third this "
    "those though thought thousand three through time times today told took total toward towards turn turned twelve "
    "twenty twice two under unless until upon used very want wanted was week weeks weight well went were what when "
    "where whether which while whom whose will with within without word words work would year years yesterday "
    "yet young your yours cost costs colour born died dead dies mother father brother sister wife husband "
    "daughter woman women child children town city village country street river house company firm called".split()
)


def words(text: str) -> list[str]:
    """The words of a text that others may stand for, in lower case."""
    return [word for word in (w.lower() for w in _WORD.findall(text)) if word not in _KEPT]


def pool(texts: Iterable[str]) -> Pool:
    """Every word of the texts by its shape, each as often as it stands there."""
    found: dict[Shape, list[str]] = {}
    for text in texts:
        for word in words(text):
            found.setdefault(shape(word), []).append(word)
    return found


def shape(word: str) -> Shape:
    """What a word's stand-in must share with it."""
    return next(e for e in _ENDINGS if word.endswith(e)), word[0] in "aeiou"


def shared(prose: str, questions: str) -> tuple[str, ...]:
    """Words of both, of which no other form stands in either."""
    told, asked = words(prose), words(questions)
    forms: dict[str, set[str]] = {}
    for word in (*told, *asked):
        forms.setdefault(word[:_STEM], set()).add(word)
    return tuple(sorted(w for w in set(told) & set(asked) if len(forms[w[:_STEM]]) == 1))


def swaps(v: Dice, common: Sequence[str], others: Pool, taken: frozenset[str]) -> dict[str, str]:
    """A stand-in for some of the common words; never one that the page has itself."""
    share = v.rng.uniform(0.1, 0.6)
    chosen = {word: v.one(others[shape(word)]) for word in common if v.chance(share) and others.get(shape(word))}
    return {word: other for word, other in chosen.items() if other not in taken}


def put(stand_ins: Mapping[str, str], text: str) -> str:
    """The text with the stand-ins in place, capitals kept."""
    if not stand_ins:
        return text

    def one(found: re.Match[str]) -> str:
        word = found[0]
        other = stand_ins.get(word.lower())
        return word if other is None else other.capitalize() if word[0].isupper() else other

    return _WORD.sub(one, text)
