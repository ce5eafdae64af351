"""Answer scores: exact match and token F1 with SQuAD normalisation, the best over a question's gold answers.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 4.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def exact_match(answer: str, gold: Sequence[str]) -> float:
    """1.0 when the normalised answer equals a normalised gold answer, else 0.0; 0.0 when there are none."""
    return _best(_same, answer, gold)


def f1(answer: str, gold: Sequence[str]) -> float:
    """Harmonic mean of token precision and recall against the closest gold answer, 0..1; 0.0 when there are none.

    Two texts that are both empty after normalisation agree (1.0); one empty against one that is not does not (0.0).
    """
    return _best(_overlap, answer, gold)


def _best(measure: Callable[[list[str], list[str]], float], answer: str, gold: Sequence[str]) -> float:
    words = normalise(answer).split()
    return max((measure(words, normalise(alias).split()) for alias in gold), default=0.0)


def _same(answer: list[str], gold: list[str]) -> float:
    return float(answer == gold)


def _overlap(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = (Counter(answer) & Counter(gold)).total()
    return 2.0 * shared / (len(answer) + len(gold))
