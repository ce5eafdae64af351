"""PSA: read blocks from the most promising on, and stop once enough of the attention has been covered.

Paper: Progressive Sparse Attention: Algorithm and System Co-design for Efficient Attention in LLM Serving
(arXiv 2503.00392), algorithm 1.

    q [Hkv, g, d]        queries of the token, by kv head
    CS [Hkv, B]          criticality scores of the blocks, from their digests
    order [Hkv, M]       the ranked blocks, best first
    AS_b [Hkv, g]        mass of a block: sum of exp(score) over its keys. The code uses its logarithm, so that nothing
                         overflows
    AS_acc, AS_min       mass read so far; the least mass of a block read so far
    N_left               blocks not read yet
    P_acc                AS_acc / (AS_acc + AS_min N_left). If the ranking is right, no unread block has more mass than
                         AS_min, and P_acc is at most the share of the attention that has been read

Every kv head that is not done reads `micro` blocks at a time; each head has its own list. Digests are boxes over keys
with RoPE (`blocks.cuboid`). They are built once the context is stitched; a block gets its digest when it becomes full.

With `reach="all"`, blocks that were left out of the context can come back. Each is represented by one point, the mean
of its keys, and competes with the others by that (paper silent: PSA has all KV at hand). A step fetches those that a
head would have read, and more of them while the threshold is not reached. All heads read a fetched block, and it stays
in the cache.

Differs from the paper:

- The blocks of the attention sinks and the block with the newest rows are read before all others. They do not count for
  AS_min and N_left: a block that is not full has little mass and would end the reading at once.
- A kv head stops when the least covered of its query heads is covered, and not before it has read `least` blocks and
  `part` of all. P_acc holds only as far as the ranking is right; with a wrong ranking, a head that has met one weak
  block would stop at once (docs/lab-notes.md).
- Blocks come from one cache in memory. `ragkv/model/execution/pooled_decode.py` implements the paper's system, with KV
  on the host and one pool on the GPU. It differs, too: the kernel itself reads blocks without a slot over the bus, so
  no thread polls a flag. What is loaded ahead is not the next micro-batch but what the next layer read in the last
  step. Blocks that their layer read in its latest step are not evicted (`ragkv/kernels/slots.py`). A slot holds a block
  of one kv head, because kv heads read different blocks (paper silent).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.kernels.attention import attend, merge
from ragkv.sparse.attention import attend_heads, score_dtype
from ragkv.sparse.base import BlockFetcher, DecodePolicy, DecodeState
from ragkv.sparse.blocks import BlockDigests, cuboid, gather_blocks


@dataclass(frozen=True)
class Psa(DecodePolicy):
    """Parameters.

    Attributes:
        threshold: Share of the attention to cover, the paper's epsilon (it names .95 and .98 and tunes it); 1 reads
            everything.
        block: Keys per block (paper: 32 where it measures; a profile says 16).
        micro: Blocks between two checks of the share, the paper's m (paper silent; its figure draws 4).
        least: Ranked blocks that are read before the first check, as a number (paper silent; a profile says 32).
        part: The same as a part of all blocks; the larger of the two counts (paper silent; a profile says a quarter).
        most: Largest part of all blocks that `least` may demand (paper silent). Below 1 the policy leaves something out
            of short contexts, too.
        sinks: Blocks at the start that are always read (paper silent).
        group: What must be covered among the query heads of a kv head: their `min` or their `mean` (paper silent).
        bound: Mass that a block is taken to have that was not read: the `least` of those read, as in the paper, or the
            largest of the latest micro-batch, `batch`. A wrong ranking meets a light block early, and then the least
            one says nothing of those to come; a whole batch of light blocks is rarer (paper silent on wrong rankings).
        dense: Layers that read everything, from the first on (paper silent).
        reach: Blocks that may be read: those `kept` for the answer, or `all` (paper silent).
    """

    threshold: float = 0.95
    block: int = 32
    micro: int = 4
    least: int = 0
    part: float = 0.0
    most: float = 1.0
    sinks: int = 1
    group: Literal["min", "mean"] = "min"
    bound: Literal["least", "batch"] = "least"
    dense: int = 0
    reach: Literal["kept", "all"] = "kept"

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError("threshold must be above 0 and at most 1")
        if self.block < 1 or self.micro < 1 or min(self.least, self.sinks, self.dense) < 0:
            raise ValueError("block and micro must be at least 1, least, sinks and dense not negative")
        if not (0 <= self.part <= 1 and 0 <= self.most <= 1):
            raise ValueError("part and most must be from 0 to 1")
        if self.group not in ("min", "mean"):
            raise ValueError("group must be 'min' or 'mean'")
        if self.bound not in ("least", "batch"):
            raise ValueError("bound must be 'least' or 'batch'")
        if self.reach not in ("kept", "all"):
            raise ValueError("reach must be 'kept' or 'all'")

    def bound_of(self, before: Tensor, masses: Tensor) -> Tensor:
        """Return log AS_min [...] behind a micro-batch of masses [..., m], in logarithms; `before`: that before it."""
        if self.bound == "batch":
            return masses.amax(-1)
        return torch.minimum(before, masses.amin(-1))

    def bounds(self, masses: Tensor) -> Tensor:
        """Return what `bound_of` is at the end of each micro-batch of ranked masses [..., M], for all its blocks."""
        if self.bound == "least":
            least: Tensor = masses.cummin(-1).values
            return least
        total = masses.shape[-1]
        lacking = -total % self.micro
        batches = F.pad(masses, (0, lacking), value=-math.inf).unflatten(-1, (-1, self.micro))
        largest: Tensor = batches.amax(-1, keepdim=True).expand_as(batches).flatten(-2)[..., :total]
        return largest

    def start(self) -> PsaState:
        """Create the state of one request."""
        return PsaState(self)


@dataclass(frozen=True)
class RankedBlocks:
    """Which blocks to read progressively, and what is known besides.

    Attributes:
        order: Ranked full blocks [Hkv, M], best first.
        near: Output [Hkv, g, d] and log-sum-exp [Hkv, g] of the rows that were read before; None for none.
        beyond: Number of blocks besides the ranked ones, which are not read here.
    """

    order: Tensor
    near: tuple[Tensor, Tensor] | None = None
    beyond: float = 0.0


class ProgressiveRead(NamedTuple):
    """Result of progressive reading.

    Attributes:
        out: Output [Hkv, g, d].
        lse: Log-sum-exp [Hkv, g].
        blocks_read: Ranked blocks read [Hkv] int64.
        p_acc: P_acc [Hkv, g].
        log_as_min: Logarithm of AS_min [Hkv, g], or of what `bound` takes for it.
    """

    out: Tensor
    lse: Tensor
    blocks_read: Tensor
    p_acc: Tensor
    log_as_min: Tensor


class PsaState(DecodeState):
    """State of one request.

    Attributes:
        params: The parameters.
        marked: bool [Hkv, B] by layer, the blocks that the last step read, including near ones.
        p_acc: P_acc [Hq] at the end of the last step, by layer.
    """

    name = "psa"

    def __init__(self, params: Psa):
        super().__init__()
        self.params, self.wants_offloaded = params, params.reach == "all"
        self.marked: dict[int, Tensor] = {}
        self.p_acc: dict[int, Tensor] = {}
        self._blocks: dict[int, BlockDigests] = {}

    def learn(self, layer: int, q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, k_pos: Tensor, *, scale: float) -> None:
        """Build the digests of full blocks. Queries do not matter."""
        if layer >= self.params.dense:
            self._blocks.setdefault(layer, BlockDigests(self.params.block, self.params.sinks, cuboid)).update(k, k_pos)

    def step(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, k_pos: Tensor, *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `DecodeState.step`."""
        rows, heads = k.shape[:2]
        if layer < self.params.dense:
            out = attend(q[None], k, v, k_pos[-1:], k_pos, scale=scale)[0]
            return out, torch.full((heads,), rows, device=k.device)
        blocks = self._blocks[layer]
        blocks.update(k, k_pos)
        tail = blocks.tail(rows)
        queries = q.unflatten(0, (heads, -1)).to(score_dtype(q.dtype))
        near = attend_heads(queries, *(blocks.near_rows(x, tail).transpose(0, 1) for x in (k, v)), scale=scale)
        scores = blocks.scores(queries)
        order, beyond = blocks.rank(scores, tail), 0.0
        if self.offloaded is not None:
            beyond = int(self.offloaded.keys(layer)[1].sum()) / blocks.size
        attend_ranked = attend_progressively_at_once if k.is_cuda else attend_progressively
        done = attend_ranked(queries, k, v, RankedBlocks(order, near, beyond), self.params, scale=scale)
        self.marked[layer] = blocks.mark_read(order, done.blocks_read, tail)
        always = rows - order.shape[1] * blocks.size
        if self.offloaded is not None:
            bar = last_read_score(scores, order, done.blocks_read)
            done, fetched = self._attend_offloaded(
                layer, self.offloaded, queries, done, bar, order.shape[1], scale=scale
            )
            always += fetched
        self.p_acc[layer] = done.p_acc.flatten()
        return done.out.flatten(0, 1).to(q.dtype), always + done.blocks_read * blocks.size

    def _attend_offloaded(
        self,
        layer: int,
        offloaded: BlockFetcher,
        q: Tensor,
        done: ProgressiveRead,
        bar: Tensor,
        total: int,
        *,
        scale: float,
    ) -> tuple[ProgressiveRead, int]:
        """Continue with blocks outside the cache: those that score above bar [Hkv], then the best for heads not done.

        `total` is the number of ranked blocks in the cache. Returns the final result and the number of fetched keys.
        """
        p, fetched = self.params, 0
        while True:
            keys, sizes = offloaded.keys(layer)
            if not len(sizes):
                break
            scores = torch.einsum("had,hd->ha", keys.to(q.dtype), q.mean(1))
            which = (scores > bar[:, None]).any(0).nonzero()[:, 0]
            short = group_share(done.p_acc, p) <= p.threshold
            if not len(which) and bool(short.any()):
                which = scores[short].amax(0).topk(min(p.micro, len(sizes))).indices.sort().values
            if not len(which):
                break
            new_sizes = sizes[which.cpu()]
            k, v = (x.transpose(0, 1) for x in self._fetch(layer, offloaded, which.tolist()))
            exact = q @ k.mT.to(q.dtype) * scale
            masses = torch.stack([part.logsumexp(-1) for part in exact.split(new_sizes.tolist(), dim=-1)], dim=-1)
            lse = masses.logsumexp(-1)
            part = torch.exp(exact - lse[..., None]) @ v.to(q.dtype), lse
            out, lse = merge([(done.out, done.lse), part])
            full_masses = masses + torch.log(p.block / new_sizes.to(masses))  # as if the blocks were as long as others
            least = p.bound_of(done.log_as_min, full_masses)
            left = total - done.blocks_read[:, None] + float(sizes.sum() - new_sizes.sum()) / p.block
            done = ProgressiveRead(out, lse, done.blocks_read, accumulated_share(lse, least, left), least)
            fetched += int(new_sizes.sum())
        return done, fetched


