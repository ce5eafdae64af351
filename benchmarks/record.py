"""Outcomes in a file, one JSON line each, so that an interrupted run can continue.

The first line identifies the run (model, questions, longest answer, prefix, dtype, body). A file of another run is
refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragkv.errors import InputError
from ragkv.evaluation.quality import Asked
from ragkv.evaluation.quality_figures import QualityFigures, QualityOutcome
from ragkv.evaluation.sets import QuestionSet
from ragkv.model.decoder import DecoderModel


class RunRecord:
    """The outcomes of one run: `done` from the file, and new ones appended to it."""

    def __init__(
        self,
        path: Path,
        model: DecoderModel,
        sets: Sequence[QuestionSet],
        max_tokens: int,
        prefix: str = "shared",
        body: str = "exact",
    ):
        """Read the file, or start it. Raises InputError if it holds another run or cannot be read."""
        questions = hashlib.sha256(repr([dataclasses.astuple(each) for each in sets]).encode()).hexdigest()
        self._path, self._sets = path, sets
        run = {"ragkv": "quality", "model": model.weights_hash, "questions": questions, "max_tokens": max_tokens}
        run |= {"prefix": prefix, "dtype": str(model.dtype), "body": body}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: cannot be read ({error})") from None
        if lines and not lines[-1].endswith("}"):  # the run was interrupted in the middle of a line
            lines.pop()
        if lines and _parse(path, 1, lines[0]) != run:
            raise InputError(
                f"{path} holds a run with another model, questions, answer length, prefix, dtype or body; "
                "name another file"
            )
        self.done: dict[Asked, QualityOutcome] = {}
        for number, line in enumerate(lines[1:], 2):
            outcome = self._outcome(number, _parse(path, number, line))
            self.done[(*outcome.at, outcome.method)] = outcome
        text = "".join(f"{line}\n" for line in lines or [json.dumps(run)])
        path.write_text(text, encoding="utf-8")

    def keep(self, outcome: QualityOutcome) -> None:
        """Append one outcome."""
        line = {
            "at": outcome.at,
            "method": outcome.method,
            "answer": outcome.answer,
            "figures": dataclasses.asdict(outcome.figures),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _outcome(self, number: int, line: Any) -> QualityOutcome:
        try:
            i, j = line["at"]
            return QualityOutcome(
                self._sets[i].questions[j], line["method"], line["answer"], QualityFigures(**line["figures"]), (i, j)
            )
        except (KeyError, TypeError, ValueError, IndexError):
            raise InputError(f"{self._path}:{number}: is no outcome of this run") from None


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}:{number}: not JSON ({error})") from None
