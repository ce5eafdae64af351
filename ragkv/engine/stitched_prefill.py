"""One question over stored chunks, stage by stage: the main line of the papers.

    open      reserve rows, read the tokens that an earlier turn left pending, append the new chunks
    load      blocks for the composite pass
    plan      composite pass: the question's queries choose blocks and the tokens to recompute
    load      the chosen blocks, and no others
    repair    recompute tokens over what is kept, where the plan does not do it in one pass with the question
    prefill   the question over the context

Nothing here knows about retrieval, stores or text.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ragkv.engine.adaptive_plan import AdaptivePlan
from ragkv.engine.memory_source import ChunkSource
from ragkv.engine.offloaded_blocks import OffloadedBlocks
from ragkv.engine.pass_runner import PassRunner
from ragkv.engine.passes import Passes
from ragkv.engine.prefill_state import DenseReasons, PrefilledContext, PrefillOptions, mean_keys
from ragkv.engine.session import SessionState, minus, plus
from ragkv.engine.window_reach import WindowReach
from ragkv.recompute.base import Blocks, Expansion, Method, Plan, Rows, overwritten_blocks, recomputed_tokens
from ragkv.sparse.base import DecodeState, decode_state, last_rows, observe_queries
from ragkv.sparse.pairs import appended_pairs
from ragkv.sparse.prefill import SparsePrefill
from ragkv.timing import StepTimer


class StitchedPrefill:
    """The stages of one question. State of one request; call `run`, or `plan`, once."""

    def __init__(
        self,
        runner: PassRunner,
        sources: Sequence[ChunkSource],
        question: Sequence[int],
        method: Method,
        options: PrefillOptions,
        timer: StepTimer,
        state: SessionState,
    ):
        """Set up the stages.

        Args:
            runner: Runs passes and loads blocks.
            sources: One source a chunk: first the chunks that are in `state`, in their order, then the new ones.
            question: Token ids.
            method: Chooses blocks and the tokens to recompute.
            options: Policies, and room for the answer.
            timer: Gets the steps load, plan, repair and prefill.
            state: The session that the question continues. A method whose plan expands needs a fresh one, because
                where it rotates keys to depends on the question.
        """
        self._runner, self._model = runner, runner.model
        self._sources, self._question, self._method = sources, question, method
        self._options, self._timer, self._state = options, timer, state
        self._stitch = state.stitch
        self._pieces = [source.piece for source in sources]
        self._cached = state.cached, state.chunks
        self._pending, self._composed = state.pending_count, 0
        self._dense = DenseReasons()
        self._sparse: SparsePrefill | None = None
        self._decoding: DecodeState | None = None
        self._looks: list[tuple[Blocks, ...]] = []
        self._reach: WindowReach

    def run(self) -> Passes[PrefilledContext]:
        """Run all stages; yield the passes that may run beside those of other questions."""
        blocks = self._method.composite_blocks(self._pieces)
        yield from self._open(blocks)
        plan, later = yield from self._plan(blocks)
        if plan.expansion is not None:
            return (yield from self._expand(plan, plan.expansion))
        plan = yield from self._load_plan(plan, later)
        self._choose_attention(plan)
        if plan.one_pass:
            logits = yield from self._repair_and_prefill(plan)
        else:
            plan = yield from self._repair(plan)
            with self._timer.step("prefill"):
                logits = yield from self._prefill_question()
        self._state.append_question(len(self._question))
        if self._decoding is not None and self._decoding.wants_offloaded:
            self._decoding.offloaded = OffloadedBlocks(self._model, self._stitch, self._sources, plan)
        prefilled = sum(recomputed_tokens(plan.recompute)) + self._pending + self._composed + len(self._question)
        return self._context(logits, plan, self._stitch.end, prefilled)

    def plan(self) -> Passes[Plan]:
        """Return what the method plans for the question, and prefill nothing. Call it instead of `run`."""
        blocks = self._method.composite_blocks(self._pieces)
        yield from self._open(blocks)
        plan, _ = yield from self._plan(blocks)
        return plan

    def _context(self, logits: Tensor, plan: Plan, end: int, prefilled: float) -> PrefilledContext:
        return PrefilledContext(
            self._stitch.cache,
            logits,
            end,
            plan,
            self._sparse,
            self._decoding,
            self._dense,
            *self._cached,
            prefilled,
            tuple(self._looks),
        )

    def _open(self, fixed: tuple[Blocks, ...]) -> Passes[None]:
        """Make room, give rows to pending tokens, append the new chunks."""
        new = self._state.chunks
        rows = self._pending + self._runner.capacity(self._pieces[new:], fixed[new:]) + len(self._question)
        self._stitch.cache.make_room(rows + self._options.answer_tokens)
        yield from self._runner.read_pending(self._state, self._timer)
        yield from self._begin_states(self._sources[new:])
        self._state.join(self._pieces[new:])
        self._reach = WindowReach(self._model.kinds, self._pieces, self._stitch.starts, self._stitch.end)

    def _begin_states(self, new: Sequence[ChunkSource]) -> Passes[None]:
        """Let layers with a state go on from behind new chunks: the last of them, or all, as the method says."""
        if self._method.states == "last":
            with self._timer.step("load"):
                yield from self._runner.begin_states(self._stitch, new)
            return
        self._composed = sum(source.piece.tokens for source in new)
        with self._timer.step("prefill"):
            yield from self._runner.compose_states(self._stitch, new)

    def _load_composite(self, blocks: tuple[Blocks, ...]) -> Passes[list[Sequence[Blocks]]]:
        """Load the blocks per chunk that a composite pass reads; return those [layer][chunk] that it does not read.

        The composite pass attends in all its layers but the last: of that one only the queries are needed.
        """
        layers = self._model.shape.layers
        requested = self._reach.limit((blocks or ((),) * len(self._pieces),) * layers)
        with self._timer.step("load"):
            missing = self._state.missing(requested)
            self._stitch.reserve(self._pieces, missing)
            now, later = split_layers(missing, self._method.composite_layers(layers) - 1)
            yield from self._runner.load_blocks(self._stitch, self._sources, now)
            self._state.hold(requested)
        return later

    def _plan(self, blocks: tuple[Blocks, ...]) -> Passes[tuple[Plan, list[Sequence[Blocks]]]]:
        """Ask with the question's queries over S and the blocks of the composite pass, and let the method plan.

        Returns:
            The plan, and the blocks [layer][chunk] that are in the context but not loaded in all layers.
        """
        later = yield from self._load_composite(blocks)
        with self._timer.step("plan"):
            depth = self._method.composite_layers(self._model.shape.layers)
            if depth:
                self._looks.append(blocks)
            queries = yield from self._runner.query_pass(self._stitch, self._question, depth)
            return self._reach.limit_plan(self._method.plan(self._pieces, queries, blocks)), later

    def _load_plan(self, plan: Plan, later: Sequence[Sequence[Blocks]]) -> Passes[Plan]:
        """Load what the plan keeps and the cache lacks; return what is left of the plan in this turn.

        Blocks whose rows are all recomputed and overwritten get rows and no bytes.
        """
        with self._timer.step("load"):
            missing = self._state.missing(plan.kept)
            joining = max(
                sum(piece.row_count(blocks) for piece, blocks in zip(self._pieces, layer, strict=True))
                for layer in {id(each): each for each in missing}.values()
            )
            self._stitch.cache.make_room(joining + len(self._question) + self._options.answer_tokens)
            self._stitch.reserve(self._pieces, missing)
            plan = self._state.remaining(plan, self._pieces)
            requested = minus(plus(later, missing), overwritten_blocks(self._pieces, plan))
            yield from self._runner.load_blocks(self._stitch, self._sources, requested, plan.key_positions)
        return plan

    def _choose_attention(self, plan: Plan, joining: int = 0) -> None:
        """Choose the attention of the repaired rows and the question, and that of the tokens decoded behind them.

        What counts is what will be attended, not the question alone: the rows that are kept, and the new ones.

        Args:
            plan: What is recomputed.
            joining: Rows that may join the context while the question is prefilled.
        """
        rows = sum(recomputed_tokens(plan.recompute)) + len(self._question)
        kinds = self._model.kinds
        keys = mean_keys(self._stitch.cache, kinds) + joining + len(self._question)
        self._dense = self._options.why_dense(rows, keys, kinds)
        policy = self._options.prefill_policy
        self._sparse = self._state.attention(policy, None) if policy and not self._dense.prefill else None
        self._decoding = None if self._dense.decode else decode_state(self._options.decode_policy, keys, self._sparse)

    def _prefill_question(self) -> Passes[Tensor]:
        """Prefill the question behind the repaired rows; return the logits [vocabulary] of its last row.

        A policy may act on the many repaired rows and leave the few of the question dense.
        """
        cache, rows, sparse, kinds = self._stitch.cache, len(self._question), self._sparse, self._model.kinds
        if sparse is not None and self._options.why_dense(rows, mean_keys(cache, kinds) + rows, kinds).prefill:
            attending = [rows] * (len(kinds) - 1) + [last_rows(self._decoding)]
            each = zip(cache.lengths, attending, kinds, strict=True)
            pairs = sum(appended_pairs(length, rows, some) for length, some, kind in each if kind.plain)
            sparse.count_dense(self._model.shape.q_heads * pairs)
            sparse = None
        logits = yield from self._runner.prefill_tokens(self._stitch, self._question, sparse, self._decoding)
        return logits

    def _repair_and_prefill(self, plan: Plan) -> Passes[Tensor]:
        """Recompute tokens and prefill the question in one pass; return the logits [vocabulary] of the last row."""
        tokens, attention = self._token_ids(), observe_queries(self._sparse, self._decoding, self._stitch.end)
        with self._timer.step("prefill"):
            logits = yield from self._runner.last_logits(
                self._stitch.repair(
                    plan, tokens, self._question, outputs=last_rows(self._decoding), attention=attention
                )
            )
        return logits

    def _repair(self, plan: Plan) -> Passes[Plan]:
        """Recompute tokens in place; return the plan as it was carried out. Padding is there for this pass only."""
        tokens = self._token_ids()
        if plan.refinement is not None:
            with self._timer.step("repair"):
                adaptive = AdaptivePlan(self._model, self._stitch, plan, self._sparse)
                return (yield from adaptive.refine(plan.refinement, tokens, self._cached[1]))
        if any(any(layer) for layer in plan.recompute):
            lengths = list(self._stitch.cache.lengths)
            with self._timer.step("load"):
                self._stitch.reserve(self._pieces, plan.padding)
                yield from self._runner.load_blocks(self._stitch, self._sources, plan.padding)
            with self._timer.step("repair"):
                yield self._stitch.repair(plan, tokens, attention=self._sparse)
            self._stitch.cache.truncate(lengths)
        return plan

    def _expand(self, plan: Plan, expansion: Expansion) -> Passes[PrefilledContext]:
        """Prefill the question layer by layer over a context that grows; all stored blocks are loaded first."""
        with self._timer.step("load"):
            layers = self._model.shape.layers
            stored = list[list[Rows]]()
            for source in self._sources:
                stored.append((yield from source.load([tuple(range(source.piece.blocks))] * layers)))
        # How much the context grows is not known yet: it has at most all rows of the chunks.
        self._choose_attention(plan, joining=sum(piece.tokens for piece in self._pieces))
        with self._timer.step("prefill"):
            attention = observe_queries(self._sparse, self._decoding, self._stitch.end)
            adaptive = AdaptivePlan(self._model, self._stitch, plan, attention)
            logits, plan = yield from adaptive.expand(
                expansion, self._pieces, stored, self._question, last_rows(self._decoding)
            )
        return self._context(logits, plan, self._stitch.end + len(self._question), float(len(self._question)))

    def _token_ids(self) -> list[tuple[int, ...]]:
        return [source.tokens for source in self._sources]


def split_layers(
    requested: Sequence[Sequence[Blocks]], layer: int
) -> tuple[list[Sequence[Blocks]], list[Sequence[Blocks]]]:
    """Split blocks [layer][chunk] into those of the layers below `layer` and those of the others.

    Both parts have all layers; a layer that belongs to the other part is empty.
    """
    nothing: list[Sequence[Blocks]] = [((),) * len(requested[0])] * len(requested)
    cut = max(0, layer)
    return [*requested[:cut], *nothing[cut:]], [*nothing[:cut], *requested[cut:]]
