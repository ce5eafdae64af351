"""Questions in other words than the text's: content words are replaced by synonyms from WordNet.

Questions made by rules repeat the words of their sentence. A reader that learns from them alone takes a question in
other words for one that the text does not answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

from ragkv.evaluation.lexicon import (
    ADVERBS,
    AUXILIARIES,
    DETERMINERS,
    PREPOSITIONS,
    PRONOUNS,
    SUBORDINATORS,
    VERBS,
    regular,
)
from ragkv.evaluation.questions import Asked
from ragkv.tune.contexts import Context, Source

WORD_SHARE = 0.4
"""Probability that a word with a synonym is replaced, in a question that is paraphrased at all."""
QUESTION_SHARE = 0.5
"""Probability that a question is paraphrased."""

_FIXED = ADVERBS | AUXILIARIES | DETERMINERS | PREPOSITIONS | PRONOUNS | SUBORDINATORS
_WORD = re.compile(r"[A-Za-z]+(?:['’-][A-Za-z]+)*")


class Paraphraser:
    """Replaces words of questions."""

    def __init__(self, synonyms: dict[str, dict[str, list[str]]]):
        """Take what `tools.prose.synonyms` wrote: base forms nouns, verbs and adjectives apart."""
        self._forms = _forms(synonyms)

    @classmethod
    def read(cls, path: Path) -> Paraphraser:
        """Read synonyms.json."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def paraphrase(self, rng: Random, question: str) -> str:
        """Return the question with some of its words replaced. Names and quoted words stay."""

        def other(found: re.Match[str]) -> str:
            word = found[0]
            if word not in self._forms or word in _FIXED or rng.random() >= WORD_SHARE:
                return word
            return rng.choice(self._forms[word])

        return "".join(
            piece if number % 2 else _WORD.sub(other, piece) for number, piece in enumerate(re.split(_QUOTED, question))
        )


_QUOTED = re.compile(r"([\"“][^\"”]*[\"”])")


def _forms(synonyms: dict[str, dict[str, list[str]]]) -> dict[str, list[str]]:
    """Return inflected words with their inflected synonyms. A verb's forms go before a noun's of the same letters."""
    found: dict[str, list[str]] = {}
    for word, others in synonyms["adjective"].items():
        found[word] = others
    for word, others in synonyms["noun"].items():
        found.setdefault(word, others)
        found[_plural(word)] = [_plural(other) for other in others]
    for word, others in synonyms["verb"].items():
        forms = [VERBS.get(each) or regular(each) for each in (word, *others)]
        for old, *new in (
            [form.past for form in forms],
            [form.participle for form in forms],
            [_running(form.base) for form in forms],
        ):
            found[old] = new
        if word not in synonyms["noun"]:
            found[word] = others
            found[forms[0].third] = [form.third for form in forms[1:]]
    return found


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def _running(base: str) -> str:
    return f"{base[:-1]}ing" if base.endswith("e") and not base.endswith("ee") else f"{base}ing"


class ParaphrasedSource:
    """Another source's contexts, with a part of their questions in other words, those without an answer too."""

    def __init__(self, source: Source, paraphraser: Paraphraser):
        """Take the source and what changes its questions."""
        self._source, self._paraphraser = source, paraphraser

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        found = self._source.context(rng, tokens)
        return replace(found, asked=tuple(self._other(rng, asked) for asked in found.asked))

    def _other(self, rng: Random, asked: Asked) -> Asked:
        if rng.random() >= QUESTION_SHARE:
            return asked
        return replace(asked, text=self._paraphraser.paraphrase(rng, asked.text))
