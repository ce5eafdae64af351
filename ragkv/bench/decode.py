"""`ragkv bench decode`: attention of a known shape while it decodes, dense and under every decode policy.

One attention layer of a model, as often as `layers` says, so that no processor cache still holds a layer when its turn
comes again. Keys and queries are drawn with the structure that trained models show: sinks, a band of neighbours, and
some keys of every kv head that its queries look at again and again; the rest is noise of standard deviation 1. Each
policy first sees a question of `question` rows, then decodes; policies take turns at every token, so that a slow moment
of the machine meets them all. What is timed is attention alone: no projections, no MLP, keys and values in host memory
on a CPU, in GPU memory on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ragkv.kernels.attention import attend
from ragkv.model.layer_pass import Attention
from ragkv.sparse.base import DecodePolicy, DecodeState
from ragkv.sparse.blocks import block_logsumexp, coverage
from ragkv.sparse.topk import TopKeys

Named = tuple[str, DecodePolicy]
Progress = Callable[[str, int, int], None]
"""(what, done, total)"""

SINKS, BAND, KEY = 4, tuple(0.01 * 1.4**turn for turn in range(12)), 40.0
"""Tokens at the start that every head reads; turns per position of the band, enough of them that only neighbours agree
in all; a key's part in what heads look for."""


@dataclass(frozen=True)
class DecodeParams:
    """keys: of the context · steps: timed tokens, after `warmup` untimed ones · question: rows read first · layers:
    alternating · q_heads, kv_heads, head_dim: of the shape · anchors: keys of each kv head that its queries look at."""

    keys: int = 65536
    steps: int = 20
    warmup: int = 3
    question: int = 24
    layers: int = 2
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    anchors: int = 120
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0


@dataclass(frozen=True)
class DecodeRow:
    """ms, fastest: of one token in one layer, median and minimum · to_dense, to_topk: dense attention's, exact top-k's
    median over this one's, in the same run · read: share of the keys, mean · covered: share of the attention that lies
    in the blocks read, mean and worst over heads and steps; None where no blocks are read · agree: share of the blocks
    read that would be read, too, if as many were chosen by their true share of the attention; likewise · error:
    relative L2 of the outputs to dense attention's."""

    policy: str
    ms: float
    fastest: float
    to_dense: float
    to_topk: float
    read: float
    covered: float | None
    worst: float | None
    agree: float | None
    error: float


class Stream:
    """Keys, values and queries of one layer, from the context to the last step."""

    def __init__(self, params: DecodeParams, seed: int):
        p, generator = params, torch.Generator().manual_seed(seed)
        rows = p.keys + p.question + p.warmup + p.steps

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        k, self.v = noise(rows, p.kv_heads, p.head_dim), noise(rows, p.kv_heads, p.head_dim)
        asking = p.question + p.warmup + p.steps
        group, unit = p.q_heads // p.kv_heads, p.head_dim**0.5 / KEY
        q = noise(asking, p.q_heads, p.head_dim)
        # Each thing heads look for has a direction of its own; dimensions come in the order they are taken.
        sink, far, band = 0, 1, 2
        k[:SINKS, :, sink] += KEY
        q[..., sink] = unit * 11 * (1 + 0.05 * noise(asking, p.q_heads))
        for head in range(p.kv_heads):
            anchors = torch.randint(SINKS, p.keys, (p.anchors,), generator=generator)
            k[anchors, head, far] += KEY
        strength = 9 + 3 * torch.rand(p.kv_heads * group, generator=generator)
        q[..., far] = unit * strength * (1 + 0.05 * noise(asking, p.q_heads))
        place, places = torch.arange(rows)[:, None], torch.arange(p.keys, rows)[:, None]
        for turn in BAND:
            for dim, of in ((band, torch.cos), (band + 1, torch.sin)):
                k[..., dim] += KEY / 4 * of(turn * place)
                q[..., dim] = 4 * unit * 10 / len(BAND) * of(turn * places)
            band += 2
        self.q, self.k, self.v = (x.to(p.device, p.dtype) for x in (q, k, self.v))
        self.at = torch.arange(rows)
        self.params = p

    def ask(self, attention: Attention, layer: int) -> None:
        """The question's rows."""
        start, stop = self.params.keys, self.params.keys + self.params.question
        self._attend(attention, layer, start, stop)

    def step(self, attention: Attention, layer: int, number: int) -> Tensor:
        """One decoded token: out [Hq, d]."""
        start = self.params.keys + self.params.question + number
        return self._attend(attention, layer, start, start + 1)[0]

    def query(self, number: int) -> Tensor:
        """The query of a step [Hq, d]."""
        return self.q[self.params.question + number]

    def keys(self, number: int) -> Tensor:
        """The keys of a step [n, Hkv, d]."""
        return self.k[: self.params.keys + self.params.question + number + 1]

    def _attend(self, attention: Attention, layer: int, start: int, stop: int) -> Tensor:
        q = self.q[start - self.params.keys : stop - self.params.keys]
        scale = self.params.head_dim**-0.5
        return attention(layer, q, self.k[:stop], self.v[:stop], self.at[start:stop], self.at[:stop], scale=scale)


