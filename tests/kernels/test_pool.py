"""Progressive reading out of a pool: reference and Triton twin against `sparse.psa.attend_progressively`."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.kernels import pool as reference
from ragkv.kernels.attention import attend
from ragkv.kernels.decode_step import CachePointers
from ragkv.kernels.pool import StopRule, rank
from ragkv.model.execution.pooled_decode import PooledKV
from ragkv.sparse import psa
from ragkv.sparse.attention import attend_heads
from ragkv.sparse.blocks import BlockDigests, cuboid
from ragkv.sparse.psa import Psa
from ragkv.types import Shape

triton_pool = pytest.importorskip("ragkv.kernels.triton_pool")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWINS = {"reference": reference.attend_progressively, "triton": triton_pool.attend_progressively}
SCALE = 0.4


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Cache:
    """What `PooledKV` asks of a context cache: random rows, at positions in no order."""

    def __init__(self, shape, lengths, dtype, seed):
        self.shape, self.dtype, self.device, self.lengths = shape, dtype, torch.device(DEVICE), lengths
        rows = [(n, shape.kv_heads, shape.head_dim) for n in lengths]
        self._k = [drawn(*each, seed=seed + i).to(DEVICE, dtype) for i, each in enumerate(rows)]
        self._v = [drawn(*each, seed=seed + 50 + i).to(DEVICE, dtype) for i, each in enumerate(rows)]
        self._at = [torch.randperm(n, generator=torch.Generator().manual_seed(seed)) for n in lengths]

    def k(self, layer):
        return self._k[layer]

    def v(self, layer):
        return self._v[layer]

    def positions(self, layer):
        return self._at[layer]


class Decoded:
    """Requests, step after step, of one layer; the new row of each step is drawn."""

    def __init__(self, progress, shape, lengths, params, share, *, room=8, dtype=torch.float32, layer=1):
        caches = [Cache(shape, [max(1, n - 9 * i) for i in range(shape.layers)], dtype, 7 * of)
                  for of, n in enumerate(lengths)]  # fmt: skip
        self.kv, self.caches = PooledKV(caches, params, share, room), caches
        self.progress, self.params, self.layer, self.dtype, self.steps = progress, params, layer, dtype, 0
        self.rows = [(cache.k(layer), cache.v(layer)) for cache in caches]

    def step(self, rule, sharp=1.5):
        """(query, what is read, order)."""
        kv, layer, shape = self.kv, self.layer, self.kv.shape
        self.steps += 1
        q = (sharp * drawn(len(self.rows), shape.q_heads, shape.head_dim, seed=900 + self.steps)).to(DEVICE, self.dtype)
        k, v = kv.near
        held = torch.tensor(kv.held) + self.steps - 1
        for of, (keys, values) in enumerate(self.rows):
            at = int(held[layer, of])
            new = [drawn(shape.kv_heads, shape.head_dim, seed=10**4 * side + 100 * of + self.steps).to(keys)
                   for side in (1, 2)]  # fmt: skip
            k[layer][of][at], v[layer][of][at] = new
            self.rows[of] = torch.cat([keys, new[0][None]]), torch.cat([values, new[1][None]])
        addresses = [[[each.data_ptr() for each in line] for line in store] for store in (k, v)]
        places = CachePointers(torch.tensor([*addresses, held.tolist()], device=DEVICE), k, v)
        order = rank(q, kv.digests[layer], kv.hidden[layer])
        clock = torch.tensor([self.steps], device=DEVICE)
        met = self.progress(q, order, kv.pool, places, layer, shape, rule, clock, scale=SCALE)
        return q, met, order

    def expected(self, of, q, order):
        """`sparse.psa.attend_progressively` over one cache in memory: (out [Hq, d], blocks read [Hkv])."""
        k, v = (each.double() for each in self.rows[of])
        size, context = self.params.block, len(k) - self.steps
        known = BlockDigests(size, self.params.sinks, cuboid)
        known.update(k[:context], self.caches[of].positions(self.layer))
        tail = context // size
        asked = q[of].double().unflatten(0, (k.shape[1], -1))
        near = attend_heads(asked, *(known.near_rows(x, tail).transpose(0, 1) for x in (k, v)), scale=SCALE)
        ranked = tail - len(known.sinks)
        blocks = psa.RankedBlocks(order[of, :, :ranked], near)
        done = psa.attend_progressively(asked, k, v, blocks, self.params, scale=SCALE)
        return done.out.flatten(0, 1), done.blocks_read


def rule_of(params):
    return StopRule(params.threshold, params.micro, params.least, params.group == "mean", params.part)


def check_pool(kv):
    """Every slot holds the block that it is said to hold, and no block is said to be in a slot that is another's."""
    pool = kv.pool
    for layer, line in enumerate(pool.blocks):
        for of, blocks in enumerate(line):
            for head in range(len(blocks)):
                place, owner = pool.place[layer, of, head].tolist(), pool.owner[layer, of, head].tolist()
                assert {b: s for b, s in enumerate(place) if s >= 0} == {b: s for s, b in enumerate(owner) if b >= 0}
                for slot, block in enumerate(owner):
                    if block >= 0:
                        held = pool.slots[layer, of, head, slot]
                        assert torch.equal(held, blocks[head, block].to(held.device))


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    ("shape", "lengths", "params"),
    [
        (Shape(2, 4, 2, 16), (137, 60, 250), Psa(threshold=0.7, block=8)),
        (Shape(2, 3, 1, 24), (90, 10, 4), Psa(threshold=0.6, block=8, micro=3, group="mean", sinks=2)),
        (Shape(2, 4, 4, 32), (300,), Psa(threshold=0.5, block=16, micro=2, least=5, sinks=0)),
        (Shape(2, 4, 2, 16), (250, 70), Psa(threshold=0.2, block=8, micro=1, part=0.5)),
    ],
)
def test_the_same_blocks_are_read_as_from_one_cache(name, share, shape, lengths, params):
    decoded = Decoded(TWINS[name], shape, lengths, params, share)
    stopped = 0
    for _ in range(3):
        inside = decoded.kv.pool.place[1].clone() >= 0
        q, met, order = decoded.step(rule_of(params))
        for of in range(len(lengths)):
            out, read = decoded.expected(of, q, order)
            assert met.read[of].tolist() == read.tolist()
            torch.testing.assert_close(met.out[of].double(), out, rtol=0, atol=2e-5)
            for head, count in enumerate(read.tolist()):
                # A block that lost its slot within the step is read from the host; blocks outside always are.
                lacking = int((~inside[of, head][order[of, head, :count]]).sum())
                assert lacking <= int(met.missed[of, head]) <= count
                assert share or int(met.missed[of, head]) == count
                assert share < 1 or not int(met.missed[of, head])
                stopped += count < int(decoded.kv.pool.ranked[1, of])
        check_pool(decoded.kv)
    assert stopped, "nothing was left unread"


