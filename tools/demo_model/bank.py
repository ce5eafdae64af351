"""Fact banks: what can be said about a kind of thing, and how people ask for it. Plain text, see banks/*.txt.

    values WORD: a / b / c        a word list, usable as slot {WORD}
    phrases NAME: a | b | c       what any document may hold besides facts
    kind NAME                     a kind of subject; then name, noun, title, prose. A kind may go on in another file
    fact                          one relation; then say, ask SLOT, path SLOT, and perhaps over

Alternatives are separated by " | ", a longer line goes on in indented lines. `{e}` is the subject, `{type}` or
`{type2}` a slot that `values.Values` fills; `{verb+ed}`, `{noun+s}` a form of what fills it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tools.demo_model.inflect import IRREGULAR, inflect
from tools.demo_model.values import knows

BANKS = Path(__file__).parent / "banks"
SUBJECT = "e"
DRESS = "with_"
_SLOT = re.compile(r"\{(\w+(?:\+\w+)?)\}")


_KEYWORD = re.compile(r"((values|phrases) \w+:|kind \w+$|fact$|(name|noun|title|prose|over|say|ask @?\w+|path @?\w+):)")


class BankError(ValueError):
    """A bank file that cannot be used; says the file and the line of text."""


@dataclass(frozen=True)
class Template:
    """Text with slots. parts: literal, slot, literal, … , literal, where a slot may ask for a form (`verb+ed`) · slots:
    their names, without forms and without the subject's · order: the same in the order of the text, for everything
    that draws: the order of a set is another one in every process."""

    parts: tuple[str, ...]
    order: tuple[str, ...]
    slots: frozenset[str]

    @property
    def opens(self) -> bool:
        """Whether the subject comes first, so that the rest is a predicate."""
        return len(self.parts) > 1 and not self.parts[0] and self.parts[1] == SUBJECT and self.parts[2].startswith(" ")

    @property
    def names_subject(self) -> bool:
        """Whether the subject stands in it."""
        return SUBJECT in self.parts[1::2]

    def fill(self, values: dict[str, str]) -> str:
        """The text. values: by slot, the subject's included."""
        filled = list(self.parts)
        for at in range(1, len(filled), 2):
            filled[at] = shown(filled[at], values)
        return "".join(filled)


@dataclass(frozen=True)
class Fact:
    """One relation of a kind. ask: questions by the slot that answers them · path: phrases that stand for a slot."""

    say: tuple[Template, ...]
    ask: dict[str, tuple[Template, ...]]
    path: dict[str, tuple[Template, ...]]


@dataclass(frozen=True)
class Kind:
    """A kind of subject. maker: the slot type of its name · nouns: what a text may call it after "the"."""

    name: str
    maker: str
    nouns: tuple[str, ...]
    titles: tuple[Template, ...]
    prose: tuple[Template, ...]
    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Banks:
    """All kinds, word lists and phrases."""

    kinds: tuple[Kind, ...]
    lists: dict[str, tuple[str, ...]]
    phrases: dict[str, tuple[Template, ...]]

    @cached_property
    def dress(self) -> dict[str, tuple[Fact, ...]]:
        """What may be added to a name, by the type of the name: the facts of the kinds called with_TYPE."""
        return {kind.name.removeprefix(DRESS): kind.facts for kind in self.kinds if kind.name.startswith(DRESS)}

    @cached_property
    def asides(self) -> tuple[Template, ...]:
        """Sentences of all kinds that name no subject."""
        return tuple(text for kind in self.kinds for text in kind.prose if not text.names_subject)


def template(text: str) -> Template:
    """Parse one alternative."""
    parts = tuple(_SLOT.split(text))
    order = tuple(dict.fromkeys(part.partition("+")[0] for part in parts[1::2] if part != SUBJECT))
    return Template(parts, order, frozenset(order))


def shown(part: str, values: dict[str, str]) -> str:
    """What a slot of a template shows: its value, or a form of it."""
    return inflect(part, values[part.partition("+")[0]]) if "+" in part else values[part]


@cache
def load(folder: Path = BANKS) -> Banks:
    """Read every bank of a folder, in order of their names. Raises BankError."""
    lists: dict[str, tuple[str, ...]] = {}
    phrases: dict[str, tuple[Template, ...]] = {}
    drafts: dict[str, _Draft] = {}
    for path in sorted(folder.glob("*.txt")):
        for line in _lines(path.read_text(encoding="utf-8")):
            try:
                _read(line, lists, phrases, drafts)
            except (KeyError, IndexError, ValueError) as error:
                raise BankError(f"{path.name}: {error}: {line[:100]}") from error
    lists["verb"] = lists.get("verb", ()) + tuple(IRREGULAR)
    kinds = tuple(draft.kind() for draft in drafts.values())
    for kind in kinds:
        _check(kind, lists)
    return Banks(kinds, lists, phrases)


class _Draft:
    """A kind while it is read."""

    def __init__(self, name: str):
        self.name, self.fields = name, dict[str, str]()
        self.facts: list[dict[str, str]] = []

    def kind(self) -> Kind:
        facts = tuple(
            Fact(_alternatives(fact.get("say", "")), _by_slot(fact, "ask"), _paths(fact))
            for told in self.facts
            for fact in _over(told)
        )
        nouns = tuple(noun.strip() for noun in self.fields["noun"].split("|"))
        titles, prose = _alternatives(self.fields["title"]), _alternatives(self.fields.get("prose", ""))
        return Kind(self.name, self.fields["name"].strip(), nouns, titles, prose, facts)


