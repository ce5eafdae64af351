"""Rules that ask when, where and why."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from ragkv.evaluation.drafts import (
    Draft,
    Told,
    asked,
    carried,
    repeatable,
    rest_of,
)
from ragkv.evaluation.noun_phrases import bare, clear, place

_SECOND_DATE = re.compile(r"\d{4}| and [A-Z]?[a-z]+ \d")
_ALONE = frozenset(
    "die bear release found publish begin end start create establish introduce complete develop write invent build "
    "launch destroy close open retire win form appear".split()
)


def when(rng: random.Random, told: Told) -> Iterator[Draft]:
    """ "X was released in 1989": when, or in what year?"""
    clause = told.clause
    if clause.tense in ("be", "modal") or clause.verb is None or not repeatable(told):
        return
    for phrase in clause.phrases:
        if phrase.kind != "date" or phrase.preposition not in ("in", "on", "during"):
            continue
        rest = rest_of(rng, told, phrase)
        others = " ".join((rest, *(other.body.text for other in clause.phrases if other is not phrase)))
        if _SECOND_DATE.search(others) or (not rest and clause.verb.base not in _ALONE):
            continue
        agents = [
            e for e in clause.phrases if e.kind == "agent" and clear(e.body.text) and len(e.body.text.split()) < 6
        ]
        if agents and rng.random() < 0.4:
            rest = f"{rest} by {agents[0].body.text}".strip()
        says = asked(rng, told, rest)
        thing = clause.object.text if clause.object else ""
        form = clause.verb.participle if clause.tense == "passive" else clause.verb.base
        query = f"when {says.split(' ', 1)[0]} {told.name} {form} {thing}".strip()
        names = tuple(part for part in (told.name, thing) if part)
        opening = _opening(rng, phrase.body.text)
        yield Draft(f"{opening} {says}", bare(phrase.body), "when", names, query, clause.verb.base)


def _opening(rng: random.Random, date: str) -> str:
    if re.fullmatch(r"\d{4}", date):
        return rng.choice(("In what year", "In which year", "What year", "When", "When", "When"))
    exact = re.search(r"\d{4}", date) and re.match(r"\d|[A-Z]\w+ \d{1,2}\b", date)
    return "On what date" if exact and rng.random() < 0.3 else "When"


def where(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    for phrase in clause.phrases:
        if phrase.kind != "place" or clause.tense in ("be", "modal") or clause.verb is None or not repeatable(told):
            continue
        known = place(phrase.body.text) or clause.verb.base in (
            "locate",
            "bear",
            "die",
            "live",
            "settle",
            "bury",
        )
        rest = rest_of(rng, told, phrase)
        if not known or (
            not rest
            and clause.verb.base
            not in (
                "locate",
                "bear",
                "die",
                "live",
                "hold",
                "settle",
                "begin",
                "originate",
                "build",
                "find",
                "arrive",
                "found",
                "publish",
                "develop",
            )
        ):
            continue
        yield Draft(
            f"Where {asked(rng, told, rest)}",
            bare(phrase.body),
            "where",
            (told.name,),
            f"where {told.name} {clause.verb.past}",
            clause.verb.base,
        )


def why(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    if clause.because is None or (not repeatable(told) and clause.tense != "be"):
        return
    if clause.object and not carried(clause.object.text):
        return
    yield Draft(
        f"Why {asked(rng, told, rest_of(rng, told, least=2))}",
        clause.because,
        "why",
        (told.name,),
        f"why {told.name} {clause.object.text if clause.object else ''}".strip(),
        clause.verb.base if clause.verb else "",
    )
