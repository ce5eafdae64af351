"""PSA: read blocks from the most promising on, and stop once enough of the attention has been seen.

Paper: Progressive Sparse Attention: Algorithm and System Co-design for Efficient Attention in LLM Serving
(arXiv 2503.00392), algorithm 1.

    q [Hkv, g, d]        queries of the token, by kv head
    CS [Hkv, B]          criticality scores of the blocks, from their digests
    order [Hkv, M]       the ranked blocks, best first
    AS_b [Hkv, g]        mass of a block: sum of exp(score) over its keys; here its logarithm, so that nothing overflows
    AS_acc, AS_min       mass read so far; the least mass of a block read so far
    N_left               blocks not read yet
    P_acc                AS_acc / (AS_acc + AS_min N_left): if the ranking is right, no unread block has more than
                         AS_min, and this is at most the share of the attention that has been read

Blocks are read `micro` at a time, by all kv heads that are not done; each has its own list. Digests are boxes over
keys with RoPE (`blocks.cuboid`), built once the context is stitched; a block gets its digest when its last row has
come.

With `reach="all"` blocks that the context was built without can come back: each is known by one point, the mean of its
keys, and competes with the others by that (paper silent: PSA has all KV at hand). Those that a head would have read,
and more of them as long as the share is not reached, are loaded in the middle of a step, read by all heads, and are in
the cache from then on.

Differs from the paper: the blocks of the attention sinks and the block with the newest rows are read before all others
and stay out of AS_min and N_left (a block that is not full has little mass and would end the reading at once); a kv
head stops when the least covered of its query heads is covered, and not before it has read `least` blocks and `part` of
all: P_acc holds only as far as the ranking is right, and where it is not, a head that has met one weak block would stop
at once (docs/lab-notes.md). Blocks come from one cache in memory; with KV on the host and a pool on the GPU it is
`ragkv/model/execution/pooled_decode.py`. There, too, things differ: slots belong to a kv head of a layer of a request, not to one pool for
all, so that nothing is atomic; what has no slot is read by the kernel itself over the bus, so that no thread polls a
flag and nothing is loaded that is not read; rows of the answer stay near, and get no digest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ragkv.kernels.attention import attend, merge
from ragkv.sparse.base import BlockFetcher, DecodePolicy, DecodeState, wide
from ragkv.sparse.blocks import BlockTable, cuboid, fetch


@dataclass(frozen=True)
class Psa(DecodePolicy):
    """threshold: share of the attention to be covered, the paper's epsilon (it names .95 and .98 and tunes it); 1 reads
    everything · block: keys read together (paper: 32 where it measures; a profile says 16) · micro: blocks between two
    looks at the share, the paper's m (paper silent; its figure draws 4) · least, part: ranked blocks that are read
    before the share is asked for, a number and a part of all, whichever is more (paper silent; a profile says 32 and a
    quarter) · sinks: blocks at the start that are always read (paper silent) · group: what must be covered for the
    query heads of a kv head, the least of them or their mean (paper silent) · dense: layers from the first on that
    read everything (paper silent) · reach: blocks that may be read, those that were `kept` for the answer or `all`
    (paper silent)."""

    threshold: float = 0.95
    block: int = 32
    micro: int = 4
    least: int = 0
    part: float = 0.0
    sinks: int = 1
    group: Literal["min", "mean"] = "min"
    dense: int = 0
    reach: Literal["kept", "all"] = "kept"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError("threshold must be above 0 and at most 1")
        if self.block < 1 or self.micro < 1 or min(self.least, self.sinks, self.dense) < 0:
            raise ValueError("block and micro must be at least 1, least, sinks and dense not negative")
        if not 0 <= self.part <= 1:
            raise ValueError("part must be from 0 to 1")
        if self.group not in ("min", "mean"):
            raise ValueError("group must be 'min' or 'mean'")
        if self.reach not in ("kept", "all"):
            raise ValueError("reach must be 'kept' or 'all'")

    def start(self) -> Progressive:
        """State of one request."""
        return Progressive(self)


class Progressive(DecodeState):
    """Digests of one request's blocks.

    Of the last step, by layer: marked, bool [Hkv, B], the blocks read, near ones included · claimed [Hq], P_acc at the
    end.
    """

    def __init__(self, params: Psa):
        super().__init__()
        self.params, self.wants_offloaded = params, params.reach == "all"
        self.marked: dict[int, Tensor] = {}
        self.claimed: dict[int, Tensor] = {}
        self._blocks: dict[int, BlockTable] = {}

    def observe(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float
    ) -> None:
        """Digests of the blocks that are full; queries do not matter."""
        if layer >= self.params.dense:
            self._blocks.setdefault(layer, BlockTable(self.params.block, self.params.sinks, cuboid)).update(k, k_pos)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `Decoding.step`."""
        rows, heads = k.shape[:2]
        if layer < self.params.dense:
            out = attend(q[None], k, v, k_pos[-1:], k_pos, scale=scale)[0]
            return out, torch.full((heads,), rows, device=k.device)
        blocks = self._blocks[layer]
        blocks.update(k, k_pos)
        tail = blocks.tail(rows)
        asked = q.unflatten(0, (heads, -1)).to(wide(q.dtype))
        near = over(asked, *(blocks.near(x, tail).transpose(0, 1) for x in (k, v)), scale=scale)
        ranks = blocks.scores(asked)
        order, beyond = blocks.ranked(ranks, tail), 0.0
        if self.offloaded is not None:
            beyond = int(self.offloaded.keys(layer)[1].sum()) / blocks.size
        work = progress_at_once if k.is_cuda else progress
        done = work(asked, k, v, order, self.params, near, beyond, scale=scale)
        self.marked[layer] = blocks.mark(order, done.read, tail)
        always = rows - order.shape[1] * blocks.size
        if self.offloaded is not None:
            bar = last_read(ranks, order, done.read)
            done, came = self._reach(layer, self.offloaded, asked, done, bar, order.shape[1], scale=scale)
            always += came
        self.claimed[layer] = done.claimed.flatten()
        return done.out.flatten(0, 1).to(q.dtype), always + done.read * blocks.size

    def _reach(
        self,
        layer: int,
        elsewhere: BlockFetcher,
        q: Tensor,
        done: ProgressiveRead,
        bar: Tensor,
        total: int,
        *,
        scale: float,
    ) -> tuple[ProgressiveRead, int]:
        """Go on with what is elsewhere: blocks that rank above bar [Hkv], then the best for heads that are not done.
        total: blocks in the cache that are ranked. Returns what was read in the end, and how many keys came."""
        p, came = self.params, 0
        while True:
            keys, tokens = elsewhere.keys(layer)
            if not len(tokens):
                break
            score = torch.einsum("had,hd->ha", keys.to(q.dtype), q.mean(1))
            which = (score > bar[:, None]).any(0).nonzero()[:, 0]
            short = share_of(done.claimed, p) <= p.threshold
            if not len(which) and bool(short.any()):
                which = score[short].amax(0).topk(min(p.micro, len(tokens))).indices.sort().values
            if not len(which):
                break
            sizes = tokens[which.cpu()]
            k, v = (x.transpose(0, 1) for x in self._fetch(layer, elsewhere, which.tolist()))
            scores = q @ k.mT.to(q.dtype) * scale
            each = torch.stack([part.logsumexp(-1) for part in scores.split(sizes.tolist(), dim=-1)], dim=-1)
            part = each.logsumexp(-1)
            out, lse = merge([(done.out, done.lse), (torch.exp(scores - part[..., None]) @ v.to(q.dtype), part)])
            whole = each + torch.log(p.block / sizes.to(each))  # as if these blocks were as long as the others
            least = torch.minimum(done.least, whole.amin(-1))
            left = total - done.read[:, None] + float(tokens.sum() - sizes.sum()) / p.block
            done, came = ProgressiveRead(out, lse, done.read, covered(lse, least, left), least), came + int(sizes.sum())
        return done, came


