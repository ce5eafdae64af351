"""Answer scores: exact match and token F1 with SQuAD normalisation, the best over a question's gold answers.

`interval` tells how far a mean difference of scores may be due to the choice of questions.

Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016), section 4. Chinese is written
without spaces: there every character counts for itself, and runs of other letters and digits count as words (Cui et
al., "A Span-Extraction Dataset for Chinese Machine Reading Comprehension", 2019, section 4).
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

RESAMPLES = 2000

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CHINESE = re.compile(rf"[{_HAN}]|[^\W_{_HAN}]+")


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def tokens(text: str, language: str = "en") -> list[str]:
    """What F1 counts: normalised words, or for language `zh` characters and runs of anything else."""
    if language != "zh":
        return normalise(text).split()
    return _CHINESE.findall(unicodedata.normalize("NFKC", text).lower())


def exact_match(answer: str, gold: Sequence[str], language: str = "en") -> float:
    """1.0 when the answer is, normalised, one of the gold answers, else 0.0; 0.0 when there are none."""
    return _best(_same, answer, gold, language)


def f1(answer: str, gold: Sequence[str], language: str = "en") -> float:
    """Harmonic mean of token precision and recall against the closest gold answer, 0..1; 0.0 when there are none.

    Two texts that are both empty after normalisation agree (1.0); one empty against one that is not does not (0.0).
    """
    return _best(_overlap, answer, gold, language)


def interval(differences: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The bounds of 95% of the means of samples drawn with replacement."""
    values = np.asarray(differences, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def _best(measure: Callable[[list[str], list[str]], float], answer: str, gold: Sequence[str], language: str) -> float:
    said = tokens(answer, language)
    return max((measure(said, tokens(alias, language)) for alias in gold), default=0.0)


def _same(answer: list[str], gold: list[str]) -> float:
    return float(answer == gold)


def _overlap(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = (Counter(answer) & Counter(gold)).total()
    return 2.0 * shared / (len(answer) + len(gold))