@torch.inference_mode()
def measure(params: DecodeParams, policies: Sequence[Named], progress: Progress) -> list[DecodeRow]:
    """Dense attention, exact top-k over single keys, and the policies."""
    streams = [Stream(params, params.seed + layer) for layer in range(params.layers)]
    named: list[tuple[str, Attention]] = [("dense", _dense), ("top keys", TopKeys().start())]
    named += [(name, policy.start()) for name, policy in policies]
    for _, attention in named:
        for layer, stream in enumerate(streams):
            stream.ask(attention, layer)
    times: dict[str, list[float]] = {name: [] for name, _ in named}
    errors: dict[str, list[float]] = {name: [] for name, _ in named}
    covered: dict[str, list[Tensor]] = {name: [] for name, _ in named}
    agreed: dict[str, list[Tensor]] = {name: [] for name, _ in named}
    total = params.warmup + params.steps
    for number in range(total):
        for layer, stream in enumerate(streams):
            exact: Tensor | None = None
            for name, attention in named:
                spent, out = _timed(params.device, partial(stream.step, attention, layer, number))
                exact = out if exact is None else exact
                if number >= params.warmup:
                    times[name].append(spent)
                    errors[name].append(float((out - exact).float().norm() / exact.float().norm()))
                    covered[name] += _covered(attention, stream, layer, number)
                    agreed[name] += _agreed(attention, stream, layer, number)
        progress("decode", number + 1, total)
    dense, best = (statistics.median(times[name]) for name in ("dense", "top keys"))
    return [
        _row(name, attention, times[name], errors[name], covered[name], agreed[name], dense, best)
        for name, attention in named
    ]


def _dense(layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    return attend(q, k, v, q_pos, k_pos, scale=scale)


def _timed(device: str, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """(milliseconds, what it gave)."""
    start = now(device)
    out = run()
    return 1000 * (now(device) - start), out


def now(device: str) -> float:
    """Seconds, when all that was asked for is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _covered(attention: Attention, stream: Stream, layer: int, number: int) -> list[Tensor]:
    """Share of the attention [Hq] in the blocks that the step read, for policies that read blocks."""
    marked = getattr(attention, "marked", {}).get(layer)
    if marked is None:
        return []
    size, scale = attention.params.block, stream.params.head_dim**-0.5  # type: ignore[attr-defined]
    return [coverage(stream.query(number), stream.keys(number), marked, size, scale=scale)]


def _agreed(attention: Attention, stream: Stream, layer: int, number: int) -> list[Tensor]:
    """Share [Hkv] of the blocks that the step read which the same number of best blocks would hold."""
    marked = getattr(attention, "marked", {}).get(layer)
    if marked is None:
        return []
    size, scale = attention.params.block, stream.params.head_dim**-0.5  # type: ignore[attr-defined]
    true = block_logsumexp(stream.query(number), stream.keys(number), size, scale=scale).softmax(-1)
    true = true.unflatten(0, (marked.shape[0], -1)).mean(1)
    ranks = true.argsort(-1, descending=True).argsort(-1)
    marked = marked[:, : ranks.shape[1]].to(ranks.device)
    best = ranks < marked.sum(-1, keepdim=True)
    return [(best & marked).sum(-1) / marked.sum(-1)]


def _row(
    name: str,
    attention: Attention,
    times: Sequence[float],
    errors: Sequence[float],
    covered: Sequence[Tensor],
    agreed: Sequence[Tensor],
    dense: float,
    best: float,
) -> DecodeRow:
    ms = statistics.median(times)
    read = (
        attention.keys_read / attention.keys_present
        if isinstance(attention, DecodeState) and attention.keys_present
        else 1.0
    )
    shares = torch.stack(list(covered)) if covered else None
    return DecodeRow(
        policy=name,
        ms=ms,
        fastest=min(times),
        to_dense=dense / ms,
        to_topk=best / ms,
        read=read,
        covered=None if shares is None else float(shares.mean()),
        worst=None if shares is None else float(shares.min()),
        agree=float(torch.stack(list(agreed)).mean()) if agreed else None,
        error=statistics.fmean(errors),
    )
