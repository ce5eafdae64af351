"""Near words: the words that the default embedder puts close to each word of the pages. They replace it in questions.

People ask in other words than the text. The pages have such wordings for their own sentences; this adds them to all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tools.demo_model.bank import load as load_banks
from tools.demo_model.dice import Dice
from tools.demo_model.page import stock

NAME = "near.json"
CLOSE, FAR, MOST = 0.6, 0.95, 5  # cosine similarities; words
_WORD = re.compile(r"(?<![\w'-])[a-z]{4,}(?![\w'-])")
Near = Mapping[str, Sequence[str]]


def words() -> list[str]:
    """The words of all pages."""
    return sorted({word for each in stock(frozenset(load_banks().lists)).values() for word in each})


def make(folder: Path, known: Sequence[str]) -> int:
    """Write folder/near.json: up to MOST near words of each known word. Returns how many words have any."""
    from ragkv.retrieval.embedder import Embedder  # training also resumes on machines without sentence-transformers

    vectors = Embedder().encode(known)
    near: dict[str, list[str]] = {}
    for word, vector in zip(known, vectors, strict=True):
        row = vectors @ vector
        best = np.argsort(-row, kind="stable")[: MOST + 1]
        close = [known[at] for at in best if CLOSE <= row[at] <= FAR and known[at] != word]
        if close:
            near[word] = close
    (folder / NAME).write_text(json.dumps(near), encoding="utf-8")
    return len(near)


def load(folder: Path) -> Near:
    """Load what `make` wrote."""
    near: Near = json.loads((folder / NAME).read_text(encoding="utf-8"))
    return near


def put(v: Dice, near: Near, text: str) -> str:
    """The text with one of its words replaced by a near word, if there is one."""
    places = [found for found in _WORD.finditer(text) if found[0] in near]
    if not places:
        return text
    found = v.one(places)
    return text[: found.start()] + v.one(near[found[0]]) + text[found.end() :]
