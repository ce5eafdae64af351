"""What a document is made of: subjects, claims, an outline of what it is to hold, and the document itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.demo_model.bank import Fact, Kind, shown
from tools.demo_model.page import Instance
from tools.demo_model.values import Values

PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his"), "it": ("it", "it", "its")}


@dataclass(eq=False)
class Subject:
    """Whom or what sentences are about. pronoun: subject, object and possessive form · short: what a text may call it
    once it was introduced."""

    kind: Kind
    name: str
    pronoun: tuple[str, str, str]
    short: tuple[str, ...] = ()


@dataclass(eq=False)
class Claim:
    """A fact as a document states it.

    values: what fills each slot · seen: the form it stands in · bare: the sentence does not speak of its subject ·
    named: the piece, or the title, names the subject · nameless: no piece does · dressed: slots with what the text adds
    to them · added: the claims that this makes.
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
        """What a slot of the statement shows, with what the text adds to it."""
        return self.dressed.get(part) or shown(part, self.values)


@dataclass(eq=False)
class Story:
    """A document: title, the text of each piece, and what it claims; or an instance of a page, which knows its own
    questions. first: which of its pieces is the story's first · twin: another instance stands in the same context."""

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
    """What a document is to hold: subjects, the first one its main subject, and facts of each.

    words: of one piece · dependent: share of later pieces that never name their subject · generic: whether the title
    names nobody · title: instead of one of the kind's · bridges: how other subjects come in; without them, all are
    introduced side by side · linked: names of other documents' subjects by slot type, which values may be.
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
