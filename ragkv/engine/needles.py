"""Generated documents with one planted answer per question, and the span of each answer.

The documents are plain sentences about invented firms, people, towns and ships. Every name, number and phrase that
answers a question occurs once in the whole set, among others of its kind. Nothing depends on a tokenizer or a model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal, NamedTuple

from ragkv.engine.needle_words import ASIDES, TOPICS, WOMEN, Names, Topic
from ragkv.errors import InputError
from ragkv.types import Document

QuestionKind = Literal["one", "coref"]

FACT_SHARE = 0.55  # share of a document's tokens, unless its questions need more; other sentences answer nothing
COREF_SHARE = 0.35  # share of the facts that call their subject "it", "she" or "the firm"


@dataclass(frozen=True)
class NeedleQuestion:
    """A question with its planted answer. The answer occurs nowhere else in the set.

    Attributes:
        question: The question.
        answer: The answer; it equals text[start:end] of the document.
        document_id: The document that holds the answer.
        start: First character of the answer.
        end: Character behind the answer.
        kind: "one" if the sentence with the answer names its subject, "coref" if it refers back to it.
        depth: start / len(text), 0..1.
    """

    question: str
    answer: str
    document_id: str
    start: int
    end: int
    kind: QuestionKind
    depth: float


@dataclass(frozen=True)
class NeedleSet:
    """Documents, and questions about them in shuffled order."""

    documents: tuple[Document, ...]
    questions: tuple[NeedleQuestion, ...]


class Sentence(NamedTuple):
    """A sentence of a document. Without a question, it answers nothing."""

    text: str
    question: str = ""
    answer: str = ""
    kind: QuestionKind = "one"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fact(relation: tuple[str, str, str], topic: Topic, subject: str, value: str, rng: random.Random) -> Sentence:
    (_, sentence, question), name = relation, subject
    kind: QuestionKind = "coref" if rng.random() < COREF_SHARE else "one"
    if kind == "coref" and topic.noun == "person":
        name = "she" if subject.split()[0] in WOMEN else "he"
    elif kind == "coref":
        # "it" is used only at the start of a sentence: "the mayor of it" is not English.
        name = "it" if sentence.startswith("{e}") and rng.random() < 0.5 else f"the {topic.noun}"
    return Sentence(_capital(sentence.format(e=name, v=value)), question.format(e=subject), value, kind)


def _prose(names: Names, room: int, least: int, length: Callable[[str], int]) -> Iterator[Sentence]:
    """Yield sentences that answer nothing, with their own years, people and towns, while `least` tokens fit."""
    for line in cycle(names.rng.sample(ASIDES, len(ASIDES))):
        slot = re.search(r"{(\w+)}", line)
        value = names.draw(slot[1]) if slot else ""
        text = re.sub(r"{\w+}", value or "", line)
        if value is not None and length(" " + text) <= room:
            room -= length(" " + text)
            yield Sentence(text)
        if room < least:
            return


def _draft(
    topic: Topic, subject: str, names: Names, budget: int, facts: int, length: Callable[[str], int]
) -> list[Sentence]:
    """Write sentences of about `budget` tokens. At least `facts` of them are facts; facts are spread evenly."""
    intro = Sentence(_capital(topic.intro.format(e=subject)))
    room = budget - length(intro.text)
    fact_sentences: list[Sentence] = []
    for relation in names.rng.sample(topic.relations, len(topic.relations)):
        if len(fact_sentences) >= facts and room < budget * (1 - FACT_SHARE):
            break
        value = names.draw(relation[0])
        if value is not None:
            fact_sentences.append(_fact(relation, topic, subject, value, names.rng))
            room -= length(" " + fact_sentences[-1].text)
    if room < 0:
        raise InputError(f"a document of {budget} tokens does not hold {facts} facts: ask fewer questions")
    least = max(length(" " + min(ASIDES, key=len)), budget // 50)
    prose = list(_prose(names, room, least, length))
    total, phase = len(fact_sentences) + len(prose), names.rng.random()
    slots = {int((number + phase) * total / len(fact_sentences)) for number in range(len(fact_sentences))}
    return [intro] + [fact_sentences.pop() if slot in slots else prose.pop() for slot in range(total)]


def _questions(document: Document, draft: list[Sentence], whole: str) -> Iterator[NeedleQuestion]:
    """Yield the questions whose answer occurs once in the lower-cased text of all documents."""
    for _, question, answer, kind in draft:
        if question and whole.count(answer.lower()) == 1:
            start = document.text.index(answer)
            end, depth = start + len(answer), start / len(document.text)
            yield NeedleQuestion(question, answer, document.id, start, end, kind, depth)


def make_needles(seed: int, documents: int, tokens: int, count: int, length: Callable[[str], int]) -> NeedleSet:
    """Generate questions and documents. The same arguments give the same set.

    The depths of the answers are spread evenly over 0..1.

    Args:
        seed: Seed of the random choices.
        documents: Number of documents.
        tokens: Tokens per document, about. A text exceeds it only by rounding where sentences are joined.
        count: Number of questions.
        length: Returns the number of tokens of a text.

    Raises:
        InputError: The documents cannot hold so many questions.
    """
    if documents < 1 or count < 1:
        raise InputError(f"needles need at least one document and one question, got {documents} and {count}")
    names = Names(random.Random(seed))
    topics = names.rng.sample(TOPICS, len(TOPICS))
    made: list[Document] = []
    drafts: list[list[Sentence]] = []
    for number in range(documents):
        topic = topics[number % len(topics)]
        subject = names.draw(topic.noun) or topic.noun
        drafts.append(_draft(topic, subject, names, tokens, -(-count // documents), length))
        text = " ".join(sentence.text for sentence in drafts[-1])
        made.append(Document(f"needle-{seed}-{number}", _capital(subject), text))
    whole = "\n".join(f"{document.title}\n{document.text}" for document in made).lower()
    remaining = [list(_questions(document, draft, whole)) for document, draft in zip(made, drafts, strict=True)]
    selected: list[NeedleQuestion] = []
    for number in range(count):
        candidates, depth = remaining[number % documents], (number + 0.5) / count
        if not candidates:
            raise InputError(f"{documents} documents of {tokens} tokens hold only {number} of {count} questions")
        selected.append(min(candidates, key=lambda question: abs(question.depth - depth)))
        candidates.remove(selected[-1])
    names.rng.shuffle(selected)
    return NeedleSet(tuple(made), tuple(selected))


def span_tokens(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, ...]:
    """Return the indices of the tokens that overlap text[start:end].

    Args:
        offsets: (start, end) of each token, in characters.
        start: First character.
        end: Character behind the last one.
    """
    return tuple(index for index, (left, right) in enumerate(offsets) if left < right and left < end and right > start)