class ProgressiveRead(NamedTuple):
    """What progressive reading gives: out [Hkv, g, d], lse [Hkv, g], ranked blocks read [Hkv] int64, P_acc [Hkv, g],
    the logarithm of AS_min [Hkv, g]."""

    out: Tensor
    lse: Tensor
    read: Tensor
    claimed: Tensor
    least: Tensor


def progress(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    params: Psa,
    near: tuple[Tensor, Tensor] | None = None,
    beyond: float = 0.0,
    *,
    scale: float,
) -> ProgressiveRead:
    """Algorithm 1 from line 7 on: q [Hkv, g, d] over ranked full blocks [Hkv, M] of k, v [n, Hkv, d].

    near: out [Hkv, g, d] and log-sum-exp [Hkv, g] of what has been read beforehand, or None · beyond:
    blocks that there are beside the ranked ones, not to be read here.
    """
    total = order.shape[1]
    out, lse = (torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)) if near is None else near
    out, lse = out.clone(), lse.clone()
    least = torch.full_like(lse, math.inf)
    claimed = torch.ones_like(lse) if total or not beyond else torch.zeros_like(lse)
    read = order.new_zeros(order.shape[0])
    heads = torch.arange(order.shape[0], device=order.device)
    for start in range(0, total, params.micro):
        batch = order[heads, start : start + params.micro]
        keys, values = (fetch(x, batch, heads, params.block).to(q.dtype) for x in (k, v))
        scores = q[heads] @ keys.mT * scale
        each = scores.unflatten(-1, (-1, params.block)).logsumexp(-1)  # log AS, line 10
        part = each.logsumexp(-1)
        block_out = torch.exp(scores - part[..., None]) @ values
        out[heads], lse[heads] = merge([(out[heads], lse[heads]), (block_out, part)])  # lines 11, 12
        least[heads] = torch.minimum(least[heads], each.amin(-1))  # line 13
        read[heads] += batch.shape[1]  # line 14
        claimed[heads] = covered(lse[heads], least[heads], total - start - batch.shape[1] + beyond)  # lines 15, 16
        short = share_of(claimed[heads], params) <= params.threshold  # line 17: until it is above, not reached
        heads = heads[short | (read[heads] < max(params.least, params.part * total))]
        if not heads.numel():
            break
    return ProgressiveRead(out, lse, read, claimed, least)


