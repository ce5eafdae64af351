"""How many chunks become one context cache: the nouns every method shares.

A method sees tensors only. It is asked twice per question:
    first(pieces)          which blocks the composite pass reads (empty: the method needs no query)
    plan(pieces, queries)  which blocks are kept per layer, which of their tokens are recomputed, and how
Blocks and tokens are numbered inside their chunk. "Chunk" here is SamKV's "document".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ragkv.types import Blend, Digest

Blocks = tuple[int, ...]
"""Sorted, unique block numbers of one chunk."""

Tokens = tuple[int, ...]
"""Sorted, unique token indices of one chunk."""


@dataclass(frozen=True)
class Piece:
    """A chunk as selection sees it: its size and its digest, no KV.

    exact: its stored KV already is what a full prefill would compute (the first chunk after a shared prefix).
    """

    tokens: int
    block: int
    digest: Digest
    exact: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks; a partial last one counts."""
        return -(-self.tokens // self.block)

    def span(self, block: int) -> range:
        """Token indices of a block."""
        return range(block * self.block, min(self.tokens, (block + 1) * self.block))

    def rows(self, blocks: Sequence[int]) -> Tokens:
        """Token indices of blocks, in order."""
        return tuple(token for block in blocks for token in self.span(block))


Rows = tuple[Tensor, Tensor]
"""k, v [m, Hkv, d] of some tokens."""


@dataclass(frozen=True)
class Refinement:
    """Which tokens go on being recomputed, seen only while recomputing: from `layer` on, one share per layer, those
    whose new rows differ most from the stored ones; later layers keep the last choice.

    shares: of all context tokens · measure: (new rows, stored rows) -> how far apart [m]; K of both rotated alike
    """

    layer: int
    shares: tuple[float, ...]
    measure: Callable[[Rows, Rows], Tensor]


@dataclass(frozen=True)
class ChunkSpan:
    """Where a chunk stands: positions of the first chunk's, of its own, and behind the last chunk's last token."""

    first: int
    start: int
    end: int


KeyPositions = Callable[[Tensor, ChunkSpan], Tensor]
"""(token indices of a chunk [m], its place) -> the positions that their keys are rotated to [m]."""

Expansion = Callable[[int, Tensor, Sequence[Tensor]], tuple[Blocks, ...]]
"""(layer, the question's pre-RoPE queries there [question tokens, Hq, d], pre-RoPE keys of every chunk there
[n, Hkv, d]) -> blocks per chunk to read beside the kept ones."""


@dataclass(frozen=True)
class Plan:
    """What one question reads and recomputes; [layer][chunk] everywhere.

    kept       blocks the answer is read from
    recompute  R_l: tokens of kept blocks whose K, V are computed again at this layer
    padding    blocks not kept whose stored rows stand in, during repair only, for tokens that pass through (rule 2)
    blend      how new rows meet stored ones; None: overwrite
    one_pass   repair and question prefill in one pass; equal to two passes, because causality comes from positions, as
               long as there is no padding, which the question must not see
    check      `recompute` is where to begin; what is done is decided on the way
    grow       `kept` is where to begin; each layer adds what the question asks for there, out of all that is stored
    angle      for baselines that turn keys elsewhere than to where they stand
    """

    kept: tuple[tuple[Blocks, ...], ...]
    recompute: tuple[tuple[Tokens, ...], ...]
    padding: tuple[tuple[Blocks, ...], ...]
    blend: Blend | None = None
    one_pass: bool = False
    refinement: Refinement | None = None
    expansion: Expansion | None = None
    key_positions: KeyPositions | None = None


class Method(Protocol):
    """One way of making a context cache out of stored chunks."""

    def first(self, pieces: Sequence[Piece]) -> tuple[Blocks, ...]:
        """Blocks per chunk the composite pass reads in every layer; () when no query is needed."""
        ...

    def depth(self, layers: int) -> int:
        """How many layers of the composite pass `plan` needs the queries of."""
        ...

    def plan(self, pieces: Sequence[Piece], queries: Sequence[Tensor]) -> Plan:
        """queries: per layer, pre-RoPE [question tokens, Hq, d] of the composite pass."""
        ...


def within(low: float, high: float, **values: float) -> None:
    """Raise ValueError naming the value that does not lie in low..high."""
    for name, value in values.items():
        if not low <= value <= high:
            limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"{name} must be {limit}, not {value}")