def _over(fact: dict[str, str]) -> Iterator[dict[str, str]]:
    """A fact with `over: slot:word / …` once for every pair, put in place of @slot and @word."""
    pairs = [pair.strip().partition(":") for pair in fact.get("over", "").split("/") if pair.strip()]
    for slot, _, word in pairs or [("", "", "")]:
        yield {
            head.replace("@slot", slot): text.replace("@slot", slot).replace("@word", word)
            for head, text in fact.items()
            if head != "over"
        }


def _lines(text: str) -> Iterator[str]:
    """Logical lines: a line without a keyword belongs to the one before."""
    held = ""
    for raw in text.splitlines():
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if re.match(
            r"((values|phrases) \w+:|kind \w+$|fact$|(name|noun|title|prose|over|say|ask @?\w+|path @?\w+):)", line
        ):
            if held:
                yield held
            held = line
        else:
            held += " " + line
    if held:
        yield held


def _read(
    line: str, lists: dict[str, tuple[str, ...]], phrases: dict[str, tuple[Template, ...]], drafts: dict[str, _Draft]
) -> None:
    head, _, rest = line.partition(":")
    match head.split():
        case ["values", name]:
            lists[name] = lists.get(name, ()) + tuple(word.strip() for word in rest.split(" / "))
        case ["phrases", name]:
            phrases[name] = phrases.get(name, ()) + _alternatives(rest)
        case ["kind", name]:
            drafts[name] = drafts.pop(name, _Draft(name))  # the one that is read stands last
        case ["fact"]:
            _last(drafts).facts.append({})
        case ["name" | "noun" | "title" | "prose" as field]:
            _last(drafts).fields[field] = rest
        case _:
            fact = _last(drafts).facts[-1]
            fact[head] = f"{fact[head]} | {rest}" if head in fact else rest


def _last(drafts: dict[str, _Draft]) -> _Draft:
    return next(reversed(drafts.values()))


def _alternatives(text: str) -> tuple[Template, ...]:
    return tuple(template(part.strip()) for part in text.split("|") if part.strip())


def _by_slot(fact: dict[str, str], field: str) -> dict[str, tuple[Template, ...]]:
    return {head.split()[1]: _alternatives(text) for head, text in fact.items() if head.startswith(f"{field} ")}


_PHRASES = (
    (re.compile(r"Who (?:is|was) (the [a-z ]+ of \{e\})\?"), r"\1"),
    (re.compile(r"Who (?!is |was |did |does |has )([^?]*\{e\}[^?]*)\?"), r"the person who \1"),
    (re.compile(r"Which company (?!did |does )([^?]*\{e\}[^?]*)\?"), r"the company that \1"),
    (re.compile(r"Where (is|was) (\{e\}) ([^?]+)\?"), r"the place where \2 \1 \3"),
    (re.compile(r"In which (town|city|place|village) (is|was) (\{e\}) ([^?]+)\?"), r"the \1 in which \3 \2 \4"),
)
"""Phrases that stand for the answer of a question: "Who leads {e}?" makes "the person who leads {e}"."""


def _paths(fact: dict[str, str]) -> dict[str, tuple[Template, ...]]:
    """The paths of a fact, and those that its questions make."""
    paths = _by_slot(fact, "path")
    for head, text in fact.items():
        slot = head.removeprefix("ask ")
        if head.startswith("ask ") and slot.rstrip("0123456789") in ("person", "company", "city"):
            made = [
                rule.sub(form, q.strip())
                for q in text.split("|")
                for rule, form in _PHRASES
                if rule.fullmatch(q.strip())
            ]
            made = [phrase for phrase in made if not (slot.startswith("company") and "person" in phrase)]
            paths[slot] = paths.get(slot, ()) + tuple(template(phrase) for phrase in made)
    return {slot: forms for slot, forms in paths.items() if forms}


def _check(kind: Kind, lists: dict[str, tuple[str, ...]]) -> None:
    if not knows(kind.maker, lists):
        raise BankError(f"kind {kind.name}: no maker of names {kind.maker!r}")
    for fact in kind.facts:
        for form in (*fact.say, *(form for forms in fact.ask.values() for form in forms)):
            if form.parts.count(SUBJECT) > 1:
                raise BankError(f"kind {kind.name}: the subject stands twice: {form.parts}")
        said = frozenset[str]().union(*(say.slots for say in fact.say))
        for slot in (*fact.ask, *fact.path):
            if slot not in said:
                raise BankError(f"kind {kind.name}: {slot!r} is asked for but never said: {fact.say}")
        for slot in said:
            if not knows(slot.rstrip("0123456789"), lists):
                raise BankError(f"kind {kind.name}: nothing fills the slot {slot!r}")
    for text in (*kind.prose, *kind.titles):
        for slot in text.slots:
            if not knows(slot.rstrip("0123456789"), lists):
                raise BankError(f"kind {kind.name}: nothing fills the slot {slot!r}: {text.parts}")
