"""Model passes and block loads on a context cache that begins with S: the primitives that every prefill is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from ragkv.engine.kv_transfer import KVTransfer, acquire, make_kv_transfer
from ragkv.engine.memory_source import ChunkSource
from ragkv.engine.passes import Passes
from ragkv.engine.session import SessionState
from ragkv.engine.stitch import Stitch
from ragkv.kernels.transfer import PinnedBlocks
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.graph_decode import GraphDecoder
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, Pass, append
from ragkv.model.recurrence import Composition, RecurrentState
from ragkv.recompute.base import Blocks, KeyPositions, Piece, Rows
from ragkv.sparse.base import DecodeState, last_rows, observe_queries
from ragkv.sparse.prefill import PrefillPolicy, SparsePrefill, prefill_attention
from ragkv.timing import StepTimer

EXPECTED = 8
"""A plan is expected to keep one token in so many beside the fixed blocks: what scout keeps of short documents. More
would be memory that most questions never use."""
FILLED_ROWS = 8192
"""Rows, over all layers, that are turned and written at once; more would take memory and gain nothing."""


class PassRunner:
    """Runs passes of one model, by recorded graphs where there are any. Holds no request state.

    A pass that no graph runs is yielded (`Passes`), so that it can run together with those of other requests.

    Attributes:
        model: The model whose passes are run.
        prefix_tokens: Token ids of S.
        mode: What chunks are encoded after, as in `Prefiller`.
        ingest_policy: How long chunks attend while they are encoded.
        prefix: KV of S, computed once.
    """

    def __init__(
        self,
        model: DecoderModel,
        prefix: Sequence[int],
        *,
        mode: str = "shared",
        ingest_policy: PrefillPolicy | None = None,
        graph_decoder: GraphDecoder | None = None,
        kv_transfer: KVTransfer | None = None,
    ):
        """Set up the runner and prefill S.

        Args:
            model: The model.
            prefix: Token ids of S.
            mode: What chunks are encoded after, as in `Prefiller`.
            ingest_policy: How long chunks attend while they are encoded; None is dense.
            graph_decoder: Recorded graphs for short questions and passes of few rows; None runs every pass eagerly.
            kv_transfer: Copies blocks into the cache without making rows of them first. None makes one for the model's
                device where the device can have one.
        """
        self.model, self.prefix_tokens, self.mode, self.ingest_policy = model, tuple(prefix), mode, ingest_policy
        self._graph_decoder = graph_decoder
        self._kv_transfer = kv_transfer or make_kv_transfer(model)
        self.prefix = ContextCache(model.shape, len(self.prefix_tokens), model.dtype, model.devices)
        if self.prefix_tokens:
            model.forward([append(self.prefix, self.prefix_tokens, 0, outputs=0)])

    def encoding_pass(self, tokens: Sequence[int]) -> Pass:
        """Return the pass that encodes a chunk, with a cache and a capture of its own."""
        start = len(self.prefix_tokens) if self.mode == "shared" else 0
        cache = ContextCache(self.model.shape, start + len(tokens), self.model.dtype, self.model.devices)
        if start:
            cache.extend(self.prefix)
        sparse = prefill_attention(self.ingest_policy, start + len(tokens))
        return append(cache, tokens, start, outputs=0, capture=Capture(keys_too=True), attention=sparse)

    def read_pending(self, state: SessionState, timer: StepTimer) -> Passes[None]:
        """Give rows to the tokens that stand at the end of a session without any: S at first, later an answer's end."""
        stitch = state.stitch
        if not state.started:
            stitch.cache.extend(self.prefix)
        elif state.pending_tokens:
            with timer.step("prefill"):
                yield append(stitch.cache, state.pending_tokens, stitch.end, outputs=0)
        stitch.end, state.pending_tokens = state.position, ()

    def begin_states(self, stitch: Stitch, sources: Sequence[ChunkSource]) -> Passes[None]:
        """Let layers with a state go on from behind the last of new chunks, as it was encoded.

        Such a layer forgets, and what stands last counts most. What other chunks and earlier turns left there is
        dropped; the layers with attention read it. A chunk that has to be encoded again yields its pass.
        """
        if sources and self.model.states.bytes:
            tensors = yield from sources[-1].load_states()
            stitch.cache.states = self.model.states_of(tensors)

    def compose_states(self, stitch: Stitch, sources: Sequence[ChunkSource]) -> Passes[None]:
        """Let layers with a state read all new chunks, one after another, with the inputs of their encoding.

        The states that stand in the cache go on, each through its layer's transitions over every chunk. What enters a
        layer is not stored, so each chunk is run again as it was encoded. In a full prefill other rows would enter the
        layers behind the first one; the transitions of the rows that do enter are exact.
        """
        nothing = (RecurrentState(),) * len(self.model.states.recurrent)
        composition = Composition(stitch.cache.states or nothing)
        for source in sources:
            yield replace(self.encoding_pass(source.tokens), capture=None, composition=composition)
        stitch.cache.states = composition.states

    def capacity(self, pieces: Sequence[Piece], fixed: Sequence[Blocks]) -> int:
        """Return the rows that a layer is likely to need. A plan that keeps more lets the cache grow."""
        context = sum(piece.tokens for piece in pieces)
        rows = sum(piece.row_count(blocks) for piece, blocks in zip(pieces, fixed, strict=False))
        return len(self.prefix_tokens) + (min(context, rows + context // EXPECTED) if fixed else context)

    def query_pass(self, stitch: Stitch, question: Sequence[int], depth: int) -> Passes[list[Tensor]]:
        """Run the composite pass: the question over S and the blocks that are in the cache.

        The pass leaves no rows behind.

        Args:
            stitch: The context cache.
            question: Token ids.
            depth: Number of layers whose queries are wanted.

        Returns:
            Per layer the pre-RoPE queries [question tokens, Hq, d], all on the model's first device.
        """
        if depth == 0:
            return []
        if self._graph_decoder is not None and self._graph_decoder.supports_queries(stitch.cache, question):
            return self._graph_decoder.queries(stitch.cache, question, stitch.end, depth)
        capture, lengths = Capture(), list(stitch.cache.lengths)
        yield append(stitch.cache, question, stitch.end, outputs=0, capture=capture, depth=depth)
        stitch.cache.truncate(lengths)
        return [q.to(self.model.device) for q in capture.q]  # methods compare those of several layers

    def prefill_tokens(
        self, stitch: Stitch, tokens: Sequence[int], sparse: SparsePrefill | None, decoding: DecodeState | None
    ) -> Passes[Tensor]:
        """Append tokens to the context; a decode policy observes all of them.

        Returns:
            Logits [vocabulary] of the last token.
        """
        attention = observe_queries(sparse, decoding, stitch.end)
        logits = yield from self.last_logits(
            append(stitch.cache, tokens, stitch.end, outputs=last_rows(decoding), attention=attention)
        )
        return logits

    def last_logits(self, layer_pass: Pass) -> Passes[Tensor]:
        """Run a pass, by a recorded graph where there is one, and return the logits [vocabulary] of its last row."""
        if self._graph_decoder is not None and self._graph_decoder.prefill.supports(layer_pass):
            return self._graph_decoder.prefill.last_logits(layer_pass)
        logits = yield layer_pass
        return logits[-1]

    def load_blocks(
        self,
        stitch: Stitch,
        sources: Sequence[ChunkSource],
        requested: Sequence[Sequence[Blocks]],
        key_positions: KeyPositions | None = None,
    ) -> Passes[None]:
        """Load blocks into the rows that are reserved for them. A chunk that has to be encoded again yields its pass.

        With a KV transfer, blocks that are in memory may still be in flight when this returns; the cache waits for
        them where it is read.

        Args:
            stitch: The context cache.
            sources: One source a chunk.
            requested: Blocks [layer][chunk].
            key_positions: Where keys are rotated to; None rotates them to their stitched positions.
        """
        with ExitStack() as held:
            todo = {i: mine for i in range(len(sources)) if any(mine := [layer[i] for layer in requested])}
            pinned: dict[int, PinnedBlocks] = {}
            if self._kv_transfer is not None and key_positions is None:
                pins = {i: sources[i].pin(mine, self._kv_transfer.threads) for i, mine in todo.items()}
                pinned = acquire(pins, held)
            rows: dict[int, list[Rows]] = {}
            for i in todo.keys() - pinned.keys():
                rows[i] = yield from sources[i].load(todo[i])
            for layers in self._alike(requested) if rows else ():
                names = [(i, sources[i].piece.rows(requested[layers[0]][i])) for i in rows]
                size = max(1, FILLED_ROWS // max(1, sum(len(tokens) for _, tokens in names)))
                for some in (layers[start : start + size] for start in range(0, len(layers), size)):
                    parts = [(i, tokens, [rows[i][layer] for layer in some]) for i, tokens in names]
                    stitch.fill(some, parts, key_positions)
            if self._kv_transfer is not None and pinned:
                pieces = [source.piece for source in sources]
                self._kv_transfer.transfer(stitch, pieces, pinned, held.pop_all().close)

    def _alike(self, requested: Sequence[Sequence[Blocks]]) -> Iterable[list[int]]:
        """Return groups of layers of one kind on one device that load the same blocks."""
        alike: dict[tuple[object, ...], list[int]] = {}
        for layer, blocks in enumerate(requested):
            alike.setdefault((tuple(blocks), self.model.kinds[layer], self.model.devices[layer]), []).append(layer)
        return alike.values()