def fixed_blocks(blocks: int, initial: int, local: int) -> Blocks:
    """Initial and local blocks of a chunk; all of them when it has no middle."""
    if blocks <= initial + local:
        return tuple(range(blocks))
    return (*range(initial), *range(blocks - local, blocks))


def middle_blocks(blocks: int, initial: int, local: int) -> range:
    """The blocks between the initial and the local ones."""
    return range(initial, max(initial, blocks - local))


def rows_alive(recompute: Sequence[Sequence[Tokens]]) -> list[list[Tokens]]:
    """T_l = union of R_m over m >= l: tokens whose hidden state must enter layer l (rule 1). Same nesting as R; layers
    that recompute the same object have the same objects here."""
    alive: list[list[Tokens]] = []
    below: list[Tokens] = [()] * len(recompute[0])
    last: Sequence[Tokens] | None = None
    for layer in reversed(recompute):
        if layer is not last:
            below, last = [_union(seen, now) for seen, now in zip(below, layer, strict=True)], layer
        alive.append(below)
    return alive[::-1]


def _union(seen: Tokens, now: Tokens) -> Tokens:
    if not seen or seen is now:
        return now
    return seen if seen == now else tuple(sorted({*seen, *now}))


def recomputed(recompute: Sequence[Sequence[Tokens]]) -> list[float]:
    """Tokens computed again, per chunk: the mean over layers of those that enter the layer."""
    alive = rows_alive(recompute)
    return [sum(len(layer[i]) for layer in alive) / len(alive) for i in range(len(alive[0]))]


def padding_for(
    pieces: Sequence[Piece], kept: Sequence[Sequence[Blocks]], recompute: Sequence[Sequence[Tokens]]
) -> tuple[tuple[Blocks, ...], ...]:
    """Blocks to load at layers where a token passes through (T_l without R_l) and its block is not kept."""
    alive = rows_alive(recompute)
    return tuple(
        tuple(
            tuple(sorted({token // piece.block for token in alive[layer][i]} - set(kept[layer][i])))
            for i, piece in enumerate(pieces)
        )
        for layer in range(len(kept))
    )


def overwritten(pieces: Sequence[Piece], plan: Plan) -> list[list[Blocks]]:
    """Kept blocks [layer][chunk] that need no stored rows: all of them are computed again and written over what lies
    there, and a layer writes its rows before it reads any."""
    if plan.blend is not None or plan.refinement is not None or plan.expansion is not None:
        return [[()] * len(pieces) for _ in plan.kept]
    found: list[list[Blocks]] = []
    before: tuple[Sequence[Blocks], Sequence[Tokens]] | None = None
    for layer in zip(plan.kept, plan.recompute, strict=True):
        found.append(found[-1] if layer == before else [_whole(*each) for each in zip(pieces, *layer, strict=True)])
        before = layer
    return found


def _whole(piece: Piece, blocks: Blocks, tokens: Tokens) -> Blocks:
    """The blocks that the tokens have all of."""
    found = set(tokens)
    return tuple(block for block in blocks if found.issuperset(piece.span(block))) if found else ()


def outside(pieces: Sequence[Piece], blocks: Sequence[Blocks]) -> tuple[Tokens, ...]:
    """Tokens of `blocks` in every chunk that is not exact already: the usual repair set."""
    return tuple(() if piece.exact else piece.rows(chosen) for piece, chosen in zip(pieces, blocks, strict=True))
