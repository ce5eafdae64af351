"""Rules that ask when, where and why."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from ragkv.tune.clauses import Span
from ragkv.tune.drafts import (
    Draft,
    Told,
    asked,
    carried,
    repeatable,
    rest_of,
)
from ragkv.tune.nouns import bare, clear, place


def when(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    for each in clause.phrases:
        if each.kind != "date" or each.preposition not in ("in", "on", "during") or not repeatable(told):
            continue
        if clause.tense in ("be", "modal") or clause.verb is None:
            continue
        agents = [
            other
            for other in clause.phrases
            if other.kind == "agent" and clear(other.body.text) and len(other.body.text.split()) < 6
        ]
        rest = rest_of(rng, told, each)
        if re.search(
            r"\d{4}| and [A-Z]?[a-z]+ \d",
            " ".join((rest, *(other.body.text for other in clause.phrases if other is not each))),
        ):
            continue
        if not rest and clause.verb.base not in (
            "die",
            "bear",
            "release",
            "found",
            "publish",
            "begin",
            "end",
            "start",
            "create",
            "establish",
            "introduce",
            "complete",
            "develop",
            "write",
            "invent",
            "build",
            "launch",
            "destroy",
            "close",
            "open",
            "retire",
            "win",
            "form",
            "appear",
        ):
            continue
        if agents and rng.random() < 0.4:
            rest = f"{rest} by {agents[0].body.text}".strip()
        year = bool(re.fullmatch(r"\d{4}", each.body.text))
        opening = (
            rng.choice(("In what year", "In which year", "What year", "When", "When", "When"))
            if year
            else "On what date"
            if re.search(r"\d{4}", each.body.text)
            and re.match(r"\d|[A-Z]\w+ \d{1,2}\b", each.body.text)
            and rng.random() < 0.3
            else "When"
        )
        says = asked(rng, told, rest)
        thing = clause.object.text if clause.object else ""
        form = clause.verb.participle if clause.tense == "passive" else clause.verb.base
        query = f"when {says.split(' ', 1)[0]} {told.name} {form} {thing}".strip()
        names = tuple(part for part in (told.name, thing) if part)
        answer = Span(
            re.sub(r"^the ", "", each.body.text), each.body.start + (4 if each.body.text.startswith("the ") else 0)
        )
        yield Draft(f"{opening} {says}", answer, "when", names, query, clause.verb.base)


def where(rng: random.Random, told: Told) -> Iterator[Draft]:
    clause = told.clause
    for each in clause.phrases:
        if each.kind != "place" or clause.tense in ("be", "modal") or clause.verb is None or not repeatable(told):
            continue
        known = place(each.body.text) or clause.verb.base in (
            "locate",
            "bear",
            "die",
            "live",
            "settle",
            "bury",
        )
        rest = rest_of(rng, told, each)
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
            bare(each.body),
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
