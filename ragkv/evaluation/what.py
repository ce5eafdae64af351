"""Rules that ask for the object of a verb, a number, or what a preposition governs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from ragkv.evaluation.clauses import Span
from ragkv.evaluation.drafts import (
    AGENTIVE,
    STRANDED,
    Draft,
    Told,
    asked,
    carried,
    leading,
    without_object,
)
from ragkv.evaluation.lexicon import UNITS
from ragkv.evaluation.noun_phrases import bare, clear, counted, person, proper


def thing(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause, thing = told.clause, told.clause.object
    if thing is None or clause.verb is None or clause.tense in ("passive", "be", "modal") or not clear(thing.text):
        return
    if (
        not carried(thing.text)
        or counted(thing.text)
        or clause.verb.base
        in ("have", "become", "want", "remain", "appear", "get", "put", "go", "come", "look", "die", "live")
    ):
        return
    answer = bare(thing)
    if (
        len(answer.text.split()) > 7
        or answer.text.lower().endswith(("ly", "ing", "ed"))
        or answer.text.split()[0].endswith("ly")
    ):
        return
    if not (proper(answer.text) or len(answer.text) > 4) or re.match(
        r"(?:to|not|very|more|less|so|too|well|able) ", answer.text
    ):
        return
    extra = leading(clause)
    said = " ".join(f"{each.preposition} {each.body.text}" for each in extra[:2])
    if (not said and not (proper(told.name) and clause.tense == "past" and clause.verb.base in AGENTIVE)) or (
        clause.listed and not clause.phrases
    ):
        return
    who = person(answer.text)
    support = asked(rng, Told(without_object(clause), told.name, told.human), said)
    names = (told.name, *(each.body.text for each in extra[:2]))
    yield Draft(
        f"{'Who' if who else 'What'} {support}",
        answer,
        "object",
        names,
        f"{told.name} {clause.verb.base} {said}".strip(),
        clause.verb.base,
    )
    if clause.tense == "past" and proper(told.name) and not who and clause.verb.base in AGENTIVE:
        yield Draft(
            f"What was {clause.verb.participle} by {told.name} {said}".strip(),
            answer,
            "object",
            names,
            "",
            clause.verb.base,
        )


def count(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    sources = [(clause.object, ""), *((each.body, each.preposition) for each in clause.phrases)]
    for span, preposition in sources:
        if span is None or not (found := counted(span.text)):
            continue
        number, noun = found
        answer = Span(number, span.start + span.text.find(number))
        more = span.text[span.text.find(noun, span.text.find(number)) + len(noun) :].strip()
        others = [
            e
            for e in clause.phrases
            if e.body is not span and carried(e.body.text) and len(e.body.text.split()) < 7 and e.kind != "agent"
        ]
        said = " ".join(f"{e.preposition} {e.body.text}" for e in others[:1])
        if (more and (not more.startswith("of ") or not carried(more))) or clause.tense == "be":
            continue
        base = Told(without_object(clause), told.name, told.human)
        if preposition in ("for", "") and noun.split()[0] in UNITS and noun.split()[-1] == noun and not more:
            if preposition == "for" or (
                clause.verb and clause.verb.base in ("live", "spend", "last", "take", "wait", "serve")
            ):
                thing = clause.object.text if clause.object and clause.object is not span else ""
                if carried(thing):
                    yield Draft(
                        f"How long {asked(rng, base, f'{thing} {said}'.strip())}",
                        Span(f"{number} {noun}", answer.start),
                        "long",
                        (told.name,),
                        f"how long {told.name} {clause.verb.past if clause.verb else ''}",
                        clause.verb.base if clause.verb else "",
                    )
            continue
        if preposition == "" and clause.verb:
            body = f"{noun} {more}".strip()
            yield Draft(
                f"How many {body} {asked(rng, base, said)}",
                answer,
                "count",
                (told.name, noun),
                f"number of {body} {told.name}",
                clause.verb.base,
            )


def stranded(rng: random.Random, told: Told) -> Iterator[Draft]:
    """ "UNIX was derived from MULTICS": what was it derived from?"""
    clause = told.clause
    if clause.tense != "passive" or clause.verb is None or clause.object is not None or not clause.phrases:
        return
    each = clause.phrases[0]
    answer = bare(each.body)
    if each.preposition not in STRANDED or each.kind or not clear(each.body.text) or not carried(each.body.text):
        return
    if clause.listed and len(clause.phrases) == 1:
        return
    if (
        len(answer.text.split()) > 7
        or answer.text.split()[0].endswith("ing")
        or (
            each.preposition == "to"
            and answer.text.split()[0].islower()
            and not each.body.text.startswith(("the ", "a "))
        )
    ):
        return
    opening = "Who" if person(answer.text) else "What"
    yield Draft(
        f"{opening} {clause.auxiliary} {told.name} {clause.verb.participle} {each.preposition}",
        answer,
        "stranded",
        (told.name,),
        f"{told.name} {clause.verb.participle} {each.preposition}",
        clause.verb.base,
    )
