"""A toy request: a context cache, a question, tokens one after another, and dense attention to compare with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.kernels.attention import attend
from ragkv.model.layer_pass import append
from tests import tiny

GROUPINGS = [(8, 1), (8, 2), (8, 4), (8, 8)]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass
class Request:
    """A context, a question and the tokens of an answer. Slices of the tensors are what a cache would hold.

    Attributes:
        k: Keys [rows + steps, Hkv, d].
        v: Values [rows + steps, Hkv, d].
        q: Queries [question + steps, Hq, d].
        positions: Positions [rows + steps].
        rows: Rows of context and question.
        question: Rows of the question; they are the last of `rows`.
        scale: Softmax scale.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    positions: Tensor
    rows: int
    question: int
    scale: float = 0.35

    def prefill(self, state):
        """Pass the question to the state."""
        n, t = self.rows, self.question
        return state(
            *(0, self.q[:t], self.k[:n], self.v[:n], self.positions[n - t : n], self.positions[:n]), scale=self.scale
        )

    def step(self, state, at):
        """Return the output [Hq, d] of step `at`, counted from 0."""
        return state(*self.call_args(at), scale=self.scale)[0]

    def call_args(self, at):
        """Return the arguments of the attention call of step `at`."""
        n, t = self.rows + at + 1, self.question + at
        return 0, self.q[t : t + 1], self.k[:n], self.v[:n], self.positions[n - 1 : n], self.positions[:n]

    def dense(self, at):
        """Return what dense attention gives for step `at`."""
        return attend(*self.call_args(at)[1:], scale=self.scale)[0]

    @property
    def steps(self):
        return len(self.positions) - self.rows


def make_request(rows=150, question=7, steps=40, *, q_heads=8, kv_heads=2, d=8, gapped=True, sharp=2.0, seed=0):
    """Make a random request. Gapped: context rows have scattered positions in no order, as stitching leaves them."""
    context = rows - question
    context_positions = torch.randperm(3 * context, generator=torch.Generator().manual_seed(seed))[:context]
    start = 3 * context + 11
    if not gapped:
        context_positions, start = torch.arange(context), context
    positions = torch.cat([context_positions, torch.arange(start, start + question + steps)])
    k, v = normal(rows + steps, kv_heads, d, seed=seed + 1), normal(rows + steps, kv_heads, d, seed=seed + 2)
    return Request(k, v, sharp * normal(question + steps, q_heads, d, seed=seed + 3), positions, rows, question)


def restricted(at, request, marked, size):
    """Compute the attention of step `at` over the rows of marked blocks [Hkv, B] only."""
    _, q, k, v, _, _ = request.call_args(at)
    group = q.shape[1] // k.shape[1]
    rows = marked.repeat_interleave(size, dim=1)[:, : len(k)].repeat_interleave(group, dim=0)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q[0], k) * request.scale
    return torch.einsum("hn,nhd->hd", scores.masked_fill(~rows, -torch.inf).softmax(-1), v)


def greedy(model, states, contexts, questions, count=8):
    """Decode requests together and return the tokens and logits of each.

    Each request has its context in its cache, prefills its question and decodes `count` tokens under its state; None
    means dense.
    """
    from ragkv.model.kv_cache import ContextCache

    caches = []
    for tokens in contexts:
        cache = ContextCache(model.shape, 8, model.dtype)
        model.forward([append(cache, tokens, 0, outputs=0)])
        caches.append(cache)
    ends = [len(context) + 20 for context in contexts]
    prefills = zip(caches, questions, ends, states, strict=True)
    logits = model.forward([append(c, q, end, attention=state) for c, q, end, state in prefills])
    outputs = [([], []) for _ in contexts]
    for step in range(count):
        for (tokens, seen), row in zip(outputs, logits, strict=True):
            tokens.append(int(row[-1].argmax()))
            seen.append(row[-1])
        ends_now = [end + len(q) + step for end, q in zip(ends, questions, strict=True)]
        rows = zip(caches, outputs, ends_now, states, strict=True)
        logits = model.forward([append(c, [tokens[-1]], at, attention=state) for c, (tokens, _), at, state in rows])
    return [(tokens, torch.stack(seen)) for tokens, seen in outputs]


def assert_matches_dense(params, kind="llama"):
    """Compare greedy tokens and logits of a tiny model under the identity setting with dense attention."""
    model = tiny.model(kind)
    contexts, questions = [tiny.tokens(61, 1), tiny.tokens(24, 2)], [tiny.tokens(9, 3), tiny.tokens(5, 4)]
    dense = greedy(model, [None, None], contexts, questions)
    sparse = greedy(model, [params.start(), params.start()], contexts, questions)
    for (tokens, logits), (dense_tokens, dense_logits) in zip(sparse, dense, strict=True):
        assert tokens == dense_tokens
        torch.testing.assert_close(logits, dense_logits, rtol=0, atol=1e-10)
