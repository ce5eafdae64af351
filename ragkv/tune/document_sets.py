"""Questions about a user's own documents, to calibrate a model with (`ragkv calibrate --documents`).

They are made by the rules that `ragkv tune` uses (questions.py). Only those are taken whose answer stands in one chunk:
the calibration measures whether attention finds that place.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from ragkv.engine.calibration import CalibrationQuestion, CalibrationSet
from ragkv.evaluation.questions import Asked
from ragkv.tune.contexts import Context, Source


@dataclass(frozen=True)
class DocumentSetParams:
    """Sizes of the sets.

    Attributes:
        sets: Number of contexts.
        tokens: Tokens of a context, about.
        questions: Most questions of a context.
        seed: Seed of the contexts.
    """

    sets: int = 16
    tokens: int = 3072
    questions: int = 8
    seed: int = 0


def document_sets(source: Source, params: DocumentSetParams = DocumentSetParams()) -> list[CalibrationSet]:
    """Return sets of chunks with questions; a context of which no question could be made is left out."""
    found = list[CalibrationSet]()
    for number in range(params.sets):
        context = source.context(Random(f"calibration/{params.seed}/{number}"), params.tokens)
        placed = [each for asked in context.asked if (each := _placed(context, asked)) is not None]
        if placed:
            found.append(CalibrationSet(context.chunks, tuple(placed[: params.questions])))
    return found


def _placed(context: Context, asked: Asked) -> CalibrationQuestion | None:
    """Return the question with the place of its answer; None where no chunk or more than one place holds it."""
    if asked.kind != "one" or asked.chunk < 0:
        return None
    text = context.chunks[asked.chunk][1]
    start = text.find(asked.answer)
    if start < 0 or sum(chunk_text.count(asked.answer) for _, chunk_text in context.chunks) > 1:
        return None
    return CalibrationQuestion(asked.text, asked.chunk, start, start + len(asked.answer))
