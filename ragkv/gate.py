"""Whether a question is answered sooner from stored KV or by prefilling everything: predicted from a few measurements.

Reading from stored KV has costs of its own that a short context does not repay: a second pass, by which the question
chooses blocks, and the calls that find, move and turn rows. So two predictions are compared, in milliseconds:

    full(tokens) = a + b (n + w n²)                      as in cost.py
    sparse(work) = c + d (r + 2 w r k) + load(bytes)     r rows go through the model, each over k keys in the mean

w is the weight of n² against n, and n tokens that see one another are n²/2 pairs, hence the 2. c and d are measured
with chunks where they are read from as a rule, so `load` is only for bytes that have a longer way than those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragkv.cost import TURNS, Curve, Line, curve
from ragkv.reader import Reader, Source
from ragkv.recompute.base import fixed_blocks
from ragkv.recompute.scout import Scout
from ragkv.watch import Watch

Opened = Callable[[], Sequence[Source]]
"""Opens the chunks of a measurement anew, the first of them exact."""

QUESTION = 32
"""Tokens of the questions that are asked to measure."""


NEAR = Line(0, 0)
"""What bytes cost that have no longer way than those of the measurement."""


@dataclass(frozen=True)
class Work:
    """What reading from stored KV does. rows: that go through the model, question included · keys: that a row attends
    to, in the mean · bytes: that have a longer way than those of the measurement."""

    rows: float
    keys: float
    bytes: int = 0


@dataclass(frozen=True)
class Gate:
    """full: by tokens of a full prefill · sparse: by rows, weighed by what they attend to · load: by bytes."""

    full: Curve
    sparse: Line
    load: Line = NEAR

    def sparse_ms(self, work: Work) -> float:
        """Milliseconds from the question to its first token, from stored KV."""
        far = self.load.at(work.bytes) if work.bytes else 0.0
        return self.sparse.at(weighed(work, self._weight)) + far

    def opens(self, tokens: int, work: Work) -> bool:
        """Whether stored KV is predicted to be quicker than a full prefill of so many tokens, question included."""
        return self.sparse_ms(work) < self.full.at(tokens)

    @property
    def _weight(self) -> float:
        return self.full.square / self.full.each if self.full.each else 0.0


def weighed(work: Work, weight: float) -> float:
    """Rows, and what they attend to in terms of rows. weight: of n² against n."""
    return work.rows * (1 + 2 * weight * work.keys)


def expected(scout: Scout, sizes: Sequence[int], block: int, question: int) -> Work:
    """The most that scout does with chunks of `sizes` tokens, the first of which is exact: known before any of them is
    opened. question: its tokens."""
    blocks = [-(-size // block) for size in sizes]
    fixed = [block * len(fixed_blocks(count, scout.initial, scout.local)) for count in blocks]
    picked = block * max(scout.floor, int(scout.cap * sum(blocks)))
    kept = min(sum(sizes), sum(fixed) + picked)
    again = {"none": 0, "rules": sum(fixed[1:]), "kept": kept - fixed[0]}[scout.repair] if len(sizes) > 1 else 0
    rows = again + question
    # A repaired row sees what stands before it, half of all in the mean; the question sees all.
    return Work(rows, (again * kept / 2 + question * kept) / rows)


def measured(reader: Reader, scout: Scout, few: Opened, many: Opened) -> Gate:
    """From the best times of a few questions about few and about many chunks, and of full prefills of the same."""
    question = (0,) * QUESTION
    weight, block = reader.model.pair_weight, reader.model.profile.block

    def best(ask: Callable[[Watch], object]) -> float:
        """Milliseconds; the first time is a warm-up."""
        times = []
        for _ in range(1 + TURNS):
            watch = Watch(reader.model.device)
            ask(watch)
            times.append(watch.total())
        return min(times[1:])

    def times(opened: Opened) -> tuple[tuple[int, float], tuple[float, float]]:
        """(tokens, milliseconds) of a full prefill and (rows, milliseconds) of a question from stored KV."""
        tokens = [source.tokens for source in opened()]
        sizes = [len(each) for each in tokens]
        prefill = best(lambda watch: reader.full(tokens, question, 0, watch))
        spent = best(lambda watch: reader.sparse(opened(), question, scout, 0, watch))
        rows = weighed(expected(scout, sizes, block, QUESTION), weight)
        return (len(reader.prefix_tokens) + sum(sizes) + QUESTION, prefill), (rows, spent)

    (short, (start, low)), (long, (end, high)) = times(few), times(many)
    each = max(0.0, high - low) / (end - start)
    return Gate(curve(short, long, weight), Line(max(0.0, low - each * start), each))
