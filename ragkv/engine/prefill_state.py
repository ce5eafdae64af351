"""What a prefill is given, and what it leaves: the options of one request and the context to decode from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_kinds import LayerKind
from ragkv.recompute.base import Blocks, Plan
from ragkv.sparse.base import DecodePolicy, DecodeState
from ragkv.sparse.prefill import PrefillPolicy, SparsePrefill

ASKED_FOR = "dense was asked for"
"""The reason where there is no policy."""
NO_PLAIN_LAYER = "policies act in layers without window, soft cap and sinks, and the model has none"
"""The reason where no layer attends as policies do."""


@dataclass(frozen=True)
class PrefillOptions:
    """How one request is prefilled.

    Attributes:
        answer_tokens: Rows of the cache that are reserved for the answer.
        prefill_policy: How long inputs attend; None is dense.
        decode_policy: Observes the question's rows; None decodes densely.
    """

    answer_tokens: int = 0
    prefill_policy: PrefillPolicy | None = None
    decode_policy: DecodePolicy | None = None

    def why_dense(self, rows: float, keys: float, kinds: Sequence[LayerKind]) -> DenseReasons:
        """Return why attention is dense.

        Args:
            rows: New rows: those that are repaired, and the question.
            keys: Keys that they attend to, themselves included.
            kinds: The attention of the model's layers.
        """
        prefill, decode = self.prefill_policy, self.decode_policy
        never = "" if any(kind.plain for kind in kinds) else NO_PLAIN_LAYER
        return DenseReasons(
            ASKED_FOR if prefill is None else never or prefill.why_dense(round(rows), round(keys)),
            ASKED_FOR if decode is None else never or decode.why_dense(keys),
        )


@dataclass(frozen=True)
class DenseReasons:
    """Why a policy left attention dense.

    Attributes:
        prefill: Reason of the prefill policy; "" where it was at work.
        decode: Reason of the decode policy, likewise.
    """

    prefill: str = ""
    decode: str = ""


@dataclass(frozen=True)
class PrefilledContext:
    """A context cache that is ready to decode from.

    Attributes:
        cache: The stitched KV.
        logits: Logits [vocabulary] of the first answer token.
        position: Position of the first answer token.
        plan: What was kept and recomputed; None when everything was prefilled.
        sparse: What the prefill policy did; None when all attention was dense.
        decoding: What the decode policy observed; None when decoding is dense.
        dense: Why all attention of the prefill was dense, and why decoding is; "" where it is not.
        cached_tokens: Tokens that were in the cache when the turn began, S not counted; mean over layers.
        cached_chunks: Chunks that were in the cache when the turn began.
        prefilled_tokens: Tokens that went through the model, S and the composite pass not counted; mean over layers.
        looks: Blocks per chunk that each composite pass read.
    """

    cache: ContextCache
    logits: Tensor
    position: int
    plan: Plan | None
    sparse: SparsePrefill | None = None
    decoding: DecodeState | None = None
    dense: DenseReasons = DenseReasons()
    cached_tokens: float = 0.0
    cached_chunks: int = 0
    prefilled_tokens: float = 0.0
    looks: tuple[tuple[Blocks, ...], ...] = ()


def mean_keys(cache: ContextCache, kinds: Sequence[LayerKind]) -> float:
    """Return the rows of a layer: the mean over layers in which policies act, or over all where they act in none."""
    lengths = [length for length, kind in zip(cache.lengths, kinds, strict=True) if kind.plain] or cache.lengths
    return sum(lengths) / len(lengths)
