"""Progressive attention over one pool of slots: reference and Triton kernels against `sparse.psa`, step after step."""

from __future__ import annotations

import math

import pytest
import torch

from ragkv.kernels import pool as reference
from ragkv.kernels.attention import attend
from ragkv.kernels.pool import rank
from ragkv.kernels.slots import LISTED, make_slot_pool, refill
from ragkv.model.execution.kv_pool import KVPool
from ragkv.model.kv_cache import ContextCache
from ragkv.sparse import psa
from ragkv.sparse.attention import attend_heads
from ragkv.sparse.blocks import BlockDigests, cuboid
from ragkv.sparse.psa import Psa
from ragkv.types import Shape
from tests.slots import check_slots

triton_pool = pytest.importorskip("ragkv.kernels.triton_pool")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = {"reference": reference, "triton": triton_pool}
SCALE = 0.4


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Decoded:
    """Decode steps of some requests in one layer, over a pool with `slots` slots. New rows are random."""

    def __init__(self, kernels, shape, lengths, params, slots, *, dtype=torch.float32, layer=1):
        block = 2 * params.block * shape.head_dim * dtype.itemsize
        self.pool = KVPool(shape, dtype, DEVICE, params, slots * block)
        self.kernels, self.params, self.layer, self.dtype = kernels, params, layer, dtype
        self.rows, self.known = [], []
        for of, length in enumerate(lengths):
            cache = ContextCache(shape, length, dtype, DEVICE)
            positions = torch.randperm(length, generator=torch.Generator().manual_seed(of))
            for at in range(shape.layers):
                k, v = (random(length, shape.kv_heads, shape.head_dim, seed=seed + 7 * of + at) for seed in (1, 50))
                cache.put(at, k.to(DEVICE, dtype), v.to(DEVICE, dtype), positions)
            self.pool.join(cache, params, 40)
            self.rows.append((cache.k(layer).to(DEVICE), cache.v(layer).to(DEVICE)))
            self.known.append(BlockDigests(params.block, params.sinks, cuboid))
            self.known[of].update(self.rows[of][0].double(), cache.positions(layer))

    def step(self, sharp=1.5, refilled=True):
        """Run a step; return the queries, the result and the order of blocks."""
        pool, layer, shape = self.pool, self.layer, self.pool.shape
        places = list(range(len(self.rows)))
        inputs = pool.begin_step(places, [0] * len(places), [900] * len(places)).to(DEVICE)
        rows, seed = pool.rows(inputs), 900 + pool.step
        q = (sharp * random(pool.places, shape.q_heads, shape.head_dim, seed=seed)).to(DEVICE, self.dtype)
        for of, (keys, values) in enumerate(self.rows):
            new = [random(shape.kv_heads, shape.head_dim, seed=10**4 * side + 100 * of + seed).to(keys)
                   for side in (1, 2)]  # fmt: skip
            at = int(rows.near.table[2, layer, of])
            rows.near.k[layer][of][at], rows.near.v[layer][of][at] = new
            self.rows[of] = torch.cat([keys, new[0][None]]), torch.cat([values, new[1][None]])
        index = pool.index
        self.kernels.load_ahead(index.order[layer], index.read[layer], pool.pool, rows, layer, index.ahead[layer])
        order = rank(q, index.digests[layer], index.hidden[layer])
        result = self.kernels.attend_progressively(q, order, pool.pool, rows, layer, shape, pool.rule, scale=SCALE)
        index.order[layer], index.read[layer] = order, result.read
        if refilled:
            refill(pool.pool, rows.clock, layer)
        pool.end_step(places, [900 + pool.step] * len(places))
        return q, result, order

    def expected(self, of, q, order):
        """Run `sparse.psa.attend_progressively` over one cache in memory; return out [Hq, d] and blocks read [Hkv]."""
        k, v = (each.double() for each in self.rows[of])
        known = self.known[of]
        known.update(k, self.pool.caches[of].positions(self.layer))
        tail = known.tail(len(k))
        queries = q[of].double().unflatten(0, (k.shape[1], -1))
        near = attend_heads(queries, *(known.near_rows(x, tail).transpose(0, 1) for x in (k, v)), scale=SCALE)
        blocks = psa.RankedBlocks(order[of, :, : tail - int((known.sinks < tail).sum())], near)
        done = psa.attend_progressively(queries, k, v, blocks, self.params, scale=SCALE)
        return done.out.flatten(0, 1), done.blocks_read


