"""A hand-over: what another server needs to answer a question over stored KV, such as vLLM (integrations/vllm.py).

    prompt   S, the kept tokens of the chunks, the question: token ids, the first `rows` of which have KV here
    rows     K and V of these tokens, which the other server reads as one prefix that it has computed already

Another server counts the positions of a prompt without gaps, and a plan leaves gaps where it drops blocks. RoPE depends
on distances alone. So every key is turned back by the number of dropped tokens, S by all of them, and stands as far
from the question as it does in the context cache here. Dropping blocks therefore changes nothing in what the other
server computes, and keys of S get positions below 0.

A hand-over holds no KV and is kept nowhere. It names rows of the catalogue, which are never used twice, so KV of a
document that was removed or replaced is found no more.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from safetensors.torch import save
from torch import Tensor

from ragkv.engine.engine import Engine
from ragkv.engine.memory_source import ChunkSource
from ragkv.engine.passes import Passes
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.request import Request
from ragkv.engine.retokenise import with_own_tokens
from ragkv.engine.stitched_prefill import StitchedPrefill
from ragkv.errors import InputError, NotFound, Outdated
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import Capture, append
from ragkv.model.rotary import rotate
from ragkv.passages import Citation
from ragkv.recompute.base import Blocks, Plan, Rows
from ragkv.types import AskOptions, Hit


@dataclass(frozen=True)
class KeptChunk:
    """What a plan keeps of a chunk.

    Attributes:
        row: Row of the chunk in the catalogue.
        blocks: Blocks that are kept, in order. A chunk of which none is kept has positions all the same.
    """

    row: int
    blocks: Blocks


@dataclass(frozen=True)
class HandOver:
    """A question as another server reads it.

    Attributes:
        tokens: Token ids of the prompt.
        rows: How many of the first tokens have KV here; 0 where the other server has to prefill everything.
        chunks: What is kept of each chunk, in order; empty where `rows` is 0.
        salt: Name of these rows, the same for the same rows; where there are none, that of the collection. KV of chunks
            that were encoded alone is not that of their tokens in one text, so a cache of prefixes must keep both
            apart.
        stop: Strings that end an answer.
        method: Name of the method.
        citations: The passages.
    """

    tokens: tuple[int, ...]
    rows: int
    chunks: tuple[KeptChunk, ...]
    salt: str
    stop: tuple[str, ...]
    method: str
    citations: tuple[Citation, ...]


@dataclass(frozen=True)
class HandedRows:
    """KV of a hand-over.

    Attributes:
        tokens: Token ids [n] of the rows, S included.
        k: Rotated keys [L, n, Hkv, d], on the CPU.
        v: Values [L, n, Hkv, d], on the CPU.
    """

    tokens: Tensor
    k: Tensor
    v: Tensor

    def encode(self) -> bytes:
        """Return the rows in the format of safetensors: `tokens`, `k`, `v`."""
        return save({"tokens": self.tokens, "k": self.k, "v": self.v})


def hand_over(engine: Engine, question: str, options: AskOptions) -> Passes[HandOver]:
    """Choose what a question reads, and describe it; the passes that this takes are yielded.

    Args:
        engine: The engine.
        question: The question.
        options: How it is asked. It belongs to no conversation.

    Raises:
        InputError: What `Engine.prefill` raises it for; or the method recomputes tokens, or keeps other blocks in each
            layer; or the model's KV has no form that another server reads.
        NotFound: As of `Engine.prefill`.
        Outdated: A document was removed or replaced meanwhile.
    """
    questions, request = engine.questions, Request(question, options)
    questions.prepare(request)
    request.hits = questions.retrieve(request)
    choice, timer = request.method, request.timer
    session = request.session = yield from engine.sessions.recall(options.collection, None, choice, timer)
    session.sought, method = request.sought, choice.method
    session.hits += questions.screen(request)
    questions.check_room(request, session.hits)
    kept: list[KeptChunk] = []
    if method is not None:
        _check_model(engine.model, options.collection)
        yield from engine.sessions.open_sources(session, method, timer)
        stages = (session.sources, request.question_tokens, method, PrefillOptions(), timer, session.state)
        blocks = _blocks_of((yield from StitchedPrefill(engine.prefiller.runner, *stages).plan()), choice.name)
        kept = [KeptChunk(hit.row, some) for hit, some in zip(session.hits, blocks, strict=True)]
        context = _tokens(engine, session.sources, blocks)
    else:
        context = (*engine.model.prompt.prefix, *(token for hit in session.hits for token in hit.chunk.tokens))
    if not engine.sessions.is_current(session):
        raise Outdated
    return HandOver(
        (*context, *request.question_tokens),
        len(context) if kept else 0,
        tuple(kept),
        salt_of(engine, options.collection, kept),
        tuple(request.sampling.stop),
        choice.name,
        request.citations,
    )


def handed_rows(engine: Engine, collection: str, kept: Sequence[KeptChunk], salt: str) -> Passes[HandedRows]:
    """Load the KV that a hand-over names. What the store does not deliver is encoded again; the pass is yielded.

    Args:
        engine: The engine.
        collection: Collection of the chunks.
        kept: What is read of each chunk, in order.
        salt: That of the hand-over, under which the other server caches the rows.

    Raises:
        InputError: The salt is not that of these rows, a chunk has no such block, or the model's KV has no form that
            another server reads.
        NotFound: A chunk is not in the collection: its document was removed or replaced.
        Outdated: One was removed while its KV was loaded.
    """
    _check_model(engine.model, collection)
    if not hmac.compare_digest(salt.encode(), salt_of(engine, collection, kept).encode()):
        raise InputError("the salt is not that of these rows: ask with `cache_salt` as it was handed over")
    numbers = [each.row for each in kept]
    found = engine.catalog.chunks(collection, numbers)
    if not kept or len(found) < len(set(numbers)):
        raise NotFound("a document that was handed over was removed or replaced; hand the question over again")
    hits = [Hit(found[number], 0.0, number) for number in numbers]
    hits = with_own_tokens(hits, collection, engine.catalog, engine.model.prompt, engine.fingerprint, wrapped=True)
    sources = yield from engine.chunks.open_all([(hit.chunk, i == 0) for i, hit in enumerate(hits)], collection)
    for source, chunk in zip(sources, kept, strict=True):
        if list(chunk.blocks) != sorted({*chunk.blocks} & {*range(source.piece.blocks)}):
            raise InputError(f"chunk {chunk.row} has blocks 0 to {source.piece.blocks - 1}; name some, in order")
    blocks = [each.blocks for each in kept]
    tokens = torch.tensor(_tokens(engine, sources, blocks), dtype=torch.int64)
    k, v = yield from _stitched(engine, sources, blocks)
    if engine.catalog.standing(collection, numbers) != set(numbers):
        raise Outdated
    return HandedRows(tokens, k, v)


def salt_of(engine: Engine, collection: str, kept: Sequence[KeptChunk]) -> str:
    """Return the name of rows: a hash over model, collection, chunks and blocks, keyed with the store's secret."""
    facts = [engine.fingerprint, collection, [(each.row, each.blocks) for each in kept]]
    secret = engine.settings.store_secret.get_secret_value()
    return hmac.new(secret.encode(), json.dumps(facts).encode(), hashlib.sha256).hexdigest()


