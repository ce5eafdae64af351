"""Talk: what one conversation has in its context cache between two turns. A single question is a talk of one turn.

    S · chunks · question · answer · chunks that join · question · …      one sequence, positions never change

The rows of an answer come into the cache while it is decoded, but for its last token. That one, and what the prompt
puts between an answer and the next turn, is carried: the next turn reads it first. At the very beginning S is carried.

Blocks stay where an earlier question had them loaded, and rows stay as they were repaired: a question loads and
repairs what it wants beyond that. What was read before a block came in has not seen it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.recompute.base import Blocks, Piece, Plan, Tokens, padding_for
from ragkv.sparse.base import PrefillPolicy, PrefillState, SparsePrefill


class SessionState:
    """State of one conversation. Not thread-safe; a turn that failed half-way leaves it useless.

    carry: token ids that stand at the end and have no rows yet · chunks: how many stand in it. Once there are any, it
    goes on as it began: by full prefills, or from stored KV.
    """

    def __init__(self, model: DecoderModel, prefix: Sequence[int]):
        """prefix: token ids of S."""
        self.stitch = Stitch(model, (), 0, 0)
        self.pending_tokens = tuple(prefix)
        self.chunks = 0
        self._prefix = len(self.pending_tokens)
        self._held: Sequence[Sequence[Blocks]] = [()] * model.shape.layers
        self._repaired: Sequence[Sequence[Tokens]] = [()] * model.shape.layers
        self._question_ends = [0] * model.shape.layers
        self._policy: PrefillPolicy | None = None
        self._choice: PrefillState | None = None

    @property
    def started(self) -> bool:
        """Whether anything was read yet."""
        return self.stitch.end > 0

    @property
    def position(self) -> int:
        """Where the next chunk, or the next question, will stand."""
        return self.stitch.end + len(self.pending_tokens)

    @property
    def pending_count(self) -> int:
        """Tokens that have to be read before anything joins; S was read when the reader was made."""
        return len(self.pending_tokens) if self.started else 0

    @property
    def first(self) -> int:
        """Where the first chunk stands, or will stand."""
        return self.stitch.starts[0] if self.stitch.starts else self.position

    @property
    def cached(self) -> float:
        """Tokens in the cache, S aside: the mean over layers."""
        lengths = self.stitch.cache.lengths
        return sum(lengths) / len(lengths) - self._prefix if self.started else 0.0

    @property
    def bytes(self) -> int:
        """Memory of the cache."""
        return self.stitch.cache.bytes

    def join(self, pieces: Sequence[Piece]) -> None:
        """Chunks take their places at the end."""
        self.stitch.join(pieces)
        self.chunks += len(pieces)
        nothing: Sequence[Sequence[Tokens]] = [((),) * len(pieces)] * len(self._held)
        self._held, self._repaired = _each(_beside, self._held, nothing), _each(_beside, self._repaired, nothing)

    def missing(self, wanted: Sequence[Sequence[Blocks]]) -> list[Sequence[Blocks]]:
        """Of the wanted blocks [layer][chunk], those that are not in the cache."""
        return minus(wanted, self._held)

    def hold(self, blocks: Sequence[Sequence[Blocks]]) -> None:
        """Blocks [layer][chunk] were loaded."""
        self._held = plus(self._held, blocks)

    def remaining(self, plan: Plan, pieces: Sequence[Piece]) -> Plan:
        """What is left to do of a plan for all chunks: `kept` has the blocks of earlier questions, too, `recompute`
        lacks what was repaired for them. From here on it counts as done."""
        self.hold(plan.kept)
        before, self._repaired = self._repaired, plus(self._repaired, plan.recompute)
        kept, todo = _frozen(self._held), _frozen(minus(plan.recompute, before))
        if (kept, todo) == (plan.kept, plan.recompute):
            return plan
        padding = padding_for(pieces, kept, todo)
        one_pass = plan.one_pass and not any(any(layer) for layer in padding)
        return replace(plan, kept=kept, recompute=todo, padding=padding, one_pass=one_pass)

    def append_question(self, tokens: int) -> None:
        """So many tokens, what was carried among them, were read behind everything else, a question at their end."""
        self.stitch.end, self.pending_tokens = self.stitch.end + tokens, ()
        self._question_ends = list(self.stitch.cache.lengths)

    def append_answer(self, tokens: Sequence[int], then: Sequence[int]) -> None:
        """tokens: of the answer as far as it counts; rows decoded beyond them go · then: what stands behind it.

        Where blocks came in among the answer's rows all of these go, and the next turn reads the answer."""
        cache = self.stitch.cache
        came = [
            int((cache.positions(layer)[asked:] < self.stitch.end).sum())
            for layer, asked in enumerate(self._question_ends)
        ]
        rows = 0 if any(came) else min(len(tokens), cache.lengths[0] - self._question_ends[0])
        cache.truncate([length + rows for length in self._question_ends])
        self.stitch.end += rows
        self.pending_tokens = (*tokens[rows:], *then)

    def attention(self, policy: PrefillPolicy | None, end: int) -> SparsePrefill | None:
        """The attention of an input that ends at position `end`. What a policy remembers goes from turn to turn."""
        if policy is None or not policy.applies(end):
            return None
        if self._choice is None or policy != self._policy:
            self._policy, self._choice = policy, policy.start()
        return SparsePrefill(self._choice, end)


def minus(wanted: Sequence[Sequence[Tokens]], have: Sequence[Sequence[Tokens]]) -> list[Sequence[Tokens]]:
    """Blocks, or tokens, of `wanted` alone, same nesting."""
    return _each(_without, wanted, have)


def plus(have: Sequence[Sequence[Tokens]], more: Sequence[Sequence[Tokens]]) -> list[Sequence[Tokens]]:
    """Blocks, or tokens, of either, same nesting."""
    return _each(_with, have, more)


Layer = Sequence[Tokens]
"""Blocks, or tokens, of every chunk."""


def _each(work: Callable[[Layer, Layer], Layer], ones: Sequence[Layer], others: Sequence[Layer]) -> list[Layer]:
    """`work` on every layer; on layers that are the same objects, as most are, once."""
    known: dict[tuple[int, int], Layer] = {}
    found = []
    for one, other in zip(ones, others, strict=True):
        both = id(one), id(other)
        if both not in known:
            known[both] = work(one, other)
        found.append(known[both])
    return found


def _without(wanted: Layer, have: Layer) -> Layer:
    return tuple(tuple(sorted(set(want) - set(had))) if had else want for want, had in zip(wanted, have, strict=True))


def _with(have: Layer, more: Layer) -> Layer:
    return tuple(
        a if a == b else tuple(sorted({*a, *b})) if a and b else a or b for a, b in zip(have, more, strict=True)
    )


def _beside(before: Layer, joining: Layer) -> Layer:
    return (*before, *joining)


def _frozen(nested: Sequence[Layer]) -> tuple[tuple[Tokens, ...], ...]:
    return tuple(map(tuple, nested))