def attend_progressively(
    q: Tensor, k: Tensor, v: Tensor, blocks: RankedBlocks, params: Psa, *, scale: float
) -> ProgressiveRead:
    """Run algorithm 1 from line 7 on: attend with q [Hkv, g, d] to ranked blocks of k, v [n, Hkv, d]."""
    order, beyond, total = blocks.order, blocks.beyond, blocks.order.shape[1]
    out, lse = _near(q, blocks)
    out, lse = out.clone(), lse.clone()
    least = torch.full_like(lse, math.inf)
    p_acc = torch.ones_like(lse) if total or not beyond else torch.zeros_like(lse)
    read = order.new_zeros(order.shape[0])
    heads = torch.arange(order.shape[0], device=order.device)
    for start in range(0, total, params.micro):
        batch = order[heads, start : start + params.micro]
        keys, values = (gather_blocks(x, batch, heads, params.block).to(q.dtype) for x in (k, v))
        scores = q[heads] @ keys.mT * scale
        masses = scores.unflatten(-1, (-1, params.block)).logsumexp(-1)  # log AS, line 10
        part = masses.logsumexp(-1)
        batch_out = torch.exp(scores - part[..., None]) @ values
        out[heads], lse[heads] = merge([(out[heads], lse[heads]), (batch_out, part)])  # lines 11, 12
        least[heads] = params.bound_of(least[heads], masses)  # line 13
        read[heads] += batch.shape[1]  # line 14
        left = total - start - batch.shape[1] + beyond
        p_acc[heads] = accumulated_share(lse[heads], least[heads], left)  # lines 15, 16
        short = group_share(p_acc[heads], params) <= params.threshold  # line 17: until it is above, not reached
        heads = heads[short | (read[heads] < first_check(params, total))]
        if not heads.numel():
            break
    return ProgressiveRead(out, lse, read, p_acc, least)


