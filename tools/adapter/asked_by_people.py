"""Questions that people asked, as a source of contexts for training: files in SQuAD's format.

A context holds paragraphs of one article beside others, some of them joined, in random order. A question is asked where
its words tell its paragraph from the other chunks: crowdworkers saw one paragraph, and "What is the product?" has an
answer there alone. A question about a paragraph of the same article that is not in the context has no answer.

    python -m tools.adapter.asked_by_people new_wiki.json covid.json --questions 150 --out dev.jsonl

writes a development set of articles that are not trained on, in LongBench's format.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import unquote

from ragkv.evaluation.questions import UNKNOWN, Asked
from ragkv.tune.contexts import SMALLEST, TRIES, Chunk, Context

WORDS = 110
"""Longer paragraphs are split after sentences into pieces of about so many words."""
LONGEST_ANSWER = 16
"""Words; answers that are longer are left out, because the model's readers want short ones."""
QUESTION_TOKENS = 24
"""Tokens of a question with its answer, about."""
HELD_OUT = 12
"""One article in so many is not trained on: the development set."""
SHARED_WORDS = 12
"""A paragraph that has so many words in a row in common with a text that is measured on is left out."""

_WORD = re.compile(r"\w+")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“(])|\n+")
_COMMON = frozenset(
    "what which when where while whom whose that this these those there their they them with from have does been were "
    "will would could should about into than then many much some other used name kind type called made year".split()
)


@dataclass(frozen=True)
class AskedParagraph:
    """A paragraph, or a piece of one.

    Attributes:
        article: Title of its article.
        text: Its text.
        asked: (question, answer); the answer is a span of the text.
    """

    article: str
    text: str
    asked: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class PeopleParams:
    """How contexts are put together.

    Attributes:
        question_share: Smallest and largest share of a context's tokens that go to questions.
        article_share: Share of the paragraphs that come from the article of the first one.
        joined: Probability that a chunk holds two adjacent paragraphs.
        unknown: Share of the questions that the context does not answer.
    """

    question_share: tuple[float, float] = (0.25, 0.5)
    article_share: float = 0.5
    joined: float = 0.25
    unknown: float = 0.12


class PeopleSource:
    """Contexts from questions that people asked."""

    def __init__(
        self,
        paragraphs: Sequence[AskedParagraph],
        count_tokens: Callable[[Chunk], int],
        params: PeopleParams = PeopleParams(),
    ):
        """Take paragraphs, those of an article adjacent and in order; see `read_articles`."""
        self._paragraphs, self._count, self._params = paragraphs, count_tokens, params
        self._articles: dict[str, list[int]] = {}
        for number, each in enumerate(paragraphs):
            self._articles.setdefault(each.article, []).append(number)
        self._names = list(self._articles)
        self._weights = [len(numbers) ** 0.5 for numbers in self._articles.values()]
        self._words = [content_words(each.text) for each in paragraphs]

    def context(self, rng: Random, tokens: int) -> Context:
        """Return a context; see `Source`."""
        params = self._params
        count = max(1, int(tokens * rng.uniform(*params.question_share) / QUESTION_TOKENS))
        groups = self._groups(rng, tokens - count * QUESTION_TOKENS)
        chunks = tuple(self._chunk(group) for group in groups)
        words = [frozenset().union(*(self._words[at] for at in group)) for group in groups]
        inside = {at for group in groups for at in group}
        known = [
            Asked(question, answer, number)
            for number, group in enumerate(groups)
            for at in group
            for question, answer in self._paragraphs[at].asked
            if tells(question, number, words)
        ]
        articles = {self._paragraphs[at].article for at in inside}
        text = " ".join(chunk[1].lower() for chunk in chunks)
        outside = [at for name in articles for at in self._articles[name] if at not in inside]
        absent = [
            Asked(question, UNKNOWN, -1, "absent")
            for at in rng.sample(outside, min(len(outside), 8))
            for question, answer in self._paragraphs[at].asked
            if answer.lower() not in text
        ]
        known = rng.sample(known, min(len(known), count))
        most = int(len(known) * params.unknown / (1 - params.unknown) + rng.random())
        asked = known + rng.sample(absent, min(len(absent), most))
        rng.shuffle(asked)
        return Context(chunks, tuple(asked))

    def _groups(self, rng: Random, room: int) -> list[list[int]]:
        """Return groups of adjacent paragraphs for `room` tokens, in random order."""
        params, first = self._params, rng.choices(self._names, self._weights)[0]
        groups, held = list[list[int]](), set[int]()
        for attempt in range(TRIES):
            near = not attempt or rng.random() < params.article_share
            article = self._articles[first if near else rng.choices(self._names, self._weights)[0]]
            start = rng.randrange(len(article))
            group = [at for at in article[start : start + 1 + (rng.random() < params.joined)] if at not in held]
            size = self._count(self._chunk(group)) if group else room + 1
            if size <= room:
                groups.append(group)
                held.update(group)
                room -= size
            if room < SMALLEST:
                break
        rng.shuffle(groups)
        return groups

    def _chunk(self, group: Sequence[int]) -> Chunk:
        return self._paragraphs[group[0]].article, "\n".join(self._paragraphs[at].text for at in group)


