"""A context and its questions, for one row of training or one set of the evaluation.

Questions are of the kinds one (the piece, or its title, names the subject), coref (only another piece does), two
(two facts, the first describes the subject) and none (there is no answer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

from tools.demo_model import cloze, near
from tools.demo_model.bank import SUBJECT, Banks, Fact, Kind
from tools.demo_model.compose import story
from tools.demo_model.near import Near
from tools.demo_model.page import Instance, Page, stock
from tools.demo_model.page import load as load_pages
from tools.demo_model.questions import UNKNOWN, Asked, Questioner, Told, vary
from tools.demo_model.shape import Shape
from tools.demo_model.story import Bridge, Outline, Story, subject
from tools.demo_model.values import Values

PAGE_WORDS = 270  # of a page, about
STANDS_FOR = {"device": "product", "policy": "org", "school": "university", "museum": "building", "hotel": "building"}
"""Slot type whose values may name a subject, if it differs from the type of the subject's name."""


@dataclass(frozen=True)
class Context:
    """Chunks, (title, text) in the order of the prompt, and questions about them."""

    chunks: tuple[tuple[str, str], ...]
    asked: tuple[Asked, ...]


@dataclass
class _Entry:
    """A planned document. facts, title: shared by twins."""

    kind: Kind
    name: str
    pieces: int
    words: int
    facts: tuple[Fact, ...] = ()
    title: str = ""


