"""Rules that ask who did a thing, and what a thing is."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from ragkv.evaluation.clauses import Clause, Phrase, Span
from ragkv.evaluation.drafts import (
    AGENTIVE,
    HUMAN,
    NOUNS,
    Draft,
    Told,
    carried,
    other_verb,
    predicate,
    repeatable,
    rest_of,
)
from ragkv.evaluation.lexicon import DEFINED, Verb
from ragkv.evaluation.noun_phrases import bare, clear, organisation, people, person, proper, specific


def subject(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    if told.resolved or clause.tense == "be" or clause.verb is None or not repeatable(told):
        return
    answer = bare(clause.subject)
    named = proper(answer.text) and not people(answer.text)
    if not clear(clause.subject.text) or len(answer.text.split()) > 6 or not (named or specific(clause.subject.text)):
        return
    rest = rest_of(rng, told, least=1)
    content = [word for word in rest.split() if len(word) > 3 or word[:1].isupper() or word[:1].isdigit()]
    if len(content) < (2 if named else 3) or (
        clause.tense == "passive" and not any(w[:1].isupper() or w[:1].isdigit() for w in content)
    ):
        return
    noun = organisation(answer.text)
    who = told.human or (
        named
        and clause.tense != "passive"
        and (clause.verb.base in AGENTIVE or (clause.tense == "past" and clause.verb.base in HUMAN))
    )
    opening = f"Which {noun}" if noun and rng.random() < 0.6 else "Who" if who else "What"
    says = predicate(rng, told, rest)
    noun_of = NOUNS.get(clause.verb.base)
    query = (
        f"{noun_of} of {clause.object.text}"
        if noun_of and clause.object and clause.tense == "past"
        else f"{'who' if who else 'what'} {says}"
    )
    names = tuple(
        each.text for each in (clause.object, *(phrase.body for phrase in clause.phrases)) if each and each.text in rest
    )
    yield Draft(f"{opening} {says}", answer, "subject", names, query, clause.verb.base)
    if noun_of and clause.object and who and clause.tense == "past" and specific(clause.object.text):
        yield Draft(
            f"Who {'is' if rng.random() < 0.4 else 'was'} the {noun_of} of {clause.object.text}",
            answer,
            "subject",
            (clause.object.text,),
            query,
            clause.verb.base,
        )


def agent(rng: random.Random, told: Told) -> Iterator[Draft]:
    """ "X was built by Y": who built X?"""
    clause = told.clause
    if clause.tense != "passive" or clause.verb is None or clause.object is not None:
        return
    for at, phrase in enumerate(clause.phrases[:2]):
        if at == 1 and clause.phrases[0].kind not in ("date", "place"):
            return
        if phrase.kind != "agent" or (clause.listed and phrase is clause.phrases[-1]) or not _doer(phrase):
            continue
        answer = bare(phrase.body)
        leading = re.match(r"(?:[a-z]+ ){1,3}(?=[A-Z][\w.]+ [A-Z])", answer.text)
        if leading and clause.verb.base in AGENTIVE and not re.search(r"\b(?:of|and)\b", leading[0]):
            answer = Span(answer.text[leading.end() :], answer.start + leading.end())
        rest = " ".join(
            f"{o.preposition} {o.body.text}"
            for o in clause.phrases
            if o is not phrase and carried(o.body.text) and len(o.body.text.split()) < 7 and rng.random() < 0.5
        )
        for text, query in _agent_forms(rng, told, clause.verb, answer, rest):
            yield Draft(text.strip(), answer, "agent", (told.name,), query, clause.verb.base)


def _doer(each: Phrase) -> bool:
    """Whether what follows "by" does something: no means, no list, no clause."""
    text, parts = bare(each.body).text, bare(each.body).text.split()
    if not clear(each.body.text) or not carried(each.body.text) or len(parts) > 6:
        return False
    if any(word.endswith("ing") for word in parts[:2]) or re.search(r" of \w+ing\b", text):
        return False
    if " and " in text and not (people(text) or all(proper(part.strip()) for part in text.split(" and "))):
        return False
    return not (len(parts) == 1 and text.islower() and text == each.body.text)


def _agent_forms(rng: random.Random, told: Told, verb: Verb, answer: Span, rest: str) -> Iterator[tuple[str, str]]:
    """Questions with their queries."""
    was = told.clause.auxiliary
    noun = organisation(answer.text) or ("company" if answer.text.endswith(" company") else "")
    who = person(answer.text) or people(answer.text) or (verb.base in AGENTIVE and proper(answer.text))
    opening = f"Which {noun}" if noun and rng.random() < 0.6 else "Who" if who else "What"
    noun_of = NOUNS.get(verb.base)
    query = f"{noun_of} of {told.name}" if noun_of else f"{told.name} {verb.participle} by"
    other = other_verb(rng, verb, True)
    yield f"{opening} {other.past if was in ('was', 'were') else other.third} {told.name} {rest}", query
    if who:
        yield f"By whom {was} {told.name} {verb.participle} {rest}", ""
    if who and noun_of:
        yield f"Who was the {noun_of} of {told.name}", query


def define(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause, thing = told.clause, told.clause.object
    if (
        clause.tense != "be"
        or thing is None
        or not re.match(r"(?:an?|the) ", thing.text)
        or clause.auxiliary not in ("is", "was")
    ):
        return
    answer = bare(thing)
    parts = re.split(r" of | to |, ", answer.text)[0].split()
    if (
        not 1 <= len(answer.text.split()) <= 9
        or parts[-1].lower() in DEFINED
        or not carried(answer.text)
        or " and the " in answer.text
        or not clear(thing.text)
    ):
        return
    if (len(parts) < 2 and " of " not in answer.text) or answer.text.endswith(
        (" and", " or", "the", "er than", "ly", "ed", "est")
    ):
        return
    low = told.name.split()
    if not (proper(told.name) or (low[0] in ("a", "an") and len(low) <= 5) or told.resolved):
        return
    name = told.name
    who = told.human or person(name)
    forms = (
        (f"Who {clause.auxiliary} {name}",)
        if who
        else (
            f"What {clause.auxiliary} {name}",
            f"What {clause.auxiliary} {name}",
            f"What kind of thing is {name}",
            f"What is meant by {name}",
        )
    )
    answer = longer(clause, answer)
    yield Draft(
        rng.choice(forms),
        answer,
        "define",
        (name,),
        rng.choice((f"{name} meaning", f"define {name}", f"what is {name}", name)),
    )


def longer(clause: Clause, answer: Span) -> Span:
    """A definition with the phrase after its noun, if that is short."""
    if clause.phrases and not clause.listed:
        each = clause.phrases[0]
        gap = each.body.start - answer.end
        if gap == len(each.preposition) + 2 and clear(each.body.text) and carried(each.body.text):
            longer = clause.sentence.text[answer.start - clause.sentence.start : each.body.end - clause.sentence.start]
            if len(longer.split()) <= 8:
                return Span(longer, answer.start)
    return answer


def identify(rng: random.Random, told: Told) -> Iterator[Draft]:
    """ "Paris is the capital of France": which city is it?"""
    clause, thing = told.clause, told.clause.object
    if clause.tense != "be" or thing is None or told.resolved or not carried(thing.text) or not clear(thing.text):
        return
    said = " ".join(
        (thing.text, *(f"{e.preposition} {e.body.text}" for e in clause.phrases[:1] if carried(e.body.text)))
    )
    content = [word for word in said.split() if word[:1].isupper() or len(word) > 4]
    if thing.text.startswith("the ") and proper(clause.subject.text) and len(content) >= 3 and " of " in f" {said} ":
        who = person(clause.subject.text)
        yield Draft(
            f"{'Who' if who else 'What'} {clause.auxiliary} {said}",
            bare(clause.subject),
            "identify",
            (thing.text,),
            said.removeprefix("the "),
        )
    if (
        clause.subject.text.startswith("The ")
        and " of " in clause.subject.text
        and (proper(thing.text) or thing.text[:1].isdigit())
    ):
        who = person(thing.text)
        yield Draft(
            f"{'Who' if who else 'What'} {clause.auxiliary} {told.name}",
            bare(thing),
            "identify",
            (told.name,),
            told.name.removeprefix("the "),
        )
