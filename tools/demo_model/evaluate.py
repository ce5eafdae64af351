"""Quality of the weights: generated sets by length and the natural set by chunks, by kind, with `full` and `reuse`.

`python -m tools.demo_model.evaluate MODEL` prints the tables of the model card. The seeds are unseen, and training
never uses the natural set.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

from benchmarks.natural import NATURAL, natural_sets
from ragkv.evaluation.evidence import packaged_evidence
from ragkv.evaluation.quality import QualityParams, ask_all
from ragkv.evaluation.quality_figures import QualityOutcome
from ragkv.evaluation.sets import GoldSpan, QuestionSet, SetQuestion
from ragkv.model.decoder import DecoderModel
from tools.demo_model.bank import load
from tools.demo_model.recipe import BUNDLED
from tools.demo_model.rows import MOST_CHUNKS, RowMaker
from tools.demo_model.task import Author, Context

METHODS = ("full", "reuse")
KINDS = ("one", "coref", "two", "none")
UNSEEN = 1_000_000  # training uses no seeds from here on
QUESTION_ROOM = 64
LENGTHS = (1024, 2048, 4096, 8192)


def generated(model: DecoderModel, tokens: int, sets: int, questions: int) -> list[QuestionSet]:
    """Contexts of nearly `tokens` tokens, from unseen seeds, in the shape of the last stage, nothing reworded."""
    made: list[QuestionSet] = []
    shape = BUNDLED.stages[-1].shape.unaided()
    maker = RowMaker(model.tokenizer, model.prompt, shape)
    for number in range(10 * sets):
        author = Author(Random(f"{UNSEEN + number}/{tokens}"), load(), shape)
        piece = author.v.one([size for size in (110, 230, 320, 400) if 2 * size < tokens < size * MOST_CHUNKS])
        stories = maker.stories(author, tokens - QUESTION_ROOM, piece)
        context = author.arrange(stories, questions)
        if sum(len(model.prompt.chunk(*chunk)) for chunk in context.chunks) > 0.85 * tokens:
            made.append(_set(context))
        if len(made) == sets:
            break
    return made


def _set(context: Context) -> QuestionSet:
    questions = (
        SetQuestion(
            q.text, (q.answer,), q.kind, None if q.chunk < 0 else GoldSpan(q.chunk, q.start, q.start + len(q.answer))
        )
        for q in context.asked
    )
    return QuestionSet(context.chunks, tuple(questions))


def table(name: str, outcomes: Sequence[QualityOutcome]) -> Iterator[str]:
    """Lines of a table: exact match by kind, false unknowns, answers that end by themselves."""
    for method in METHODS:
        mine = [o for o in outcomes if o.method == method]
        cells = [f"{kind} {_mean([o.figures.em for o in mine if o.question.kind == kind])}" for kind in KINDS]
        told = [o for o in mine if o.question.kind != "none"]
        hard = [o.figures.em for o in mine if o.question.kind in ("coref", "two")]
        cells += [
            f"coref+two {_mean(hard)}",
            f"answerable {_mean([o.figures.em for o in told])}",
            f"f1 {_mean([o.figures.f1 for o in mine])}",
            f"false unknown {_mean([float(o.answer == 'unknown') for o in told])}",
            f"stops {_mean([o.figures.stopped for o in mine])}",
        ]
        yield f"{name:<16} {method:<6} EM {_mean([o.figures.em for o in mine])}  " + "  ".join(cells)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f} ({len(values)})" if values else "-"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.evaluate", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sets", type=int, default=8, help="generated sets per length")
    parser.add_argument("--questions", type=int, default=25, help="questions per generated set")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--chunks", type=int, nargs="*", default=[8, 24], help="chunks of the natural contexts")
    parser.add_argument("--natural", type=Path, default=NATURAL, help="folder of the natural set")
    parser.add_argument("--json", type=Path, help="write every answer here")
    chosen = parser.parse_args()
    model = DecoderModel.load(chosen.model, chosen.device, "float32")
    runs = [(f"generated {n}", generated(model, n, chosen.sets, chosen.questions)) for n in chosen.lengths]
    runs += [(f"natural {n} chunks", natural_sets(n, folder=chosen.natural)) for n in chosen.chunks]
    kept, params = [], QualityParams(evidence=packaged_evidence(model))
    for name, sets in runs:
        outcomes = ask_all(model, sets, METHODS, lambda *_: None, params)
        print("\n".join(table(name, outcomes)), flush=True)
        kept += [asdict(outcome) | {"run": name} for outcome in outcomes]
    if chosen.json:
        chosen.json.write_text(json.dumps(kept, ensure_ascii=False, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
