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
from contextlib import suppress
from dataclasses import dataclass

import torch

from ragkv.engine.chunk_source import ChunkSource, StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.cost_model import TURNS, LinearCost, QuadraticCost, fit_quadratic
from ragkv.engine.prefill import Prefiller
from ragkv.errors import StoreError
from ragkv.recompute.base import Method, fixed_blocks
from ragkv.recompute.scout import Scout
from ragkv.timing import StepTimer

OpenSources = Callable[[], Sequence[ChunkSource]]
"""Opens the chunks of a measurement anew, the first of them exact."""

MEASURED = "gate: a measurement"
"""The collection of what is stored to measure; no user's name has a colon or a space."""
CHUNKS, LENGTH = 4, 512
"""How many chunks are measured with, beside one alone, and their tokens."""
QUESTION = 32
"""Tokens of the questions that are asked to measure."""


NEAR = LinearCost(0, 0)
"""What bytes cost that have no longer way than those of the measurement."""


@dataclass(frozen=True)
class ReuseWork:
    """What reading from stored KV does. rows: that go through the model, question included · keys: that a row attends
    to, in the mean · bytes: that have a longer way than those of the measurement."""

    rows: float
    keys: float
    bytes: int = 0


@dataclass(frozen=True)
class ReusePolicy:
    """full: by tokens of a full prefill · sparse: by rows, weighed by what they attend to · load: by bytes."""

    full: QuadraticCost
    sparse: LinearCost
    load: LinearCost = NEAR

    def sparse_ms(self, work: ReuseWork) -> float:
        """Milliseconds from the question to its first token, from stored KV."""
        far = self.load.at(work.bytes) if work.bytes else 0.0
        return self.sparse.at(weighted_rows(work, self._weight)) + far

    def prefers(self, tokens: int, work: ReuseWork) -> bool:
        """Whether stored KV is predicted to be quicker than a full prefill of so many tokens, question included."""
        return self.sparse_ms(work) < self.full.at(tokens)

    def reuses(self, method: Method | None, sizes: Sequence[int], block: int, question: int) -> bool:
        """Whether a question is to be read the way that was meant: scout, where it is predicted to be quicker for
        chunks of `sizes` tokens; any other way in any case."""
        return not isinstance(method, Scout) or self.prefers(
            sum(sizes) + question, expected_work(method, sizes, block, question)
        )

    @property
    def _weight(self) -> float:
        return self.full.square / self.full.each if self.full.each else 0.0


def measure_reuse(prefiller: Prefiller, store: ChunkStore, method: Method) -> ReusePolicy | None:
    """Measured with chunks that are stored for that and removed again: a second or so on a GPU, whose kernels are
    compiled by it. None for a method other than scout, and where the store does not take them."""
    if not isinstance(method, Scout):
        return None
    generator = torch.Generator().manual_seed(0)
    highest = prefiller.model.config.vocab_size
    chunks = [tuple(torch.randint(highest, (LENGTH,), generator=generator).tolist()) for _ in range(CHUNKS)]
    try:
        for chunk in chunks:
            _, fault = store.put(prefiller.encode(chunk))
            if fault is not None:
                return None

        def opened(count: int) -> Sequence[ChunkSource]:
            return [_open(prefiller, store, chunk, i == 0) for i, chunk in enumerate(chunks[:count])]

        return fit_reuse(prefiller, method, lambda: opened(1), lambda: opened(CHUNKS))
    finally:
        for chunk in chunks:
            with suppress(StoreError):
                store.remove(chunk)


def _open(reader: Prefiller, shelf: ChunkStore, chunk: tuple[int, ...], first: bool) -> StoredChunk:
    return StoredChunk(shelf, chunk, first and reader.mode == "shared", lambda: reader.encode(chunk))


def weighted_rows(work: ReuseWork, weight: float) -> float:
    """Rows, and what they attend to in terms of rows. weight: of n² against n."""
    return work.rows * (1 + 2 * weight * work.keys)


def expected_work(scout: Scout, sizes: Sequence[int], block: int, question: int) -> ReuseWork:
    """The most that scout does with chunks of `sizes` tokens, the first of which is exact: known before any of them is
    opened. question: its tokens."""
    blocks = [-(-size // block) for size in sizes]
    fixed = [block * len(fixed_blocks(count, scout.initial, scout.local)) for count in blocks]
    picked = block * max(scout.floor, int(scout.cap * sum(blocks)))
    kept = min(sum(sizes), sum(fixed) + picked)
    again = {"none": 0, "rules": sum(fixed[1:]), "kept": kept - fixed[0]}[scout.repair] if len(sizes) > 1 else 0
    rows = again + question
    # A repaired row sees what stands before it, half of all in the mean; the question sees all.
    return ReuseWork(rows, (again * kept / 2 + question * kept) / rows)


def fit_reuse(prefiller: Prefiller, scout: Scout, few: OpenSources, many: OpenSources) -> ReusePolicy:
    """From the best times of a few questions about few and about many chunks, and of full prefills of the same."""
    question = (0,) * QUESTION
    weight, block = prefiller.model.pair_weight, prefiller.model.profile.block

    def best(ask: Callable[[StepTimer], object]) -> float:
        """Milliseconds; the first time is a warm-up."""
        times = []
        for _ in range(1 + TURNS):
            watch = StepTimer(prefiller.model.device)
            ask(watch)
            times.append(watch.total())
        return min(times[1:])

    def times(opened: OpenSources) -> tuple[tuple[int, float], tuple[float, float]]:
        """(tokens, milliseconds) of a full prefill and (rows, milliseconds) of a question from stored KV."""
        tokens = [source.tokens for source in opened()]
        sizes = [len(each) for each in tokens]
        prefill = best(lambda watch: prefiller.prefill_full(tokens, question, 0, watch))
        spent = best(lambda watch: prefiller.prefill_sparse(opened(), question, scout, 0, watch))
        rows = weighted_rows(expected_work(scout, sizes, block, QUESTION), weight)
        return (len(prefiller.prefix_tokens) + sum(sizes) + QUESTION, prefill), (rows, spent)

    (short, (start, low)), (long, (end, high)) = times(few), times(many)
    each = max(0.0, high - low) / (end - start)
    return ReusePolicy(fit_quadratic(short, long, weight), LinearCost(max(0.0, low - each * start), each))
