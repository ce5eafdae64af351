"""Lent blocks: what is carried is what would have been loaded, and nothing stays pinned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.kv_transfer import KVTransfer, acquire
from ragkv.engine.prefill import Prefiller
from ragkv.engine.stitch import Stitch
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.recompute.cacheblend import CacheBlend
from ragkv.recompute.reuse import Reuse, ReuseEncoded
from ragkv.recompute.samkv import SamKV
from ragkv.recompute.scout import Scout
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.layout import BODIES, Layout
from ragkv.store.tiers import TierBudgets, Tiers
from ragkv.timing import StepTimer
from tests import tiny

triton_transfer = pytest.importorskip("ragkv.kernels.triton_transfer")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PREFIX, QUESTION = tiny.tokens(3, 99), tiny.tokens(5, 50)
CHUNKS = [tiny.tokens(n, n) for n in (30, 26, 41)]
HEADS = ((1, 1), (2, 6))
ROOM = 2**24


@pytest.fixture(scope="module")
def model():
    made = DecoderModel(tiny.weights().float().to(DEVICE))
    made.profile = replace(made.profile, block=4, initial=1, local=2, stable_layers=(2, 3), retrieval_heads=HEADS)
    return made


class Case:
    """A store with the chunks in it, and two readers over it: one that has blocks carried, one that loads rows."""

    def __init__(self, folder, model, body="exact", host=ROOM, gpu=0):
        self.model, self.body, self.folder = model, body, folder
        self.carrying = Prefiller(model, PREFIX, kv_transfer=KVTransfer(model, triton_transfer.transfer_blocks))
        self.loading = Prefiller(model, PREFIX)
        self.loading._kv_transfer = None
        self.store = DiskStore(folder)
        layout = Layout(model.shape, 4, 4, model.dtype, body)
        self.tiers = [Tiers(self.store, layout, TierBudgets(host, gpu), model.device) for _ in range(2)]
        self.shelves = [ChunkStore(tiers, model, "f", "c", body) for tiers in self.tiers]
        for chunk in CHUNKS:
            assert self.shelves[0].put(self.loading.encode(chunk))[1] is None

    def asked(self, reader, which, method):
        """(context, sources) of one question."""
        shelf = self.shelves[which]
        encode = [lambda chunk=chunk: self.loading.encode(chunk) for chunk in CHUNKS]
        sources = [
            StoredChunk(shelf, c, i == 0, e, lambda kv: shelf.put(kv)[0])
            for i, (c, e) in enumerate(zip(CHUNKS, encode, strict=True))
        ]
        return reader.sparse(sources, QUESTION, method, 8, StepTimer()), sources

    def compare(self, method, turns=2):
        """Ask the same both ways, from the store and then from memory."""
        for _ in range(turns):
            (one, ours), (other, theirs) = (
                self.asked(reader, which, method) for which, reader in enumerate((self.carrying, self.loading))
            )
            torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
            assert one.plan == other.plan
            for layer in range(4):
                torch.testing.assert_close(one.cache.k(layer), other.cache.k(layer), rtol=1e-4, atol=1e-4)
                assert torch.equal(one.cache.positions(layer), other.cache.positions(layer))
            told = [[(s.tier, s.loaded_bytes, s.hit, s.fallback) for s in sources] for sources in (ours, theirs)]
            assert told[0] == told[1]
        assert self.pinned() == 0
        return ours

    def pinned(self):
        """Blocks that are still lent when the GPU is done."""
        self.carrying._kv_transfer._ending.shutdown()
        return sum(stats.pinned for stats in self.tiers[0].stats().values())


def scout(model, **fields):
    return Scout(layers=4, heads=HEADS, group=4, scale=model.scale, floor=1, cap=0.2, **fields)


@pytest.mark.parametrize("body", BODIES)
def test_carried_blocks_answer_as_loaded_ones(tmp_path, model, body):
    ours = Case(tmp_path, model, body).compare(Reuse(4))
    assert {source.tier for source in ours} == {"host"}


@pytest.mark.parametrize("name", ["scout", "fusion", "samkv", "blend", "encoded"])
def test_so_they_do_under_every_kind_of_plan(tmp_path, model, name):
    ways = {
        "scout": scout(model),
        "fusion": scout(model, update="fusion"),
        "samkv": SamKV(layers=(2, 3), extremes="dynamic"),
        "blend": CacheBlend(4),
        "encoded": ReuseEncoded(4),  # turned elsewhere: such blocks are not lent
    }
    Case(tmp_path, model).compare(ways[name])


@pytest.mark.parametrize(("near", "told"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_blocks_are_near_only_if_all_of_them_are(tmp_path, model, near, told):
    """What reads the GPU's own memory with many programs would keep the bus's readers from everything else."""
    case, forms = Case(tmp_path, model), []
    _, sources = case.asked(case.loading, 0, Reuse(4))
    stitch = Stitch(model, [source.piece for source in sources], 0, 128)
    wanted = [((0, 1), (0,), ())] * 4
    stitch.reserve([source.piece for source in sources], wanted)
    with ThreadPoolExecutor(1) as threads, ExitStack() as held:
        lent = acquire({i: sources[i].pin([each[i] for each in wanted], threads) for i in range(2)}, held)
        lent = {i: replace(each, form=replace(each.form, near=near[i])) for i, each in lent.items()}
        carrier = KVTransfer(model, lambda *told: forms.append(told[-1]))
        carrier.transfer(stitch, [source.piece for source in sources], lent, held.pop_all().close)
    assert {form.near for form in forms} == {told}


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_blocks_in_the_pool_of_a_gpu_are_carried_from_there(tmp_path, model):
    ours = Case(tmp_path, model, gpu=ROOM).compare(Reuse(4))
    assert {source.tier for source in ours} == {"gpu"}


@pytest.mark.parametrize("host", [0, 40_000])
def test_what_memory_has_no_room_for_is_loaded(tmp_path, model, host):
    """No pool at all, and one that holds some chunks and not others."""
    case = Case(tmp_path, model, host=host)
    slots = case.tiers[0].stats()["host"].slots
    assert slots < 4 * sum(-(-len(chunk) // 4) for chunk in CHUNKS)
    (one, _), (other, _) = case.asked(case.carrying, 0, Reuse(4)), case.asked(case.loading, 1, Reuse(4))
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)


def test_a_chunk_that_is_damaged_is_encoded_again_and_the_others_are_carried(tmp_path, model):
    case = Case(tmp_path, model)
    healthy, _ = case.asked(case.loading, 1, Reuse(4))
    shelf = case.shelves[0]
    shelf.head(shelf.key(CHUNKS[1]), len(CHUNKS[1]))  # is in memory from now on
    (file,) = tmp_path.glob(f"*/{shelf.key(CHUNKS[1])}.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    context, sources = case.asked(case.carrying, 0, Reuse(4))
    assert [bool(source.fallback) for source in sources] == [False, True, False]
    assert case.pinned() == 0
    torch.testing.assert_close(context.logits, healthy.logits, rtol=1e-4, atol=1e-4)


def test_a_source_that_fails_leaves_nothing_pinned(tmp_path, model):
    case = Case(tmp_path, model)

    class Broken(StoredChunk):
        def pin(self, wanted, threads):
            def wait():
                raise RuntimeError("out of order")

            return wait

    shelf = case.shelves[0]
    sources = [StoredChunk(shelf, CHUNKS[0], True, lambda: None), Broken(shelf, CHUNKS[1], False, lambda: None)]
    sources.append(StoredChunk(shelf, CHUNKS[2], False, lambda: None))
    with pytest.raises(RuntimeError, match="out of order"):
        case.carrying.prefill_sparse(sources, QUESTION, Reuse(4), 8, StepTimer())
    assert case.pinned() == 0


class Behind:
    """Counts who waits for it."""

    waited = 0

    def wait(self):
        self.waited += 1


TOUCHES = {
    "k": lambda cache: cache.k(1),
    "v": lambda cache: cache.v(1),
    "stores": lambda cache: cache.stores(1, 0),
    "put": lambda cache: cache.put(1, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([5])),
    "write": lambda cache: cache.write(1, torch.tensor([0]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)),
    "fill": lambda cache: cache.fill(1, torch.tensor([0]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)),
    "truncate": lambda cache: cache.truncate([0] * 4),
    "make_room": lambda cache: cache.make_room(100),
    "settle": lambda cache: cache.settle(1),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_whatever_touches_a_layer_waits_once_for_what_is_on_its_way_there(name):
    cache = ContextCache(tiny.model().shape, 4, torch.float32)
    cache.reserve(1, torch.arange(2))
    one, other = Behind(), Behind()
    cache.record_event(1, one)
    cache.record_event(2, other)
    TOUCHES[name](cache)
    TOUCHES[name](cache)
    assert one.waited == 1
    assert other.waited == (name in ("truncate", "make_room"))
    assert cache.tensors