def _check_model(model: DecoderModel, collection: str) -> None:
    """Raise InputError where rows are not what another server's cache holds at the same position."""
    windows = any(kind.window is not None for kind in model.kinds)
    why = (
        ("layers with a window, which counts true positions" if windows else "")
        or ("layers with a state" if model.states.bytes else "")
        or ("wrapper tokens, which no other vocabulary has" if model.wrappers.find(collection) else "")
        or ("" if model.compares_heads else "layers with heads of different sizes")
        or ("" if model.orders_alike else "keys whose dimensions ragkv stores in an order of its own")
    )
    if why:
        raise InputError(f"the KV of {model.name} cannot be handed over: it has {why}; ask with method full")


def _blocks_of(plan: Plan, method: str) -> Sequence[Blocks]:
    """Return the blocks per chunk of a plan that is one and the same in every layer and repairs nothing."""
    if plan.refinement or plan.expansion or plan.key_positions or any(any(layer) for layer in plan.recompute):
        raise InputError(
            f"method {method} recomputes tokens for each question, which only ragkv's own answers do; "
            "ask with scout:repair=none or with reuse"
        )
    if len(set(plan.kept)) > 1:
        raise InputError(f"method {method} keeps other blocks in each layer; ask with scout:repair=none or with reuse")
    return plan.kept[0]


def _tokens(engine: Engine, sources: Sequence[ChunkSource], blocks: Sequence[Blocks]) -> tuple[int, ...]:
    """Return the token ids of S and of the kept blocks."""
    pairs = zip(sources, blocks, strict=True)
    kept = (source.tokens[row] for source, some in pairs for row in source.piece.rows(some))
    return (*engine.model.prompt.prefix, *kept)


def _stitched(
    engine: Engine, sources: Sequence[ChunkSource], blocks: Sequence[Blocks]
) -> Passes[tuple[Tensor, Tensor]]:
    """Return K and V [L, n, Hkv, d] of S and of the kept blocks, keys as far from position n as from the question."""
    model, prefix = engine.model, engine.model.prompt.prefix
    starts = list(accumulate((len(source.tokens) for source in sources), initial=len(prefix)))
    parts: list[list[Rows]] = []
    if prefix:
        capture = Capture(keys_too=True)
        cache = ContextCache(model.shape, len(prefix), model.dtype, model.devices)
        yield append(cache, prefix, 0, outputs=0, capture=capture)
        parts.append(list(zip(capture.k, capture.v, strict=True)))
    for source, some in zip(sources, blocks, strict=True):
        if some:
            parts.append((yield from source.load([some] * model.shape.layers)))
    at = [*range(len(prefix)), *_positions(sources, blocks, starts)]
    positions = torch.tensor(at) - (starts[-1] - len(at))
    with torch.inference_mode():
        layers = [
            _turned(model, layer, [part[layer] for part in parts], positions) for layer in range(len(model.kinds))
        ]
    return torch.stack([k for k, _ in layers]), torch.stack([v for _, v in layers])


def _positions(sources: Sequence[ChunkSource], blocks: Sequence[Blocks], starts: Sequence[int]) -> Iterator[int]:
    for source, some, start in zip(sources, blocks, starts, strict=False):
        yield from (start + row for row in source.piece.rows(some))


def _turned(model: DecoderModel, layer: int, parts: Sequence[Rows], positions: Tensor) -> Rows:
    """Return rows of a layer on the CPU, pre-RoPE keys turned to positions [n]."""
    device = model.devices[layer]
    k, v = (torch.cat([part[side].to(device) for part in parts]) for side in (0, 1))
    return rotate(k, model.rotary(positions, layer).to(device)).cpu(), v.cpu()
