"""Types and helpers that every recompute method shares.

A method decides how stored chunks become one context cache. It sees tensors only. The engine calls, in this order:

    screen(found)                   which of the retrieved chunks join the context, where the method limits their number
    composite_blocks(pieces)        which blocks the composite pass reads; empty if the method needs no query
    composite_layers(layers)        how many layers that pass runs
    plan(pieces, queries, read)     which blocks are kept per layer, which of their tokens are recomputed, and how

Blocks and tokens are numbered inside their chunk. A chunk is SamKV's "document".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from ragkv.recompute.evidence import BlockEvidence, Kind
from ragkv.types import Blend, Digest

Blocks = tuple[int, ...]
"""Sorted, unique block numbers of one chunk."""

Tokens = tuple[int, ...]
"""Sorted, unique token indices of one chunk."""


@dataclass(frozen=True)
class Piece:
    """A chunk as a method sees it: its size and its digest, without KV.

    Attributes:
        tokens: Number of tokens.
        block: Tokens per block.
        digest: Digest of the chunk.
        exact: Whether the stored KV equals that of a full prefill (the first chunk after a shared prefix).
        evidence: What speaks for each block, before the model has read anything; None where nothing is known.
    """

    tokens: int
    block: int
    digest: Digest
    exact: bool = False
    evidence: BlockEvidence | None = None

    @property
    def blocks(self) -> int:
        """Number of blocks. A partial last block counts."""
        return -(-self.tokens // self.block)

    def span(self, block: int) -> range:
        """Return the token indices of a block."""
        return range(block * self.block, min(self.tokens, (block + 1) * self.block))

    def rows(self, blocks: Sequence[int]) -> Tokens:
        """Return the token indices of blocks, in order."""
        return tuple(token for block in blocks for token in self.span(block))

    def row_count(self, blocks: Sequence[int]) -> int:
        """Return how many tokens blocks have, without listing them as `rows` does."""
        return sum(len(self.span(block)) for block in blocks)


StatesBehind = Literal["last", "composed"]
"""The states behind the `last` chunk, as it was encoded, or those that are `composed` of all chunks."""

Rows = tuple[Tensor, Tensor]
"""k, v [m, Hkv, d] of some tokens."""


@dataclass(frozen=True)
class Refinement:
    """A choice of tokens that is made while recomputing.

    From `layer` on, only the tokens whose new rows differ most from the stored ones are recomputed further. There is
    one share per layer; the layers after the last share keep its choice.

    Attributes:
        layer: First layer that chooses.
        shares: Tokens that are recomputed further, as shares of all context tokens.
        measure: Maps (new rows, stored rows) to their difference [m]. Both K have the same rotation.
    """

    layer: int
    shares: tuple[float, ...]
    measure: Callable[[Rows, Rows], Tensor]


@dataclass(frozen=True)
class ChunkSpan:
    """Positions of a chunk in its context.

    Attributes:
        first: Position of the first chunk's first token.
        start: Position of this chunk's first token.
        end: Position behind the last chunk's last token.
    """

    first: int
    start: int
    end: int


KeyPositions = Callable[[Tensor, ChunkSpan], Tensor]
"""Maps token indices of a chunk [m] and its span to the positions [m] that the keys are rotated to."""

Expansion = Callable[[int, Tensor, Sequence[Tensor]], tuple[Blocks, ...]]
"""Maps a layer, the question's pre-RoPE queries in it [question tokens, Hq, d] and the pre-RoPE keys of every chunk in
it [n, Hkv, d] to the blocks per chunk that are read besides the kept ones."""


@dataclass(frozen=True)
class Plan:
    """What one question reads and recomputes. Nested tuples are indexed `[layer][chunk]`.

    Attributes:
        kept: Blocks that the answer is read from.
        recompute: R_l, tokens of kept blocks whose K and V are recomputed in this layer.
        padding: Blocks that are not kept, but whose stored rows are used during repair for tokens that pass through
            (rule 2).
        blend: Combines new and stored rows; None overwrites.
        one_pass: Whether repair and question prefill run as one pass. This equals two passes, since causality comes
            from positions, as long as there is no padding: the question must not see padding.
        refinement: If set, `recompute` is only the start, and the tokens are chosen while recomputing.
        expansion: If set, `kept` is only the start, and each layer adds what the question asks for, out of all that is
            stored.
        key_positions: For baselines that rotate keys to other positions than their own.
        promised: Probability that the answer is in what is kept, as far as the method knows; None where it does not.
    """

    kept: tuple[tuple[Blocks, ...], ...]
    recompute: tuple[tuple[Tokens, ...], ...]
    padding: tuple[tuple[Blocks, ...], ...]
    blend: Blend | None = None
    one_pass: bool = False
    refinement: Refinement | None = None
    expansion: Expansion | None = None
    key_positions: KeyPositions | None = None
    promised: float | None = None


class Method(Protocol):
    """A method that builds a context cache from stored chunks."""

    @property
    def chunks(self) -> int:
        """Most retrieved chunks that join the context in a turn; 0: all, and `screen` is not called."""
        ...

    @property
    def evidence(self) -> tuple[Kind, ...]:
        """The kinds of evidence that the method asks of pieces."""
        ...

    @property
    def states(self) -> StatesBehind:
        """What layers with a state go on from, in a model that has them."""
        ...

    def screen(self, found: Sequence[BlockEvidence]) -> tuple[int, ...]:
        """Return the chunks that join the context, ascending. The others take no positions and are not read.

        Args:
            found: The evidence of the retrieved chunks that are not in the context, in order.
        """
        ...

    def composite_blocks(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Return the blocks per chunk that the composite pass reads in every layer; () if no query is needed."""
        ...

    def composite_layers(self, layers: int) -> int:
        """Return how many layers of the composite pass `plan` needs the queries of, out of `layers`."""
        ...

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor], read: Sequence[Blocks] = ()) -> Plan:
        """Plan what is kept and recomputed.

        Args:
            pieces: The chunks, in order.
            queries: Pre-RoPE queries [question tokens, Hq, d] of the composite pass, per layer.
            read: What `composite_blocks` returned. These blocks are in the context cache, so a plan keeps them.
        """
        ...


