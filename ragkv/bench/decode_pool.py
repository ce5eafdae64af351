"""Decoding with KV in host memory and a GPU pool for a share of it: dense against PSA, with the same pool.

One context is prefilled, and its KV is copied for every request into pinned memory of its own. From then on requests
differ in their tokens, which are drawn, a new one for every request and step, the same for all ways to decode:

    dense, staged        the pool keeps its share; the rest is copied every step while layers compute (bench/staged.py)
    dense, by address    likewise, but kernels read the rest straight from host memory
    psa                  `PooledSteps`: ranked blocks until enough is covered; the pool keeps what was read last

Each begins with the same rows and a pool of the first blocks, which the dense ways do not change; `warmup` steps are
not timed, in which the pool of PSA fills with what its heads read. `ratio` is to the better of the two dense ways.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ragkv.bench.decode import Progress
from ragkv.bench.grid import TextGrid, number
from ragkv.bench.prefill import Tokens
from ragkv.bench.staged import StagedDecoder
from ragkv.errors import InputError
from ragkv.kernels.pool import rank
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.pooled_decode import PooledDecoder, PooledKV
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.profile import Profile
from ragkv.sparse.psa import Psa

STAGED, BY_ADDRESS, PSA = "dense, staged", "dense, by address", "psa"


def usual() -> Psa:
    """PSA as a profile has it that says nothing of its own."""
    return Psa(block=Profile.decode_block, least=Profile.decode_least, part=Profile.decode_part)


@dataclass(frozen=True)
class PoolParams:
    """length: keys of a context · batch: requests · share: of the KV that the pool has room for · psa: the policy ·
    steps, warmup: of PSA, timed and before that · dense_steps: timed steps of the dense ways, after one that is not ·
    covered: requests whose true coverage is measured, at one step; it reads all keys · seed: of the tokens."""

    length: int = 32768
    batch: int = 16
    share: float = 0.25
    psa: Psa = field(default_factory=usual)
    steps: int = 64
    warmup: int = 32
    dense_steps: int = 4
    covered: int = 1
    seed: int = 1


@dataclass(frozen=True)
class PoolRow:
    """rate: tokens a second, of all requests · p50, p99: milliseconds of a step · ratio: rate over that of the better
    dense way · read: keys read / keys there · hits: ranked blocks that were read from the pool, as a share · host:
    bytes a step over the bus · error: of the first step's logits against the first dense way's, relative · covered,
    worst: true share of the attention that was read, mean and least over query heads and layers; None for dense."""

    way: str
    rate: float
    p50: float
    p99: float
    ratio: float
    read: float
    hits: float
    host: float
    error: float
    covered: float | None = None
    worst: float | None = None


@torch.inference_mode()
def measure(model: DecoderModel, params: PoolParams, progress: Progress, tokens: Tokens) -> list[PoolRow]:
    """Every way, one after another. Raises InputError for a length that the model does not read, or a share of all."""
    p, shape = params, model.shape
    room = max(p.warmup + p.steps, p.dense_steps + 1) + 1
    if p.length + room > model.max_positions or p.length < p.psa.block:
        raise InputError(f"{p.length + room} tokens; {model.name} reads {model.max_positions}, and at least a block")
    if not 0 < p.share < 1:
        raise InputError("a pool has room for more than nothing and less than all")
    context = ContextCache(shape, p.length, model.dtype, model.devices)
    model.forward([append(context, tokens(model, p.length), 0)])
    kv = PooledKV([context] * p.batch, p.psa, p.share, room)
    del context
    generator = torch.Generator().manual_seed(p.seed)
    drawn = torch.randint(2, model.config.vocab_size, (room, p.batch), generator=generator).tolist()
    ways: list[tuple[str, Callable[[], PooledDecoder], int, int]] = [
        (STAGED, lambda: StagedDecoder(model, kv), 1, p.dense_steps),
        (BY_ADDRESS, lambda: PooledDecoder(model, kv, None), 1, p.dense_steps),
        (PSA, lambda: PooledDecoder(model, kv, p.psa), p.warmup, p.steps),
    ]
    rows, first = list[PoolRow](), None
    for way, make, warmup, timed in ways:
        row, logits = _row(model, way, make(), drawn, warmup, timed)
        first = logits if first is None else first
        rows.append(replace(row, error=float((logits - first).norm() / first.norm())))
        progress("decode", len(rows), len(ways))
    dense = max(row.rate for row in rows if row.way != PSA)
    covered, worst = _coverage(model, kv, p, drawn[-1])
    rows[-1] = replace(rows[-1], covered=covered, worst=worst)
    return [replace(row, ratio=row.rate / dense) for row in rows]


def _row(
    model: DecoderModel, way: str, steps: PooledDecoder, drawn: Sequence[Sequence[int]], warmup: int, timed: int
) -> tuple[PoolRow, Tensor]:
    """(its figures; logits of the first step)."""
    kv, times, counts, first = steps.kv, list[float](), list[Tensor](), torch.empty(0)
    for at in range(warmup + timed):
        start = _now(model)
        logits = steps.decode(drawn[at])
        took = 1000 * (_now(model) - start)
        if not at:
            first = logits.float().clone()  # a recorded step writes the next ones there
        if at >= warmup:
            times.append(took)
            counts.append(torch.stack([torch.stack([met.read, met.missed]) for met in steps.reads]).sum((0, 2, 3)))
    read, missed = (float(each) for each in torch.stack(counts).double().mean(0))
    heads = kv.shape.kv_heads
    ranked, near = heads * int(kv.pool.ranked.sum()), heads * sum(map(sum, kv.near_lengths))
    share = (near + read * kv.size) / (near + ranked * kv.size)
    host = float(steps.copied) if isinstance(steps, StagedDecoder) else missed * kv.bytes
    hits = 1 - host / kv.bytes / read if read else 1.0
    rate = 1000 * len(kv.positions) / statistics.fmean(times)
    p50, p99 = np.percentile(times, (50, 99))
    return PoolRow(way, rate, float(p50), float(p99), 1.0, share, hits, host, 0.0), first


def _now(model: DecoderModel) -> float:
    """Seconds, when the step is done. What is copied ahead for the next one goes on."""
    if model.device.type == "cuda":
        torch.cuda.current_stream(model.device).synchronize()
    return time.perf_counter()


def _coverage(model: DecoderModel, kv: PooledKV, params: PoolParams, tokens: Sequence[int]) -> tuple[float, float]:
    """(mean, least) over query heads and layers, of one more step."""
    watched = _Watched(model, kv, params.psa, params.covered)
    watched.decode(tokens)
    found = torch.cat(watched.shares)
    return float(found.mean()), float(found.min())


class _Watched(PooledDecoder):
    """Steps that look at all keys afterwards. shares: what each query head [Hq] of the first `count` requests has
    covered, by layer and request."""

    def __init__(self, model: DecoderModel, kv: PooledKV, params: Psa, count: int):
        super().__init__(model, kv, params)
        self._records, self._count, self.shares = False, count, list[Tensor]()

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `PooledSteps.attend`."""
        out, kv = super().attend(layer, q), self.kv
        order = rank(q, kv.digests[layer], kv.hidden[layer])
        for of in range(min(self._count, len(q))):
            ranked = int(kv.pool.ranked[layer, of])
            asked = q[of].float().unflatten(0, (kv.shape.kv_heads, -1))
            near = self._pointers.k[layer][of][: int(self._pointers.table[2, layer, of]) + 1].float()
            beside = (torch.einsum("hgd,nhd->hgn", asked, near) * self._model.scale).logsumexp(-1)
            keys = kv.pool.blocks[layer][of][:, :, 0].to(q.device).float()
            each = (torch.einsum("hgd,hbnd->hgbn", asked, keys) * self._model.scale).logsumexp(-1)
            listed = order[of, :, :ranked]
            mass = each.gather(2, listed[:, None].expand(-1, each.shape[1], -1))
            taken = torch.arange(ranked, device=q.device) < self.reads[-1].read[of][:, None]
            seen = torch.cat([mass.masked_fill(~taken[:, None], -torch.inf), beside[..., None]], -1).logsumexp(-1)
            whole = torch.cat([mass, beside[..., None]], -1).logsumexp(-1)
            self.shares.append(torch.exp(seen - whole).flatten())
        return out


def grid(rows: Sequence[PoolRow]) -> TextGrid:
    """Times in ms, shares in percent, GB of 10^9 bytes."""
    heads = ("decode", "tokens/s", "× dense", "p50", "p99", "keys read", "from the pool", "GB a step", "covered",
             "worst head", "error")  # fmt: skip
    cells = [
        (
            row.way,
            f"{row.rate:.1f}",
            f"{row.ratio:.2f}",
            f"{row.p50:.2f}",
            f"{row.p99:.2f}",
            number(row.read, ".1f", 100),
            number(row.hits, ".1f", 100),
            number(row.host, ".3f", 1e-9),
            number(row.covered, ".3f"),
            number(row.worst, ".3f"),
            f"{row.error:.4f}",
        )
        for row in rows
    ]
    return TextGrid(heads, tuple(cells))
