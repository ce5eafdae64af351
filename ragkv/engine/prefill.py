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

from ragkv.engine.adaptive_plan import expand, refine
from ragkv.engine.chunk_source import ChunkSource
from ragkv.engine.kv_transfer import KVTransfer, acquire, make_kv_transfer
from ragkv.engine.offloaded_blocks import OffloadedBlocks
from ragkv.engine.session import SessionState, minus, plus
from ragkv.engine.stitch import Stitch
from ragkv.kernels.transfer import PinnedBlocks
from ragkv.model.decoder import DecoderModel, rotate
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, Pass, append
from ragkv.recompute.base import Blocks, Expansion, KeyPositions, Method, Piece, Plan, Rows, overwritten, recomputed
from ragkv.recompute.digest import DigestParams, digest, retrieval_pairs
from ragkv.sparse.base import (
    DecodePolicy,
    DecodeState,
    PrefillPolicy,
    SparsePrefill,
    decode_state,
    last_rows,
    observe_queries,
    prefill_attention,
)
from ragkv.timing import StepTimer
from ragkv.types import ChunkKV


@dataclass(frozen=True)
class PrefilledContext:
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
    sparse: SparsePrefill | None = None
    decoding: DecodeState | None = None
    cached_tokens: float = 0.0
    cached_chunks: int = 0
    prefilled_tokens: float = 0.0


