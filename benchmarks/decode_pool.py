"""Decoding with KV in host memory and a GPU pool for a share of it: dense against PSA, with the same memory.

One context is prefilled, and its KV is copied into pinned memory for every request. After that requests differ in their
tokens, which are random, one per request and step. Both decoders get the same tokens:

    dense, staged   the GPU keeps the share; the rest is copied every step while layers compute (bench/staged.py)
    psa             `PooledDecoder`, as the engine runs it: ranked blocks until enough is covered, and one pool of
                    blocks for all requests, layers and kv heads

During the untimed `warmup` steps the pool of PSA fills with the blocks that its heads read. `ratio` is relative to the
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

from benchmarks.decode import Progress
from benchmarks.grid import TextGrid, number
from benchmarks.prefill import Tokens
from benchmarks.staged import StagedDecoder
from ragkv.errors import InputError
from ragkv.kernels.pool import PooledRows, rank
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.kv_pool import PoolUse
from ragkv.model.execution.pooled_decode import PooledDecoder, PooledRequest
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.model.profile import Profile
from ragkv.sparse.psa import Psa

STAGED, PSA = "dense, staged", "psa"


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
        dense_steps: timed steps of the dense decoder, after an untimed one.
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
        ratio: rate / rate of the dense decoder.
        read: keys read / keys present.
        hits: share of what was read besides near rows that was on the device.
        host: bytes per step over the bus.
        error: relative error of the first step's logits to those of the dense decoder.
        covered: true share of the attention that was read, mean over query heads and layers; None for dense decoding.
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
    """Measure both decoders. Raises InputError if the length does not fit the model or the share is not below 1."""
    p = params
    room = max(p.warmup + p.steps, p.dense_steps) + 2
    if p.length + room > model.max_positions or p.length < p.psa.block:
        raise InputError(f"{p.length + room} tokens; {model.name} reads {model.max_positions}, and at least a block")
    if not 0 < p.share < 1:
        raise InputError("a pool has room for more than nothing and less than all")
    decoder = PooledDecoder(model, p.psa, int(p.share * p.batch * p.length * model.token_bytes))
    requests = _prefilled(decoder, p, room, tokens)
    generator = torch.Generator().manual_seed(p.seed)
    drawn = torch.randint(2, model.config.vocab_size, (room, p.batch), generator=generator).tolist()
    dense, expected = _dense(model, [each.cache for each in requests], p, drawn)
    progress("decode", 1, 2)
    psa, logits = _psa(decoder, requests, p, drawn)
    error = float((logits - expected).norm() / expected.norm())
    covered, worst = _coverage(decoder, requests, p, drawn[p.warmup + p.steps])
    progress("decode", 2, 2)
    for request in requests:
        request.leave()
    return [dense, replace(psa, ratio=psa.rate / dense.rate, error=error, covered=covered, worst=worst)]


def _prefilled(decoder: PooledDecoder, params: PoolParams, room: int, tokens: Tokens) -> list[PooledRequest]:
    """Requests that have joined, all with copies of one context."""
    model, requests = decoder.model, list[PooledRequest]()
    context = ContextCache(model.shape, params.length, model.dtype, model.devices)
    model.forward([append(context, tokens(model, params.length), 0)])
    for _ in range(params.batch):
        cache = ContextCache(model.shape, params.length + room, model.dtype, model.devices)
        cache.extend(context)
        request = decoder.open(cache, params.psa, room)
        assert request is not None, "the pool was made for this policy"
        request.join()
        requests.append(request)
    return requests


def _dense(
    model: DecoderModel, caches: Sequence[ContextCache], params: PoolParams, drawn: Sequence[Sequence[int]]
) -> tuple[PoolRow, Tensor]:
    """(figures, logits of the first step)."""
    decoder = StagedDecoder(model, caches, params.share, params.dense_steps + 1)
    first, times = _timed(model, lambda at: decoder.decode(drawn[at]), 1, params.dense_steps)
    rate, p50, p99 = _figures(times, len(caches))
    whole = sum(sum(cache.lengths) for cache in caches) * model.token_bytes // model.shape.layers
    return PoolRow(STAGED, rate, p50, p99, 1.0, 1.0, 1 - decoder.copied / whole, float(decoder.copied), 0.0), first


def _psa(
    decoder: PooledDecoder, requests: Sequence[PooledRequest], params: PoolParams, drawn: Sequence[Sequence[int]]
) -> tuple[PoolRow, Tensor]:
    """Likewise."""
    pool, uses, model = decoder.pool, list[PoolUse](), decoder.model

    def step(at: int) -> Tensor:
        if at == params.warmup:
            uses.append(pool.use())
        return decoder.decode(requests, drawn[at], [params.length + at] * len(requests))

    first, times = _timed(model, step, params.warmup, params.steps)
    before, after = (*uses, pool.use())
    read = (after.read - before.read) / params.steps
    near = model.shape.kv_heads * sum(pool.near_rows(each.place) for each in requests)
    present = model.shape.kv_heads * sum(sum(each.cache.lengths) for each in requests)
    hits = (after.hits - before.hits) / max(1, after.read - before.read)
    host = (after.loaded - before.loaded) * pool.slot_bytes / params.steps
    rate, p50, p99 = _figures(times, len(requests))
    return PoolRow(PSA, rate, p50, p99, 1.0, (near + read * pool.size) / present, hits, host, 0.0), first


def _timed(model: DecoderModel, step: Callable[[int], Tensor], warmup: int, timed: int) -> tuple[Tensor, list[float]]:
    """(logits of the first step, ms of each timed one)."""
    times, first = list[float](), torch.empty(0)
    for at in range(warmup + timed):
        start = _now(model)
        logits = step(at)
        elapsed = 1000 * (_now(model) - start)
        if not at:
            first = logits.float().clone()
        if at >= warmup:
            times.append(elapsed)
    return first, times


def _figures(times: Sequence[float], requests: int) -> tuple[float, float, float]:
    """(tokens per second, median ms, 99th percentile)."""
    p50, p99 = np.percentile(times, (50, 99))
    return 1000 * requests / statistics.fmean(times), float(p50), float(p99)


def _now(model: DecoderModel) -> float:
    """Seconds of the clock, after the step. Copies for the next step may still run."""
    if model.device.type == "cuda":
        torch.cuda.current_stream(model.device).synchronize()
    return time.perf_counter()


def _coverage(
    decoder: PooledDecoder, requests: Sequence[PooledRequest], params: PoolParams, tokens: Sequence[int]
) -> tuple[float, float]:
    """(mean, minimum) of the coverage over query heads and layers, of one more step."""
    observed = _ObservedDecoder(decoder, [each.place for each in requests[: params.covered]])
    observed.decode(requests, tokens, [params.length + params.warmup + params.steps] * len(requests))
    found = torch.cat(observed.shares)
    return float(found.mean()), float(found.min())


class _ObservedDecoder(PooledDecoder):
    """A decoder of the same pool that computes the coverage of every step from all keys. It records no graph.

    Attributes:
        shares: coverage of each query head [Hq] of some places, by layer and place.
    """

    def __init__(self, decoder: PooledDecoder, observed: Sequence[int]):
        self.__dict__.update(decoder.__dict__)
        self._graphs, self._observed, self.shares = None, observed, list[Tensor]()

    def attend(self, layer: int, q: Tensor, rows: PooledRows) -> Tensor:
        """See `PooledDecoder.attend`."""
        out, index, size = super().attend(layer, q, rows), self.pool.index, self.pool.size
        order = rank(q, index.digests[layer], index.hidden[layer])
        for place in self._observed:
            host = rows.k[layer][place]
            assert host is not None
            ranked = int(rows.ranked[layer, place])
            query = q[place].float().unflatten(0, (self.model.shape.kv_heads, -1))
            near = rows.near.k[layer][place][: int(rows.near.table[2, layer, place]) + 1].float()
            beside = (torch.einsum("hgd,nhd->hgn", query, near) * self.model.scale).logsumexp(-1)
            keys = host[: len(host) // size * size].to(q.device).float().unflatten(0, (-1, size))
            each = (torch.einsum("hgd,bnhd->hgbn", query, keys) * self.model.scale).logsumexp(-1)
            listed = order[place, :, :ranked]
            mass = each.gather(2, listed[:, None].expand(-1, each.shape[1], -1))
            taken = torch.arange(ranked, device=q.device) < index.read[layer, place][:, None]
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
