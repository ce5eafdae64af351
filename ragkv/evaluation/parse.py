"""Reads the main clause of a sentence: its subject, its verb, its object and the phrases after it.

There is no tagger: word tables and word order decide, and a sentence that they cannot decide gives nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ragkv.evaluation.clauses import YEAR, Clause, Phrase, Span, between, dated, phrase_of, tail, words
from ragkv.evaluation.lexicon import (
    ADVERBS,
    AUXILIARIES,
    BE,
    DETERMINERS,
    HAVE,
    LEADS,
    MODALS,
    MONTHS,
    NUMBERS,
    PARTICIPLES,
    PAST,
    PREPOSITIONS,
    PRONOUNS,
    SUBORDINATORS,
    THIRD,
    VAGUE,
    VERBS,
    Verb,
)  # fmt: skip

_LIST = re.compile(r",(?: [^\s,.]+){1,4}(?:,(?: [^\s,.]+){1,4})*,? (?:and|or) ")
_APPOSITION = re.compile(
    r", (?:also |formerly |sometimes )?(?:called|known as|named|or|who|which|a|an|the|born) [^,;]{3,90},"
    r"|\s\([^()]{1,60}\)"
)


def read(sentence: Span) -> list[Clause]:
    """The main clause and what is said of the same subject after "and"; nothing where word order does not tell."""
    text = sentence.text
    if not 25 <= len(text) <= 400 or text[-1] in "?:!" or text[0] in "\"“‘'([" or text.count('"') % 2:
        return []
    if "“" in text or '"' in text[:60] or ";" in text[:30]:
        return []
    tokens = words(sentence)
    early, tokens = _fronted(sentence, tokens) if len(tokens) > 3 else ([], [])
    if len(tokens) < 3:
        return []
    first = _main(sentence, tokens, early)
    if first is None:
        return []
    return [first, *_joined(first, tokens)]


def _joined(first: Clause, tokens: list[Span]) -> Iterator[Clause]:
    """ "… and died in 1832": a second verb of the same subject."""
    for at in range(3, len(tokens) - 2):
        if tokens[at].text != "and" or tokens[at].start < first.subject.end + 2 or tokens[at - 1].text == ",":
            continue
        form, after = tokens[at + 1].text, tokens[at + 2].text
        past = (
            form in PAST and first.tense in ("past", "passive") and (first.tense == "past" or form not in PARTICIPLES)
        )
        said = past or (form in ("was", "is") and first.auxiliary in ("was", "is", ""))
        if said and after not in ("and", ","):
            found = _clause(first.sentence, tokens, at + 1, [], None, first.subject)
            if found:
                yield found
        return


def _main(sentence: Span, tokens: list[Span], early: list[Phrase]) -> Clause | None:
    if tokens[0].text.lower() in SUBORDINATORS | ADVERBS or tokens[0].text in ("There", "Here", "You", "I", "We"):
        return None
    if tokens[0].text in ("Having", "Being", "Whoever", "Whatever", "Using", "Given", "Whichever", "Not", "Let"):
        return None
    if tokens[0].text.endswith("ing") and len(tokens) > 1 and tokens[1].text in PARTICIPLES:
        return None
    if tokens[0].text.endswith("ly") and tokens[0].text[:1].isupper():
        return None
    skipped = _apposition(sentence, tokens)
    limit = min(len(tokens), 24)
    for at in range(1, limit):
        if skipped and skipped.start <= tokens[at].start < skipped.end:
            continue
        form = tokens[at].text
        if form in {",", ";", ":", "-", "–", "—", "(", '"', "/", "[", "…", "."}:
            return None
        if (form in SUBORDINATORS and form != "and") or form in ("cannot", "not"):
            return None
        if form in AUXILIARIES or _finite(tokens, at):
            return _clause(sentence, tokens, at, early, skipped)
    return None


def _fronted(sentence: Span, tokens: list[Span]) -> tuple[list[Phrase], list[Span]]:
    """A date or place before the subject, and the words after it."""
    if tokens[0].text in LEADS:
        cut = next((n for n, each in enumerate(tokens[:12]) if each.text == ","), -1)
        if cut > 0 or tokens[0].text in ("And", "But", "Thus", "Then", "So"):
            return [], tokens[max(cut, 0) + 1 :] if cut > 0 and tokens[0].text not in ("And", "But", "So") else tokens[
                1:
            ]
    if tokens[0].text not in ("In", "On", "By", "During", "At"):
        return [], tokens
    comma = next((n for n, each in enumerate(tokens[:10]) if each.text == "," and not _inside(tokens, n)), 0)
    if not comma:
        found = dated(sentence.text[len(tokens[0].text) + 1 :])
        if not found:
            return [], tokens
        comma = next((n for n, each in enumerate(tokens) if each.start >= tokens[1].start + len(found)), 1) - 1
    body = between(sentence, tokens[1].start, tokens[comma].start if tokens[comma].text == "," else tokens[comma].end)
    phrase = phrase_of(tokens[0].text.lower(), body)
    return ([phrase] if phrase.kind else []), tokens[comma + 1 :] or tokens


def _inside(tokens: list[Span], at: int) -> bool:
    """Whether a comma stands inside a date such as "July 4, 1776"."""
    return (
        at + 1 < len(tokens)
        and (tokens[at - 1].text[:1].isdigit() or tokens[at - 1].text in MONTHS.split("|"))
        and bool(re.fullmatch(YEAR, tokens[at + 1].text))
    )


def _apposition(sentence: Span, tokens: list[Span]) -> Span | None:
    """What stands between commas or brackets right after the first words."""
    offset = tokens[0].start - sentence.start
    found = _APPOSITION.search(sentence.text, offset, offset + 160)
    if not found or len(sentence.text[offset : found.start()].split()) > 7:
        return None
    return Span(found[0], sentence.start + found.start())


def _finite(tokens: list[Span], at: int) -> bool:
    """Whether a word is the main verb of its clause."""
    form, before = tokens[at].text, tokens[at - 1].text
    after = tokens[at + 1].text if at + 1 < len(tokens) else "."
    if (
        before.lower() in DETERMINERS | PREPOSITIONS
        or before in {"to", "and", "or", "not", "'s"}
        or before.endswith("'s")
    ):
        return False
    if form in PAST:
        if form in PARTICIPLES and (after in PREPOSITIONS or after in ("to", "here")):
            if at == 1 and before.endswith("s") and form not in ("was", "went"):
                return False
            return (
                before[:1].isupper()
                and (after != "by")
                and tokens[0].text[:1].isupper()
                and at <= 4
                and before.isalpha()
            )
        next_ones = DETERMINERS | PRONOUNS | PREPOSITIONS | set(NUMBERS)
        return not (form in PARTICIPLES and after[:1].islower() and after not in next_ones
                    and not before[:1].isupper())  # fmt: skip
    opens = (
        after in DETERMINERS
        or after[:1].isdigit()
        or after in NUMBERS
        or (after[:1].isupper() and form not in ("names",))
    )
    if form in THIRD:
        return opens and not before.endswith("s") and before.lower() not in VAGUE
    return form in VERBS and after in DETERMINERS and before.endswith("s") and not before.endswith(("ss", "us", "is"))


def _clause(sentence: Span, tokens: list[Span], at: int, early: list[Phrase], skipped: Span | None,
            known: Span | None = None) -> Clause | None:  # fmt: skip
    last = at
    while last > 1 and (tokens[last - 1].text.endswith("ly") or tokens[last - 1].text in ADVERBS):
        last -= 1
    end = skipped.start if skipped and skipped.start < tokens[at].start else tokens[last].start
    subject = known or between(sentence, tokens[0].start, end)
    if not subject.text or len(subject.text.split()) > 9:
        return None
    form, auxiliary, verb, rest = tokens[at].text, "", None, at + 1
    tense = "past" if form in PAST else "third" if form in THIRD else "base"
    if form in AUXILIARIES:
        auxiliary = form
        rest, verb, tense = _compound(tokens, at)
        if not tense:
            return None
    else:
        verb = PAST.get(form) or THIRD.get(form) or VERBS[form]
    stop, because = _stop(sentence, tokens, rest)
    thing, phrases = tail(sentence, tokens[rest:stop])
    listed = stop < len(tokens) and bool(_LIST.match(sentence.text, tokens[stop].start - sentence.start))
    goal = stop < len(tokens) and tokens[stop].text == "to"
    return Clause(sentence, subject, auxiliary, verb, tense, thing, (*phrases, *early), because, listed, goal)


def _compound(tokens: list[Span], at: int) -> tuple[int, Verb | None, str]:
    """(the place after an auxiliary and its verb, the verb, the tense); "" where they do not fit."""
    form, rest = tokens[at].text, at + 1
    while rest < len(tokens) and (
        tokens[rest].text.endswith("ly") or tokens[rest].text in ("also", "first", "originally")
    ):
        rest += 1
    following = tokens[rest].text if rest < len(tokens) else ""
    if following in ("not", "n't", "no", "never", "only", "all", "both", "been", "being", "there"):
        return rest, None, ""
    if form in BE:
        if following in PARTICIPLES:
            return rest + 1, PARTICIPLES[following], "passive"
        if following.endswith(("ing", "ed")):
            return rest, None, ""
        return at + 1, None, "be"
    if form in MODALS and following in VERBS:
        return rest + 1, VERBS[following], "modal"
    if form in HAVE and following in PARTICIPLES and form != "had":
        return rest + 1, PARTICIPLES[following], "perfect"
    if form in ("has", "have", "had") and (following in DETERMINERS or following[:1].isdigit() or following in NUMBERS):
        return rest, Verb("have", "had", "had", "has"), {"has": "third", "have": "base", "had": "past"}[form]
    return rest, None, ""


def _stop(sentence: Span, tokens: list[Span], rest: int) -> tuple[int, Span | None]:
    """(where the clause ends, the reason clause after it)."""
    for at in range(rest, len(tokens)):
        form = tokens[at].text
        if form == "because" and at + 2 < len(tokens) and tokens[at + 1].text != "of":
            return at, _reason(sentence, tokens, at)
        if form == "," and _inside(tokens, at):
            continue
        if form == "," and at + 1 < len(tokens) and tokens[at + 1].text == "because":
            continue
        if form in {",", ";", ":", "(", "[", "–", "—", ".", '"', "-"} or (
            form in SUBORDINATORS and form not in ("and", "or", "also")
        ):
            return at, None
        if at > rest and _modifies(tokens, at):
            return at, None
        if form in ("and", "or") and at + 1 < len(tokens):
            after = tokens[at + 1].text
            if (
                after.endswith("ed")
                or after in AUXILIARIES
                or after in PAST
                or after in PARTICIPLES
                or after in PRONOUNS
                or after in THIRD
            ):
                return at, None
    return len(tokens), None


def _modifies(tokens: list[Span], at: int) -> bool:
    """Whether a participle or an infinitive begins here, which says more about the noun before it."""
    form, before = tokens[at].text, tokens[at - 1].text
    after = tokens[at + 1].text if at + 1 < len(tokens) else "."
    if before.lower() in DETERMINERS | PREPOSITIONS | SUBORDINATORS or before.endswith("ly"):
        return False
    if form == "to":
        return after in VERBS or after in ("be", "have", "do")
    ends = after in PREPOSITIONS or after in DETERMINERS or not after[:1].isalnum() or after in ("to", "and")
    return (
        ends
        and form.islower()
        and (form in PARTICIPLES or form.endswith(("ed", "ing")))
        and form not in VERBS
        and len(form) > 3
    )


def _reason(sentence: Span, tokens: list[Span], at: int) -> Span | None:
    stop = next(
        (n for n in range(at + 1, len(tokens)) if tokens[n].text in {",", ";", ".", ":", "(", "–", "—"}), len(tokens)
    )
    reason = between(sentence, tokens[at + 1].start, tokens[stop - 1].end)
    cut = stop < len(tokens) and _LIST.match(sentence.text, tokens[stop].start - sentence.start)
    verbal = any(
        word in AUXILIARIES or word in PAST or word in THIRD or word in VERBS for word in reason.text.split()[1:]
    )
    return reason if 3 <= len(reason.text.split()) <= 14 and not cut and verbal else None


def passive(sentence: Span, subject: Span, place: int) -> Clause | None:
    """A clause of a participle without "was". place: where the participle stands in the sentence."""
    tokens = words(sentence)
    at = next((n for n, each in enumerate(tokens) if each.start == sentence.start + place), -1)
    if at < 1 or tokens[at].text not in PARTICIPLES:
        return None
    stop, because = _stop(sentence, tokens, at + 1)
    thing, phrases = tail(sentence, tokens[at + 1 : stop])
    listed = stop < len(tokens) and bool(_LIST.match(sentence.text, tokens[stop].start - sentence.start))
    return Clause(
        sentence, subject, "was", PARTICIPLES[tokens[at].text], "passive", thing, tuple(phrases), because, listed
    )
