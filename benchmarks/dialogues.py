"""`ragkv bench dialogues`: generated conversations, compared turn by turn with one dense prefill.

A turn is a user's text with a question somewhere in it: at the beginning, in the middle or at the end, as in the
benchmark of LoopServe (arXiv 2507.13681, section 4.1). Every turn is asked in the conversation, under the policies of a
combination. Then everything up to its question, the conversation's own answers included, is prefilled at once, densely,
and answered (single-shot). The last turn is asked once more in a conversation with the same history of which no KV is
in memory: the cost of starting over.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.stages import Stages
from ragkv.catalog import StoredTurn
from ragkv.engine.decoding import decode
from ragkv.engine.detokenizer import StopChecker
from ragkv.engine.engine import Engine
from ragkv.engine.generation import Sampling
from ragkv.engine.needle_words import ASIDES
from ragkv.engine.needles import NeedleQuestion, make_needles
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.evaluation.score import exact_match
from ragkv.ingest.pipeline import ingest
from ragkv.report import Answer, Report
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Document

Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

PLACES = ("beginning", "middle", "end")
"""Place of a question in its turn. The turns of a dialogue rotate through them, and so do first turns."""

SENTENCES = tuple(aside for aside in ASIDES if "{" not in aside)
"""Sentences around the questions."""


@dataclass(frozen=True)
class DialogueParams:
    """What is asked. All chunks of a set are retrieved.

    Attributes:
        dialogues: number of dialogues.
        each: dialogues per set of documents.
        turns: turns of a dialogue.
        chunks: chunks of a set.
        chunk_tokens: tokens per chunk, about.
        sentences: sentences around every question.
        max_tokens: longest answer.
        seed: seed of the sets and texts.
    """

    dialogues: int = 30
    each: int = 6
    turns: int = 3
    chunks: int = 8
    chunk_tokens: int = 512
    sentences: int = 2
    max_tokens: int = 24
    seed: int = 11


@dataclass(frozen=True)
class DialogueTurn:
    """What the user says in a turn. place: of the question in the text, one of PLACES."""

    text: str
    gold: str
    place: str


@dataclass(frozen=True)
class Dialogue:
    """A dialogue: its turns, and the collection of its documents."""

    collection: str
    turns: tuple[DialogueTurn, ...]


@dataclass(frozen=True)
class DialogueOutcome:
    """An answered turn.

    Attributes:
        single: the answer after one dense prefill of everything up to the question.
        gold: the right answer.
        place: place of the question, one of PLACES.
        report: of the answer.
    """

    answer: str
    single: str
    gold: str
    place: str
    report: Report

    @property
    def right(self) -> bool:
        """Whether the answer is an exact match."""
        return exact_match(self.answer, (self.gold,)) == 1.0


@dataclass(frozen=True)
class Held:
    """A finished dialogue. over, over_ttft: prefilled and ttft of its last turn with an empty cache."""

    outcomes: tuple[DialogueOutcome, ...]
    over: float
    over_ttft: float


@dataclass(frozen=True)
class DialogueFigures:
    """Figures of one method under one prefill policy and one decode policy.

    Attributes:
        agree: turns answered as after one dense prefill.
        right: turns whose answer is an exact match.
        em: exact match by place of the question, in the order of PLACES; None where no question stood there.
        pairs: query-key pairs that the prefills of all turns read / those of dense attention.
        keys: keys that the decode steps of all turns read / keys present.
        whole: dialogues in which all turns agree.
        prefilled: mean tokens by number of the turn.
        ttft: mean milliseconds by number of the turn.
        over: mean tokens prefilled in the last turn with an empty cache.
        over_ttft: likewise, milliseconds.
        share: tokens prefilled in the last turn / with an empty cache, the largest of all dialogues.
    """

    method: str
    prefill: str
    decode: str
    dialogues: int
    turns: int
    agree: int
    right: int
    em: tuple[float | None, ...]
    pairs: float
    keys: float
    whole: int
    prefilled: tuple[float, ...]
    ttft: tuple[float, ...]
    over: float
    over_ttft: float
    share: float


def fill(engine: Engine, params: DialogueParams, progress: Progress) -> list[Dialogue]:
    """Ingest generated sets, a collection each, and make the dialogues about them.

    The engine's `chunk_tokens` must be at least those of the params.
    """
    made: list[Dialogue] = []
    wrapper = 32  # room for the wrapper and an overshoot of the last sentence, so that a document is one chunk
    sets = -(-params.dialogues // params.each)
    for number in range(sets):
        seed, name = params.seed + number, f"dialogues-{params.seed + number}"
        needles = make_needles(
            seed,
            params.chunks,
            params.chunk_tokens - wrapper,
            params.each * params.turns,
            lambda text: len(engine.model.prompt.plain(text)),
        )
        for i, given in enumerate(needles.documents):
            ingest(engine, Document(given.id, given.title, given.text, collection=name))
            progress("ingest", number * params.chunks + i + 1, sets * params.chunks)
        rng = random.Random(seed)
        for start in range(params.each):
            questions = needles.questions[start * params.turns : (start + 1) * params.turns]
            made.append(Dialogue(name, tuple(_turn(q, start + i, params, rng) for i, q in enumerate(questions))))
    return made[: params.dialogues]


def hold(
    engine: Engine, dialogues: Sequence[Dialogue], stages: Stages, params: DialogueParams, progress: Progress
) -> list[Held]:
    """Run every dialogue with one method under its policies. Its turns are removed from the catalogue."""
    held: list[Held] = []
    for number, dialogue in enumerate(dialogues):
        held.append(_hold(engine, dialogue, stages, params))
        progress("ask", number + 1, len(dialogues))
    return held


def figures(stages: Stages, held: Sequence[Held]) -> DialogueFigures:
    """Figures of the dialogues that were held with one method under its policies."""
    turns = [outcome for each in held for outcome in each.outcomes]
    by_number = list(zip(*(each.outcomes for each in held), strict=True))
    reports = [outcome.report for outcome in turns]
    read, dense = (
        sum(getattr(each.prefilling, name) or 0 for each in reports) for name in ("pairs_read", "pairs_dense")
    )
    keys, present = (
        sum(each.decoding.steps * getattr(each.decoding, name) for each in reports) for name in ("read", "present")
    )
    return DialogueFigures(
        method=stages.method,
        prefill=stages.prefill,
        decode=stages.decode,
        dialogues=len(held),
        turns=len(turns),
        agree=sum(outcome.answer == outcome.single for outcome in turns),
        right=sum(outcome.right for outcome in turns),
        em=tuple(_share([outcome.right for outcome in turns if outcome.place == place]) for place in PLACES),
        pairs=read / dense if dense else 1.0,
        keys=keys / present if present else 1.0,
        whole=sum(all(o.answer == o.single for o in each.outcomes) for each in held),
        prefilled=tuple(statistics.fmean(o.report.tokens.prefilled for o in same) for same in by_number),
        ttft=tuple(statistics.fmean(o.report.timings_ms.ttft for o in same) for same in by_number),
        over=statistics.fmean(each.over for each in held),
        over_ttft=statistics.fmean(each.over_ttft for each in held),
        share=max(each.outcomes[-1].report.tokens.prefilled / each.over for each in held),
    )


def _share(flags: Sequence[bool]) -> float | None:
    return statistics.fmean(flags) if flags else None


def _turn(question: NeedleQuestion, number: int, params: DialogueParams, rng: random.Random) -> DialogueTurn:
    """The question among filler sentences."""
    around, place = rng.sample(SENTENCES, params.sentences), PLACES[number % len(PLACES)]
    at = {"beginning": 0, "middle": (params.sentences + 1) // 2, "end": params.sentences}[place]
    return DialogueTurn(" ".join([*around[:at], question.question, *around[at:]]), question.answer, place)


def _hold(engine: Engine, dialogue: Dialogue, stages: Stages, params: DialogueParams) -> Held:
    name, twin, collection = "dialogue", "dialogue from nothing", dialogue.collection
    outcomes: list[DialogueOutcome] = []
    past: list[StoredTurn] = []
    for turn in dialogue.turns:
        past = engine.catalog.turns(collection, name)
        answer = _ask(engine, dialogue, name, turn.text, stages, params)
        single = _single_shot(engine, collection, engine.catalog.turns(collection, name), params)
        outcomes.append(DialogueOutcome(answer.answer, single, turn.gold, turn.place, answer.report))
    after: list[int] = []
    for stored in past:
        row = engine.catalog.add_turn(collection, twin, after, stored)
        after += [] if row is None else [row]
    over = _ask(engine, dialogue, twin, dialogue.turns[-1].text, stages, params).report
    for conversation in (name, twin):
        engine.sessions.remove(collection, conversation)
    return Held(tuple(outcomes), over.tokens.prefilled, over.timings_ms.ttft)


def _ask(engine: Engine, dialogue: Dialogue, name: str, text: str, stages: Stages, params: DialogueParams) -> Answer:
    return engine.answer(
        text,
        AskOptions(
            collection=dialogue.collection,
            conversation=name,
            top_k=params.chunks,
            method=stages.method,
            prefill=stages.prefill,
            decode=stages.decode,
            max_tokens=params.max_tokens,
        ),
    )


def _single_shot(engine: Engine, collection: str, turns: Sequence[StoredTurn], params: DialogueParams) -> str:
    """The answer to the last turn after one dense prefill of everything up to its question."""
    chunks = engine.catalog.chunks(collection, [row for turn in turns for row, _ in turn.joined])
    said: list[int] = []
    for turn in turns:
        said += [token for row, _ in turn.joined for token in chunks[row].tokens]
        said += turn.asked if turn is turns[-1] else (*turn.asked, *turn.written)
    model = engine.model
    context = engine.prefiller.prefill_full([said], (), StepTimer(model.device), PrefillOptions(params.max_tokens))
    sampling = Sampling(params.max_tokens)
    tokens = list(decode(model, context.cache, context.logits, context.position, sampling))
    return StopChecker(model.profile.stop).cut(model.tokenizer.decode(tokens))[0].strip()
