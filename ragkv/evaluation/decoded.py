"""What the benches of policies share: an answer decoded under a policy, its scores, and what it read."""

from __future__ import annotations

import statistics
from collections import abc
from dataclasses import dataclass

from ragkv.engine.decoding import generate
from ragkv.engine.detokenizer import Detokenizer
from ragkv.engine.generation import Sampling, Sequence
from ragkv.engine.prefill_state import PrefilledContext
from ragkv.evaluation.score import exact_match, f1, interval
from ragkv.evaluation.sets import SetQuestion
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.split_context import split_context
from ragkv.sparse.base import DecodeState
from ragkv.timing import StepTimer


@dataclass(frozen=True)
class DecodedAnswer:
    """One answer.

    Attributes:
        text: Text up to a stop string.
        em: Exact match.
        f1: Token F1.
        read: Keys read, summed over steps, layers and lists of attention heads.
        present: Keys present, the same sum.
        lists: Lists of attention heads, the same sum.
        steps: Decode steps.
        stopped: Whether a stop token or string ended it.
    """

    text: str
    em: float
    f1: float
    read: int
    present: int
    lists: int
    steps: int
    stopped: bool


@dataclass(frozen=True)
class PairedScore:
    """Scores of a policy over questions, and their difference to dense attention on the same questions; means.

    Attributes:
        delta: F1 minus that of dense attention.
        low: Lower end of the 95% interval of `delta`, by a paired bootstrap.
        high: Upper end.
    """

    questions: int
    em: float
    f1: float
    delta: float
    low: float
    high: float


@dataclass(frozen=True)
class KeysRead:
    """Keys that decoding read.

    Attributes:
        share: Keys read / keys present; 1 where everything was dense.
        read: Keys read per token, layer and list of attention heads; 0 where everything was dense.
        present: Keys present, likewise.
    """

    share: float
    read: float
    present: float


def decode_answer(
    model: DecoderModel, context: PrefilledContext, question: SetQuestion, max_tokens: int
) -> DecodedAnswer:
    """Decode the answer to a question greedily, under the context's decode policy, and score it."""
    detokenizer, state = Detokenizer(model, model.profile.stop, StepTimer(model.device)), context.decoding
    attention = split_context(model, context.cache, state, max_tokens) or state
    sequence = Sequence(context.cache, context.logits, context.position, Sampling(max_tokens), attention, detokenizer)
    for _ in generate(model, sequence):
        pass
    text = detokenizer.text.strip()
    scores = exact_match(text, question.gold, question.language), f1(text, question.gold, question.language)
    return DecodedAnswer(text, *scores, *_key_sums(state), sequence.steps, sequence.stopped)


def paired_score(answers: abc.Sequence[DecodedAnswer], dense: abc.Sequence[DecodedAnswer]) -> PairedScore:
    """Score answers beside those of dense attention to the same questions."""
    differences = [one.f1 - other.f1 for one, other in zip(answers, dense, strict=True)]
    em, f1 = (statistics.fmean(getattr(one, name) for one in answers) for name in ("em", "f1"))
    return PairedScore(len(answers), em, f1, statistics.fmean(differences), *interval(differences))


def keys_read(answers: abc.Sequence[DecodedAnswer]) -> KeysRead:
    """Return what decoding all these answers read."""
    read, present, lists = (sum(getattr(one, name) for one in answers) for name in ("read", "present", "lists"))
    return KeysRead(
        read / present if present else 1.0, read / lists if lists else 0.0, present / lists if lists else 0.0
    )


def _key_sums(state: DecodeState | None) -> tuple[int, int, int]:
    if state is None:
        return 0, 0, 0
    return state.keys_read, state.keys_present, sum(each.read.shape[0] for each in state.key_counts)
