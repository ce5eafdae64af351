"""What a chunk tells: clauses with known subjects, and patterns that need no clause."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ragkv.tune.clauses import Span, read, sentences
from ragkv.tune.nouns import clear, lowered, people, person, proper, specific
from ragkv.tune.rules import Draft, Told, drafts

_SHORT = re.compile(r"((?:[A-Z][\w-]+|of|for|and|the|in|on)(?: (?:[A-Z][\w-]+|of|for|and|the|in|on)){1,6}) \(([A-Z][A-Za-z]{1,6})\)")
_STANDS = re.compile(r"\b([A-Z][A-Z0-9]{1,7}) (?:stands|stood|is short|is an acronym|is an abbreviation) for [\"“]?((?:[A-Z][\w-]*|of|for|and|the|to|in)(?: (?:[A-Z][\w-]*|of|for|and|the|to|in)){1,7})")
_ALSO = re.compile(r"\b((?:[Tt]he |[Aa]n? )?[A-Za-z][\w-]+(?: [A-Za-z][\w-]+){0,3}),? \(?(?:also|sometimes|formerly|originally|commonly|previously|better) (?:called|known as|named) (?:the |an? |[\"“])?([A-Z]?[\w-]+(?: [A-Z][\w-]+){0,3})")
_FRAGMENT = re.compile(r"(?:An?|The) ((?:[a-zA-Z][\w'’-]* ){0,5}?[a-z][\w'’-]+)(?= (?:that|which|who|for|from|in|on|used|made|by|with|where|to|designed|developed|written|created|at|and|whose|between|based|of|intended|produced)\b|[.,;:(])")


@dataclass(frozen=True)
class Chunk:
    """What the rules found in a chunk."""

    title: str
    text: str
    told: tuple[Told, ...]


@lru_cache(maxsize=4096)
def facts(title: str, text: str) -> Chunk:
    """The clauses of a chunk whose subjects are known."""
    told: list[Told] = []
    topic = title if ": " not in title and len(title.split()) <= 4 and proper(title) else ""
    last, since = "", 9
    for sentence in sentences(text):
        since += 1
        clause = read(sentence)
        if clause is None:
            continue
        subject = clause.subject.text
        if specific(subject) and not (subject.endswith("s") and subject.split()[0] in ("Some", "Many")):
            name = lowered(clause.subject, sentence)
            human = person(subject) or people(subject)
            told.append(Told(clause, name, human))
            last, since = (subject, 0) if proper(subject) and not people(subject) else ("", 9)
        elif subject in ("He", "She"):
            who = last if last and since <= 2 else topic if person(topic) else ""
            if who and (person(who) or proper(who)) and not who.lower().startswith("the "):
                told.append(Told(clause, who, True, True))
                last, since = who, 0
        elif subject == "It" and last and since == 1 and not person(last) and clause.tense in ("passive", "past", "be") and clause.phrases:
            told.append(Told(clause, last if not last.startswith("The ") else f"the {last[4:]}", False, True))
    return Chunk(title, text, tuple(told))


def patterns(rng: random.Random, chunk: Chunk) -> Iterator[Draft]:
    """Questions about short forms, other names, and dictionary entries."""
    text = chunk.text
    for found in _SHORT.finditer(text):
        full, short = found[1], found[2]
        cut = _initials(full, short)
        if cut is not None:
            span = Span(full[cut:], found.start(1) + cut)
            yield from _stands(rng, short, span, Span(short, found.start(2)))
    for found in _STANDS.finditer(text):
        if _initials(found[2], found[1]) == 0:
            yield from _stands(rng, found[1], Span(found[2], found.start(2)), None)
    for found in _ALSO.finditer(text):
        name, other = found[1], Span(found[2], found.start(2))
        low = name.lower().split()
        if (name.startswith(("The ", "the ", "A ", "a ", "An ", "an ")) or proper(name)) and clear(name) and len(other.text) > 2 and specific(name):
            name = name[:1].lower() + name[1:] if low[0] in ("the", "a", "an") else name
            form = rng.choice((f"What is another name for {name}", f"What is {name} also called", f"By what other name is {name} known"))
            yield Draft(form, other, "also", (name,), f"another name for {name}")
    found_ = _FRAGMENT.match(text)
    title = chunk.title
    if found_ and ": " not in title and 0 < len(title.split()) <= 4 and title.lower() not in text[:80].lower() and len(found_[1].split()) > 1:
        form = rng.choice((f"What is {title}", f"What is {title}", f"What does {title} mean", f"What kind of thing is {title}"))
        yield Draft(form, Span(found_[1], found_.start(1)), "entry", (title,), rng.choice((f"define {title}", f"{title} meaning", f"what is {title}")))


def _initials(full: str, short: str) -> int | None:
    """Where in `full` the words begin whose initials are `short`."""
    starts = [found.start() for found in re.finditer(r"(?<![\w])\w|(?<=-)\w", full)]
    for start in starts:
        if full[start] == short[0] and full[start].isupper():
            part = full[start:]
            capitals = "".join(re.findall(r"\b[A-Z]", part))
            every = "".join(re.findall(r"\b\w", part))
            if short.upper() in (capitals.upper(), every.upper()):
                return start
    return None


def _stands(rng: random.Random, short: str, full: Span, back: Span | None) -> Iterator[Draft]:
    yield Draft(rng.choice((f"What does {short} stand for", f"What is {short} short for", f"What is the full name of {short}")), full, "stands", (short,), f"{short} stands for")
    if back:
        yield Draft(rng.choice((f"What is the abbreviation for {full.text}", f"What is the acronym of {full.text}")), back, "stands", (full.text,), f"{full.text} abbreviation")


def ask(rng: random.Random, chunk: Chunk) -> list[Draft]:
    """Some questions about a chunk, in a random order."""
    found = list(patterns(rng, chunk))
    for each in rng.sample(chunk.told, min(len(chunk.told), 6)):
        found += drafts(rng, each)
    rng.shuffle(found)
    return found
