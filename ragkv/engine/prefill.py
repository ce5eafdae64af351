"""What the papers do, between the model and stored chunks. No retrieval, no store, no text.

encode_many      run chunks once: their KV before RoPE, and their digests
prefill_full     prefill everything: the ceiling for quality and the cost to beat
prefill_sparse   composite pass → plan → load → repair → question prefill (stitched_prefill.py)

Both prefills continue a session if they are given its state: what the cache holds stays, and only what is new is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragkv.engine.kv_transfer import KVTransfer
from ragkv.engine.memory_source import ChunkSource
from ragkv.engine.pass_runner import PassRunner
from ragkv.engine.passes import Passes, run_alone
from ragkv.engine.prefill_state import PrefilledContext, PrefillOptions, mean_keys
from ragkv.engine.session import SessionState
from ragkv.engine.stitch import Stitch
from ragkv.engine.stitched_prefill import StitchedPrefill, split_layers
from ragkv.kernels.host_copy import begin_host_copies
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Pass
from ragkv.model.rotary import rotate
from ragkv.recompute.base import Blocks, Method
from ragkv.recompute.digest import DigestParams, block_means, build_digest, layers_at_once, retrieval_pairs
from ragkv.sparse.base import decode_state
from ragkv.sparse.prefill import PrefillPolicy
from ragkv.timing import StepTimer
from ragkv.types import ChunkKV

DENSE = PrefillOptions()


class Prefiller:
    """Encodes chunks and prefills questions with one model. Holds no request state.

    Attributes:
        model: The model.
        prefix_tokens: Token ids of S.
        mode: What chunks are encoded after.
        ingest_policy: How long chunks attend while they are encoded.
        runner: Runs passes and loads blocks.
    """

    def __init__(
        self,
        model: DecoderModel,
        prefix: Sequence[int],
        mode: str = "shared",
        ingest_policy: PrefillPolicy | None = None,
        graph_decoder: GraphDecoder | None = None,
        kv_transfer: KVTransfer | None = None,
    ):
        """Set up the prefiller and prefill S.

        Args:
            model: The model.
            prefix: Token ids of S.
            mode: `shared` encodes chunks right after S, `isolated` alone from position 0 (SamKV A13; paper silent).
            ingest_policy: How long chunks attend while they are encoded; None is dense.
            graph_decoder: See `PassRunner`.
            kv_transfer: See `PassRunner`.
        """
        self.model, self.prefix_tokens, self.mode, self.ingest_policy = model, tuple(prefix), mode, ingest_policy
        self.runner = PassRunner(
            model,
            prefix,
            mode=mode,
            ingest_policy=ingest_policy,
            graph_decoder=graph_decoder,
            kv_transfer=kv_transfer,
        )

    @property
    def prefix(self) -> ContextCache:
        """KV of S."""
        return self.runner.prefix

    @property
    def digest_params(self) -> DigestParams:
        """What a digest holds for this model and profile."""
        profile, group = self.model.profile, self.model.shape.q_heads // self.model.shape.kv_heads
        pairs = retrieval_pairs(profile.retrieval_heads, group)
        law = profile.importance_axis, profile.importance_constant
        return DigestParams(profile.block, profile.local, pairs, *law)

    def encode(self, tokens: Sequence[int]) -> ChunkKV:
        """Encode one chunk, see `encode_many`."""
        return self.encode_many([tokens])[0]

    def encode_many(self, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
        """Run chunks through the model, each after S, in one forward pass, and keep their rows.

        Each chunk attends to S and to itself, so its KV does not depend on the chunks beside it.

        Args:
            chunks: Token ids, none empty.

        Returns:
            The KV of each chunk: k, v [L, n, Hkv, d] on the CPU.
        """
        return [_on_host(kv) for kv in self.encode_on_device(chunks)]

    def encode_on_device(self, chunks: Sequence[Sequence[int]]) -> list[ChunkKV]:
        """Do what `encode_many` does, and leave the KV and the digests on the model's device. Does not wait for it."""
        passes = [self.encoding_pass(tokens) for tokens in chunks]
        self.model.forward(passes)
        return [self._captured(tokens, each) for tokens, each in zip(chunks, passes, strict=True)]

    def encode_passes(self, tokens: Sequence[int]) -> Passes[ChunkKV]:
        """Encode one chunk, see `encode_many`; the pass is yielded."""
        encoding = self.encoding_pass(tokens)
        yield encoding
        return self.captured(tokens, encoding)

    def encoding_pass(self, tokens: Sequence[int]) -> Pass:
        """Return the pass that encodes a chunk, with a cache and a capture of its own."""
        return self.runner.encoding_pass(tokens)

    def captured(self, tokens: Sequence[int], done: Pass) -> ChunkKV:
        """Return the KV that a pass captured, with its digest, as `encode_many` does."""
        return _on_host(self._captured(tokens, done))

    def _captured(self, tokens: Sequence[int], done: Pass) -> ChunkKV:
        """Return the KV that a pass captured, with its digest, on the model's device."""
        if done.capture is None:
            raise ValueError("the pass has captured nothing")
        here, captured = self.model.device, done.capture
        keys, values = ([each.to(here) for each in rows] for rows in (captured.k, captured.v))
        queries = [self._compared(layer, q.to(here)) for layer, q in enumerate(captured.q)]
        k, v, cache = torch.stack(keys), torch.stack(values), done.cache
        at_once = layers_at_once(len(tokens), cache.lengths[0], here)

        def rotated(layers: range) -> tuple[Tensor, Tensor]:
            stacked = torch.stack([cache.k(layer).to(here) for layer in layers])
            if self.model.turns_alike:
                rotary = self.model.rotary(done.positions)
                return rotate(torch.stack([queries[layer] for layer in layers]), rotary), stacked
            return torch.stack([self._turned(layer, queries[layer], done.positions) for layer in layers]), stacked

        groups = (range(first, min(first + at_once, len(queries))) for first in range(0, len(queries), at_once))
        digest = build_digest(queries, k, map(rotated, groups), self.digest_params, scale=self.model.scale)
        if self.model.profile.key_means == "rotated":
            digest = replace(digest, mean_keys=self._rotated_means(k))
        states = tuple(each.to(here) for each in self.model.states.flat(cache.states or ()))
        return ChunkKV(tokens=tuple(tokens), k=k, v=v, digest=digest, states=states)

    def _rotated_means(self, k: Tensor) -> Tensor:
        """Average keys [L, n, Hkv, d] by block, rotated to their positions in the chunk."""
        return block_means(self.model.turned(k, torch.arange(k.shape[1])), self.model.profile.block)

    def _compared(self, layer: int, q: Tensor) -> Tensor:
        """Return queries [T, Hq, d] of a layer as digests have them: 0 where stored keys are not the layer's heads."""
        if self.model.kinds[layer].packed is None:
            return q
        return q.new_zeros(*q.shape[:2], self.model.shape.head_dim)

    def _turned(self, layer: int, q: Tensor, positions: Tensor) -> Tensor:
        """Apply a layer's RoPE to queries [T, Hq, d] as digests have them."""
        return q if self.model.kinds[layer].packed else rotate(q, self.model.rotary(positions, layer).to(q.device))

    def new_state(self) -> SessionState:
        """Return the state of a session in which nothing was said yet."""
        return SessionState(self.model, self.prefix_tokens)

    def prefill_full(
        self,
        chunks: Sequence[Sequence[int]],
        question: Sequence[int],
        timer: StepTimer,
        options: PrefillOptions = DENSE,
        state: SessionState | None = None,
    ) -> PrefilledContext:
        """Prefill S, all chunks and the question in one pass. See `full_passes`."""
        return run_alone(self.model, self.full_passes(chunks, question, timer, options, state))

    def full_passes(
        self,
        chunks: Sequence[Sequence[int]],
        question: Sequence[int],
        timer: StepTimer,
        options: PrefillOptions = DENSE,
        state: SessionState | None = None,
    ) -> Passes[PrefilledContext]:
        """Prefill S, all chunks and the question in one pass, which is yielded.

        Args:
            chunks: Token ids of the chunks; in a session only of those that are new.
            question: Token ids.
            timer: Gets the step prefill.
            options: Policies, and room for the answer.
            state: The session that is continued: its pending tokens are prefilled instead of S. None starts one.
        """
        state = state or self.new_state()
        stitch, cached, pending = state.stitch, (state.cached, state.chunks), state.pending_count
        new = [*(token for chunk in chunks for token in chunk), *question]
        tokens = [*state.pending_tokens, *new]
        stitch.cache.make_room(len(tokens) + options.answer_tokens)
        with timer.step("prefill"):
            kinds = self.model.kinds
            keys = mean_keys(stitch.cache, kinds) + len(tokens)
            dense = options.why_dense(len(tokens), keys, kinds)
            policy = options.prefill_policy
            sparse = state.attention(policy, stitch.end + len(tokens)) if policy and not dense.prefill else None
            decoding = None if dense.decode else decode_state(options.decode_policy, keys, sparse)
            logits = yield from self.runner.prefill_tokens(stitch, tokens, sparse, decoding)
        state.append_question(len(tokens))
        state.chunks += len(chunks)
        prefilled = float(pending + len(new))
        return PrefilledContext(stitch.cache, logits, stitch.end, None, sparse, decoding, dense, *cached, prefilled)

    def prefill_sparse(
        self,
        sources: Sequence[ChunkSource],
        question: Sequence[int],
        method: Method,
        timer: StepTimer,
        options: PrefillOptions = DENSE,
        state: SessionState | None = None,
    ) -> PrefilledContext:
        """Prefill a question over the stored KV of chunks, as `method` plans it. See `StitchedPrefill`."""
        return run_alone(self.model, self.sparse_passes(sources, question, method, timer, options, state))

    def sparse_passes(
        self,
        sources: Sequence[ChunkSource],
        question: Sequence[int],
        method: Method,
        timer: StepTimer,
        options: PrefillOptions = DENSE,
        state: SessionState | None = None,
    ) -> Passes[PrefilledContext]:
        """The same as `prefill_sparse`; the passes are yielded."""
        state = state or self.new_state()
        return StitchedPrefill(self.runner, sources, question, method, options, timer, state).run()

    def queries(
        self, sources: Sequence[ChunkSource], fixed: Sequence[Blocks], question: Sequence[int], depth: int
    ) -> list[Tensor]:
        """Run the composite pass alone.

        Args:
            sources: One source a chunk.
            fixed: Blocks per chunk that the pass reads beside S.
            question: Token ids.
            depth: Number of layers whose queries are wanted.

        Returns:
            Per layer the question's pre-RoPE queries [question tokens, Hq, d].
        """
        pieces = [source.piece for source in sources]
        room = self.runner.capacity(pieces, fixed) + len(question)
        stitch = Stitch(self.model, pieces, len(self.prefix_tokens), room)
        stitch.cache.extend(self.prefix)
        run_alone(self.model, self.runner.begin_states(stitch, sources))
        read, _ = split_layers((tuple(fixed),) * self.model.shape.layers, depth - 1)
        stitch.reserve(pieces, read)
        run_alone(self.model, self.runner.load_blocks(stitch, sources, read))
        return run_alone(self.model, self.runner.query_pass(stitch, question, depth))


def _on_host(kv: ChunkKV) -> ChunkKV:
    """Copy K, V and what a plan reads of the digest to the CPU. Keys that are multiplied by queries stay."""
    digest = kv.digest
    read = [digest.alpha, digest.unimportance, digest.landmarks]
    (k, v, alpha, unimportance, landmarks, *states), wait = begin_host_copies([kv.k, kv.v, *read, *kv.states])
    wait()
    digest = replace(digest, alpha=alpha, unimportance=unimportance, landmarks=landmarks)
    return replace(kv, k=k, v=v, digest=digest, states=tuple(states))
