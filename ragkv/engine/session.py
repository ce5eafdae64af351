"""What a session has in its context cache between two turns. A single question is a session of one turn.

    S, chunks, question, answer, new chunks, question, …      one sequence; positions never change

Decoding adds the rows of an answer to the cache, all but its last token. That token, and what the prompt puts between
an answer and the next turn, are pending tokens: the next turn prefills them first. At the very beginning S is pending.

Blocks stay where an earlier question loaded them, and rows stay as they were repaired. A question loads and repairs
only what it needs beyond that. Rows that were computed before a block was loaded have not attended to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.recurrence import States
from ragkv.recompute.base import Blocks, Piece, Plan, Tokens, padding_for
from ragkv.sparse.prefill import PrefillPolicy, PrefillState, SparsePrefill


class SessionState:
    """State of one session. Not thread-safe. A turn that fails half-way leaves it unusable.

    Once it holds chunks, it continues as it began: by full prefills, or from stored KV.

    Attributes:
        stitch: The context cache.
        pending_tokens: Token ids at the end that have no rows yet.
        chunks: Chunks in the context.
    """

    def __init__(self, model: DecoderModel, prefix: Sequence[int]):
        """Start with S pending; prefix: its token ids."""
        self.stitch = Stitch(model, (), 0, 0)
        self.pending_tokens = tuple(prefix)
        self.chunks = 0
        self._prefix = len(self.pending_tokens)
        self._held: Sequence[Sequence[Blocks]] = [()] * model.shape.layers
        self._repaired: Sequence[Sequence[Tokens]] = [()] * model.shape.layers
        self._question_ends = [0] * model.shape.layers
        self._question_states: States | None = None
        self._policy: PrefillPolicy | None = None
        self._choice: PrefillState | None = None

    @property
    def started(self) -> bool:
        """Whether anything was prefilled yet."""
        return self.stitch.end > 0

    @property
    def position(self) -> int:
        """Position of the next chunk, or of the next question."""
        return self.stitch.end + len(self.pending_tokens)

    @property
    def pending_count(self) -> int:
        """Pending tokens that cost a pass. S does not: its rows are copied."""
        return len(self.pending_tokens) if self.started else 0

    @property
    def first(self) -> int:
        """Position of the first chunk."""
        return self.stitch.starts[0] if self.stitch.starts else self.position

    @property
    def cached(self) -> float:
        """Tokens in the cache, S not counted; mean over layers."""
        lengths = self.stitch.cache.lengths
        return sum(lengths) / len(lengths) - self._prefix if self.started else 0.0

    @property
    def bytes(self) -> int:
        """Bytes of the cache, and of what the prefill policy remembers."""
        return self.stitch.cache.bytes + (self._choice.bytes if self._choice is not None else 0)

    def begin_with(self, prefix: ContextCache, chunks: Sequence[ContextCache]) -> None:
        """Begin with rows that were computed before: those of S and, densely, of chunks that follow each other."""
        for rows in (prefix, *chunks):
            self.stitch.cache.extend(rows)
        self.stitch.end, self.pending_tokens = self.stitch.cache.lengths[0], ()
        self.chunks = len(chunks)

    def join(self, pieces: Sequence[Piece]) -> None:
        """Append chunks at the end."""
        self.stitch.join(pieces)
        self.chunks += len(pieces)
        nothing: Sequence[Sequence[Tokens]] = [((),) * len(pieces)] * len(self._held)
        self._held, self._repaired = _each(_beside, self._held, nothing), _each(_beside, self._repaired, nothing)

    def missing(self, requested: Sequence[Sequence[Blocks]]) -> list[Sequence[Blocks]]:
        """Return those of the wanted blocks [layer][chunk] that are not in the cache."""
        return minus(requested, self._held)

    def hold(self, blocks: Sequence[Sequence[Blocks]]) -> None:
        """Note that blocks [layer][chunk] are loaded."""
        self._held = plus(self._held, blocks)

    def remaining(self, plan: Plan, pieces: Sequence[Piece]) -> Plan:
        """Return what is left to do of a plan for all chunks, and count it as done.

        In the result `kept` includes the blocks of earlier questions; `recompute` lacks what was repaired for them.
        """
        self.hold(plan.kept)
        before, self._repaired = self._repaired, plus(self._repaired, plan.recompute)
        kept, todo = _frozen(self._held), _frozen(minus(plan.recompute, before))
        if (kept, todo) == (plan.kept, plan.recompute):
            return plan
        padding = padding_for(pieces, kept, todo)
        one_pass = plan.one_pass and not any(any(layer) for layer in padding)
        return replace(plan, kept=kept, recompute=todo, padding=padding, one_pass=one_pass)

    def append_question(self, tokens: int) -> None:
        """Note that tokens were prefilled at the end: pending tokens, and a question as the last of them."""
        self.stitch.end, self.pending_tokens = self.stitch.end + tokens, ()
        self._question_ends = list(self.stitch.cache.lengths)
        self._question_states = self.stitch.cache.states

    def append_answer(self, tokens: Sequence[int], then: Sequence[int]) -> None:
        """Append an answer.

        Rows that were decoded beyond the answer are dropped. If blocks were loaded between the answer's rows, or states
        are ahead of the answer, all rows of the answer are dropped, and the next turn prefills it.

        Args:
            tokens: Token ids of the answer, as far as it counts.
            then: Token ids that the prompt puts behind it.
        """
        cache = self.stitch.cache
        came = [
            int((cache.positions(layer)[asked:] < self.stitch.end).sum())
            for layer, asked in enumerate(self._question_ends)
        ]
        decoded = cache.lengths[0] - self._question_ends[0]
        rows = 0 if any(came) else min(len(tokens), decoded)
        if cache.states is not None and rows < decoded:
            rows, cache.states = 0, self._question_states
        cache.truncate([length + rows for length in self._question_ends])
        self.stitch.end += rows
        self.pending_tokens = (*tokens[rows:], *then)

    def attention(self, policy: PrefillPolicy, end: int | None) -> SparsePrefill:
        """Return the attention of the next rows under a policy.

        What a policy remembers is passed on from turn to turn.

        Args:
            policy: The policy.
            end: As in `PrefillState.select`.
        """
        if self._choice is None or policy != self._policy:
            self._policy, self._choice = policy, policy.start()
        return SparsePrefill(self._choice, end)


def minus(requested: Sequence[Sequence[Tokens]], have: Sequence[Sequence[Tokens]]) -> list[Sequence[Tokens]]:
    """Return the blocks, or tokens, that are in `wanted` and not in `have`; nested alike."""
    return _each(_without, requested, have)


def plus(have: Sequence[Sequence[Tokens]], more: Sequence[Sequence[Tokens]]) -> list[Sequence[Tokens]]:
    """Return the blocks, or tokens, that are in either; nested alike."""
    return _each(_with, have, more)


Layer = Sequence[Tokens]
"""Blocks, or tokens, of every chunk."""


def _each(work: Callable[[Layer, Layer], Layer], ones: Sequence[Layer], others: Sequence[Layer]) -> list[Layer]:
    """Apply `work` to every layer. Layers that are the same objects, as most are, are done once."""
    if len({*map(id, ones)}) == len({*map(id, others)}) == 1 and len(ones) == len(others):
        return [work(ones[0], others[0])] * len(ones)
    known: dict[tuple[int, int], Layer] = {}
    found = []
    for one, other in zip(ones, others, strict=True):
        both = id(one), id(other)
        if both not in known:
            known[both] = work(one, other)
        found.append(known[both])
    return found


def _without(requested: Layer, have: Layer) -> Layer:
    return tuple(
        tuple(sorted(set(want) - set(had))) if had else want for want, had in zip(requested, have, strict=True)
    )


def _with(have: Layer, more: Layer) -> Layer:
    return tuple(
        a if a == b else tuple(sorted({*a, *b})) if a and b else a or b for a, b in zip(have, more, strict=True)
    )


def _beside(before: Layer, joining: Layer) -> Layer:
    return (*before, *joining)


def _frozen(nested: Sequence[Layer]) -> tuple[tuple[Tokens, ...], ...]:
    return tuple(map(tuple, nested))