@pytest.mark.parametrize("name", TWINS)
def test_with_a_threshold_of_one_everything_is_read(name):
    params = Psa(threshold=1.0, block=8)
    decoded = Decoded(TWINS[name], Shape(2, 4, 2, 16), (137, 33), params, 0.25)
    for _ in range(2):
        q, met, _ = decoded.step(rule_of(params), sharp=6.0)
        assert met.read.tolist() == decoded.kv.pool.ranked[1][:, None].expand(-1, 2).tolist()
        for of, (k, v) in enumerate(decoded.rows):
            at = torch.arange(len(k))
            expected = attend(q[of : of + 1].double(), k.double(), v.double(), at[-1:], at, scale=SCALE)[0]
            torch.testing.assert_close(met.out[of].double(), expected, rtol=0, atol=2e-5)


def test_twins_leave_the_same_pool():
    """Over steps that want other blocks every time, with fewer slots than a step reads, and with more."""
    params, shape = Psa(threshold=0.6, block=8, micro=2), Shape(2, 4, 2, 16)
    for share in (0.1, 0.5):
        one, other = (Decoded(each, shape, (230, 64), params, share, room=12) for each in TWINS.values())
        moved = 0
        for _ in range(7):
            before = one.kv.pool.place.clone()
            first, second = one.step(rule_of(params))[1], other.step(rule_of(params))[1]
            assert torch.equal(first.read, second.read)
            assert torch.equal(first.missed, second.missed)
            for name in ("place", "owner", "used", "slots"):
                assert torch.equal(getattr(one.kv.pool, name), getattr(other.kv.pool, name)), name
            moved += int((before != one.kv.pool.place).sum())
        check_pool(other.kv)
        assert moved > 20