class Author:
    """Makes contexts. The same random numbers make the same contexts."""

    def __init__(self, rng: Random, banks: Banks, shape: Shape | None = None, words: Near | None = None):
        """Take the banks and pages. words: near words, which may replace words of questions."""
        self._near = words or {}
        self.v, self.banks, self.shape = Values(rng, banks.lists), banks, shape or Shape()
        named = {kind.name: kind for kind in banks.kinds}
        self._open = {True: [named["somebody"]], False: [named["something"], named["anything"]]}
        self._world = named["world"].facts
        known = frozenset(banks.lists)
        self._pages, self._others = load_pages(known), stock(known)
        self._kinds = [kind for kind in banks.kinds if kind.prose and kind.name != "anything"]
        self._by_maker: dict[str, list[Kind]] = {}
        for kind in self._kinds:
            self._by_maker.setdefault(kind.maker, []).append(kind)
            if kind.maker in STANDS_FOR:
                self._by_maker.setdefault(STANDS_FOR[kind.maker], []).append(kind)

    def open_facts(self, kind: Kind) -> Sequence[Fact]:
        """Facts that any person, or any thing, may have."""
        return self.v.one(self._open[kind.maker == "person"]).facts

    # -- documents

    def stories(self, words: int, piece: int, most: int) -> list[Story]:
        """Documents of about `words` words altogether, in pieces of about `piece` words, at most `most` pieces."""
        v, left, pieces = self.v, words, 0
        kinds = v.rng.sample(self._kinds, 2) if v.chance(self.shape.rival) else self._kinds
        plan: list[_Entry] = []
        told: list[Story] = []
        unused = v.rng.sample(self._pages, len(self._pages))
        while left > 0 and pieces < most:
            if unused and left > 1.5 * PAGE_WORDS and v.chance(self.shape.page):
                made = self._pages_of(unused.pop(), most - pieces)
                told += made
                left -= sum(len(text.split()) for each in made for text in each.pieces)
                pieces += sum(len(each.pieces) for each in made)
                continue
            kind = v.one(kinds if v.chance(0.7) else self._kinds)
            if v.chance(self.shape.plain):
                kind = v.one((self._open[True][0], self._open[False][0]))
            count = min(v.one((1, 1, 2, 2, 2, 3, 4)), most - pieces, max(1, round(left / piece)))
            size = int(piece * (0.7 + 0.5 * v.rng.random()))
            entry = _Entry(kind, v.draw(kind.maker), count, size)
            twins = v.whole(2, 3) if v.chance(self.shape.twin) and count > 1 else 1
            plan += self._twins(entry, min(twins, (most - pieces) // count)) if twins > 1 else [entry]
            left, pieces = left - twins * count * piece, pieces + twins * count
        linked: dict[str, list[str]] = {}
        for entry in plan:
            linked.setdefault(STANDS_FOR.get(entry.kind.maker, entry.kind.maker), []).append(entry.name)
        return told + [story(v, self.banks, self._outline(entry, linked)) for entry in plan]

    def _pages_of(self, page: Page, most: int) -> list[Story]:
        """The documents of a page, if there is room for them, and perhaps those of a twin.

        The twin has the same titles if these name nobody.
        """
        v = self.v
        if len(page.pieces) > most:
            return []
        if not v.chance(self.shape.twin) or 2 * len(page.pieces) > most:
            return _documents(Instance(v, page, self._others if v.chance(self.shape.swap) else None), twin=False)
        first, second = both = Instance(v, page), Instance(v, page)
        said = [value for each in both for value in each.values.values()]
        second.titles = [
            other if any(value in title + other for value in said) else title
            for title, other in zip(first.titles, second.titles, strict=True)
        ]
        return [story for each in both for story in _documents(each, twin=True)]

    def _twins(self, entry: _Entry, count: int) -> list[_Entry]:
        """Documents under one title with the same facts about different subjects, which only the first pieces name."""
        v = self.v
        facts = [
            fact for fact in self._facts(entry.kind, self._wanted(entry)) if any(s.names_subject for s in fact.say)
        ]
        titles = [title for title in entry.kind.titles if not title.names_subject] or entry.kind.titles
        form = v.one(titles)
        title = form.fill({slot: v.draw(slot) for slot in form.order} | {SUBJECT: v.draw(entry.kind.maker)})
        return [
            _Entry(entry.kind, v.draw(entry.kind.maker), entry.pieces, entry.words, tuple(facts), title)
            for _ in range(count)
        ]

    def _wanted(self, entry: _Entry) -> int:
        """Number of facts of a document."""
        return max(2, int(entry.pieces * entry.words / 13 * (0.45 + 0.5 * self.v.rng.random())))

    def _outline(self, entry: _Entry, linked: dict[str, list[str]]) -> Outline:
        v, shape, kind = self.v, self.shape, entry.kind
        main = subject(v, kind, entry.name)
        outline = Outline(
            [main], [], entry.pieces, entry.words, shape.dependent, v.chance(shape.generic), linked=linked
        )
        if entry.facts:
            outline.facts, outline.dependent, outline.title = (
                [v.rng.sample(entry.facts, len(entry.facts))],
                1.0,
                entry.title,
            )
            return outline
        u, requested = v.rng.random(), self._wanted(entry)
        if u < shape.bridged and requested >= 4:
            self._bridge(outline, requested)
        elif u < shape.bridged + shape.grouped and requested >= 4:
            self._group(outline, requested)
        else:
            outline.facts = [self._facts(kind, requested)]
        return outline

    def _facts(self, kind: Kind, count: int) -> list[Fact]:
        """Facts of a kind, facts that any person or thing may have, and facts about other things."""
        v, shape = self.v, self.shape
        pools = [kind.facts, *(each.facts for each in self._open[kind.maker == "person"] if each is not kind)]
        own = round(count * shape.own) if len(pools) > 1 else count
        world = round(count * shape.world)
        chosen = v.rng.sample(kind.facts, min(own, len(kind.facts)))
        for pool in pools[1:]:
            room = count - world - len(chosen)
            chosen += v.rng.sample(pool, max(0, min(room if pool is pools[-1] else room * 2 // 3, len(pool))))
        chosen += v.rng.sample(self._world, min(world, len(self._world)))
        v.rng.shuffle(chosen)
        return chosen

    def _bridge(self, outline: Outline, requested: int) -> None:
        """Add one or two values of the main subject as further subjects of the document."""
        v, main = self.v, outline.subjects[0]
        facts = self._facts(main.kind, max(2, requested * 2 // 3))
        doors = [(f, s) for f in facts for s in f.path if s.rstrip("0123456789") in self._by_maker]
        v.rng.shuffle(doors)
        for fact, slot in doors[: v.whole(1, 2)]:
            kinds = self._by_maker[slot.rstrip("0123456789")]
            kind = self._open[True][0] if kinds[0].maker == "person" and v.chance(0.4) else v.one(kinds)
            who = subject(v, kind, v.draw(slot))
            outline.subjects.append(who)
            outline.bridges.append(Bridge(fact, slot, who))
        first = {id(bridge.fact) for bridge in outline.bridges}
        facts.sort(key=lambda fact: id(fact) not in first)
        each = max(1, (requested - len(facts)) // max(1, len(outline.bridges)))
        outline.facts = [facts, *(self._facts(bridge.subject.kind, each + 1) for bridge in outline.bridges)]

    def _group(self, outline: Outline, requested: int) -> None:
        """Two or three subjects of one kind side by side, with the same facts."""
        v, main = self.v, outline.subjects[0]
        count = v.whole(2, 3)
        outline.subjects += [subject(v, main.kind, v.draw(main.kind.maker)) for _ in range(count - 1)]
        shared = self._facts(main.kind, max(2, requested // count))
        outline.facts = [v.rng.sample(shared, len(shared)) for _ in outline.subjects]
        outline.generic = True

    # -- contexts

    def context(self, words: int, piece: int, most: int, questions: int) -> Context:
        """A context of about `words` words with about `questions` questions, perhaps fewer."""
        return self.arrange(self.stories(words, piece, most), questions)

    def arrange(self, stories: Sequence[Story], questions: int) -> Context:
        """Shuffle the documents, keep the order of their pieces, and make questions."""
        v = self.v
        order = v.rng.sample(list(stories), len(stories))
        chunks: list[tuple[str, str]] = []
        told: list[Told] = []
        ready: list[Asked] = []
        placed: dict[int, tuple[Story, dict[int, int]]] = {}
        for tale in order:
            lost = {n for n in range(len(tale.pieces)) if len(tale.pieces) > 1 and v.chance(self.shape.lost)}
            at = {}
            for number, text in enumerate(tale.pieces):
                if number not in lost:
                    at[number] = len(chunks)
                    chunks.append((tale.title, text))
            told += [Told(claim, at[claim.piece], not lost) for claim in tale.claims if claim.piece in at]
            if tale.instance:
                _, there = placed.setdefault(id(tale.instance), (tale, {}))
                there.update({tale.first + number: chunk for number, chunk in at.items()})
        for tale, there in placed.values():
            ready += self._ready(tale, there)
            if v.chance(self.shape.absent_questions):
                ready.append(self._absent({id(other.instance.page) for other in order if other.instance}))
        ready = v.rng.sample(ready, min(len(ready), questions))
        asked = [*ready, *Questioner(v, self.shape, chunks, told, self.open_facts).ask(questions - len(ready))]
        return Context(tuple(chunks), tuple(self._reworded(q) for q in v.rng.sample(asked, len(asked))))

    def _reworded(self, asked: Asked) -> Asked:
        if not self._near or asked.kind == "none" or not self.v.chance(self.shape.near):
            return asked
        return replace(asked, text=near.put(self.v, self._near, asked.text))

    def _absent(self, here: set[int]) -> Asked:
        """A question of a page that is not in the context."""
        v = self.v
        page = v.one(self._pages)
        while id(page) in here:
            page = v.one(self._pages)
        return Asked(vary(v, Instance(v, page).render(v.one(v.one(page.lines).wordings))), UNKNOWN, "none")

    def _ready(self, told: Story, at: dict[int, int]) -> Iterator[Asked]:
        """The questions of a page, each in one wording; for a twin those that name somebody. at: chunk by piece."""
        v, instance = self.v, told.instance
        if not instance:
            return
        whole = len(at) == len(instance.pieces)
        for line in instance.page.lines:
            wordings = [each for each in line.wordings if not told.twin or instance.names(each)]
            if not wordings or (told.twin and not whole):
                continue
            wording = v.one(wordings)
            text = vary(v, instance.render(wording))
            if line.kind == "none":
                yield Asked(text, UNKNOWN, "none")
                continue
            answer = instance.answer(line.answer)
            place = instance.place(line, answer)
            if place and place[0] in at and (whole or line.kind == "one"):
                far = told.twin and not any(name in instance.pieces[place[0]] for name in instance.names(wording))
                kind = "coref" if far and line.kind == "one" else line.kind
                yield Asked(text, answer, kind, at[place[0]], place[1])
            elif not any(answer in instance.pieces[n] for n in at):
                yield Asked(text, UNKNOWN, "none")
        found = [] if told.twin else list(cloze.gaps(instance.pieces, instance.values))
        for gap in v.rng.sample(found, min(len(found), round(self.shape.cloze * len(instance.page.lines)))):
            text = cloze.ask(v, instance.pieces[gap.piece], gap)
            if text and gap.piece in at:
                yield Asked(vary(v, text), gap.value, "one", at[gap.piece], gap.start)


def _documents(instance: Instance, twin: bool) -> list[Story]:
    """Every document of a page as a story."""
    stories, first = [], 0
    for title, sheet in zip(instance.titles, instance.page.sheets, strict=True):
        pieces = instance.pieces[first : first + len(sheet.pieces)]
        stories.append(Story(title, pieces, instance=instance, first=first, twin=twin))
        first += len(pieces)
    return stories
