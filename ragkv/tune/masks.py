"""Masks of training rows: what a token sees under full attention, and what it sees where KV is stored.

    token of      sees under full attention           sees where KV is stored
    S             S                                   S
    S' (a copy)   its own copy                        its own copy
    a chunk       S, earlier chunks, its own          its copy of S, its own chunk
    a question    S, all chunks, its own question     S, the blocks kept for it, its own question

Always causally, in the order of the row. A padded token sees itself alone, so that no row of a softmax is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragkv.model.wrapper import is_wrapper_token
from ragkv.tune.rows import CHUNK, COPY, PADDING, PREFIX, QUESTION


@dataclass(frozen=True)
class RowBatch:
    """Rows of one length; see `TrainingRow` for the columns.

    Attributes:
        ids: int64 [R, T].
        positions: int64 [R, T].
        kinds: int64 [R, T].
        parts: int64 [R, T].
        blocks: int64 [R, T].
        targets: bool [R, T].
        kept: bool [R, Q, B].
    """

    ids: Tensor
    positions: Tensor
    kinds: Tensor
    parts: Tensor
    blocks: Tensor
    targets: Tensor
    kept: Tensor


def unwrapped(batch: RowBatch) -> RowBatch:
    """Return the rows as they are without wrapper tokens: nobody sees these, and no position is left for them."""
    wrapper = is_wrapper_token(batch.ids)
    kinds = batch.kinds.masked_fill(wrapper, PADDING)
    return replace(batch, kinds=kinds, positions=batch.positions - wrapper.cumsum(1))


def near_mask(batch: RowBatch, window: int) -> Tensor:
    """Return what is less than `window` positions behind a token, bool [R, T, T] (query, key)."""
    return batch.positions[:, :, None] - batch.positions[:, None, :] < window


def full_mask(batch: RowBatch) -> Tensor:
    """Return what tokens see under full attention, bool [R, T, T] (query, key)."""
    query, key = batch.kinds[:, :, None], batch.kinds[:, None, :]
    context = (key == PREFIX) | ((key == CHUNK) & (query != PREFIX))
    return _allowed(batch, context & (query != COPY) & (query != PADDING))


def stored_mask(batch: RowBatch) -> Tensor:
    """Return what tokens see where KV is stored, bool [R, T, T] (query, key)."""
    query, key = batch.kinds[:, :, None], batch.kinds[:, None, :]
    same = batch.parts[:, :, None] == batch.parts[:, None, :]
    chunk = (query == CHUNK) & same & ((key == CHUNK) | (key == COPY))
    asking = batch.kinds == QUESTION
    # kept[r, question of the query, block of the key]
    part = torch.where(asking, batch.parts, 0)
    rows = torch.gather(batch.kept, 1, part[:, :, None].expand(-1, -1, batch.kept.shape[2]))
    kept = torch.gather(rows, 2, batch.blocks[:, None, :].expand(-1, rows.shape[1], -1))
    question = (query == QUESTION) & ((key == PREFIX) | ((key == CHUNK) & kept))
    return _allowed(batch, chunk | question | ((query == PREFIX) & (key == PREFIX)))


def _allowed(batch: RowBatch, context: Tensor) -> Tensor:
    """Return `context` and what every token sees of its own copy or question and of itself, causally."""
    length = batch.kinds.shape[1]
    query, key = batch.kinds[:, :, None], batch.kinds[:, None, :]
    same = (batch.parts[:, :, None] == batch.parts[:, None, :]) & (query == key)
    own = same & ((query == COPY) | (query == QUESTION))
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.kinds.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=batch.kinds.device)
    return (causal & (context | own)) | itself
