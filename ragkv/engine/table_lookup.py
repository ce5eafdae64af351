"""Questions that name a row and a column of a table get the cell where these meet.

    Year: 2022                 "How many ducks were counted in 2022?"
    Ducks: 170                 the row has 2022, the column is Ducks: 170

    From: Vala Venn            "Who sent the mail about the crane?"
    Date: 2 Nov 2026           the passage found first is a mail: Vala Venn

A small model that quotes spans reads the cell of a neighbouring row. So where the words of a question leave no choice,
the tokens of the cell are forced: the answer is decoded, cited and kept as any other. Where they leave one, where they
ask for more than a cell (a total, the highest, a yes), or say more than rows and columns do, the model answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.engine.structured import Guide
from ragkv.normalisation import folded

if TYPE_CHECKING:
    from torch import Tensor

    from ragkv.engine.logits import RowLogits
    from ragkv.engine.request import Request
    from ragkv.model.decoder import DecoderModel
    from ragkv.types import Hit

MOST_WORDS = 12
"""Words of a cell that is an answer."""
MOST_LEFT = 1
"""Words of a question that neither rows nor columns have."""
_LONGEST_NAME = 40
_FIELD = re.compile(r"([^:\n|]{1,40}): (\S[^\n]*)")
_WORD = re.compile(r"[^\W_]+")
_SUPPLEMENT = re.compile(r", | \(| <|; ")
"""What stands before a supplement of a cell: `Venn, Dr`."""
_SMALL = frozenset(
    "a an the of in on at for by to from with and or as is are was were be been do does did has have had what which who"
    " whom whose when where how many much long old far it its this that these those there me i you we us tell give show"
    " please can could per s".split()
)
_MORE_THAN_A_CELL = frozenset(
    "total sum average mean median most least highest lowest largest smallest biggest oldest newest longest shortest"
    " max min maximum minimum more less fewer than between all any every each except not no without list both"
    " difference compare before after since until other another only together count".split()
)
_ASKS_OTHERWISE = frozenset("is are was were do does did has have had can could will would should why".split())
_MAIL = frozenset("mail email message letter".split())
_HEADERS = {
    "From": (frozenset("sent send wrote write written sender author from".split()), frozenset(("who", "what", "whom"))),
    "To": (frozenset("receive received receiver recipient to addressee".split()), frozenset(("who", "whom"))),
    "Date": (frozenset("sent send wrote written date dated".split()), frozenset(("when",))),
}
"""Header of a mail → words of which a question has one, and words that it begins with."""
_TIMES = ("date", "day", "year", "time")
"""What columns are called that say when."""
_PREFIX = 6
"""Letters at the beginning in which a word and another one of its family agree: `subscribe` and `subscription`."""
_ENDINGS = ("ing", "ed", "es", "s", "e")
_STEM = 3


@dataclass(frozen=True)
class Record:
    """A row of a table.

    Attributes:
        document: Id of its document.
        cells: Its cells by the names of their columns.
    """

    document: str
    cells: Mapping[str, str]


class CellGuide(Guide):
    """Leads an answer through the tokens of a cell. State of one request."""

    def __init__(self, tokens: Sequence[int]):
        """tokens: Of the cell, and one that ends the answer."""
        self._tokens = tuple(tokens)

    @property
    def complete(self) -> bool:
        """Whether the answer is whole and nothing can follow."""
        return not self._tokens

    def accept(self, token: int) -> None:
        """Take the token that was chosen."""
        self._tokens = self._tokens[1:]

    def forced(self, most: int) -> tuple[int, ...]:
        """Return the tokens that must follow, at most `most`."""
        return self._tokens[:most]

    def allows(self, row: RowLogits) -> bool:
        """Whether the most likely token may come next."""
        return self._tokens[:1] == (row.best,)

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits [vocabulary] with -inf for every token that may not come next."""
        allowed = logits.new_full(logits.shape, -float("inf"))
        allowed[list(self._tokens[:1])] = 0.0
        return logits + allowed


def cell_guide(model: DecoderModel, request: Request) -> CellGuide | None:
    """Return what leads an answer through the cell that a question names; None where it names none.

    Only models that quote spans are led, and only questions that ask for nothing but an answer.
    """
    options = request.options
    if not model.profile.extractive or options.beginning or options.instructions or options.answer_schema:
        return None
    cell = looked_up(request.read, request.hits)
    tokens = model.prompt.answer(cell) if cell else ()
    if not tokens or len(tokens) >= request.sampling.max_tokens:
        return None
    return CellGuide((*tokens, min(model.stop_ids)))


def looked_up(question: str, hits: Sequence[Hit]) -> str:
    """Return the cell of the passages that a question names by row and column; "" where that is not certain.

    Args:
        question: As the model reads it.
        hits: The passages.
    """
    words = _words(question)
    if not words or words[0] in _ASKS_OTHERWISE or (words[0] == "how" and words[1:2] not in (["many"], ["much"])):
        return ""
    if cell := _of_mail(words, hits):
        return cell
    records = [record for hit in hits for record in _records(hit)]
    named = [(_covered(record, words), record) for record in records]
    most = max((len(covered) for covered, _ in named), default=0)
    cells = set[str]()
    for covered, record in named:
        column = _asked(record, words, covered) if len(covered) == most > 0 else ""
        if not column:
            continue
        if _says_more(question, words, covered, column, record, hits):
            return ""
        cells.add(record.cells[column])
    (cell,) = cells if len(cells) == 1 else ("",)
    return cell if cell and _fits(words, cell) and len(_words(cell)) <= MOST_WORDS else ""


