"""Reader: what the papers do, between the model and stored chunks. No retrieval, no store, no text.

encode(tokens)                       read a chunk once: KV before RoPE, and the digest
full(chunks, question)               prefill everything: the quality ceiling and the cost to beat
sparse(sources, question, method)    composite pass → plan → load → repair → question prefill

Both go on with a `Talk` if they are given one: what it holds stays, and only what is new is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.carrier import Carrier, borrow, make_carrier
from ragkv.context import ContextCache
from ragkv.deciding import follow, grow
from ragkv.elsewhere import Absent
from ragkv.fresh import Source
from ragkv.kernels.carry import Lent
from ragkv.model import DecoderModel, rotate
from ragkv.passes import Capture, Pass, append
from ragkv.recompute.base import Angle, Blocks, Grow, Method, Piece, Plan, Rows, overwritten, recomputed
from ragkv.recompute.digest import DigestParams, digest, retrieval_pairs
from ragkv.sparse.base import Decoder, Decoding, Policy, Sparse, decoding, last_rows, reading, watched
from ragkv.steps import Steps
from ragkv.stitch import Stitch
from ragkv.talk import Talk, minus, plus
from ragkv.types import ChunkKV
from ragkv.watch import Watch


@dataclass(frozen=True)
class Context:
    """A context cache ready to decode from: logits [vocabulary] of the first answer token, which stands at `position`.
    plan is None when everything was prefilled · sparse: what a prefill policy did, None where all of it was dense ·
    decoding: what a decode policy learned from the question, None where decoding is dense.

    before: tokens that were in the cache when the turn began, S aside · known: chunks that stood there · read: tokens
    that went through the model, S and the composite pass aside; both mean over layers.
    """

    cache: ContextCache
    logits: Tensor
    position: int
    plan: Plan | None
    sparse: Sparse | None = None
    decoding: Decoding | None = None
    before: float = 0.0
    known: int = 0
    read: float = 0.0


class Reader:
    """Stateless between calls but for the KV of S, computed once."""

    def __init__(
        self,
        model: DecoderModel,
        prefix: Sequence[int],
        mode: str = "shared",
        policy: Policy | None = None,
        steps: Steps | None = None,
        carrier: Carrier | None = None,
    ):
        """prefix: token ids of S · mode: `shared` encodes chunks right after S, `isolated` alone from position 0
        (SamKV A13; paper silent) · policy: how long chunks are encoded, None: densely · steps: asks short
        questions and reads few rows by recorded graphs, None: there are none · carrier: takes blocks to their places
        without making rows of them, None: one of the model's device, where that can have one."""
        self._carrier, self._steps = carrier or make_carrier(model), steps
        self.model, self.prefix_tokens, self.mode, self.policy = model, tuple(prefix), mode, policy
        self.prefix = ContextCache(model.shape, len(self.prefix_tokens), model.dtype, model.devices)
        if self.prefix_tokens:
            model.forward([append(self.prefix, self.prefix_tokens, 0, outputs=0)])

    @property
    def digest_params(self) -> DigestParams:
        """What a digest holds for this model and profile."""
        profile, group = self.model.profile, self.model.shape.q_heads // self.model.shape.kv_heads
        return DigestParams(profile.block, profile.local, retrieval_pairs(profile.retrieval_heads, group))

    def encode(self, tokens: Sequence[int]) -> ChunkKV:
        """Run a chunk's tokens through the model, after S, and keep its rows. k, v [L, n, Hkv, d] on the CPU."""
        shared = self.mode == "shared"
        start = len(self.prefix_tokens) if shared else 0
        cache = ContextCache(self.model.shape, start + len(tokens), self.model.dtype, self.model.devices)
        if shared:
            cache.extend(self.prefix)
        capture, sparse = Capture(keys_too=True), reading(self.policy, start + len(tokens))
        self.model.forward([append(cache, tokens, start, outputs=0, capture=capture, attention=sparse)])
        here = self.model.device
        at = self.model.rotary(torch.arange(start, start + len(tokens)))
        queries, keys, values = ([each.to(here) for each in rows] for rows in (capture.q, capture.k, capture.v))
        rotated = [(rotate(q, at), cache.k(layer).to(here)) for layer, q in enumerate(queries)]
        k, v = torch.stack(keys), torch.stack(values)
        return ChunkKV(
            tokens=tuple(tokens),
            k=_home(k),
            v=_home(v),
            digest=digest(queries, k, rotated, self.digest_params, scale=self.model.scale),
        )

    def talk(self) -> Talk:
        """A conversation in which nothing was said yet."""
        return Talk(self.model, self.prefix_tokens)

    def full(
        self,
        chunks: Sequence[Sequence[int]],
        question: Sequence[int],
        room: int,
        watch: Watch,
        policy: Policy | None = None,
        talk: Talk | None = None,
        decoder: Decoder | None = None,
    ) -> Context:
        """One prefill of S, all chunks and the question, dense or under a policy. room: rows for the answer · decoder:
        looks at the last rows, None: decoding is dense.

        talk: is gone on with: chunks are those that join, and what is carried is prefilled instead of S.
        """
        talk = talk or self.talk()
        stitch, before, known, carried = talk.stitch, talk.cached, talk.chunks, talk.carried
        read = [*(t for chunk in chunks for t in chunk), *question]
        tokens = [*talk.carry, *read]
        stitch.cache.make_room(len(tokens) + room)
        with watch.step("prefill"):
            sparse = talk.attention(policy, stitch.end + len(tokens))
            state = decoding(decoder, _keys(stitch.cache) + len(tokens))
            logits = self._read(stitch, tokens, sparse, state)
        talk.asked(len(tokens))
        talk.chunks += len(chunks)
        return Context(stitch.cache, logits, stitch.end, None, sparse, state, before, known, float(carried + len(read)))

    def sparse(
        self,
        sources: Sequence[Source],
        question: Sequence[int],
        method: Method,
        room: int,
        watch: Watch,
        policy: Policy | None = None,
        talk: Talk | None = None,
        decoder: Decoder | None = None,
    ) -> Context:
        """Choose, load, repair, prefill the question. Watch steps: load, plan, repair, prefill.

        policy: for a question that is long by itself; repair is sparse as it is · talk: is gone on with: sources are
        those of the chunks that stand in it, in their order, then those that join. Not for methods whose plan grows:
        where they turn keys to depends on the question · decoder: looks at the question, None: decoding is dense.
        """
        talk = talk or self.talk()
        stitch, before, known, carried = talk.stitch, talk.cached, talk.chunks, talk.carried
        pieces = [source.piece for source in sources]
        first = method.first(pieces)
        layers = self.model.shape.layers
        fixed: tuple[tuple[Blocks, ...], ...] = ((first or ((),) * len(pieces)),) * layers
        depth = method.depth(layers)
        stitch.cache.make_room(carried + self._capacity(pieces[known:], first[known:]) + len(question) + room)
        self._settle(talk, watch)
        talk.join(pieces[known:])
        with watch.step("load"):
            todo = talk.missing(fixed)
            stitch.reserve(pieces, todo)
            # The composite pass attends in all its layers but the last, whose queries are all that is needed of it.
            now, later = _divided(todo, depth - 1)
            self._load(stitch, sources, now)
            talk.hold(fixed)
        with watch.step("plan"):
            queries = self._ask(stitch, question, depth)
            plan = method.plan(pieces, queries)
        if plan.grow is not None:
            return self._grown(stitch, sources, question, plan, plan.grow, watch, decoder)
        with watch.step("load"):
            more = talk.missing(plan.kept)
            stitch.reserve(pieces, more)
            plan = talk.rest(plan, pieces)
            self._load(stitch, sources, minus(plus(later, more), overwritten(pieces, plan)), plan.angle)
        tokens, sparse = [source.tokens for source in sources], None
        if policy is not None and policy.applies(len(question)):
            sparse = talk.attention(policy, stitch.end + len(question))
        state = decoding(decoder, _keys(stitch.cache) + len(question))
        if plan.one_pass and sparse is None:
            observed = watched(None, state, stitch.end)
            with watch.step("prefill"):
                both = stitch.repair(plan, tokens, question, outputs=last_rows(state), attention=observed)
                logits = self._last(both)
        else:
            if plan.check is None:
                self._repair(stitch, sources, plan, watch)
            else:
                with watch.step("repair"):
                    plan = follow(self.model, stitch, tokens, plan, plan.check, known)
            with watch.step("prefill"):
                logits = self._read(stitch, question, sparse, state)
        talk.asked(len(question))
        if state is not None and state.reaches:
            state.elsewhere = Absent(stitch, sources, plan)
        read = sum(recomputed(plan.recompute)) + carried + len(question)
        return Context(stitch.cache, logits, stitch.end, plan, sparse, state, before, known, read)

    def _grown(
        self,
        stitch: Stitch,
        sources: Sequence[Source],
        question: Sequence[int],
        plan: Plan,
        asks: Grow,
        watch: Watch,
        decoder: Decoder | None,
    ) -> Context:
        """The question read layer by layer, all that is stored at hand."""
        pieces, layers = [source.piece for source in sources], self.model.shape.layers
        with watch.step("load"):
            stored = [source.load([tuple(range(source.piece.blocks))] * layers) for source in sources]
        # How much it grows is not known before; what a dense answer would read is what there is at most.
        most = _keys(stitch.cache) + sum(piece.tokens for piece in pieces) + len(question)
        state = decoding(decoder, most)
        with watch.step("prefill"):
            seen = watched(None, state, stitch.end)
            logits, plan = grow(self.model, stitch, pieces, stored, question, plan, asks, seen, last_rows(state))
        end = stitch.end + len(question)
        return Context(stitch.cache, logits, end, plan, decoding=state, read=float(len(question)))

    def queries(
        self, sources: Sequence[Source], first: Sequence[Blocks], question: Sequence[int], depth: int
    ) -> list[Tensor]:
        """Composite pass alone: per layer the question's pre-RoPE queries [question tokens, Hq, d] over S and the
        blocks `first` of every source."""
        pieces = [source.piece for source in sources]
        room = self._capacity(pieces, first) + len(question)
        stitch = Stitch(self.model, pieces, len(self.prefix_tokens), room)
        stitch.cache.extend(self.prefix)
        now, _ = _divided((tuple(first),) * self.model.shape.layers, depth - 1)
        stitch.reserve(pieces, now)
        self._load(stitch, sources, now)
        return self._ask(stitch, question, depth)

    def _ask(self, stitch: Stitch, question: Sequence[int], depth: int) -> list[Tensor]:
        """Composite pass: the question over S and the fixed blocks; returns its pre-RoPE queries per layer, leaves no
        rows behind."""
        if depth == 0:
            return []
        if self._steps is not None and self._steps.takes(stitch.cache, question):
            return self._steps.ask(stitch.cache, question, stitch.end, depth)
        capture, lengths = Capture(), list(stitch.cache.lengths)
        self.model.forward([append(stitch.cache, question, stitch.end, outputs=0, capture=capture, depth=depth)])
        stitch.cache.truncate(lengths)
        return [q.to(self.model.device) for q in capture.q]  # methods compare those of several layers

    def _read(self, stitch: Stitch, tokens: Sequence[int], sparse: Sparse | None, state: Decoding | None) -> Tensor:
        """Append tokens, all of them for a decode policy to look at; logits [vocabulary] of the last."""
        attention = watched(sparse, state, stitch.end)
        reading = append(stitch.cache, tokens, stitch.end, outputs=last_rows(state), attention=attention)
        return self._last(reading)

    def _last(self, p: Pass) -> Tensor:
        """Logits [vocabulary] of a pass's last row."""
        if self._steps is not None and self._steps.passes.takes(p):
            return self._steps.passes.read(p)
        return self.model.forward([p])[0][-1]

    def _repair(self, stitch: Stitch, sources: Sequence[Source], plan: Plan, watch: Watch) -> None:
        """Recompute rows in place; padding is there for this pass only."""
        if not any(any(layer) for layer in plan.recompute):
            return
        lengths = list(stitch.cache.lengths)
        with watch.step("load"):
            stitch.reserve([source.piece for source in sources], plan.padding)
            self._load(stitch, sources, plan.padding)
        with watch.step("repair"):
            self.model.forward([stitch.repair(plan, [source.tokens for source in sources])])
        stitch.cache.truncate(lengths)

    def _load(
        self,
        stitch: Stitch,
        sources: Sequence[Source],
        wanted: Sequence[Sequence[Blocks]],
        angle: Angle | None = None,
    ) -> None:
        """Fetch blocks wanted[layer][chunk] and write them where room was reserved for them; where there is a carrier,
        those that are in memory may still be on their way."""
        with ExitStack() as held:
            todo = {i: mine for i in range(len(sources)) if any(mine := [layer[i] for layer in wanted])}
            lent: dict[int, Lent] = {}
            if self._carrier is not None and angle is None:
                lent = borrow({i: sources[i].lend(mine, self._carrier.threads) for i, mine in todo.items()}, held)
            rows: dict[int, list[Rows]] = {i: sources[i].load(mine) for i, mine in todo.items() if i not in lent}
            for layer, blocks in enumerate(wanted if rows else ()):
                parts = [(i, sources[i].piece.rows(blocks[i]), fetched[layer]) for i, fetched in rows.items()]
                stitch.fill(layer, parts, angle)
            if self._carrier is not None and lent:
                pieces = [source.piece for source in sources]
                self._carrier.carry(stitch, pieces, lent, held.pop_all().close)

    def _capacity(self, pieces: Sequence[Piece], first: Sequence[Blocks]) -> int:
        """Rows a layer is likely to need; the cache grows if a plan keeps more."""
        context = sum(piece.tokens for piece in pieces)
        fixed = sum(len(piece.rows(blocks)) for piece, blocks in zip(pieces, first, strict=False))
        return len(self.prefix_tokens) + (min(context, fixed + context // 5) if first else context)

    def _settle(self, talk: Talk, watch: Watch) -> None:
        """Give rows to what is carried."""
        stitch = talk.stitch
        if not talk.begun:
            stitch.cache.extend(self.prefix)
        elif talk.carry:
            with watch.step("prefill"):
                self.model.forward([append(stitch.cache, talk.carry, stitch.end, outputs=0)])
        stitch.end, talk.carry = talk.position, ()


def _home(x: Tensor) -> Tensor:
    """The same on the CPU; from a GPU to page-locked memory, which is many times quicker."""
    if x.device.type != "cuda":
        return x.cpu()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def _divided(wanted: Sequence[Sequence[Blocks]], layer: int) -> tuple[list[Sequence[Blocks]], list[Sequence[Blocks]]]:
    """Blocks [layer][chunk] of the layers below `layer`, and those of the others; both with all layers."""
    nothing: list[Sequence[Blocks]] = [((),) * len(wanted[0])] * len(wanted)
    cut = max(0, layer)
    return [*wanted[:cut], *nothing[cut:]], [*nothing[:cut], *wanted[cut:]]


def _keys(cache: ContextCache) -> float:
    """Rows of a layer, in the mean."""
    return sum(cache.lengths) / len(cache.lengths)
