"""Predicts whether stored KV or a full prefill gives the first token sooner, from a few measurements.

Stored KV has costs that a short context does not repay: the composite pass, and the calls that find, move and rotate
rows. So two predictions are compared, in milliseconds:

    full(tokens) = a + b (n + w n²)                      as in cost_model.py
    sparse(work) = c + d (r + 2 w r k) + load(bytes)     r rows go through the model, each over k keys in the mean

w is the weight of n² against n. n tokens that attend to one another are n²/2 pairs, hence the 2. c and d are measured
with chunks in the tier they are usually read from, so `load` counts only bytes from a farther tier.

On a CPU, prefills of the sizes that matter take seconds. So a and b are those of the cost model (cost_model.py), a row
over stored KV costs what it costs in a full prefill (d = b), and one short context gives c. It is measured once and
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.cost_model import TURNS, CostModel, LinearCost, QuadraticCost, fit_quadratic, remembered
from ragkv.engine.memory_source import ChunkSource
from ragkv.engine.prefill import Prefiller
from ragkv.errors import StoreError
from ragkv.recompute.base import Method
from ragkv.recompute.scout import Scout
from ragkv.timing import StepTimer

OpenSources = Callable[[], Sequence[ChunkSource]]
"""Opens the chunks of a measurement again; the first of them is exact."""

MEASURED = "gate: a measurement"
"""Collection of the chunks that are stored for the measurement; no user's collection has a colon or a space."""
CHUNKS, LENGTH = 4, 512
"""Chunks of the longer measurement, and their tokens; the shorter one has one chunk."""
FEW_CHUNKS, FEW_TOKENS = 2, 96
"""Chunks of the measurement on a CPU, and their tokens."""
QUESTION = 32
"""Tokens of the questions of the measurement."""


NEAR = LinearCost(0, 0)
"""Cost of bytes from the tier of the measurement."""


@dataclass(frozen=True)
class ReuseWork:
    """The work of one question over stored KV.

    Attributes:
        rows: Rows that go through the model, the question's included.
        keys: Keys that a row attends to, in the mean.
        bytes: Bytes that come from a farther tier than those of the measurement.
    """

    rows: float
    keys: float
    bytes: int = 0


@dataclass(frozen=True)
class ReusePolicy:
    """The two predictions.

    Attributes:
        full: By tokens of a full prefill.
        sparse: By rows, weighted by what they attend to.
        load: By bytes.
    """

    full: QuadraticCost
    sparse: LinearCost
    load: LinearCost = NEAR

    def sparse_ms(self, work: ReuseWork) -> float:
        """Return the milliseconds from the question to its first token, over stored KV."""
        far = self.load.at(work.bytes) if work.bytes else 0.0
        return self.sparse.at(weighted_rows(work, self._weight)) + far

    def prefers(self, tokens: int, work: ReuseWork) -> bool:
        """Whether stored KV is predicted to be quicker than a full prefill of `tokens` tokens, question included."""
        return self.sparse_ms(work) < self.full.at(tokens)

    def reuses(self, method: Method | None, sizes: Sequence[int], block: int, question: int) -> bool:
        """Whether a question keeps its method: scout where it is predicted to be quicker, any other method always.

        Args:
            method: The method; None is full.
            sizes: Tokens of each chunk.
            block: Tokens of a block.
            question: Tokens of the question.
        """
        return not isinstance(method, Scout) or self.prefers(
            sum(sizes) + question, expected_work(method, sizes, block, question)
        )

    @property
    def _weight(self) -> float:
        return self.full.square / self.full.each if self.full.each else 0.0


def measure_gate(
    prefiller: Prefiller, store: ChunkStore, method: Method, costs: CostModel, folder: Path, machine: str
) -> ReusePolicy | None:
    """Return the policy of this machine. What a CPU measures is kept; a GPU is quick enough to measure at every start.

    Args:
        prefiller: Encodes and prefills.
        store: Takes the chunks of the measurement.
        method: The default method; there is no policy for another one than scout.
        costs: What encoding and prefilling cost here.
        folder: Keeps the measurement.
        machine: Names model, device and store; see `remembered`.
    """
    if prefiller.model.device.type == "cuda":
        return measure_reuse(prefiller, store, method)
    if not costs.prefill.each:  # nothing was measured, because the store was down
        return None

    def measure() -> dict[str, Any] | None:
        policy = measure_short_reuse(prefiller, store, method, costs.prefill)
        return asdict(policy.sparse) if policy else None

    def read(known: Any) -> ReusePolicy:
        return ReusePolicy(costs.prefill, LinearCost(**known))

    return remembered(folder, f"gate {method} {machine}", measure, read)


def measure_reuse(prefiller: Prefiller, store: ChunkStore, method: Method) -> ReusePolicy | None:
    """Measure with chunks that are stored for this and removed again. It takes about a second on a GPU.

    Returns None for a method other than scout, and where the store refuses the chunks.
    """
    if not isinstance(method, Scout):
        return None
    with _stored(prefiller, store, CHUNKS, LENGTH) as opened:
        return opened and fit_reuse(prefiller, method, lambda: opened(1), lambda: opened(CHUNKS))


