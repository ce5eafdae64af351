"""Examples of questions for a collection whose user has not asked yet."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from ragkv.catalog import DocumentInfo

EXAMPLES = 4
"""Most examples that are shown."""


def example_questions(documents: Iterable[DocumentInfo]) -> list[str]:
    """Return questions that these documents may answer.

    The sample documents of ragkv bring their questions. Other documents are asked about by their titles.
    """
    found = list(documents)
    stems = {info.id.removesuffix(".md") for info in found}
    known = [question for question, needed in _sample_questions() if needed and needed <= stems]
    titles = dict.fromkeys(info.title or info.id for info in found)
    return [*known[::2], *(f"What does “{title}” say?" for title in titles)][:EXAMPLES]


@cache
def _sample_questions() -> list[tuple[str, frozenset[str]]]:
    """Return (question, ids of the documents that hold its answer, without their ending)."""
    lines = (files("ragkv") / "samples" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["q"], frozenset(row["documents"])) for row in rows if row["kind"] == "one"]