def attend_progressively_at_once(
    q: Tensor, k: Tensor, v: Tensor, blocks: RankedBlocks, params: Psa, *, scale: float
) -> ProgressiveRead:
    """Compute `attend_progressively` without its loop, up to the order of additions.

    The function computes the masses of all blocks and derives from them which blocks the loop would have read. It is
    for a GPU that holds all keys: reading them takes less time than a loop takes to start a single micro-batch, and the
    host would also wait for the device in each. Where reading is expensive, `ragkv/model/execution/pooled_decode.py`
    reads only the necessary blocks.
    """
    order, total = blocks.order, blocks.order.shape[1]
    if not total:
        return attend_progressively(q, k, v, blocks, params, scale=scale)
    out, lse = _near(q, blocks)
    rows = k.shape[0] // params.block * params.block
    keys, values = (x[:rows].transpose(0, 1).to(q.dtype) for x in (k, v))
    scores = (q @ keys.mT * scale).unflatten(-1, (-1, params.block))  # [Hkv, g, B, block]
    masses = scores.logsumexp(-1).gather(2, order[:, None].expand(-1, q.shape[1], -1))  # log AS [Hkv, g, M]
    accumulated = torch.cat([lse[..., None], masses], dim=-1).logcumsumexp(-1)[..., 1:]
    least, read = params.bounds(masses), torch.arange(1, total + 1, device=q.device)
    p_acc = accumulated_share(accumulated, least, total - read + blocks.beyond)
    enough = (group_share(p_acc.transpose(1, 2), params) > params.threshold) & (read >= first_check(params, total))
    # Heads stop at the end of a micro-batch.
    ends = (enough & (read % params.micro == 0)) | (read == total)
    last = ends.int().argmax(1, keepdim=True)  # the first such end
    requested = torch.zeros_like(scores[:, 0, :, 0], dtype=torch.bool).scatter_(1, order, read <= last + 1)
    masked = scores.masked_fill(~requested[:, None, :, None], -math.inf).flatten(2)
    part = masked.logsumexp(-1)
    out, lse = merge([(out, lse), (torch.exp(masked - part[..., None]) @ values, part)])
    at = last[:, None].expand(-1, q.shape[1], -1)
    return ProgressiveRead(out, lse, last[:, 0] + 1, p_acc.gather(2, at)[..., 0], least.gather(2, at)[..., 0])


