"""Questions over two or more paragraphs, as a source of contexts for training: files of HotpotQA and MuSiQue.

    HotpotQA    `context` [[title, [sentence, …]], …] and `supporting_facts` [[title, sentence number], …]
    MuSiQue     `paragraphs` [{title, paragraph_text, is_supporting}, …]

A file is a JSON list or has an object a line. HotpotQA's may have columns as the hub's `datasets` writes them. A
context holds the paragraphs that several questions need, and is filled with paragraphs that none of them needs, in
random order. A question whose paragraphs are not there has no answer.

    python -m tools.adapter.asked_over_paragraphs hotpot_train.json --out dev.jsonl

writes a development set of questions that are not trained on, in LongBench's format.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from ragkv.evaluation.questions import UNKNOWN, Asked
from ragkv.tune.contexts import SMALLEST, TRIES, Chunk, Context
from tools.adapter.asked_by_people import LONGEST_ANSWER, content_words, longbench_line, word_runs

QUESTION_TOKENS = 32
"""Tokens of a question with its answer, about."""
FEWEST_WORDS = 8
"""Shorter paragraphs are left out."""
HELD_OUT = 10
"""One question in so many is not trained on: the development set."""


@dataclass(frozen=True)
class HopQuestion:
    """A question over several paragraphs.

    Attributes:
        question: Its text.
        answer: Its answer; "yes" and "no" among them.
        needed: The paragraphs that it needs.
        others: Paragraphs beside them.
    """

    question: str
    answer: str
    needed: tuple[Chunk, ...]
    others: tuple[Chunk, ...]


@dataclass(frozen=True)
class HopParams:
    """How contexts are put together.

    Attributes:
        needed_share: Smallest and largest share of a context's tokens that needed paragraphs and questions take.
        unknown: Share of the questions whose paragraphs are not in the context.
    """

    needed_share: tuple[float, float] = (0.4, 0.9)
    unknown: float = 0.06


class HopSource:
    """Contexts from questions over several paragraphs."""

    def __init__(
        self, asked: Sequence[HopQuestion], count_tokens: Callable[[Chunk], int], params: HopParams = HopParams()
    ):
        """Take questions; see `read_hops`."""
        self._asked, self._count, self._params = asked, count_tokens, params

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        taken = self._taken(rng, int(tokens * rng.uniform(*self._params.needed_share)))
        chunks = list(dict.fromkeys(chunk for each in taken for chunk in each.needed))
        room = tokens - sum(map(self._count, chunks)) - len(taken) * QUESTION_TOKENS
        others = list(dict.fromkeys(chunk for each in taken for chunk in each.others if chunk not in chunks))
        rng.shuffle(others)
        for chunk in others:
            size = self._count(chunk)
            if size <= room:
                chunks.append(chunk)
                room -= size
            if room < SMALLEST:
                break
        rng.shuffle(chunks)
        asked = [Asked(each.question, each.answer, max(map(chunks.index, each.needed)), "hops") for each in taken]
        asked += self._absent(rng, chunks, len(asked))
        rng.shuffle(asked)
        return Context(tuple(chunks), tuple(asked))

    def _taken(self, rng: Random, room: int) -> list[HopQuestion]:
        """Return questions that, with what they need, take about `room` tokens; at least one where one fits."""
        taken, held = list[HopQuestion](), set[Chunk]()
        for _ in range(TRIES):
            one = rng.choice(self._asked)
            size = QUESTION_TOKENS + sum(self._count(chunk) for chunk in one.needed if chunk not in held)
            if one not in taken and size <= room:
                taken.append(one)
                held.update(one.needed)
                room -= size
            if room < SMALLEST:
                break
        return taken

    def _absent(self, rng: Random, chunks: Sequence[Chunk], known: int) -> Iterator[Asked]:
        """Yield questions that these chunks do not answer: they have none of the paragraphs, and not the answer."""
        text = " ".join(chunk[1].lower() for chunk in chunks)
        for _ in range(int(known * self._params.unknown / (1 - self._params.unknown) + rng.random())):
            one = rng.choice(self._asked)
            if one.answer.lower() not in text and not set(one.needed) & set(chunks):
                yield Asked(one.question, UNKNOWN, -1, "absent")


def is_held_out(asked: HopQuestion) -> bool:
    """Return whether the question belongs to the development set."""
    return int.from_bytes(hashlib.sha256(asked.question.encode()).digest()[:4], "big") % HELD_OUT == 0


def read_hops(path: Path, measured: frozenset[int] = frozenset()) -> list[HopQuestion]:
    """Read a file of HotpotQA or MuSiQue.

    Args:
        path: The file.
        measured: Hashes of words in a row, see `word_runs`. Questions that need a paragraph with one of them are left
            out, and so are other paragraphs that have one.
    """
    text = path.read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else map(json.loads, text.splitlines())
    found = dict[str, HopQuestion]()
    for row in rows:
        one = _question(row, measured)
        if one is not None:
            found.setdefault(one.question, one)
    return list(found.values())


def _question(row: dict[str, Any], measured: frozenset[int]) -> HopQuestion | None:
    """Return a question; None where something that it needs is missing, measured or told by one paragraph alone."""
    question, answer = " ".join(row["question"].split()), " ".join(str(row["answer"]).split())
    needed, others = list[Chunk](), list[Chunk]()
    for chunk, supports in _paragraphs(row):
        clean = measured.isdisjoint(word_runs(chunk[1]))
        if supports and not clean:
            return None
        if supports:
            needed.append(chunk)
        elif clean and len(chunk[1].split()) >= FEWEST_WORDS:
            others.append(chunk)
    text = " ".join(body for _, body in needed).lower()
    told = answer.lower() in ("yes", "no") or answer.lower() in text
    short = answer and len(answer.split()) <= LONGEST_ANSWER and len(content_words(question)) > 1
    return HopQuestion(question, answer, tuple(needed), tuple(others)) if told and short and len(needed) > 1 else None


def _paragraphs(row: dict[str, Any]) -> Iterator[tuple[Chunk, bool]]:
    """Yield (title, text) and whether the question needs it."""
    if "paragraphs" in row:
        for paragraph in row["paragraphs"]:
            yield (paragraph["title"], " ".join(paragraph["paragraph_text"].split())), bool(paragraph["is_supporting"])
        return
    facts, context = row["supporting_facts"], row["context"]
    if isinstance(facts, dict):  # as the hub's `datasets` writes columns
        facts = list(zip(facts["title"], facts["sent_id"], strict=True))
        context = list(zip(context["title"], context["sentences"], strict=True))
    titles = {title for title, _ in facts}
    for title, sentences in context:
        yield (title, " ".join(" ".join(sentences).split())), title in titles


def main() -> None:
    """Write a development set: every question over its own paragraphs."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter.asked_over_paragraphs", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    held = [each for file in chosen.files for each in read_hops(file) if is_held_out(each)]
    with chosen.out.open("w", encoding="utf-8") as file:
        for number, each in enumerate(held):
            chunks = list(dict.fromkeys([*each.needed, *each.others]))
            Random(number).shuffle(chunks)
            context = Context(tuple(chunks), (Asked(each.question, each.answer, 0),))
            file.write(json.dumps(longbench_line(context, context.asked[0])) + "\n")


if __name__ == "__main__":
    main()
