"""Questions about chunks in a tier, timed from their token ids to the id of the first answer token on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from benchmarks.backends import BACKENDS, chosen_backend, preferring, unless_full
from benchmarks.roofline import Floors, Speeds, WorkCounter, floors, settled
from benchmarks.shapes import random_tokens
from benchmarks.tiered import TieredBenchStore
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.evidence import window_vectors
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions
from ragkv.engine.reuse_policy import ReusePolicy, expected_work, fit_reuse
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Method, recomputed_tokens
from ragkv.recompute.evidence import BlockEvidence
from ragkv.recompute.scout import Scout
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.timing import StepTimer
from ragkv.types import SEGMENT_BYTES

TOKEN_BYTES, DIMENSION, WORDS, TITLE_WORDS = 4, 384, 8, 3
"""Of random evidence: bytes of a token, numbers of a vector as the packaged one, words of a question and of a title."""

CHUNKS, TRIAL, QUESTIONS = 0, 2**20, 2**21
"""First number of the random inputs of each kind, so that no two inputs are the same."""

STEPS = ("open", "load", "plan", "repair", "prefill")


@dataclass(frozen=True)
class Sample:
    """Figures of one question.

    Attributes:
        steps: milliseconds by name.
        sequence: as in a report.
        recompute: as in a report.
        load: as in a report.
        heads: bytes of head records.
        loaded: bytes of blocks and states loaded from host memory or a store.
        kv: bytes of the context cache, spare room included.
        kv_live: likewise, without spare room.
    """

    steps: dict[str, float]
    sequence: float
    recompute: float
    load: float
    heads: int
    loaded: int
    kv: int
    kv_live: int
    floors: Floors | None


class AskedSample:
    """Chunks in their tier, and questions about them.

    Attributes:
        backend: which of BACKENDS `full` prefers; "": torch's choice.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        stored: TieredBenchStore,
        chunks: Sequence[tuple[int, ...]],
        question: int,
        seed: int,
    ):
        """Take the chunks, all of them in the tier.

        Args:
            question: tokens of every question.
            seed: seed of the questions.
        """
        self.prefiller, self.chunks, self.question, self.backend = prefiller, chunks, question, ""
        self._stored = stored
        model = prefiller.model
        self._evidence = RandomEvidence([*map(len, chunks)], model.profile.block, seed)
        self._questions = (drawn(prefiller.model, question, seed, QUESTIONS + number) for number in count())

    @property
    def tokens(self) -> int:
        """Tokens of the prefix, the chunks and a question."""
        return len(self.prefiller.prefix_tokens) + sum(map(len, self.chunks)) + self.question

    def first_token(self, method: Method | None, policy: PrefillPolicy | None = None) -> float:
        """Milliseconds from a new question to the id of the first answer token. policy: None is dense."""
        return self._timed(lambda: method, policy)

    def gated(self, gate: ReusePolicy, scout: Scout, policy: PrefillPolicy | None = None) -> float:
        """Likewise, with the method that the gate chooses. The choice is timed too."""
        return self._timed(lambda: scout if self.opens(gate, scout) else None, policy)

    def opens(self, gate: ReusePolicy, scout: Scout) -> bool:
        """Whether the gate chooses reuse for these chunks."""
        sizes = [len(chunk) for chunk in self.chunks]
        return gate.prefers(self.tokens, expected_work(scout, sizes, self.prefiller.model.profile.block, self.question))

    def split(self, method: Method | None, at: Speeds, policy: PrefillPolicy | None = None) -> Sample:
        """Ask a new question; time each step and count its work, which is that of dense attention.

        Args:
            method: None is a full prefill.
            at: Speeds for the floors.
            policy: Prefill policy; None is dense.
        """
        self._stored.cool()
        model, timer = self.prefiller.model, StepTimer(self.prefiller.model.device)
        prefilled, sources = self._prefill(method, next(self._questions), timer, policy)
        plan, passes = prefilled.plan, None
        context = sum(map(len, self.chunks))
        if plan is None or method is None:
            kept = again = float(context)
            if model.wired:
                passes = WorkCounter(model).prefill_full(self.tokens)
        else:
            pieces = [source.piece for source in sources]
            layers = [[piece.row_count(b) for piece, b in zip(pieces, each, strict=True)] for each in plan.kept]
            kept, again = statistics.fmean(map(sum, layers)), sum(recomputed_tokens(plan.recompute))
            depth = method.composite_layers(model.shape.layers)
            prefix = len(self.prefiller.prefix_tokens)
            if model.wired:
                passes = WorkCounter(model).prefill_sparse(plan, pieces, prefix, self.question, prefilled.looks, depth)
        heads, loaded = sum(s.head_bytes for s in sources), sum(s.loaded_bytes + s.state_bytes for s in sources)
        row = model.token_bytes // model.shape.layers
        return Sample(
            steps={step: timer.elapsed(step) for step in STEPS},
            sequence=kept / context,
            recompute=again / context,
            load=(heads + loaded) / (context * model.token_bytes),
            heads=heads,
            loaded=loaded,
            kv=prefilled.cache.bytes,
            kv_live=row * sum(prefilled.cache.lengths),
            floors=None if passes is None else floors(passes, loaded, at),
        )

    def prefer_best(self, tries: int) -> dict[str, float]:
        """Let `full` use the fastest kernel of dense attention.

        Returns:
            Its best milliseconds by name of the kernel, for every kernel that runs here; torch's own choice first.
        """
        found: dict[str, float] = {}
        for name in ("", *BACKENDS):
            self.backend = name
            with preferring(name):
                taken = unless_full(lambda: chosen_backend(self.prefiller.model, self.tokens))
            if taken is None or taken in found:
                continue
            times = [unless_full(lambda: self.first_token(None)) for _ in range(tries)]
            done = [elapsed for elapsed in times if elapsed is not None]
            if done:
                found[taken] = min(done)
        own, best = next(iter(found), ""), min(found, key=lambda name: found[name], default="")
        self.backend = best if best in BACKENDS and best != own else ""
        return found

    def gate(self, scout: Scout, trial: Sequence[tuple[int, ...]]) -> ReusePolicy:
        """Fit the reuse policy with `trial`, chunks in the same tier."""
        few, many = [*trial[:1]], [*trial]
        return fit_reuse(self.prefiller, scout, lambda: self._open(few), lambda: self._open(many))

    def _timed(self, decide: Callable[[], Method | None], policy: PrefillPolicy | None = None) -> float:
        device, question = self.prefiller.model.device, next(self._questions)
        self._stored.cool()
        settled(device)
        start = time.perf_counter()
        context, _ = self._prefill(decide(), question, StepTimer(device), policy)
        int(context.logits.argmax())  # waits for the device
        return 1000 * (time.perf_counter() - start)

    def _prefill(
        self, method: Method | None, question: Sequence[int], timer: StepTimer, policy: PrefillPolicy | None
    ) -> tuple[PrefilledContext, list[StoredChunk]]:
        options = PrefillOptions(1, prefill_policy=policy)
        if method is None:
            with preferring(self.backend):
                return self.prefiller.prefill_full(self.chunks, question, timer, options), []
        with timer.step("open"):
            sources = self._open(self.chunks)
        if method.evidence:
            with timer.step("plan"):
                for source, evidence in zip(sources, self._evidence.find(), strict=True):
                    source.piece = replace(source.piece, evidence=evidence)
        return self.prefiller.prefill_sparse(sources, question, method, timer, options), sources

    def _open(self, chunks: Sequence[tuple[int, ...]]) -> list[StoredChunk]:
        return [self._stored.open(tokens, exact=i == 0) for i, tokens in enumerate(chunks)]


