"""Questions about claims: one fact, a subject that another piece names, two facts, or no answer at all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tools.demo_model.bank import SUBJECT, Fact, Kind, Template
from tools.demo_model.cloze import LIGHT, OPENINGS
from tools.demo_model.inflect import tidy
from tools.demo_model.shape import Shape
from tools.demo_model.story import Claim, Subject, subject
from tools.demo_model.values import Values

UNKNOWN = "unknown"
MOST_TIMES = 3  # questions about one claim; the same limit holds for its use as a second hop
ALIKE = (
    {"year", "date", "day", "month", "season", "decade", "century", "weekday", "time", "age"},
    {"city", "country", "region", "street", "building", "room", "river"},
    {"person", "firstname", "company", "org", "team", "university", "job", "a_job", "role", "group", "name"},
    {"number", "small", "ordinal"},
    {"thing", "a_thing", "things", "nouns", "list", "noun", "product"},
)
"""Groups of slot types that one question may ask for: a text with one of a group answers a question for another."""


@dataclass(frozen=True)
class Asked:
    """A question. answer == chunks[chunk][1][start : start + len(answer)], or "unknown" with chunk -1."""

    text: str
    answer: str
    kind: str
    chunk: int = -1
    start: int = -1


@dataclass
class Told:
    """A claim and the chunk it stands in."""

    claim: Claim
    chunk: int
    whole: bool


class Questioner:
    """Asks about one context."""

    def __init__(
        self,
        v: Values,
        shape: Shape,
        chunks: Sequence[tuple[str, str]],
        told: list[Told],
        open_facts: Callable[[Kind], Sequence[Fact]],
    ):
        """open_facts: what may be said of any subject of a kind."""
        self.v, self.shape, self._open = v, shape, open_facts
        self.chunks, self.told = chunks, told
        self._of: dict[str, list[Told]] = {}
        for statement in told:
            self._of.setdefault(statement.claim.subject.name, []).append(statement)
        self._subjects = Counter(
            name for name, claims in self._of.items() for _ in {id(c.claim.subject) for c in claims}
        )
        self._times = Counter[tuple[int, bool]]()
        self._facts = Counter(id(each.claim.fact) for each in told)
        self._surnames = Counter(name.split()[-1] for name in self._of)
        self._coref = [each for each in told if not each.claim.named and not each.claim.nameless and each.whole]
        self._bridges = [
            (each, slot)
            for each in told
            if (each.claim.named or each.whole) and not each.claim.nameless
            for slot in each.claim.fact.path
            if each.claim.values.get(slot) in self._of and self._subjects[each.claim.values[slot]] == 1
        ]

    def ask(self, count: int) -> Iterator[Asked]:
        """Up to `count` different questions."""
        seen: set[str] = set()
        for _ in range(count * 3):
            asked = self._one()
            if asked and asked.text.lower() not in seen:
                seen.add(asked.text.lower())
                yield asked
                if len(seen) == count:
                    return

    def _one(self) -> Asked | None:
        u, shape = self.v.rng.random(), self.shape
        if u < shape.none:
            return self._none()
        if u < shape.none + shape.two and self._bridges:
            return self._two()
        if u < shape.none + shape.two + shape.coref and self._coref:
            return self._about(self.v.one(self._coref))
        if not self.told:
            return None
        each = self.v.one(self.told)
        return self._about(each) if each.claim.named or each.claim.bare or each.whole else None

    def _about(self, each: Told, name: str = "") -> Asked | None:
        """A question that this claim answers. name: what to call its subject, in place of its name."""
        claim, v = each.claim, self.v
        if self._subjects[claim.subject.name] > 1 or self._times[id(claim), bool(name)] == MOST_TIMES:
            return None
        self._times[id(claim), bool(name)] += 1
        slots = [slot for slot in claim.fact.ask if slot in claim.slots]
        if not slots:
            return None
        slot = v.one(slots)
        place = self._locate(each, slot)
        if place is None:
            return None
        answer, start = place
        if claim.named and not name and v.chance(self.shape.keyword):
            words = self._keywords(claim, slot, answer)
            return Asked(words, answer, "one", each.chunk, start) if words else None
        forms = [q for q in claim.fact.ask[slot] if q.slots <= claim.slots - {slot}]
        if self._facts[id(claim.fact)] > 1 or name:  # words of the statement distinguish it from similar facts
            forms = [q for q in forms if q.names_subject or (q.slots and not name)]
        if claim.nameless:
            forms = [q for q in forms if not q.names_subject]
        if not forms:
            return None
        form = v.one(forms)
        kind = "two" if name else "one" if claim.named or not form.names_subject else "coref"
        text = self._fill(form, claim, name or self._call(claim.subject))
        return Asked(vary(v, text), answer, kind, each.chunk, start)

    def _locate(self, each: Told, slot: str) -> tuple[str, int] | None:
        """(answer as written in its chunk, place)."""
        text, sentence, value = self.chunks[each.chunk][1], each.claim.sentence, each.claim.seen[slot]
        at = text.find(sentence)
        inside = sentence.find(value)
        if inside < 0:
            value = value[:1].upper() + value[1:]
            inside = sentence.find(value)
        return (value, at + inside) if at >= 0 and inside >= 0 else None

    def _two(self) -> Asked | None:
        """A question whose subject is described by another fact."""
        first, slot = self.v.one(self._bridges)
        claim = first.claim
        paths = [p for p in claim.fact.path[slot] if p.slots <= claim.slots - {slot}]
        about = [
            each
            for each in self._of[claim.values[slot]]
            if (each.claim.named or each.whole) and not each.claim.nameless
        ]
        if not paths or not about or self._subjects[claim.subject.name] > 1:
            return None
        if sum(each.claim.fact is claim.fact for each in self._of[claim.subject.name]) > 1:
            return None
        name = self._fill(self.v.one(paths), claim, self._call(claim.subject))
        asked = self._about(self.v.one(about), name)
        return asked if asked and asked.answer != claim.subject.name else None

    def _none(self) -> Asked | None:
        """A question without an answer here: a missing fact, a missing detail, or an unknown subject."""
        v, u = self.v, self.v.rng.random()
        if not self.told:
            return None
        claim = v.one(self.told).claim
        who = claim.subject
        if self._subjects[who.name] > 1 or claim.nameless:
            return None
        told = {id(each.claim.fact) for each in self._of[who.name]}
        known = {s.rstrip("0123456789") for s in claim.slots}
        if u < 0.35:  # the text has the fact without this detail
            slots = [s for s in claim.fact.ask if not known & _alike(s) and claim.fact.ask[s]]
            fact, slot = claim.fact, v.one(slots) if slots else ""
        elif u < 0.8:
            fact = v.one(who.kind.facts if v.chance(0.6) else self._open(who.kind))
            slot = v.one(list(fact.ask))
            if id(fact) in told and not any(q.slots for q in fact.ask[slot]):
                return None
        else:
            fact = v.one(who.kind.facts)
            slot, who = v.one(list(fact.ask)), subject(v, who.kind, v.draw(who.kind.maker))
            if who.name in self._of:
                return None
        forms = [q for q in fact.ask.get(slot, ()) if q.names_subject]
        if not forms:
            return None
        form = v.one(forms)
        stranger = Claim(who, fact, {s: v.draw(s) for s in form.order}, {}, form.slots)
        return Asked(vary(v, self._fill(form, stranger, self._call(who))), UNKNOWN, "none")

    def _fill(self, form: Template, claim: Claim, name: str) -> str:
        return tidy(form.fill(claim.values | {SUBJECT: name}))

    def _call(self, who: Subject) -> str:
        """A name of a subject for a question."""
        v, u, words = self.v, self.v.rng.random(), who.name.split()
        if u < 0.8:
            return who.name
        if who.kind.maker == "person" and len(words) > 1:
            if u < 0.9 and self._surnames[words[-1]] == 1:
                return words[-1]
            return f"the {v.one(who.kind.nouns)} {who.name}" if u > 0.95 else who.name
        return f"the {v.one(who.kind.nouns)} {who.name}" if u < 0.9 else f"the {who.name}" if u < 0.95 else who.name

    def _keywords(self, claim: Claim, slot: str, answer: str) -> str:
        """A question word and words near the answer, as users type in a hurry."""
        v, before = self.v, claim.sentence.split(answer)
        if len(before) != 2:
            return ""
        left = [w for w in re.findall(r"[\w'-]+", before[0]) if w.lower() not in LIGHT and w not in claim.subject.name][
            -3:
        ]
        right = [
            w for w in re.findall(r"[\w'-]+", before[1]) if w.lower() not in LIGHT and w not in claim.subject.name
        ][:2]
        words = left + right[: v.whole(0, 2)]
        if not words:
            return ""
        who, opening = self._call(claim.subject), v.one(OPENINGS.get(slot.rstrip("0123456789"), ("What", "Which", "")))
        form = v.one(("{o} {k} {e}?", "{o} {e} {k}?", "{e} {k}?", "{k} {e}", "{e} {o} {k}"))
        return " ".join(form.format(o=opening, e=who, k=" ".join(words)).split())


def vary(v: Values, text: str) -> str:
    """Casing, punctuation and courtesy of a question."""
    u = v.rng.random()
    text = text[:1].upper() + text[1:]
    if u < 0.78:
        return text
    if u < 0.85:
        return text.lower()
    if u < 0.90:
        return text.rstrip("?")
    if u < 0.94:
        return text.lower().rstrip("?")
    if u < 0.96:
        return text[:-1] + " ?"
    first, rest = text[0].lower(), text[1:]
    return (
        v.one(("Please tell me: ", "I would like to know: ", "Do you know ", "According to the documents, "))
        + first
        + rest
    )


def _alike(slot: str) -> set[str]:
    kind = slot.rstrip("0123456789")
    return set[str]().union({kind}, *(group for group in ALIKE if kind in group))