def require_between(low: float, high: float, **values: float) -> None:
    """Raise a ValueError that names the first value outside low..high."""
    for name, value in values.items():
        if not low <= value <= high:
            limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"{name} must be {limit}, not {value}")


def fixed_blocks(blocks: int, initial: int, local: int) -> Blocks:
    """Return the initial and local blocks of a chunk, or all of its blocks if it has no middle."""
    if blocks <= initial + local:
        return tuple(range(blocks))
    return (*range(initial), *range(blocks - local, blocks))


def middle_blocks(blocks: int, initial: int, local: int) -> range:
    """Return the blocks between the initial and the local ones."""
    return range(initial, max(initial, blocks - local))


def rows_alive(recompute: Sequence[Sequence[Tokens]]) -> list[list[Tokens]]:
    """Compute T_l = union of R_m over m >= l: the tokens whose hidden state must enter layer l (rule 1).

    The nesting is that of R. Layers that share an object in `recompute` share the objects here.
    """
    alive: list[list[Tokens]] = []
    below: list[Tokens] = [()] * len(recompute[0])
    last: Sequence[Tokens] | None = None
    for layer in reversed(recompute):
        if layer is not last:
            below, last = [_union(above, own) for above, own in zip(below, layer, strict=True)], layer
        alive.append(below)
    return alive[::-1]


def _union(above: Tokens, own: Tokens) -> Tokens:
    if not above or above is own:
        return own
    return above if above == own else tuple(sorted({*above, *own}))


def recomputed_tokens(recompute: Sequence[Sequence[Tokens]]) -> list[float]:
    """Count the recomputed tokens per chunk: the mean over layers of the tokens that enter the layer."""
    alive = rows_alive(recompute)
    layers = different_layers(alive)
    return [sum(times * len(layer[i]) for times, layer in layers) / len(alive) for i in range(len(alive[0]))]


def different_layers(layers: Sequence[Sequence[Tokens]]) -> list[tuple[int, Sequence[Tokens]]]:
    """Return the different layers of blocks, or tokens, each with the number of layers that are the same object.

    Most layers of a plan are, so what is counted for each of them takes much longer.
    """
    times, first = Counter(map(id, layers)), {id(layer): layer for layer in layers}
    return [(times[name], layer) for name, layer in first.items()]


def padding_for(
    pieces: Sequence[Piece], kept: Sequence[Sequence[Blocks]], recompute: Sequence[Sequence[Tokens]]
) -> tuple[tuple[Blocks, ...], ...]:
    """Return the blocks to load in layers where a token passes through (T_l without R_l) and its block is not kept."""
    alive = rows_alive(recompute)
    return tuple(
        tuple(
            tuple(sorted({token // piece.block for token in alive[layer][i]} - set(kept[layer][i])))
            for i, piece in enumerate(pieces)
        )
        for layer in range(len(kept))
    )


def overwritten_blocks(pieces: Sequence[Piece], plan: Plan) -> list[list[Blocks]]:
    """Return the kept blocks `[layer][chunk]` that need no stored rows.

    All rows of such a block are recomputed and overwrite the stored ones, and a layer writes its rows before it reads
    any.
    """
    if plan.blend is not None or plan.refinement is not None or plan.expansion is not None:
        return [[()] * len(pieces) for _ in plan.kept]
    found: list[list[Blocks]] = []
    previous: tuple[Sequence[Blocks], Sequence[Tokens]] | None = None
    for layer in zip(plan.kept, plan.recompute, strict=True):
        found.append(
            found[-1] if layer == previous else [_complete(*each) for each in zip(pieces, *layer, strict=True)]
        )
        previous = layer
    return found


def _complete(piece: Piece, blocks: Blocks, tokens: Tokens) -> Blocks:
    """Return the blocks whose tokens are all in `tokens`."""
    present = set(tokens)
    return tuple(block for block in blocks if present.issuperset(piece.span(block))) if present else ()


def inexact_tokens(pieces: Sequence[Piece], blocks: Sequence[Blocks]) -> tuple[Tokens, ...]:
    """Return the tokens of `blocks` in every chunk that is not exact already: the usual repair set."""
    return tuple(() if piece.exact else piece.rows(chosen) for piece, chosen in zip(pieces, blocks, strict=True))
