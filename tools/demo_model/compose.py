"""Documents made from facts: sentences about subjects, joined, with references, cut into pieces.

A piece becomes one chunk of the prompt. This module makes documents hard: a later piece calls a subject only "she",
"the firm" or "the second", predicates share a sentence, prose surrounds the facts, and titles name nobody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.demo_model.bank import SUBJECT, Banks, Fact, Template, shown
from tools.demo_model.inflect import tidy
from tools.demo_model.story import PRONOUNS, Bridge, Claim, Outline, Story, Subject
from tools.demo_model.values import Values

PRONOUNS_ALL = {form for forms in PRONOUNS.values() for form in forms}
_BEFORE_SUBJECT = tuple(
    f"{word} "
    for word in ", that when where which until because before after while did does was is has had what".split()
)


def story(v: Values, banks: Banks, outline: Outline) -> Story:
    """Write a document."""
    main = outline.subjects[0]
    titles = [t for t in main.kind.titles if t.names_subject != outline.generic] or list(main.kind.titles)
    chosen = v.one(titles)
    title = _capital(outline.title or chosen.fill({slot: v.draw(slot) for slot in chosen.order} | {SUBJECT: main.name}))
    writer = _Writer(v, banks, outline, title)
    drafts = _deal(v, outline)
    pieces = [writer.piece(number, drafts[number]) for number in range(outline.pieces)]
    for claim in writer.claims:
        claim.nameless = not claim.named and not any(claim.subject.name in text for text in pieces)
    claims = [claim for claim in writer.claims if claim.bare or not claim.nameless]
    return Story(title, pieces, claims)


def _deal(v: Values, outline: Outline) -> list[list[tuple[Subject, Fact]]]:
    """Distribute facts over pieces.

    Those of the main subject are spread in order. Those of a bridged subject stay together in a later piece. Each of
    several subjects side by side has one fact in the first piece.
    """
    drafts: list[list[tuple[Subject, Fact]]] = [[] for _ in range(outline.pieces)]
    last = outline.pieces - 1
    for number, (who, facts) in enumerate(zip(outline.subjects, outline.facts, strict=True)):
        home = v.whole(min(1, last), last)
        for at, fact in enumerate(facts):
            if number == 0:
                place = at * outline.pieces // len(facts)
            else:
                place = home if outline.bridges or at > 0 else 0
            drafts[place].append((who, fact))
    return drafts


class _Writer:
    """Writes the pieces of one document. It knows which subjects are introduced and which was mentioned last."""

    def __init__(self, v: Values, banks: Banks, outline: Outline, title: str):
        self.v, self.banks, self.outline, self.title = v, banks, outline, title
        self.claims: list[Claim] = []
        self._introduced: set[Subject] = set()
        self._last: Subject | None = None
        prose = outline.subjects[0].kind.prose
        self._prose = v.rng.sample(prose, len(prose))
        self._asides = banks.phrases["aside"]
        self._bridges = {id(bridge.fact): bridge for bridge in outline.bridges}

    def piece(self, number: int, draft: list[tuple[Subject, Fact]]) -> str:
        """The text of one piece. Facts that do not fit are left out."""
        v, lines, room = self.v, list[str](), self.outline.words
        dependent = number > 0 and v.chance(self.outline.dependent)
        first = len(self.claims)
        queue = list(draft)
        if len(self.outline.subjects) > 1 and number == 0 and not self.outline.bridges:
            lines.append(self._introduce())
        share = room / max(1, 14 * len(queue))  # sentences that would fit, for each fact
        while room > 0 and (queue or v.chance(0.97)):
            if queue and v.chance(min(1.0, 1.25 / max(share, 0.8))):
                text = self._facts(queue, number, dependent)
            else:
                text = self._aside()
                self._last = None if v.chance(0.5) else self._last
            lines.append(text)
            room -= 1 + text.count(" ")
        text = self._paragraphs(lines)
        for claim in self.claims[first:]:
            marks = (claim.subject.name, *(short for short in claim.subject.short if not short.startswith("the ")))
            claim.named = any(mark in text or mark in self.title for mark in marks)
        return text

    def _introduce(self) -> str:
        """One sentence that names several subjects; later ones may be called by their order."""
        names, v = [who.name for who in self.outline.subjects], self.v
        kind = self.outline.subjects[0].kind
        together = f"{', '.join(names[:-1])} and {names[-1]}"
        peers = all(who.kind is kind for who in self.outline.subjects)
        if peers:
            orders = (
                ("the former", "the latter")
                if len(names) == 2 and v.chance(0.5)
                else ("the first", "the second", "the third")
            )
            for who, order in zip(self.outline.subjects, orders, strict=False):
                who.short = (order, f"{order} {kind.nouns[0]}" if "first" in orders[0] else order)
        self._introduced.update(self.outline.subjects)
        forms = (
            "{} are described here",
            "This text is about {}",
            "Two names come up again and again: {}",
            "{} are often compared",
            "Here are notes on {}",
        )
        return v.one(forms[:2] + forms[3:] if len(names) != 2 else forms).format(together) + "."

    def _facts(self, queue: list[tuple[Subject, Fact]], number: int, dependent: bool) -> str:
        """A sentence with the next fact, or with the next two of one subject."""
        v = self.v
        who, fact = queue.pop(0)
        say, claim = self._claim(who, fact, number)
        told = [claim]
        sentence, predicate = self._say(claim, say, dependent)
        if predicate and queue and queue[0][0] is who and v.chance(0.4):
            more, other = self._claim(who, queue[0][1], number, opening=True)
            if more.opens and "," not in predicate:
                queue.pop(0)
                told.append(other)
                sentence = self._join(sentence, predicate, _rest(more, other.values), who)
        elif v.chance(0.25):
            tail = self._phrase("tail")
            sentence += tail if tail[0] in ",;" else f" {tail}"
        sentence = _stop(sentence)
        told += [added for each in told for added in each.added]
        for claim in told:
            claim.sentence = sentence
        self.claims += told
        return sentence

    def _join(self, sentence: str, predicate: str, rest: str, who: Subject) -> str:
        u = self.v.rng.random()
        if u < 0.5:
            return f"{sentence} and{rest}"
        if u < 0.75:
            return f"{sentence}, and {who.pronoun[0]}{rest}"
        opening = sentence[: len(sentence) - len(predicate)]
        return f"{opening}, {'who' if who.kind.maker == 'person' else 'which'}{predicate},{rest}"

    def _claim(self, who: Subject, fact: Fact, number: int, opening: bool = False) -> tuple[Template, Claim]:
        """Choose a wording of a fact and fill its slots."""
        v, bridge = self.v, self._bridges.get(id(fact)) if who is self.outline.subjects[0] else None
        forms: Sequence[Template] = fact.say
        if bridge:
            forms = [say for say in forms if bridge.slot in say.slots]
        if opening:
            forms = [say for say in forms if say.opens] or fact.say
        if len(self.outline.subjects) > 1 and (who is not self.outline.subjects[0] or not self._bridges):
            forms = [say for say in forms if say.names_subject] or forms
        say = v.one(forms)
        values = {slot: self._value(fact, slot, who) for slot in say.order}
        if bridge and bridge.slot in say.slots:
            values[bridge.slot] = bridge.subject.name
            self._bring_in(bridge, values)
        seen = {part.partition("+")[0]: shown(part, values) for part in say.parts[1::2] if part != SUBJECT}
        claim = Claim(who, fact, values, seen, say.slots, number, bare=not say.names_subject)
        if not opening:
            self._dress(claim)
        return say, claim

    def _dress(self, claim: Claim) -> None:
        """Add something to a name: an office, an age, an origin. The addition is a claim of its own."""
        for slot, value in claim.values.items():
            facts = self.banks.dress.get(slot)
            if facts and self.v.chance(0.2):
                fact = self.v.one(facts)
                say = self.v.one(fact.say)
                values = {name: self.v.draw(name) for name in say.order} | {slot: value}
                claim.dressed[slot] = say.fill(values)
                claim.added.append(Claim(claim.subject, fact, values, values, say.slots, claim.piece, bare=True))
                return

    def _bring_in(self, bridge: Bridge, values: dict[str, str]) -> None:
        """A subject that a sentence names in passing: after it "the founder" is enough."""
        who, main = bridge.subject, self.outline.subjects[0]
        calls = dict.fromkeys(call for path in bridge.fact.path[bridge.slot] if (call := _head(path, values)))
        names = tuple(short for short in who.short if not short.startswith("the "))
        nouns = () if who.kind.maker == main.kind.maker else who.short[:2]
        who.short = (*calls, *names) or nouns or who.short
        self._introduced.add(who)

    def _value(self, fact: Fact, slot: str, who: Subject) -> str:
        names = self.outline.linked.get(slot.rstrip("0123456789"), ())
        if names and (slot in fact.path) and self.v.chance(0.6):
            name = self.v.one(names)
            if name != who.name:
                return name
        return self.v.draw(slot)

    def _say(self, claim: Claim, say: Template, dependent: bool) -> tuple[str, str]:
        """(sentence without its stop, its predicate where the subject opens it)."""
        v, who = self.v, claim.subject
        if not say.names_subject:
            self._last = self._last or who
            return "".join(p if i % 2 == 0 else claim.text(p) for i, p in enumerate(say.parts)), ""
        parts = list(say.parts)
        at = parts.index(SUBJECT, 1)
        possessive = parts[at + 1].startswith("'s")
        role = 2 if possessive else 0 if (at == 1 and not parts[0]) or parts[at - 1].endswith(_BEFORE_SUBJECT) else 1
        call = self._refer(who, role, dependent)
        if role == 1 and call in PRONOUNS_ALL and parts[at - 1].endswith("of ") and who.short:
            call = v.one(who.short)
        if possessive and call in PRONOUNS_ALL:
            parts[at + 1] = parts[at + 1][2:]
        for i in range(1, len(parts), 2):
            parts[i] = call if i == at else claim.text(parts[i])
        predicate = "".join(parts[2:]) if say.opens else ""
        sentence = "".join(parts)
        if predicate and v.chance(0.15):
            sentence = f"{self._phrase('lead')}, {sentence}"
        self._last = who
        return sentence, predicate

    def _refer(self, who: Subject, role: int, dependent: bool) -> str:
        """The expression for a subject in a sentence. role: 0 subject, 1 object, 2 possessive."""
        v, known = self.v, who in self._introduced
        if not known and not (who.name in self.title and v.chance(0.25)):
            self._introduced.add(who)
            return who.name
        u = v.rng.random()
        if self._last is who and u < (0.55 if dependent else 0.45):
            return who.pronoun[role]
        if u < (0.95 if dependent else 0.65) and who.short:
            return v.one(who.short)
        if dependent and len(self.outline.subjects) == 1:
            return who.pronoun[role]
        self._introduced.add(who)
        return who.name if not dependent or not who.short else v.one(who.short)

    def _phrase(self, name: str) -> str:
        phrase = self.v.one(self.banks.phrases[name])
        return phrase.fill({slot: self.v.draw(slot) for slot in phrase.order})

    def _aside(self) -> str:
        v = self.v
        u = v.rng.random()
        text = self._prose.pop() if self._prose and u < 0.7 else v.one(self.banks.asides if u < 0.85 else self._asides)
        values = {slot: v.draw(slot) for slot in text.order}
        if text.names_subject:
            who = self.outline.subjects[0]
            values[SUBJECT] = who.pronoun[1] if text.parts[0] else v.one(who.short or (who.pronoun[0],))
            if (not text.parts[0] and text.parts[2].startswith("'s")) or text.parts[0]:
                values[SUBJECT] = f"the {who.kind.nouns[0]}"
        return _stop(text.fill(values))

    def _paragraphs(self, lines: Sequence[str]) -> str:
        """Lines to text: spaces, some paragraphs, a heading or a list now and then."""
        v, style = self.v, self.v.rng.random()
        text = ""
        if v.chance(0.12):
            text = _heading(self._phrase("heading")) + "\n\n"
        if style < 0.06:
            return text + "\n".join(f"- {line}" for line in lines)
        gap = 0.0 if style < 0.5 else 0.15
        return text + "".join(
            line + ("" if i + 1 == len(lines) else "\n\n" if v.chance(gap) else " ") for i, line in enumerate(lines)
        )


def _rest(say: Template, values: dict[str, str]) -> str:
    """The predicate of a template that opens with its subject."""
    return "".join(part if i % 2 == 0 else shown(part, values) for i, part in enumerate(say.parts[2:]))


def _head(path: Template, values: dict[str, str]) -> str:
    """ "the lead curator" out of "the {role} of {e}"; nothing where the phrase has another form."""
    *before, subject_, after = path.parts
    if subject_ != SUBJECT or after or not before[-1].endswith(" of ") or not before[0].startswith("the "):
        return ""
    if not {part.partition("+")[0] for part in before[1::2]} <= values.keys():
        return ""
    head = "".join(part if i % 2 == 0 else shown(part, values) for i, part in enumerate(before))
    return head[: -len(" of ")] if head.count(" ") <= 4 else ""


def _heading(text: str) -> str:
    mark, _, rest = text.rpartition("# ")
    return f"{mark}# {_capital(rest)}" if mark else _capital(text)


def _stop(text: str) -> str:
    """A sentence: capital, articles and commas in order, a full stop."""
    text = re.sub(r",(?=[.,;:]|$)", "", tidy(_capital(text)))
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