class Prefiller:
    """Stateless between calls but for the KV of S, computed once."""

    def __init__(
        self,
        model: DecoderModel,
        prefix: Sequence[int],
        mode: str = "shared",
        ingest_policy: PrefillPolicy | None = None,
        graph_decoder: GraphDecoder | None = None,
        kv_transfer: KVTransfer | None = None,
    ):
        """prefix: token ids of S · mode: `shared` encodes chunks right after S, `isolated` alone from position 0
        (SamKV A13; paper silent) · policy: how long chunks are encoded, None: densely · steps: asks short
        questions and reads few rows by recorded graphs, None: there are none · carrier: takes blocks to their places
        without making rows of them, None: one of the model's device, where that can have one."""
        self._kv_transfer, self._graph_decoder = kv_transfer or make_kv_transfer(model), graph_decoder
        self.model, self.prefix_tokens, self.mode, self.ingest_policy = model, tuple(prefix), mode, ingest_policy
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
        capture, sparse = Capture(keys_too=True), prefill_attention(self.ingest_policy, start + len(tokens))
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

    def new_state(self) -> SessionState:
        """A conversation in which nothing was said yet."""
        return SessionState(self.model, self.prefix_tokens)

    def prefill_full(
        self,
        chunks: Sequence[Sequence[int]],
        question: Sequence[int],
        answer_tokens: int,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None = None,
        state: SessionState | None = None,
        decode_policy: DecodePolicy | None = None,
    ) -> PrefilledContext:
        """One prefill of S, all chunks and the question, dense or under a policy. room: rows for the answer · decoder:
        looks at the last rows, None: decoding is dense.

        talk: is gone on with: chunks are those that join, and what is carried is prefilled instead of S.
        """
        state = state or self.new_state()
        stitch, before, known, carried = state.stitch, state.cached, state.chunks, state.pending_count
        read = [*(t for chunk in chunks for t in chunk), *question]
        tokens = [*state.pending_tokens, *read]
        stitch.cache.make_room(len(tokens) + answer_tokens)
        with timer.step("prefill"):
            sparse = state.attention(prefill_policy, stitch.end + len(tokens))
            decoding = decode_state(decode_policy, _keys(stitch.cache) + len(tokens))
            logits = self._prefill_tokens(stitch, tokens, sparse, decoding)
        state.append_question(len(tokens))
        state.chunks += len(chunks)
        return PrefilledContext(
            stitch.cache, logits, stitch.end, None, sparse, decoding, before, known, float(carried + len(read))
        )

    def prefill_sparse(
        self,
        sources: Sequence[ChunkSource],
        question: Sequence[int],
        method: Method,
        answer_tokens: int,
        timer: StepTimer,
        prefill_policy: PrefillPolicy | None = None,
        state: SessionState | None = None,
        decode_policy: DecodePolicy | None = None,
    ) -> PrefilledContext:
        """Choose, load, repair, prefill the question. Watch steps: load, plan, repair, prefill.

        policy: for a question that is long by itself; repair is sparse as it is · talk: is gone on with: sources are
        those of the chunks that stand in it, in their order, then those that join. Not for methods whose plan grows:
        where they turn keys to depends on the question · decoder: looks at the question, None: decoding is dense.
        """
        state = state or self.new_state()
        stitch, before, known, carried = state.stitch, state.cached, state.chunks, state.pending_count
        pieces = [source.piece for source in sources]
        first = method.first(pieces)
        layers = self.model.shape.layers
        fixed: tuple[tuple[Blocks, ...], ...] = ((first or ((),) * len(pieces)),) * layers
        depth = method.depth(layers)
        stitch.cache.make_room(carried + self._capacity(pieces[known:], first[known:]) + len(question) + answer_tokens)
        self._read_pending(state, timer)
        state.join(pieces[known:])
        with timer.step("load"):
            todo = state.missing(fixed)
            stitch.reserve(pieces, todo)
            # The composite pass attends in all its layers but the last, whose queries are all that is needed of it.
            now, later = _divided(todo, depth - 1)
            self._load(stitch, sources, now)
            state.hold(fixed)
        with timer.step("plan"):
            queries = self._query_pass(stitch, question, depth)
            plan = method.plan(pieces, queries)
        if plan.expansion is not None:
            return self._prefill_expanding(stitch, sources, question, plan, plan.expansion, timer, decode_policy)
        with timer.step("load"):
            more = state.missing(plan.kept)
            stitch.reserve(pieces, more)
            plan = state.remaining(plan, pieces)
            self._load(stitch, sources, minus(plus(later, more), overwritten(pieces, plan)), plan.key_positions)
        tokens, sparse = [source.tokens for source in sources], None
        if prefill_policy is not None and prefill_policy.applies(len(question)):
            sparse = state.attention(prefill_policy, stitch.end + len(question))
        decoding = decode_state(decode_policy, _keys(stitch.cache) + len(question))
        if plan.one_pass and sparse is None:
            observed = observe_queries(None, decoding, stitch.end)
            with timer.step("prefill"):
                both = stitch.repair(plan, tokens, question, outputs=last_rows(decoding), attention=observed)
                logits = self._last_logits(both)
        else:
            if plan.refinement is None:
                self._repair(stitch, sources, plan, timer)
            else:
                with timer.step("repair"):
                    plan = refine(self.model, stitch, tokens, plan, plan.refinement, known)
            with timer.step("prefill"):
                logits = self._prefill_tokens(stitch, question, sparse, decoding)
        state.append_question(len(question))
        if decoding is not None and decoding.wants_offloaded:
            decoding.offloaded = OffloadedBlocks(stitch, sources, plan)
        read = sum(recomputed(plan.recompute)) + carried + len(question)
        return PrefilledContext(stitch.cache, logits, stitch.end, plan, sparse, decoding, before, known, read)

    def _prefill_expanding(
        self,
        stitch: Stitch,
        sources: Sequence[ChunkSource],
        question: Sequence[int],
        plan: Plan,
        expansion: Expansion,
        timer: StepTimer,
        decode_policy: DecodePolicy | None,
    ) -> PrefilledContext:
        """The question read layer by layer, all that is stored at hand."""
        pieces, layers = [source.piece for source in sources], self.model.shape.layers
        with timer.step("load"):
            stored = [source.load([tuple(range(source.piece.blocks))] * layers) for source in sources]
        # How much it grows is not known before; what a dense answer would read is what there is at most.
        most = _keys(stitch.cache) + sum(piece.tokens for piece in pieces) + len(question)
        state = decode_state(decode_policy, most)
        with timer.step("prefill"):
            seen = observe_queries(None, state, stitch.end)
            logits, plan = expand(self.model, stitch, pieces, stored, question, plan, expansion, seen, last_rows(state))
        end = stitch.end + len(question)
        return PrefilledContext(stitch.cache, logits, end, plan, decoding=state, prefilled_tokens=float(len(question)))

    def queries(
        self, sources: Sequence[ChunkSource], first: Sequence[Blocks], question: Sequence[int], depth: int
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
        return self._query_pass(stitch, question, depth)

    def _query_pass(self, stitch: Stitch, question: Sequence[int], depth: int) -> list[Tensor]:
        """Composite pass: the question over S and the fixed blocks; returns its pre-RoPE queries per layer, leaves no
        rows behind."""
        if depth == 0:
            return []
        if self._graph_decoder is not None and self._graph_decoder.supports_queries(stitch.cache, question):
            return self._graph_decoder.queries(stitch.cache, question, stitch.end, depth)
        capture, lengths = Capture(), list(stitch.cache.lengths)
        self.model.forward([append(stitch.cache, question, stitch.end, outputs=0, capture=capture, depth=depth)])
        stitch.cache.truncate(lengths)
        return [q.to(self.model.device) for q in capture.q]  # methods compare those of several layers

    def _prefill_tokens(
        self, stitch: Stitch, tokens: Sequence[int], sparse: SparsePrefill | None, decoding: DecodeState | None
    ) -> Tensor:
        """Append tokens, all of them for a decode policy to look at; logits [vocabulary] of the last."""
        attention = observe_queries(sparse, decoding, stitch.end)
        reading = append(stitch.cache, tokens, stitch.end, outputs=last_rows(decoding), attention=attention)
        return self._last_logits(reading)

    def _last_logits(self, p: Pass) -> Tensor:
        """Logits [vocabulary] of a pass's last row."""
        if self._graph_decoder is not None and self._graph_decoder.prefill.supports(p):
            return self._graph_decoder.prefill.last_logits(p)
        return self.model.forward([p])[0][-1]

    def _repair(self, stitch: Stitch, sources: Sequence[ChunkSource], plan: Plan, timer: StepTimer) -> None:
        """Recompute rows in place; padding is there for this pass only."""
        if not any(any(layer) for layer in plan.recompute):
            return
        lengths = list(stitch.cache.lengths)
        with timer.step("load"):
            stitch.reserve([source.piece for source in sources], plan.padding)
            self._load(stitch, sources, plan.padding)
        with timer.step("repair"):
            self.model.forward([stitch.repair(plan, [source.tokens for source in sources])])
        stitch.cache.truncate(lengths)

    def _load(
        self,
        stitch: Stitch,
        sources: Sequence[ChunkSource],
        wanted: Sequence[Sequence[Blocks]],
        angle: KeyPositions | None = None,
    ) -> None:
        """Fetch blocks wanted[layer][chunk] and write them where room was reserved for them; where there is a carrier,
        those that are in memory may still be on their way."""
        with ExitStack() as held:
            todo = {i: mine for i in range(len(sources)) if any(mine := [layer[i] for layer in wanted])}
            lent: dict[int, PinnedBlocks] = {}
            if self._kv_transfer is not None and angle is None:
                lent = acquire({i: sources[i].pin(mine, self._kv_transfer.threads) for i, mine in todo.items()}, held)
            rows: dict[int, list[Rows]] = {i: sources[i].load(mine) for i, mine in todo.items() if i not in lent}
            for layer, blocks in enumerate(wanted if rows else ()):
                parts = [(i, sources[i].piece.rows(blocks[i]), fetched[layer]) for i, fetched in rows.items()]
                stitch.fill(layer, parts, angle)
            if self._kv_transfer is not None and lent:
                pieces = [source.piece for source in sources]
                self._kv_transfer.transfer(stitch, pieces, lent, held.pop_all().close)

    def _capacity(self, pieces: Sequence[Piece], first: Sequence[Blocks]) -> int:
        """Rows a layer is likely to need; the cache grows if a plan keeps more."""
        context = sum(piece.tokens for piece in pieces)
        fixed = sum(len(piece.rows(blocks)) for piece, blocks in zip(pieces, first, strict=False))
        return len(self.prefix_tokens) + (min(context, fixed + context // 5) if first else context)

    def _read_pending(self, state: SessionState, timer: StepTimer) -> None:
        """Give rows to what is carried."""
        stitch = state.stitch
        if not state.started:
            stitch.cache.extend(self.prefix)
        elif state.pending_tokens:
            with timer.step("prefill"):
                self.model.forward([append(stitch.cache, state.pending_tokens, stitch.end, outputs=0)])
        stitch.end, state.pending_tokens = state.position, ()


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
