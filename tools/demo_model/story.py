"""The parts of a document: subjects, claims, an outline of its content, and the document itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.demo_model.bank import Fact, Kind, shown
from tools.demo_model.page import Instance
from tools.demo_model.values import Values

PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his"), "it": ("it", "it", "its")}


@dataclass(eq=False)
class Subject:
    """The person or thing that sentences are about.

    Attributes:
        pronoun: subject, object and possessive form.
        short: names that a text may use after the introduction.
    """

    kind: Kind
    name: str
    pronoun: tuple[str, str, str]
    short: tuple[str, ...] = ()


@dataclass(eq=False)
class Claim:
    """A fact as a document states it.

    Attributes:
        values: value of each slot.
        seen: form of the value in the text.
        bare: the sentence does not mention its subject.
        named: the piece, or the title, names the subject.
        nameless: no piece names the subject.
        dressed: slots with an addition of the text.
        added: claims that the additions make.
    """

    subject: Subject
    fact: Fact
    values: dict[str, str]
    seen: dict[str, str]
    slots: frozenset[str]
    piece: int = 0
    bare: bool = False
    named: bool = True
    nameless: bool = False
    sentence: str = ""
    dressed: dict[str, str] = field(default_factory=dict)
    added: list[Claim] = field(default_factory=list)

    def text(self, part: str) -> str:
        """Text of a slot in the statement, with its addition."""
        return self.dressed.get(part) or shown(part, self.values)


@dataclass(eq=False)
class Story:
    """A document: title, the text of each piece, and its claims; or an instance of a page, which has its own questions.

    Attributes:
        first: number of the page's piece that is the first one here.
        twin: whether the same context has another instance.
    """

    title: str
    pieces: list[str]
    claims: list[Claim] = field(default_factory=list)
    instance: Instance | None = None
    first: int = 0
    twin: bool = False


@dataclass
class Bridge:
    """A value of the main subject's fact that the document goes on to tell about."""

    fact: Fact
    slot: str
    subject: Subject


@dataclass
class Outline:
    """Content of a document: its subjects, the main one first, and the facts of each.

    Attributes:
        words: words of a piece.
        dependent: share of later pieces that never name their subject.
        generic: whether the title names nobody.
        title: replaces the titles of the kind.
        bridges: how other subjects are introduced; without them, all are introduced side by side.
        linked: names of other documents' subjects by slot type, which may be used as values.
    """

    subjects: list[Subject]
    facts: list[list[Fact]]
    pieces: int
    words: int
    dependent: float = 0.6
    generic: bool = False
    title: str = ""
    bridges: list[Bridge] = field(default_factory=list)
    linked: dict[str, list[str]] = field(default_factory=dict)


def subject(v: Values, kind: Kind, name: str) -> Subject:
    """A subject with its pronoun and its short names: "the firm", a surname, initials, a defined term."""
    people = kind.maker == "person"
    pronoun = PRONOUNS[v.one(("she", "he")) if people else "it"]
    short = [f"the {noun}" for noun in kind.nouns[:4]]
    words = name.split()
    if people and len(words) > 1:
        short.append(words[-1])
    elif len(words) > 1 and v.chance(0.3):
        short.append("".join(word[0] for word in words if word[0].isupper()) or words[0])
    return Subject(kind, name, pronoun, tuple(short))