def is_held_out(paragraph: AskedParagraph) -> bool:
    """Return whether the paragraph's article belongs to the development set."""
    return int.from_bytes(hashlib.sha256(paragraph.article.encode()).digest()[:4], "big") % HELD_OUT == 0


def content_words(text: str) -> frozenset[str]:
    """Return the words that can tell one text from another: long ones and numbers, without endings."""
    words = _WORD.findall(text.lower())
    return frozenset(word[:6] for word in words if (len(word) > 3 or word.isdigit()) and word not in _COMMON)


def tells(question: str, number: int, words: Sequence[frozenset[str]]) -> bool:
    """Return whether a question's words point to chunk `number`: it shares more of them than any other chunk does."""
    wanted = content_words(question)
    shared = [len(wanted & each) for each in words]
    return shared[number] >= 2 and all(at == number or count < shared[number] for at, count in enumerate(shared))


def read_articles(path: Path, measured: frozenset[int] = frozenset()) -> list[AskedParagraph]:
    """Read a file in SQuAD's format.

    Args:
        path: The file.
        measured: Hashes of words in a row, see `word_runs`; paragraphs that have one of them are left out.
    """
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    found = list[AskedParagraph]()
    for article in data["data"]:
        for paragraph in article["paragraphs"]:
            text = paragraph["context"]
            title = unquote(str(article.get("title") or text.strip().split("\n")[0])).replace("_", " ")[:120]
            if not measured.isdisjoint(word_runs(text)):
                continue
            asked = [answered for each in paragraph["qas"] if (answered := _answered(each))]
            found += _pieces(title, text, asked)
    return found


def measured_runs(files: Sequence[Path]) -> frozenset[int]:
    """Return the word runs of sets in LongBench's format."""
    lines = (line for file in files for line in file.read_text(encoding="utf-8").splitlines())
    return frozenset(run for line in lines for run in word_runs(json.loads(line)["context"]))


def word_runs(text: str) -> Iterator[int]:
    """Yield a hash for every SHARED_WORDS words in a row."""
    words = _WORD.findall(text.lower())
    for at in range(len(words) - SHARED_WORDS + 1):
        yield hash(tuple(words[at : at + SHARED_WORDS]))


def _answered(qa: dict[str, Any]) -> tuple[str, str, int] | None:
    """Return (question, the answer that most people gave, its place); None if nobody gave a short one."""
    given = Counter(each["text"].strip(" .,;:\n") for each in qa["answers"])
    if not given:
        return None
    most = max(given.values())
    answer = min((text for text, times in given.items() if times == most), key=len)
    start = next(each["answer_start"] for each in qa["answers"] if each["text"].strip(" .,;:\n") == answer)
    question = " ".join(qa["question"].split())
    short = answer and len(answer.split()) <= LONGEST_ANSWER and "\n" not in answer
    return (question, answer, int(start)) if short and len(question) > 8 else None


def _pieces(title: str, text: str, asked: Sequence[tuple[str, str, int]]) -> Iterator[AskedParagraph]:
    """Split a paragraph after sentences; every piece keeps the questions whose answer begins in it."""
    starts = [0]
    for match in _SENTENCE.finditer(text):
        if len(text[starts[-1] : match.start()].split()) >= WORDS and len(text[match.end() :].split()) > WORDS // 3:
            starts.append(match.end())
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        piece = text[start:end].strip()
        mine = tuple((question, answer) for question, answer, at in asked if start <= at < end and answer in piece)
        yield AskedParagraph(title, piece, mine)


def main() -> None:
    """Write a development set: one question a line, each over a context of its own."""
    parser = argparse.ArgumentParser(prog="python -m tools.adapter.asked_by_people", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--words", type=int, default=900, help="words of a context, about")
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    held = [piece for file in chosen.files for piece in read_articles(file) if is_held_out(piece)]
    source = PeopleSource(held, lambda chunk: len(chunk[1].split()), PeopleParams(question_share=(0.1, 0.1)))
    with chosen.out.open("w", encoding="utf-8") as file:
        for number in range(chosen.questions):
            found = source.context(Random(number), chosen.words)
            if found.asked:
                file.write(json.dumps(longbench_line(found, found.asked[0])) + "\n")


def longbench_line(context: Context, asked: Asked) -> dict[str, Any]:
    """Return a line of LongBench's format: one question over a context."""
    chunks = enumerate(context.chunks, 1)
    text = "\n\n".join(f"Passage {number}:\n{title}\n{body}" for number, (title, body) in chunks)
    return {"input": asked.text, "context": text, "answers": [asked.answer], "language": "en"}


if __name__ == "__main__":
    main()
