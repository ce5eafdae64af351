"""`ragkv bench decode`: attention of a known shape while it decodes, dense and under every decode policy.

The bench alternates between `layers` copies of one attention layer, so that a layer has left the processor cache before
it runs again. Keys and queries have the structure of trained models: sinks, a band of neighbours, and some keys of
every kv head that its queries attend to repeatedly. The rest is noise of standard deviation 1. Each policy first sees a
question of `question` rows and then decodes. Policies take turns at every token, so that a slow moment of the machine
affects all of them. Only attention is timed: no projections and no MLP. Keys and values are in host memory on a CPU and
in GPU memory on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
"""Tokens at the start that every head reads; frequencies of the band, radians per position, enough of them that only
neighbours agree in all; size of a key's component along each direction that heads search for."""


@dataclass(frozen=True)
class DecodeParams:
    """What is measured.

    Attributes:
        keys: keys of the context.
        steps: timed tokens, after `warmup` untimed ones.
        question: rows that each policy sees before it decodes.
        layers: layers that take turns.
        anchors: keys of each kv head that its queries attend to repeatedly.
    """

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
    """One policy, or dense attention, or exact top-k.

    Attributes:
        ms: median milliseconds of one token in one layer.
        fastest: the minimum.
        to_dense: median of dense attention in the same run / `ms`.
        to_topk: median of exact top-k in the same run / `ms`.
        read: mean share of the keys that is read.
        covered: share of the attention in the blocks read, mean over heads and steps; None if no blocks are read.
        worst: likewise, the minimum.
        agree: share of the blocks read that an exact choice of as many blocks, by their attention, would read too; None
            if no blocks are read.
        error: relative L2 error of the outputs to dense attention's.
    """

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


@dataclass(frozen=True)
class _Samples:
    """Of one attention, a value per timed step and layer: milliseconds, errors, and shares for policies of blocks."""

    times: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    covered: list[Tensor] = field(default_factory=list)
    agreed: list[Tensor] = field(default_factory=list)


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
        # Every structure has a direction of its own. `band` is the next free dimension.
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
        """Attend with the question's rows."""
        start, stop = self.params.keys, self.params.keys + self.params.question
        self._attend(attention, layer, start, stop)

    def step(self, attention: Attention, layer: int, number: int) -> Tensor:
        """Attend with one decoded token: out [Hq, d]."""
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
    """Measure dense attention, exact top-k over single keys, and the policies, each dense where a request would be."""
    streams = [Stream(params, params.seed + layer) for layer in range(params.layers)]
    named: list[tuple[str, Attention]] = [("dense", _dense), ("top keys", TopKeys().start())]
    keys = params.keys + params.question
    named += [(name, _dense if policy.why_dense(keys) else policy.start()) for name, policy in policies]
    for _, attention in named:
        for layer, stream in enumerate(streams):
            stream.ask(attention, layer)
    samples = {name: _Samples() for name, _ in named}
    total = params.warmup + params.steps
    for number in range(total):
        for layer, stream in enumerate(streams):
            exact: Tensor | None = None
            for name, attention in named:
                elapsed, out = _timed(params.device, partial(stream.step, attention, layer, number))
                exact = out if exact is None else exact
                if number >= params.warmup:
                    sample = samples[name]
                    sample.times.append(elapsed)
                    sample.errors.append(float((out - exact).float().norm() / exact.float().norm()))
                    sample.covered.extend(_covered(attention, stream, layer, number))
                    sample.agreed.extend(_agreed(attention, stream, layer, number))
        progress("decode", number + 1, total)
    dense, best = (statistics.median(samples[name].times) for name in ("dense", "top keys"))
    return [_row(name, attention, samples[name], dense, best) for name, attention in named]


def _dense(layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> Tensor:
    return attend(q, k, v, q_pos, k_pos, scale=scale)


def _timed(device: str, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """(milliseconds, output)."""
    start = now(device)
    out = run()
    return 1000 * (now(device) - start), out


def now(device: str) -> float:
    """Seconds of the clock, after the device has finished its queue."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _covered(attention: Attention, stream: Stream, layer: int, number: int) -> list[Tensor]:
    """Share of the attention [Hq] in the blocks that the step read; empty for policies that read no blocks."""
    marked = getattr(attention, "marked", {}).get(layer)
    if marked is None:
        return []
    size, scale = attention.params.block, stream.params.head_dim**-0.5  # type: ignore[attr-defined]
    return [coverage(stream.query(number), stream.keys(number), marked, size, scale=scale)]


def _agreed(attention: Attention, stream: Stream, layer: int, number: int) -> list[Tensor]:
    """Share [Hkv] of the blocks read that are among the same number of best blocks; empty as above."""
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


def _row(name: str, attention: Attention, samples: _Samples, dense: float, best: float) -> DecodeRow:
    """dense, best: median milliseconds of dense attention and of exact top-k."""
    ms = statistics.median(samples.times)
    read = (
        attention.keys_read / attention.keys_present
        if isinstance(attention, DecodeState) and attention.keys_present
        else 1.0
    )
    shares = torch.stack(samples.covered) if samples.covered else None
    return DecodeRow(
        policy=name,
        ms=ms,
        fastest=min(samples.times),
        to_dense=dense / ms,
        to_topk=best / ms,
        read=read,
        covered=None if shares is None else float(shares.mean()),
        worst=None if shares is None else float(shares.min()),
        agree=float(torch.stack(samples.agreed).mean()) if samples.agreed else None,
        error=statistics.fmean(samples.errors),
    )