def progress_at_once(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    params: Psa,
    near: tuple[Tensor, Tensor] | None = None,
    beyond: float = 0.0,
    *,
    scale: float,
) -> ProgressiveRead:
    """As `progress`, up to the order of additions, without its loop: what would have been read is found out from the
    masses of all blocks.

    For a GPU that holds all keys: it reads them in less time than a loop takes to start a single micro-batch, in
    which the host would wait for the device besides. Where reading is dear, `ragkv/model/execution/pooled_decode.py` reads what it must.
    """
    total = order.shape[1]
    if not total:
        return progress(q, k, v, order, params, near, beyond, scale=scale)
    out, lse = (torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)) if near is None else near
    rows = k.shape[0] // params.block * params.block
    keys, values = (x[:rows].transpose(0, 1).to(q.dtype) for x in (k, v))
    scores = (q @ keys.mT * scale).unflatten(-1, (-1, params.block))  # [Hkv, g, B, block]
    each = scores.logsumexp(-1).gather(2, order[:, None].expand(-1, q.shape[1], -1))  # log AS [Hkv, g, M]
    mass = torch.cat([lse[..., None], each], dim=-1).logcumsumexp(-1)[..., 1:]
    least, read = each.cummin(-1).values, torch.arange(1, total + 1, device=q.device)
    claimed = covered(mass, least, total - read + beyond)
    enough = (share_of(claimed.transpose(1, 2), params) > params.threshold) & (
        read >= max(params.least, params.part * total)
    )
    # Heads stop at the end of a micro-batch.
    ends = (enough & (read % params.micro == 0)) | (read == total)
    last = ends.int().argmax(1, keepdim=True)  # the first such end
    wanted = torch.zeros_like(scores[:, 0, :, 0], dtype=torch.bool).scatter_(1, order, read <= last + 1)
    hidden = scores.masked_fill(~wanted[:, None, :, None], -math.inf).flatten(2)
    part = hidden.logsumexp(-1)
    out, lse = merge([(out, lse), (torch.exp(hidden - part[..., None]) @ values, part)])
    at = last[:, None].expand(-1, q.shape[1], -1)
    return ProgressiveRead(out, lse, last[:, 0] + 1, claimed.gather(2, at)[..., 0], least.gather(2, at)[..., 0])


def share_of(claimed: Tensor, params: Psa) -> Tensor:
    """What kv heads [...] have covered, of P_acc of their query heads [..., g]."""
    return claimed.amin(-1) if params.group == "min" else claimed.mean(-1)


def last_read(scores: Tensor, order: Tensor, read: Tensor) -> Tensor:
    """The score [Hkv] of the last of `read` [Hkv] ranked blocks [Hkv, M], of scores [Hkv, B]; inf where none was."""
    if not order.shape[1]:
        return torch.full_like(scores[:, 0], math.inf) if scores.shape[1] else scores.new_full(read.shape, math.inf)
    last = scores.gather(1, order).gather(1, (read - 1).clamp(min=0)[:, None])[:, 0]
    return last.masked_fill(read == 0, math.inf)


def covered(lse: Tensor, least: Tensor, left: float | Tensor) -> Tensor:
    """P_acc of logarithms of AS_acc and AS_min: exp(l - log(exp l + N_left exp l_min)), never above 1, and 1 where
    nothing is left: a number, or one for each."""
    more = least + torch.as_tensor(left, dtype=lse.dtype, device=lse.device).log()
    return torch.exp(lse - torch.logaddexp(lse, more))


def over(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """out [H, g, d] and log-sum-exp [H, g] of q [H, g, d] over all of k, v [H, m, d]."""
    scores = q @ k.mT.to(q.dtype) * scale
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse[..., None]) @ v.to(q.dtype), lse
