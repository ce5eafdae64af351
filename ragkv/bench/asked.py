"""Questions about chunks in a tier, timed from their token ids to the first answer token's on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ragkv.bench.backends import BACKENDS, chosen_backend, preferring, unless_full
from ragkv.bench.roofline import Floors, Speeds, WorkCounter, floors, settled
from ragkv.bench.shapes import random_tokens
from ragkv.bench.tiered import TieredBenchStore
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.prefill import PrefilledContext, Prefiller
from ragkv.engine.reuse_policy import ReusePolicy, expected_work, fit_reuse
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Method, recomputed
from ragkv.recompute.scout import Scout
from ragkv.timing import StepTimer

CHUNKS, TRIAL, QUESTIONS = 0, 2**20, 2**21
"""Numbers that random inputs are drawn from: every kind has its own."""

STEPS = ("open", "load", "plan", "repair", "prefill")


@dataclass(frozen=True)
class Sample:
    """What one question did. steps: milliseconds by name · sequence, recompute,
    load: as in a report · heads, loaded: bytes of head records, and of blocks that came from host memory or beyond ·
    kv: bytes that the context cache takes, room for more included, and `kv_live` without it."""

    steps: dict[str, float]
    sequence: float
    recompute: float
    load: float
    heads: int
    loaded: int
    kv: int
    kv_live: int
    floors: Floors


class AskedSample:
    """Chunks in their tier, and questions about them."""

    def __init__(
        self, reader: Prefiller, stored: TieredBenchStore, chunks: Sequence[tuple[int, ...]], question: int, seed: int
    ):
        """question: tokens of every one · backend: which of BACKENDS `full` prefers, "": torch's choice."""
        self.reader, self.chunks, self.question, self.backend = reader, chunks, question, ""
        self._stored = stored
        self._questions = (drawn(reader.model, question, seed, QUESTIONS + number) for number in count())

    @property
    def tokens(self) -> int:
        """Of S, the chunks and a question."""
        return len(self.reader.prefix_tokens) + sum(map(len, self.chunks)) + self.question

    def first_token(self, method: Method | None) -> float:
        """Milliseconds from a new question to the id of the first answer token."""
        return self._timed(lambda: method)

    def gated(self, gate: ReusePolicy, scout: Scout) -> float:
        """The same where the gate decides, its decision included."""
        return self._timed(lambda: scout if self.opens(gate, scout) else None)

    def opens(self, gate: ReusePolicy, scout: Scout) -> bool:
        """What the gate says of these chunks."""
        sizes = [len(chunk) for chunk in self.chunks]
        return gate.prefers(self.tokens, expected_work(scout, sizes, self.reader.model.profile.block, self.question))

    def split(self, method: Method | None, at: Speeds) -> Sample:
        """A new question, its steps timed apart and what it did counted. at: what floors are reckoned with."""
        self._stored.cool()
        model, watch = self.reader.model, StepTimer(self.reader.model.device)
        read, sources = self._read(method, next(self._questions), watch)
        counter, plan = WorkCounter(model), read.plan
        context = sum(map(len, self.chunks))
        if plan is None or method is None:
            kept = again = float(context)
            passes = counter.prefill_full(self.tokens)
        else:
            pieces = [source.piece for source in sources]
            layers = [[len(piece.rows(b)) for piece, b in zip(pieces, each, strict=True)] for each in plan.kept]
            kept, again = statistics.fmean(map(sum, layers)), sum(recomputed(plan.recompute))
            first, depth = method.first(pieces), method.depth(model.shape.layers)
            prefix = len(self.reader.prefix_tokens)
            passes = counter.prefill_sparse(plan, pieces, prefix, self.question, first, depth)
        heads, loaded = sum(s.head_bytes for s in sources), sum(s.loaded_bytes for s in sources)
        row = model.token_bytes // model.shape.layers
        return Sample(
            steps={step: watch.elapsed(step) for step in STEPS},
            sequence=kept / context,
            recompute=again / context,
            load=(heads + loaded) / (context * model.token_bytes),
            heads=heads,
            loaded=loaded,
            kv=read.cache.bytes,
            kv_live=row * sum(read.cache.lengths),
            floors=floors(passes, loaded, at),
        )

    def prefer_best(self, tries: int) -> dict[str, float]:
        """Let `full` use the quickest kernel of dense attention. Returns its best times under each that torch has here,
        by the names of these kernels; the first one is torch's own choice."""
        found: dict[str, float] = {}
        for name in ("", *BACKENDS):
            self.backend = name
            with preferring(name):
                taken = unless_full(lambda: chosen_backend(self.reader.model, self.tokens))
            if taken is None or taken in found:
                continue
            times = [unless_full(lambda: self.first_token(None)) for _ in range(tries)]
            done = [spent for spent in times if spent is not None]
            if done:
                found[taken] = min(done)
        own, best = next(iter(found), ""), min(found, key=lambda name: found[name], default="")
        self.backend = best if best in BACKENDS and best != own else ""
        return found

    def gate(self, scout: Scout, trial: Sequence[tuple[int, ...]]) -> ReusePolicy:
        """Measured with chunks of their own in the same tier."""
        few, many = [*trial[:1]], [*trial]
        return fit_reuse(self.reader, scout, lambda: self._open(few), lambda: self._open(many))

    def _timed(self, decide: Callable[[], Method | None]) -> float:
        device, question = self.reader.model.device, next(self._questions)
        self._stored.cool()
        settled(device)
        start = time.perf_counter()
        context, _ = self._read(decide(), question, StepTimer(device))
        int(context.logits.argmax())  # waits for the device
        return 1000 * (time.perf_counter() - start)

    def _read(
        self, method: Method | None, question: Sequence[int], watch: StepTimer
    ) -> tuple[PrefilledContext, list[StoredChunk]]:
        if method is None:
            with preferring(self.backend):
                return self.reader.prefill_full(self.chunks, question, 1, watch), []
        with watch.step("open"):
            sources = self._open(self.chunks)
        return self.reader.prefill_sparse(sources, question, method, 1, watch), sources

    def _open(self, chunks: Sequence[tuple[int, ...]]) -> list[StoredChunk]:
        return [self._stored.open(tokens, exact=i == 0) for i, tokens in enumerate(chunks)]


def drawn(model: DecoderModel, length: int, seed: int, number: int) -> tuple[int, ...]:
    """Random token ids without an input's first one; another number gives others."""
    return tuple(random_tokens(model, length + 1, seed * 2**24 + number)[1:])
