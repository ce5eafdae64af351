"""Decoding with KV in host memory and a GPU pool for a share of it: dense against PSA, with the same pool.

One context is prefilled, and its KV is copied into pinned memory for every request. After that requests differ in their
tokens, which are random, one per request and step. All decoders get the same tokens:

    dense, staged        the pool keeps its share; the rest is copied every step while layers compute (bench/staged.py)
    dense, by address    likewise, but kernels read the rest straight from host memory
    psa                  `PooledDecoder`: ranked blocks until enough is covered; the pool keeps the blocks read last

Every decoder starts with the same rows and a pool of the first blocks, which the dense decoders do not change. During
the untimed `warmup` steps the pool of PSA fills with the blocks that its heads read. `ratio` is relative to the faster
dense decoder.
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
    """PSA with the defaults of a profile."""
    return Psa(block=Profile.decode_block, least=Profile.decode_least, part=Profile.decode_part)


@dataclass(frozen=True)
class PoolParams:
    """What is measured.

    Attributes:
        length: keys of a context.
        batch: requests.
        share: share of the KV that the pool has room for.
        psa: the policy.
        steps: timed steps of PSA.
        warmup: untimed steps of PSA before them.
        dense_steps: timed steps of the dense decoders, after an untimed one.
        covered: requests whose true coverage is measured, at one step that reads all keys.
        seed: seed of the tokens.
    """

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
    """One decoder.

    Attributes:
        way: its name.
        rate: tokens per second of all requests.
        p50: median milliseconds of a step.
        p99: likewise, the 99th percentile.
        ratio: rate / rate of the faster dense decoder.
        read: keys read / keys present.
        hits: share of the ranked blocks read that were in the pool.
        host: bytes per step over the bus.
        error: relative error of the first step's logits to those of the first dense decoder.
        covered: true share of the attention that was read, mean over query heads and layers; None for dense decoders.
        worst: likewise, the minimum.
    """

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
    """Measure every decoder. Raises InputError if the length does not fit the model or the share is not below 1."""
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
    decoders: list[tuple[str, Callable[[], PooledDecoder], int, int]] = [
        (STAGED, lambda: StagedDecoder(model, kv), 1, p.dense_steps),
        (BY_ADDRESS, lambda: PooledDecoder(model, kv, None), 1, p.dense_steps),
        (PSA, lambda: PooledDecoder(model, kv, p.psa), p.warmup, p.steps),
    ]
    rows, first = list[PoolRow](), None
    for name, make, warmup, timed in decoders:
        row, logits = _row(model, name, make(), drawn, warmup, timed)
        first = logits if first is None else first
        rows.append(replace(row, error=float((logits - first).norm() / first.norm())))
        progress("decode", len(rows), len(decoders))
    dense = max(row.rate for row in rows if row.way != PSA)
    covered, worst = _coverage(model, kv, p, drawn[-1])
    rows[-1] = replace(rows[-1], covered=covered, worst=worst)
    return [replace(row, ratio=row.rate / dense) for row in rows]


def _row(
    model: DecoderModel, name: str, decoder: PooledDecoder, drawn: Sequence[Sequence[int]], warmup: int, timed: int
) -> tuple[PoolRow, Tensor]:
    """(figures, logits of the first step)."""
    kv, times, counts, first = decoder.kv, list[float](), list[Tensor](), torch.empty(0)
    for at in range(warmup + timed):
        start = _now(model)
        logits = decoder.decode(drawn[at])
        elapsed = 1000 * (_now(model) - start)
        if not at:
            first = logits.float().clone()  # a recorded step overwrites this tensor
        if at >= warmup:
            times.append(elapsed)
            counts.append(torch.stack([torch.stack([met.read, met.missed]) for met in decoder.reads]).sum((0, 2, 3)))
    read, missed = (float(each) for each in torch.stack(counts).double().mean(0))
    heads = kv.shape.kv_heads
    ranked, near = heads * int(kv.pool.ranked.sum()), heads * sum(map(sum, kv.near_lengths))
    share = (near + read * kv.size) / (near + ranked * kv.size)
    host = float(decoder.copied) if isinstance(decoder, StagedDecoder) else missed * kv.bytes
    hits = 1 - host / kv.bytes / read if read else 1.0
    rate = 1000 * len(kv.positions) / statistics.fmean(times)
    p50, p99 = np.percentile(times, (50, 99))
    return PoolRow(name, rate, float(p50), float(p99), 1.0, share, hits, host, 0.0), first


def _now(model: DecoderModel) -> float:
    """Seconds of the clock, after the step. Copies for the next step may still run."""
    if model.device.type == "cuda":
        torch.cuda.current_stream(model.device).synchronize()
    return time.perf_counter()


def _coverage(model: DecoderModel, kv: PooledKV, params: PoolParams, tokens: Sequence[int]) -> tuple[float, float]:
    """(mean, minimum) of the coverage over query heads and layers, of one more step."""
    observed = _ObservedDecoder(model, kv, params.psa, params.covered)
    observed.decode(tokens)
    found = torch.cat(observed.shares)
    return float(found.mean()), float(found.min())


class _ObservedDecoder(PooledDecoder):
    """A decoder that computes the coverage of every step from all keys.

    Attributes:
        shares: coverage of each query head [Hq] of the first `count` requests, by layer and request.
    """

    def __init__(self, model: DecoderModel, kv: PooledKV, params: Psa, count: int):
        super().__init__(model, kv, params)
        self._records, self._count, self.shares = False, count, list[Tensor]()

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See `PooledDecoder.attend`."""
        out, kv = super().attend(layer, q), self.kv
        order = rank(q, kv.digests[layer], kv.hidden[layer])
        for of in range(min(self._count, len(q))):
            ranked = int(kv.pool.ranked[layer, of])
            query = q[of].float().unflatten(0, (kv.shape.kv_heads, -1))
            near = self._pointers.k[layer][of][: int(self._pointers.table[2, layer, of]) + 1].float()
            beside = (torch.einsum("hgd,nhd->hgn", query, near) * self._model.scale).logsumexp(-1)
            keys = kv.pool.blocks[layer][of][:, :, 0].to(q.device).float()
            each = (torch.einsum("hgd,hbnd->hgbn", query, keys) * self._model.scale).logsumexp(-1)
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
