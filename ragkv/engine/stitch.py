"""Stitching: copies stored rows into one context cache, and turns a plan's recomputation into a model pass.

positions   S begins at 0; the chunks follow back to back at their full length, then the question. Dropped blocks leave
            gaps. In a conversation the answer follows, then the new chunks of the next question, and so on
slots       where a token's row lies in the cache; per layer, because layers keep different blocks
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Attention, Pass, Step
from ragkv.model.rotary import Rotary, rotate
from ragkv.recompute.base import Blocks, ChunkSpan, KeyPositions, Piece, Plan, Rows, Tokens, rows_alive

Numbers = NDArray[np.int64]
Part = tuple[int, Tokens, Sequence[Rows]]


class Stitch:
    """The context cache of a request or session, and where its rows lie.

    Attributes:
        cache: The KV.
        starts: Position of each chunk's first token.
        end: Position of the next chunk, or of the question.
    """

    def __init__(self, model: DecoderModel, pieces: Sequence[Piece], prefix: int, capacity: int):
        """Start a cache; prefix: tokens of S, capacity: rows of every layer."""
        self.starts: list[int] = []
        self.end = prefix
        self.cache = ContextCache(model.shape, capacity, model.dtype, model.devices)
        self._model = model
        self._sizes: list[int] = []
        self._rotary: dict[tuple[int, torch.device], Rotary] = {}
        # Slot by position, -1 where there is no row. Layers whose rows lie in the same slots share one array.
        self._slots: list[Numbers] = [np.empty(0, dtype=np.int64)] * model.shape.layers
        self.join(pieces)

    def join(self, pieces: Sequence[Piece]) -> None:
        """Append chunks at the end, without rows."""
        if not pieces:
            return
        for piece in pieces:
            self.starts.append(self.end)
            self._sizes.append(piece.tokens)
            self.end += piece.tokens
        self._rotary = self._model.rotary_tables(self.end)
        joining = np.full(self.end - len(self._slots[0]), -1)
        wider = {id(old): np.concatenate([old, joining]) for old in self._slots}
        self._slots = [wider[id(old)] for old in self._slots]

    def reserve(self, pieces: Sequence[Piece], requested: Sequence[Sequence[Blocks]]) -> None:
        """Give rows to blocks requested[layer][chunk]. Their content is undefined until it is filled in or computed."""
        # Most layers keep the same blocks, in the same slots.
        alike: dict[tuple[Sequence[Blocks], int, int], list[int]] = {}
        for layer, blocks in enumerate(requested):
            if any(blocks):
                key = tuple(blocks), id(self._slots[layer]), self.cache.lengths[layer]
                alike.setdefault(key, []).append(layer)
        for (blocks, _, _), layers in alike.items():
            positions = self._places(pieces, blocks)
            slots, placed = self.cache.reserve_alike(layers, positions), self._slots[layers[0]].copy()
            placed[positions.numpy()] = slots.numpy()
            for layer in layers:
                self._slots[layer] = placed

    def fill(self, layers: Sequence[int], chunks: Sequence[Part], angle: KeyPositions | None = None) -> None:
        """Rotate rows to their positions and write them where rows are reserved for them.

        Args:
            layers: Layers of one kind on one device; few rows of each take as long as those of all.
            chunks: Triples of chunk, its token indices [m], and pre-RoPE k and v [m, Hkv, d] of each of the layers.
            angle: Where keys are rotated to; None rotates them to their stitched positions.
        """
        chunks = [part for part in chunks if part[1]]
        if not chunks:
            return
        names, device = [(i, tokens) for i, tokens, _ in chunks], self.cache.devices[layers[0]]
        in_order = [rows[number] for number in range(len(layers)) for _, _, rows in chunks]
        k, v = (torch.cat(rows).to(device, non_blocking=True) for rows in zip(*in_order, strict=True))
        positions, k = self._of(names), self.turned(layers[0], k, names, angle)
        for layer, keys, values in zip(layers, k.split(len(positions)), v.split(len(positions)), strict=True):
            self.cache.fill(layer, self._at(layer, positions), keys, values)

    def put(self, layer: int, chunks: Sequence[tuple[int, Tokens, Rows]], angle: KeyPositions | None = None) -> None:
        """Append rows and fill them; arguments as of `fill`."""
        chunks = [part for part in chunks if part[1]]
        if chunks:
            positions = self._of([(i, tokens) for i, tokens, _ in chunks])
            self._place(layer, positions, self.cache.reserve(layer, positions))
            self.fill([layer], [(i, tokens, [rows]) for i, tokens, rows in chunks], angle)

    @property
    def rotary(self) -> Rotary:
        """cos and sin of the first layer at all positions before `end`."""
        return self._table(0)

    def addresses(self, layers: Numbers, positions: Numbers) -> tuple[Numbers, Numbers]:
        """Return the addresses of K and of V of rows [m]: of layers [m], at stitched positions [m]."""
        stores = [self.cache.buffers(layer, 0) for layer in range(self.cache.shape.layers)]
        row = self.cache.shape.kv_heads * self.cache.shape.head_dim * self.cache.dtype.itemsize
        begin = np.array([[k.data_ptr() for k, _ in stores], [v.data_ptr() for _, v in stores]])
        slots = np.empty_like(positions)
        for number, slots_of in {id(each): each for each in self._slots}.items():
            here = np.array([id(each) == number for each in self._slots])[layers]
            slots[here] = slots_of[positions[here]]
        k, v = begin[:, layers] + slots * row
        return k, v

    def turned(
        self, layer: int, k: Tensor, chunks: Sequence[tuple[int, Tokens]], angle: KeyPositions | None = None
    ) -> Tensor:
        """Rotate pre-RoPE keys [L · m, Hkv, d] of (chunk, token indices) pairs in L layers like this; see `fill`."""
        if angle is None or self._model.kinds[layer].window is not None:  # windows count true positions
            at = self._of(chunks)
        else:
            places = [ChunkSpan(self.starts[0], start, self.end) for start in self.starts]
            at = torch.cat([angle(torch.tensor(tokens), places[i]) for i, tokens in chunks])
        kind, at = self._model.kinds[layer], at.repeat(len(k) // len(at))
        return kind.pack(rotate(kind.unpack(k), self._table(layer)[index_to_device(at, k.device)]))

    def _table(self, layer: int) -> Rotary:
        """Return cos and sin of a layer, on its device."""
        return self._rotary[self._model.kinds[layer].rotation, self._model.devices[layer]]

    def positions(self, tokens: Sequence[Tokens]) -> Tensor:
        """Return the stitched positions of token indices per chunk, ascending."""
        return torch.tensor(
            [s + t for s, part in zip(self.starts, tokens, strict=True) for t in part], dtype=torch.int64
        )

    def tokens(self, positions: Tensor) -> tuple[Tokens, ...]:
        """Return token indices per chunk of ascending stitched positions [m]: the inverse of `positions`."""
        starts, sizes = (torch.tensor(each, dtype=torch.int64) for each in (self.starts, self._sizes))
        first, behind = (torch.searchsorted(positions, bound).tolist() for bound in (starts, starts + sizes))
        return tuple(
            tuple((positions[i:j] - start).tolist()) for start, i, j in zip(self.starts, first, behind, strict=True)
        )

    def rows(self, layer: int, positions: Tensor) -> Rows:
        """Return copies of the rows at stitched positions [m]: k (rotated), v [m, Hkv, d]."""
        slots = index_to_device(self._at(layer, positions), self.cache.devices[layer])
        return self.cache.k(layer)[slots], self.cache.v(layer)[slots]

    def again(
        self,
        tokens: Sequence[Sequence[int]],
        positions: Tensor,
        start: int,
        depth: int,
        hidden: Tensor | None,
    ) -> Pass:
        """Return the pass that recomputes the tokens at `positions` [m] in layers [start, depth).

        Args:
            tokens: Token ids per chunk.
            positions: Stitched positions [m].
            start: First layer.
            depth: Layer to stop before.
            hidden: Hidden states [m, hidden size] that enter layer `start`; None for layer 0.
        """
        nothing = torch.empty(0, dtype=torch.int64)
        steps = [
            Step(write=None, slots=self._at(layer, positions), leave=nothing if layer == depth - 1 else None)
            for layer in range(start, depth)
        ]
        ids = self._ids(tokens)[positions]
        return Pass(ids, positions, self.cache, steps, depth=depth, start=start, hidden=hidden)

    def repair(
        self,
        plan: Plan,
        tokens: Sequence[Sequence[int]],
        question: Sequence[int] = (),
        *,
        outputs: int = 1,
        attention: Attention | None = None,
    ) -> Pass:
        """Return the pass that recomputes what the plan says, with the question's rows behind it if given.

        Rows thin out by SamKV's rule 1 and are written by rule 2. The question's rows go through every layer.

        Args:
            plan: What is recomputed.
            tokens: Token ids per chunk.
            question: Token ids.
            outputs: How many of the last rows give logits.
            attention: Attention of the pass; None is dense.
        """
        entering = rows_alive(plan.recompute)
        both = self._each([*entering, *plan.recompute])
        alive, written = both[: len(entering)], both[len(entering) :]
        asked = torch.arange(self.end, self.end + len(question))
        above: list[Tensor | None] = [*alive[1:], None]
        # Layers with the same rows in the same slots, as most are, share one step.
        alike: dict[tuple[int, ...], list[int]] = {}
        for layer, named in enumerate(zip(alive, above, written, self._slots, strict=True)):
            alike.setdefault((*map(id, named), self.cache.lengths[layer]), []).append(layer)
        steps: dict[int, Step] = {}
        for layers in alike.values():
            first, behind = layers[0], self.cache.reserve_alike(layers, asked)
            slots = torch.cat([self._at(first, written[first]), behind])
            step = _step(alive[first], above[first], written[first], slots, outputs, plan.blend is not None)
            steps |= dict.fromkeys(layers, step)
        ids = [part[t] for part, rows in zip(tokens, entering[0], strict=True) for t in rows]
        return Pass(
            torch.tensor([*ids, *question], dtype=torch.int64),
            torch.cat([alive[0], asked]),
            self.cache,
            [steps[layer] for layer in range(len(alive))],
            blend=plan.blend,
            attention=attention,
        )

    def _each(self, layers: Sequence[Sequence[Tokens]]) -> list[Tensor]:
        """Return `positions` of every layer, made once for layers that share tuples: else it is slower than loading."""
        known: dict[tuple[int, ...], Tensor] = {}
        found: dict[int, Tensor] = {}
        for layer in layers:
            if id(layer) not in found:
                key = tuple(map(id, layer))
                if key not in known:
                    known[key] = self.positions(layer)
                found[id(layer)] = known[key]
        return [found[id(layer)] for layer in layers]

    def _at(self, layer: int, positions: Tensor) -> Tensor:
        """Return the slots of rows at stitched positions [m]."""
        return torch.from_numpy(self._slots[layer][positions.numpy()])

    def _place(self, layer: int, positions: Tensor, slots: Tensor) -> None:
        """Record the slots of rows at stitched positions [m], in this layer alone."""
        if sum(each is self._slots[layer] for each in self._slots) > 1:
            self._slots[layer] = self._slots[layer].copy()
        self._slots[layer][positions.numpy()] = slots.numpy()

    def _places(self, pieces: Sequence[Piece], blocks: Sequence[Blocks]) -> Tensor:
        """Return the stitched positions of blocks per chunk, in this order."""
        chunk = np.arange(len(blocks)).repeat([len(each) for each in blocks])
        tokens, size = np.array([(piece.tokens, piece.block) for piece in pieces], dtype=np.int64)[chunk].T
        begin = np.fromiter(chain.from_iterable(blocks), np.int64, len(chunk)) * size
        rows = np.minimum(tokens - begin, size)
        # Row i of the result is (its block's first position) + (its number in the block).
        first = np.array(self.starts)[chunk] + begin
        return torch.from_numpy(np.arange(rows.sum()) + (first + rows - rows.cumsum()).repeat(rows))

    def _of(self, chunks: Sequence[tuple[int, Tokens]]) -> Tensor:
        """Return the stitched positions of (chunk, token indices) pairs, in this order."""
        return torch.cat([torch.tensor(tokens, dtype=torch.int64) + self.starts[i] for i, tokens in chunks])

    def _ids(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return token ids by position [end]; 0 outside of chunks."""
        ids = torch.zeros(self.end, dtype=torch.int64)
        for start, part in zip(self.starts, tokens, strict=True):
            ids[start : start + len(part)] = torch.tensor(part, dtype=torch.int64)
        return ids


def _step(present: Tensor, above: Tensor | None, written: Tensor, slots: Tensor, outputs: int, blend: bool) -> Step:
    """Return the step of one layer.

    Args:
        present: Positions of the recomputed rows that reach the layer; the question's rows follow them.
        above: Positions of those that go on to the next layer; None in the last layer, which `outputs` rows leave.
        written: Positions of those whose K and V are written.
        slots: Slots of all rows that are written, the question's included.
        outputs: Rows that give logits.
        blend: Whether recomputed rows are blended with stored ones.
    """
    again = written.shape[0]
    count, total = present.shape[0], present.shape[0] + slots.shape[0] - again
    behind = torch.arange(count, total)
    if above is None:
        leave = behind[-outputs:] if outputs else behind[:0]
    else:
        leave = torch.cat([_among(present, above), behind])
    write = torch.cat([_among(present, written), behind])
    return Step(
        write=None if write.shape[0] == total else write,
        slots=slots,
        blend=again if blend else 0,
        leave=None if leave.shape[0] == total else leave,
    )


def _among(present: Tensor, some: Tensor) -> Tensor:
    """Return the indices of `some` among the positions `present`; both ascending."""
    return torch.arange(present.shape[0]) if some is present else torch.searchsorted(present, some)