def _near(q: Tensor, blocks: RankedBlocks) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of the rows read before, or those of no rows."""
    return (torch.zeros_like(q), q.new_full(q.shape[:2], -math.inf)) if blocks.near is None else blocks.near


def first_check(params: Psa, total: int) -> float:
    """Return how many of `total` ranked blocks are read before the share that they cover is checked."""
    return max(min(params.least, math.ceil(params.most * total)), params.part * total)


def group_share(p_acc: Tensor, params: Psa) -> Tensor:
    """Combine P_acc [..., g] of query heads to the share that their kv heads [...] have covered."""
    return p_acc.amin(-1) if params.group == "min" else p_acc.mean(-1)


def last_read_score(scores: Tensor, order: Tensor, read: Tensor) -> Tensor:
    """Return the score [Hkv] of the last ranked block that each kv head has read; inf if it has read none.

    Args:
        scores: Scores [Hkv, B] of all blocks.
        order: Ranked blocks [Hkv, M].
        read: Ranked blocks read [Hkv].
    """
    if not order.shape[1]:
        return torch.full_like(scores[:, 0], math.inf) if scores.shape[1] else scores.new_full(read.shape, math.inf)
    last = scores.gather(1, order).gather(1, (read - 1).clamp(min=0)[:, None])[:, 0]
    return last.masked_fill(read == 0, math.inf)


def accumulated_share(lse: Tensor, least: Tensor, left: float | Tensor) -> Tensor:
    """Compute P_acc from log AS_acc, log AS_min and N_left: exp(l - log(exp l + N_left exp l_min)).

    The result is never above 1, and it is 1 if nothing is left. `left` is one number, or one per entry.
    """
    more = least + torch.as_tensor(left, dtype=lse.dtype, device=lse.device).log()
    return torch.exp(lse - torch.logaddexp(lse, more))