@pytest.mark.parametrize("name", TWINS)
def test_the_slot_that_was_read_the_longest_ago_is_given_away_and_none_of_this_step(name):
    params = Psa(threshold=1.0, block=8, micro=2, sinks=0)
    decoded = Decoded(TWINS[name], Shape(2, 2, 1, 16), (64 + 9,), params, 0.5)  # 8 blocks in layer 1, and a tail
    pool, rule = decoded.kv.pool, rule_of(params)
    slots = pool.slots.shape[3]
    pool.used[1, 0, 0] = torch.tensor([3, 1, 2, 0, 4][:slots])
    wanted = [7, 6, 2]
    pool.ranked[1, 0] = len(wanted)
    order = torch.tensor([[[*wanted, *(set(range(decoded.kv.hidden.shape[2])) - set(wanted))]]], device=DEVICE)
    k, v = decoded.kv.near
    addresses = [[[each.data_ptr() for each in line] for line in store] for store in (k, v)]
    near = CachePointers(torch.tensor([*addresses, decoded.kv.held], device=DEVICE), k, v)
    q, clock = drawn(1, 2, 16).to(DEVICE), torch.tensor([9], device=DEVICE)
    owner = pool.owner[1, 0, 0].tolist()
    met = TWINS[name](q, order, pool, near, 1, decoded.kv.shape, rule, clock, scale=SCALE)
    # 7 and 6 take the slots read in steps 0 and 1; 2 stands in a slot of step 2, and only its stamp changes.
    assert met.missed.tolist() == [[2]]
    assert pool.owner[1, 0, 0].tolist() == [owner[0], 6, 2, 7, *owner[4:]]
    assert pool.used[1, 0, 0].tolist() == [3, 9, 9, 9, *[4][: slots - 4]]
    still = {name: getattr(pool, name).clone() for name in ("place", "owner", "used", "slots")}
    TWINS[name](
        q,
        order[..., [3, 0, 4, 1, 2, 5, 6, 7, 8]].contiguous(),
        pool,
        near,
        1,
        decoded.kv.shape,
        rule,
        torch.zeros_like(clock),
        scale=SCALE,
    )
    assert all(torch.equal(getattr(pool, name), each) for name, each in still.items()), "step 0 changes nothing"
    check_pool(decoded.kv)


def test_blocks_are_ranked_as_psa_ranks_them():
    shape, digests = Shape(1, 6, 2, 8), drawn(2, 2, 11, 16, seed=3)
    digests[..., 8:].abs_()
    q, hidden = drawn(2, 6, 8), torch.zeros(2, 11, dtype=torch.bool)
    hidden[0, 0] = hidden[1, 4:] = True
    order = rank(q, digests, hidden)
    high, low = digests[..., :8] + digests[..., 8:], digests[..., :8] - digests[..., 8:]
    asked = q.unflatten(1, (shape.kv_heads, -1))[..., None, :]
    scores = torch.maximum(asked * high[:, :, None], asked * low[:, :, None]).sum(-1).mean(2)
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    found = scores.gather(2, order)
    assert bool((found[..., 1:] <= found[..., :-1] + 1e-5).all())
    assert found[0, 0, -1] == -math.inf
    assert sorted(order[1, 0, :4].tolist()) == [0, 1, 2, 3]


def test_half_precision():
    half = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    params = Psa(threshold=0.8, block=32)
    one, other = (Decoded(each, Shape(2, 8, 2, 64), (400, 290), params, 0.25, dtype=half) for each in TWINS.values())
    for _ in range(3):
        first, second = one.step(rule_of(params))[1], other.step(rule_of(params))[1]
        assert second.out.dtype == half
        assert (first.out.float() - second.out.float()).norm() < 5e-3 * first.out.float().norm()
    check_pool(other.kv)


def test_blocks_of_a_power_of_two_only():
    params = Psa(block=12)
    with pytest.raises(ValueError, match="power of two"):
        Decoded(triton_pool.attend_progressively, Shape(2, 2, 1, 16), (50,), params, 0.5).step(rule_of(params))
