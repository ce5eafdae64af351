"""What a noun phrase is: a person, an organisation, a place, a number of things, or a thing."""

from __future__ import annotations

import re

from ragkv.evaluation.clauses import Span
from ragkv.evaluation.lexicon import (
    ADVERBS,
    DETERMINERS,
    FIRST_NAMES,
    NUMBERS,
    ORGANISATIONS,
    PEOPLE,
    PLACES,
    PREPOSITIONS,
    PRONOUNS,
    SUBORDINATORS,
    TITLES,
    VAGUE,
)  # fmt: skip

_ARTICLE = re.compile(r"(?:the|a|an|The|A|An) (?=\S)")
_NAME = re.compile(
    r"(?:[Tt]he )?[A-Z][\w'’.&-]*(?: (?:(?:of|de|von|van|la|del|der|di|the|for) (?:the )?)?[A-Z0-9][\w'’.&+-]*)*"
)
_BAD = re.compile(r"n['’]t\b|['’](?:ve|re|ll|m|d)\b|[\"“”()\[\]{}<>=;|\\*]|\b(?:etc|e\.g|i\.e)\b|\s[-–—]\s")


def bare(span: Span) -> Span:
    """A phrase without its article."""
    found = _ARTICLE.match(span.text)
    return Span(span.text[found.end() :], span.start + found.end()) if found else span


def proper(text: str) -> bool:
    """Whether a phrase is a proper name as a whole."""
    first = text.lower().split()[0] if text.strip() else ""
    return bool(_NAME.fullmatch(text)) and text.lower() not in VAGUE and first not in SUBORDINATORS | ADVERBS


def person(text: str) -> bool:
    """Whether a phrase names a person."""
    parts = text.replace(".", "").split()
    if not parts or not proper(text) or len(parts) > 5 or text.lower().startswith("the "):
        return False
    low = [part.lower() for part in parts]
    if organisation(text) or low[-1] in PLACES or ({"of", "for"} & set(low[1:]) and low[0] not in FIRST_NAMES | TITLES):
        return False
    return low[0] in FIRST_NAMES or (low[0] in TITLES and len(low) > 1)


def organisation(text: str) -> str:
    """What to call the organisation that a phrase names, or ""."""
    if not proper(text):
        return ""
    return next((ORGANISATIONS[part] for part in reversed(text.lower().split()) if part in ORGANISATIONS), "")


def people(text: str) -> bool:
    """Whether a phrase is about people without naming them."""
    parts = text.lower().split()
    head = next(
        (parts[n - 1] for n, part in enumerate(parts) if n and part in PREPOSITIONS), parts[-1] if parts else ""
    )
    return head in PEOPLE


def place(text: str) -> bool:
    """Whether a phrase names a place that the tables know."""
    parts = text.lower().replace(",", "").split()
    return proper(text.replace(",", "")) and bool(parts) and bool({parts[0], parts[-1]} & PLACES)


def clear(text: str) -> bool:
    """Whether a phrase says by itself what it is about."""
    parts = text.split()
    low = [part.lower() for part in parts]
    if not parts or len(parts) > 9 or _BAD.search(text) or low[0] in PRONOUNS | SUBORDINATORS | PREPOSITIONS:
        return False
    if (
        low[0] in VAGUE
        or low[0] in DETERMINERS - {"the", "a", "an", "all", "every"}
        or low[-1] in PREPOSITIONS | DETERMINERS
    ):
        return False
    if low[-1] in PRONOUNS | SUBORDINATORS | VAGUE or any(
        part in ("his", "her", "their", "its", "this", "these") for part in low
    ):
        return False
    head = low[1] if low[0] in DETERMINERS and len(low) > 1 else low[0]
    return head not in VAGUE and head not in PRONOUNS and sum(map(len, parts)) > 2


def specific(text: str) -> bool:
    """Whether a clear phrase means one known thing: a name in it, or enough words of its own."""
    if not clear(text):
        return False
    low = text.lower().split()
    named = any(word[:1].isupper() for word in text.split()[1:]) or (proper(text) and low[0] not in DETERMINERS)
    if named:
        return True
    content = [word for word in low if word not in DETERMINERS | PREPOSITIONS and len(word) > 2]
    return len(content) >= 2 or (low[0] not in DETERMINERS and bool(content) and low[-1].endswith("s"))


def counted(text: str) -> tuple[str, str] | None:
    """(number, what is counted) where a phrase begins with a number."""
    found = re.match(
        rf"(?:about |over |nearly |almost |approximately )?((?:\d[\d,.]*|{'|'.join(NUMBERS)})"
        rf"(?: (?:hundred|thousand|million|billion))?) ([a-z][\w-]+(?: [a-z][\w-]+){{0,2}})",
        text,
    )
    if not found or not re.search(r"s$|men$|people$|children$", found[2]) or found[1].endswith((".", ",")):
        return None
    if re.fullmatch(r"1|1[5-9]\d\d|20\d\d", found[1]) or any(
        part in PREPOSITIONS | SUBORDINATORS | PRONOUNS for part in found[2].split()
    ):
        return None
    return found[1], found[2]


def lowered(span: Span, sentence: Span) -> str:
    """The phrase as it reads inside a sentence."""
    text = span.text
    first = text.split()[0]
    if span.start != sentence.start and first.lower() not in DETERMINERS:
        return text
    low = first.lower()
    keep = (
        (first.isupper() and len(first) > 1)
        or any(char.isupper() for char in first[1:])
        or low in FIRST_NAMES | PLACES | TITLES
    )
    second = text.split()[1][:1].isupper() if " " in text else False
    if low in DETERMINERS | set(NUMBERS) or (not keep and not second and low in PEOPLE):
        return text[:1].lower() + text[1:]
    if not keep and not second and " " in text and text.split()[1].islower() and text.split()[1] not in PREPOSITIONS:
        return text[:1].lower() + text[1:]
    return text