@pytest.mark.parametrize(("name", "slots"), [("reference", 1), ("reference", 20), ("reference", 500), ("triton", 20)])
@pytest.mark.parametrize(
    ("shape", "lengths", "params", "steps"),
    [
        (Shape(2, 4, 2, 16), (137, 60, 250), Psa(threshold=0.7, block=8), 2),
        (Shape(2, 3, 1, 24), (66, 18, 4), Psa(threshold=0.6, block=8, micro=3, group="mean", sinks=2), 8),
        (Shape(2, 4, 4, 32), (300,), Psa(threshold=0.5, block=16, micro=2, least=5, sinks=0), 2),
        (Shape(2, 4, 2, 16), (150, 70), Psa(threshold=0.2, block=8, micro=1, least=40, part=0.3, most=0.5), 2),
    ],
)
def test_the_same_blocks_are_read_as_from_one_cache(name, slots, shape, lengths, params, steps):
    """Where there are more steps than a block has rows, rows of the answer become blocks, or sinks."""
    decoded = Decoded(KERNELS[name], shape, lengths, params, slots)
    stopped = 0
    for _ in range(steps):
        q, result, order = decoded.step()
        for of in range(len(lengths)):
            out, read = decoded.expected(of, q, order)
            assert result.read[of].tolist() == read.tolist()
            torch.testing.assert_close(result.out[of].double(), out, rtol=0, atol=2e-5)
            assert bool((result.missed[of] <= result.read[of]).all())
            stopped += int((read < len(decoded.rows[of][0]) // params.block - params.sinks - 1).sum())
        check_slots(decoded.pool)
    assert stopped, "nothing was left unread"


@pytest.mark.parametrize("name", KERNELS)
def test_with_a_threshold_of_one_everything_is_read(name):
    decoded = Decoded(KERNELS[name], Shape(2, 4, 2, 16), (137, 33), Psa(threshold=1.0, block=8), 20)
    for _ in range(2):
        q, _, _ = decoded.step(sharp=6.0)
        for of, (k, v) in enumerate(decoded.rows):
            at = torch.arange(len(k))
            expected = attend(q[of : of + 1].double(), k.double(), v.double(), at[-1:], at, scale=SCALE)[0]
            out, _ = decoded.expected(of, q, rank(q, decoded.pool.index.digests[1], decoded.pool.index.hidden[1]))
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-9)


def test_kernels_leave_the_same_pool():
    """With fewer slots than a step reads and with more. Programs of the interpreter run one after another."""
    params, shape = Psa(threshold=0.6, block=8, micro=4), Shape(2, 4, 2, 16)
    for slots in (17, 40):
        one, other = (Decoded(each, shape, (130,), params, slots) for each in KERNELS.values())
        moved = 0
        for at in range(6):
            before = one.pool.pool.slot_of.clone()
            first, second = (each.step(refilled=at % 2 == 1)[1] for each in (one, other))
            assert torch.equal(first.read, second.read)
            if DEVICE.type == "cuda":  # there, programs take slots in any order
                continue
            assert torch.equal(first.missed, second.missed)
            assert torch.equal(one.pool.index.ahead, other.pool.index.ahead)
            for name in ("slot_of", "block_of", "last_used", "slots", "free", "taken", "evicted"):
                assert torch.equal(getattr(one.pool.pool, name), getattr(other.pool.pool, name)), name
            moved += int((before != one.pool.pool.slot_of).sum())
        assert moved > 20 or DEVICE.type == "cuda"


def pool_of(slots, blocks=20):
    return make_slot_pool(slots, (8, 16), (2, 1, 1, blocks), torch.float32, DEVICE)


def test_the_least_recently_used_blocks_are_evicted_and_none_that_its_layer_read_in_its_latest_step():
    """Two layers; the latest launch is that of layer 1 in step 9, so launches up to 17 may be evicted."""
    pool, count = pool_of(40), 40
    for slot in range(count):
        cell = slot
        pool.slot_of[cell], pool.block_of[slot] = slot, cell
        pool.last_used[slot] = 19 - slot % 20  # 19 is the launch itself, 18 the latest one of layer 0
    pool.free.fill_(count)
    refill(pool, torch.tensor([9], device=DEVICE), 1)
    evictable = sorted(range(count), key=lambda slot: int(19 - slot % 20))
    listed = pool.free.tolist()
    assert sorted(listed) == sorted(evictable[: len(listed)])
    assert pool.evicted.tolist() == [len(listed)]
    assert all(int(pool.slot_of[slot]) == -1 and int(pool.last_used[slot]) == LISTED for slot in listed)
    pool.last_used[:-1] = torch.where(pool.last_used[:-1] == LISTED, LISTED, 18)
    pool.free.fill_(count)
    refill(pool, torch.tensor([9], device=DEVICE), 1)
    assert pool.free.tolist() == [count] * len(listed), "all that is left was read by the latest step of its layer"


def test_slots_that_were_not_taken_are_listed_again():
    pool = pool_of(20)
    listed = pool.free.tolist()
    pool.taken.fill_(5)
    for number, slot in enumerate(listed[:5]):
        pool.slot_of[number], pool.block_of[slot], pool.last_used[slot] = slot, number, 100
    refill(pool, torch.ones(1, dtype=torch.int64, device=DEVICE), 0)
    assert sorted(pool.free.tolist()) == [*sorted({*range(20)} - {*listed[:5]}), 20]
    assert pool.evicted.tolist() == [0]


@pytest.mark.parametrize("name", KERNELS)
def test_blocks_of_the_last_step_without_a_slot_are_loaded_ahead(name):
    decoded = Decoded(KERNELS[name], Shape(2, 4, 2, 16), (230,), Psa(threshold=1.0, block=8), 60)
    _, first, _ = decoded.step()
    admitted = len(decoded.pool.pool.free)  # the rest of the 56 blocks found no free slot
    assert first.missed.sum() == first.read.sum() == 2 * 27
    _, second, _ = decoded.step()
    assert decoded.pool.index.ahead[1].sum() == min(60, 2 * admitted) - admitted
    assert second.missed.sum() == 2 * 27 - min(60, 2 * admitted)
    check_slots(decoded.pool)


@pytest.mark.parametrize("name", KERNELS)
def test_a_step_of_number_zero_leaves_the_pool_unchanged(name):
    decoded = Decoded(KERNELS[name], Shape(2, 4, 2, 16), (137,), Psa(threshold=0.9, block=8), 20)
    decoded.step()
    pool = decoded.pool
    inputs = pool.begin_step([0], [0], [999]).to(DEVICE).clone()
    inputs[2] = 0
    names = ("slot_of", "block_of", "last_used", "slots", "free", "taken")
    before = {name: getattr(pool.pool, name).clone() for name in names}
    q = random(1, 4, 16).to(DEVICE)
    order, kernel = rank(q, pool.index.digests[1], pool.index.hidden[1]), KERNELS[name].attend_progressively
    assert kernel(q, order, pool.pool, pool.rows(inputs), 1, pool.shape, pool.rule, scale=SCALE).missed.sum() > 0
    assert all(torch.equal(getattr(pool.pool, each), was) for each, was in before.items())


def test_blocks_are_ranked_as_psa_ranks_them():
    shape, digests = Shape(1, 6, 2, 8), random(2, 2, 11, 16, seed=3)
    digests[..., 8:].abs_()
    q, hidden = random(2, 6, 8), torch.zeros(2, 11, dtype=torch.bool)
    hidden[0, 0] = hidden[1, 4:] = True
    order = rank(q, digests, hidden)
    high, low = digests[..., :8] + digests[..., 8:], digests[..., :8] - digests[..., 8:]
    queries = q.unflatten(1, (shape.kv_heads, -1))[..., None, :]
    scores = torch.maximum(queries * high[:, :, None], queries * low[:, :, None]).sum(-1).mean(2)
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    found = scores.gather(2, order)
    assert bool((found[..., 1:] <= found[..., :-1] + 1e-5).all())
    assert found[0, 0, -1] == -math.inf
    assert sorted(order[1, 0, :4].tolist()) == [0, 1, 2, 3]


def test_half_precision():
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    params = Psa(threshold=0.8, block=32)
    one, other = (Decoded(each, Shape(2, 8, 2, 64), (400, 290), params, 20, dtype=half) for each in KERNELS.values())
    for _ in range(3):
        first, second = one.step()[1], other.step()[1]
        assert second.out.dtype == half
        assert (first.out.float() - second.out.float()).norm() < 5e-3 * first.out.float().norm()
    check_slots(other.pool)


def test_blocks_of_a_power_of_two_only():
    decoded = Decoded(triton_pool, Shape(2, 2, 1, 16), (50,), Psa(block=12), 9)
    with pytest.raises(ValueError, match="power of two"):
        decoded.step()
