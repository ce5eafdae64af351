"""How contexts and their questions are drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """How contexts are drawn. Shares are probabilities.

    Attributes:
        own: facts of the document's kind.
        world: facts about something else; the remaining facts are those that any person or thing may have.
        plain: documents about just a person or a thing.
        generic: titles that name nobody.
        bridged: documents about several subjects, introduced one after the other.
        grouped: documents about several subjects side by side.
        twin: documents and pages with a twin, which has the same facts about other subjects.
        dependent: later pieces that never name their subject.
        rival: contexts of few kinds.
        page: documents that are instances of pages.
        swap: pages with some of their words replaced.
        cloze: questions made from a page's sentences, per question of the page.
        near: questions with one word replaced by a near word.
        absent_questions: questions of other pages, per page.
        lost: pieces that retrieval did not find.
        none: questions about claims without an answer; likewise `two`, `coref` and `keyword` by kind.
    """

    own: float = 0.4
    world: float = 0.2
    plain: float = 0.25
    generic: float = 0.5
    bridged: float = 0.45
    grouped: float = 0.12
    twin: float = 0.2
    dependent: float = 0.6
    rival: float = 0.4
    page: float = 0.6
    swap: float = 0.5
    cloze: float = 0.5
    near: float = 0.25
    absent_questions: float = 0.3
    lost: float = 0.08
    none: float = 0.1
    two: float = 0.33
    coref: float = 0.25
    keyword: float = 0.05

    def unaided(self) -> Shape:
        """The shape without the changes that are for training only: contexts and questions as written."""
        return replace(self, swap=0.0, cloze=0.0, near=0.0)
