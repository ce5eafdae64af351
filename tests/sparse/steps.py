"""A request in the small: a context cache, a question, tokens one after another, and dense attention beside it."""

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
    """k, v [rows + steps, Hkv, d] · q [asked + steps, Hq, d] · positions [rows + steps]; the question is the last
    `asked` of the rows. Sliced as a cache would show it."""

    k: Tensor
    v: Tensor
    q: Tensor
    positions: Tensor
    rows: int
    asked: int
    scale: float = 0.35

    def ask(self, state):
        n, t = self.rows, self.asked
        return state(
            *(0, self.q[:t], self.k[:n], self.v[:n], self.positions[n - t : n], self.positions[:n]), scale=self.scale
        )

    def step(self, state, at):
        """Output [Hq, d] of step `at`, counted from 0."""
        return state(*self.seen(at), scale=self.scale)[0]

    def seen(self, at):
        n, t = self.rows + at + 1, self.asked + at
        return 0, self.q[t : t + 1], self.k[:n], self.v[:n], self.positions[n - 1 : n], self.positions[:n]

    def dense(self, at):
        return attend(*self.seen(at)[1:], scale=self.scale)[0]

    @property
    def steps(self):
        return len(self.positions) - self.rows


def request(rows=150, asked=7, steps=40, *, q_heads=8, kv_heads=2, d=8, gapped=True, sharp=2.0, seed=0):
    """Gapped: context rows at scattered positions, in no order, as stitching leaves them."""
    context = rows - asked
    places = torch.randperm(3 * context, generator=torch.Generator().manual_seed(seed))[:context]
    start = 3 * context + 11
    if not gapped:
        places, start = torch.arange(context), context
    positions = torch.cat([places, torch.arange(start, start + asked + steps)])
    k, v = normal(rows + steps, kv_heads, d, seed=seed + 1), normal(rows + steps, kv_heads, d, seed=seed + 2)
    return Request(k, v, sharp * normal(asked + steps, q_heads, d, seed=seed + 3), positions, rows, asked)


def restricted(at, request, marked, size):
    """Attention of step `at` over the rows of marked blocks [Hkv, B] only."""
    _, q, k, v, _, _ = request.seen(at)
    group = q.shape[1] // k.shape[1]
    rows = marked.repeat_interleave(size, dim=1)[:, : len(k)].repeat_interleave(group, dim=0)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,nhd->hn", q[0], k) * request.scale
    return torch.einsum("hn,nhd->hd", scores.masked_fill(~rows, -torch.inf).softmax(-1), v)


def greedy(model, states, contexts, questions, count=8):
    """Tokens and logits of requests that run together: each has its context in the cache, its question read and `count`
    tokens decoded under its state, None for dense."""
    from ragkv.model.kv_cache import ContextCache

    caches = []
    for tokens in contexts:
        cache = ContextCache(model.shape, 8, model.dtype)
        model.forward([append(cache, tokens, 0, outputs=0)])
        caches.append(cache)
    ends = [len(context) + 20 for context in contexts]
    ask = zip(caches, questions, ends, states, strict=True)
    logits = model.forward([append(c, q, end, attention=state) for c, q, end, state in ask])
    said = [([], []) for _ in contexts]
    for step in range(count):
        for (tokens, seen), row in zip(said, logits, strict=True):
            tokens.append(int(row[-1].argmax()))
            seen.append(row[-1])
        ends_now = [end + len(q) + step for end, q in zip(ends, questions, strict=True)]
        rows = zip(caches, said, ends_now, states, strict=True)
        logits = model.forward([append(c, [tokens[-1]], at, attention=state) for c, (tokens, _), at, state in rows])
    return [(tokens, torch.stack(seen)) for tokens, seen in said]


def says_what_dense_says(params, kind="llama"):
    """Greedy tokens and logits of a tiny model under the identity setting, against dense attention."""
    model = tiny.model(kind)
    contexts, questions = [tiny.tokens(61, 1), tiny.tokens(24, 2)], [tiny.tokens(9, 3), tiny.tokens(5, 4)]
    dense = greedy(model, [None, None], contexts, questions)
    sparse = greedy(model, [params.start(), params.start()], contexts, questions)
    for (tokens, logits), (expected, wanted) in zip(sparse, dense, strict=True):
        assert tokens == expected
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-10)