def drawn(model: DecoderModel, length: int, seed: int, number: int) -> tuple[int, ...]:
    """Random token ids, without the first one of an input. Every number gives other ids."""
    return tuple(random_tokens(model, length + 1, seed * 2**24 + number)[1:])


class RandomEvidence:
    """Evidence in chunks of random tokens: as much work as in a service that knows them, and blocks as scattered.

    Words are drawn, not looked for in texts, of which there are none.
    """

    def __init__(self, sizes: Sequence[int], block: int, seed: int):
        """Draw segments.

        Args:
            sizes: Tokens of each chunk.
            block: Tokens of a block.
            seed: Of all that is drawn.
        """
        self._random = np.random.default_rng(seed)
        self._vectors = list[Tensor]()
        for size in sizes:
            ends = TOKEN_BYTES * np.append(np.arange(block, size, block), size).astype(np.float64)
            first, last = np.concatenate([[0.0, 0.0], ends[:-2]])[: len(ends)], np.append(ends[1:], ends[-1:])
            shape = (-(-TOKEN_BYTES * size // SEGMENT_BYTES), DIMENSION)
            segments = self._random.integers(-127, 128, shape, dtype=np.int8)
            self._vectors.append(window_vectors(segments, np.stack([first, last])))

    def find(self) -> list[BlockEvidence]:
        """Return the evidence of a new random question in every chunk."""
        vector = self._random.standard_normal(DIMENSION).astype(np.float32)
        question = torch.from_numpy(vector / np.linalg.norm(vector))
        return [BlockEvidence(mine @ question, *self._words(i, len(mine))) for i, mine in enumerate(self._vectors)]

    def _words(self, number: int, windows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw which words stand in the windows of a chunk. Its own words are those of its title."""
        count = TITLE_WORDS * len(self._vectors)
        words, named = (self._random.random((windows, some)) < 0.05 for some in (WORDS, count))
        title = torch.arange(count) // TITLE_WORDS == number
        return torch.from_numpy(words), torch.from_numpy(named), title