def measure_short_reuse(
    prefiller: Prefiller, store: ChunkStore, method: Method, full: QuadraticCost
) -> ReusePolicy | None:
    """Likewise with one short context.

    Args:
        full: What a full prefill takes.
    """
    if not isinstance(method, Scout):
        return None
    with _stored(prefiller, store, FEW_CHUNKS, FEW_TOKENS) as opened:
        return opened and fit_short_reuse(prefiller, method, lambda: opened(FEW_CHUNKS), full)


@contextmanager
def _stored(
    prefiller: Prefiller, store: ChunkStore, count: int, length: int
) -> Iterator[Callable[[int], Sequence[ChunkSource]] | None]:
    """Store chunks of random tokens for a while; yield what opens the first n of them, None if the store refuses."""
    generator = torch.Generator().manual_seed(0)
    highest = prefiller.model.config.vocab_size
    chunks = [tuple(torch.randint(highest, (length,), generator=generator).tolist()) for _ in range(count)]
    try:
        faults = [store.put(prefiller.encode(chunk))[1] for chunk in chunks]
        refused = any(fault is not None for fault in faults)
        yield (
            None if refused else lambda n: [_open(prefiller, store, chunk, not i) for i, chunk in enumerate(chunks[:n])]
        )
    finally:
        for chunk in chunks:
            with suppress(StoreError):
                store.remove(chunk)


def _open(prefiller: Prefiller, store: ChunkStore, chunk: tuple[int, ...], first: bool) -> StoredChunk:
    return StoredChunk(store, chunk, first and prefiller.mode == "shared", lambda: prefiller.encode_passes(chunk))


def weighted_rows(work: ReuseWork, weight: float) -> float:
    """Return the rows, weighted by what they attend to; weight: of n² against n."""
    return work.rows * (1 + 2 * weight * work.keys)


def expected_work(scout: Scout, sizes: Sequence[int], block: int, question: int) -> ReuseWork:
    """Return the most work that scout does with chunks of `sizes` tokens, before any of them is opened.

    question: tokens of the question.
    """
    blocks = sum(-(-size // block) for size in sizes)
    budget = max(scout.floor + scout.opening, int(scout.room(blocks, scout.cap)))
    kept = min(sum(sizes), block * budget)
    again = kept if scout.repair == "kept" and len(sizes) > 1 else 0
    rows = again + question
    # A repaired row sees what stands before it, half of all in the mean; the question sees all.
    return ReuseWork(rows, (again * kept / 2 + question * kept) / rows)


def fit_reuse(prefiller: Prefiller, scout: Scout, few: OpenSources, many: OpenSources) -> ReusePolicy:
    """Fit the predictions to the best times of questions about few and many chunks, and of their full prefills."""
    question = (0,) * QUESTION
    weight, block = prefiller.model.pair_weight, prefiller.model.profile.block

    def times(opened: OpenSources) -> tuple[tuple[int, float], tuple[float, float]]:
        """(tokens, milliseconds) of a full prefill and (rows, milliseconds) of a question from stored KV."""
        tokens = [source.tokens for source in opened()]
        sizes = [len(each) for each in tokens]
        prefill = _best(prefiller, lambda timer: prefiller.prefill_full(tokens, question, timer))
        spent = _best(prefiller, lambda timer: prefiller.prefill_sparse(opened(), question, scout, timer))
        rows = weighted_rows(expected_work(scout, sizes, block, QUESTION), weight)
        return (len(prefiller.prefix_tokens) + sum(sizes) + QUESTION, prefill), (rows, spent)

    (short, (start, low)), (long, (end, high)) = times(few), times(many)
    each = max(0.0, high - low) / (end - start)
    return ReusePolicy(fit_quadratic(short, long, weight), LinearCost(max(0.0, low - each * start), each))


def fit_short_reuse(prefiller: Prefiller, scout: Scout, opened: OpenSources, full: QuadraticCost) -> ReusePolicy:
    """Fit the prediction to the best time of one context; a row costs what it costs in a full prefill."""
    sizes = [len(source.tokens) for source in opened()]
    work = expected_work(scout, sizes, prefiller.model.profile.block, QUESTION)
    spent = _best(prefiller, lambda timer: prefiller.prefill_sparse(opened(), (0,) * QUESTION, scout, timer))
    rows = weighted_rows(work, full.square / full.each if full.each else 0.0)
    return ReusePolicy(full, LinearCost(max(0.0, spent - full.each * rows), full.each))


def _best(prefiller: Prefiller, ask: Callable[[StepTimer], object]) -> float:
    """Milliseconds of the best of some runs; the first one is a warm-up."""
    times = []
    for _ in range(1 + TURNS):
        timer = StepTimer(prefiller.model.device)
        ask(timer)
        times.append(timer.total())
    return min(times[1:])