def _of_mail(words: Sequence[str], hits: Sequence[Hit]) -> str:
    """Return the header that a question about a mail asks for, where the best passage has it; "" for any other."""
    if _MAIL.isdisjoint(words) or not hits:
        return ""
    best = max(hits, key=lambda hit: hit.score).chunk.document_id
    mails = (record.cells for hit in hits if hit.chunk.document_id == best for record in _records(hit))
    cells = next((cells for cells in mails if {"From", "Date"} <= cells.keys() or {"From", "To"} <= cells.keys()), {})
    asked = [name for name, (said, first) in _HEADERS.items() if words[0] in first and not said.isdisjoint(words[1:])]
    if words[:2] == ["to", "whom"]:
        asked = ["To"]
    return cells.get(asked[0], "") if asked else ""


def _records(hit: Hit) -> Iterator[Record]:
    """Yield the rows of the tables of a passage: paragraphs of `name: value`, and lines of cells below their names."""
    for paragraph in hit.chunk.text.split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        fields = [_FIELD.fullmatch(line.strip()) for line in lines]
        if len(lines) > 1 and all(fields):
            cells = {field[1].strip(): field[2].strip() for field in fields if field}
            if len(cells) == len(lines):
                yield Record(hit.chunk.document_id, cells)
        elif len(lines) > 1 and all(" | " in line for line in lines):
            names, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
            for row in rows:
                if len(row) <= len(names) == len(set(names)) and max(map(len, names)) <= _LONGEST_NAME:
                    yield Record(
                        hit.chunk.document_id, {name: cell for name, cell in zip(names, row, strict=False) if cell}
                    )


def _covered(record: Record, words: Sequence[str]) -> dict[str, str]:
    """Return the columns of the cells that stand in a question, by the words of these cells."""
    text = f" {' '.join(words)} "
    found = dict[str, str]()
    for column, cell in record.cells.items():
        own = _words(_SUPPLEMENT.split(cell, maxsplit=1)[0])
        if own and not _SMALL.issuperset(own) and f" {' '.join(own)} " in text:
            found.update(dict.fromkeys(own, column))
    return found


def _asked(record: Record, words: Sequence[str], covered: Mapping[str, str]) -> str:
    """Return the column that a question names besides the cells of the row; "" where it names none or several."""
    stems = {_stem(word) for word in words if word not in covered and word not in _SMALL}
    stems |= set(map(_stem, _TIMES)) if words[0] == "when" else set()
    best, most = list[str](), 0
    for column in record.cells.keys() - set(covered.values()):
        names = [_stem(word) for word in _words(re.sub(r"\([^()]*\)", "", column)) if word not in _SMALL]
        met = sum(_is_among(name, stems) for name in names)
        if not names or not _is_among(names[-1], stems) or 2 * met < len(names) or met < most:
            continue
        best, most = [*best, column] if met == most else [column], met
    return best[0] if len(best) == 1 else ""


def _says_more(
    question: str,
    words: Sequence[str],
    covered: Mapping[str, str],
    column: str,
    record: Record,
    hits: Sequence[Hit],
) -> bool:
    """Whether a question says more than a row, a column and the title of their table do."""
    own = {hit.chunk.title for hit in hits if hit.chunk.document_id == record.document}
    known = {_stem(word) for text in (*record.cells, *own) for word in _words(text)} | {_stem(word) for word in covered}
    left = [word for word in words if word not in _SMALL and not _is_among(_stem(word), known)]
    texts = (hit.chunk.text for hit in hits if hit.chunk.document_id == record.document)
    elsewhere = {_stem(word) for text in texts for word in _words(text)} if left else set()
    asks_more = any(word in _MORE_THAN_A_CELL and _stem(word) not in map(_stem, _words(column)) for word in words)
    return (
        asks_more or len(left) > MOST_LEFT or any(_stem(word) in elsewhere or _is_name(word, question) for word in left)
    )


def _is_name(word: str, question: str) -> bool:
    """Whether a word is a number, or stands in a question with a capital."""
    return any(map(str.isdigit, word)) or f" {word.capitalize()}" in question


def _fits(words: Sequence[str], cell: str) -> bool:
    """Whether a cell is of the kind that a question asks for."""
    has_figures = any(map(str.isdigit, cell))
    if words[0] == "who":
        return not has_figures
    return has_figures or (words[0] not in ("when", "how"))


def _words(text: str) -> list[str]:
    return _WORD.findall(folded(text).casefold())


def _is_among(stem: str, stems: Iterable[str]) -> bool:
    """Whether a word, or one of its family, is among others."""
    return stem in stems or (
        len(stem) >= _PREFIX and any(other.startswith(stem[:_PREFIX]) for other in stems if len(other) >= _PREFIX)
    )


def _stem(word: str) -> str:
    """Return a word without its ending, so that `released` is `release` and `ducks` is `duck`."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _STEM:
            return word[: -len(ending)]
    return word
