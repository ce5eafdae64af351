"""Speculation of one request: what its drafts are copied from, and why there may be none.

Drafts come from the kept blocks of the context in prompt order, then from the question, then from the answer so far.
They are verified by dense decoding (drafting.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ragkv.engine.drafting import Drafter
from ragkv.engine.request import Request
from ragkv.engine.structured import GrammarDrafter
from ragkv.model.decoder import DecoderModel
from ragkv.model.wrapper import without_wrapper
from ragkv.recompute.base import Plan
from ragkv.report import SpeculationReport

POOL = "the pool of KV blocks decodes one token a step"
STATES = "the model's layers with a state decode one token a step"


def make_drafter(model: DecoderModel, request: Request) -> Drafter | GrammarDrafter | None:
    """Return what drafts the answer of a request that is prefilled; None where nothing may be drafted."""
    if request.sequence.guide is not None:  # whatever is forced is right
        return None if _why_none(request) else GrammarDrafter(request.sequence.guide)
    if not request.speculation or _why_none(request):
        return None
    hits, plan, block = request.session.hits, request.context.plan, model.profile.block
    chunks = [hit.chunk.tokens for hit in hits]
    kept = chunks if plan is None else kept_texts(chunks, plan, block)
    return Drafter([*map(without_wrapper, kept), request.question_tokens], model.stop_ids)


def kept_texts(chunks: Sequence[Sequence[int]], plan: Plan, block: int) -> list[Sequence[int]]:
    """Return the tokens of kept blocks in prompt order. Adjacent blocks of a chunk are one text.

    Args:
        chunks: Token ids of each chunk of the context.
        plan: Which blocks are kept. A block counts that any layer keeps.
        block: Tokens of a block.
    """
    found: list[Sequence[int]] = []
    for i, tokens in enumerate(chunks):
        blocks = sorted({each for layer in plan.kept for each in layer[i]})
        while blocks:
            count = next((at for at, each in enumerate(blocks) if each != blocks[0] + at), len(blocks))
            found.append(tokens[blocks[0] * block : (blocks[0] + count) * block])
            blocks = blocks[count:]
    return found


def speculation_report(request: Request) -> SpeculationReport | None:
    """Return what speculation did for a request whose decoding has ended; None if it was off."""
    if not request.speculation:
        return None
    drafter = request.sequence.drafter
    if drafter is None:
        return SpeculationReport(0, 0, 0, _why_none(request))
    return SpeculationReport(drafter.passes, drafter.drafted, drafter.accepted, "")


def _why_none(request: Request) -> str:
    """Return why the request decodes a token a step; "" where drafts can be verified."""
    if request.sequence.pooled is not None:
        return POOL
    if request.context.cache.states is not None:
        return STATES
    policy = request.context.decoding
    return "" if policy is None else f"the decode policy {policy.name} decodes one token a step"
