"""Pinned blocks: transferred rows equal loaded rows, and no block stays pinned."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.kv_transfer import GROWTH, LAUNCHES, LEAST, MOST, KVTransfer, acquire, launch_layers
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
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

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined: its interpreter runs on the CPU

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
    """A store with the chunks, and two prefillers over it: one transfers pinned blocks, the other loads rows."""

    def __init__(self, folder, model, body="exact", host=ROOM, gpu=0):
        self.model, self.body, self.folder = model, body, folder
        self.transferring = Prefiller(model, PREFIX, kv_transfer=KVTransfer(model, triton_transfer.transfer_blocks))
        self.loading = Prefiller(model, PREFIX)
        self.loading.runner._kv_transfer = None
        self.disk = DiskStore(folder)
        layout = Layout(model.shape, 4, 4, model.dtype, body)
        self.tiers = [Tiers(self.disk, layout, TierBudgets(host, gpu), model.device) for _ in range(2)]
        self.stores = [ChunkStore(tiers, model, "f", "c", body) for tiers in self.tiers]
        for chunk in CHUNKS:
            assert self.stores[0].put(self.loading.encode(chunk))[1] is None

    def prefill(self, prefiller, which, method):
        """Return (context, sources) of one question."""
        store = self.stores[which]
        encode = [lambda chunk=chunk: self.loading.encode_passes(chunk) for chunk in CHUNKS]
        sources = [
            StoredChunk(store, c, i == 0, e, lambda kv, error: store.put(kv)[0])
            for i, (c, e) in enumerate(zip(CHUNKS, encode, strict=True))
        ]
        return prefiller.prefill_sparse(sources, QUESTION, method, StepTimer(), PrefillOptions(8)), sources

    def compare(self, method, turns=2):
        """Prefill one question both ways, first from the store, then from memory."""
        for _ in range(turns):
            (one, ours), (other, theirs) = (
                self.prefill(prefiller, which, method)
                for which, prefiller in enumerate((self.transferring, self.loading))
            )
            torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
            assert one.plan == other.plan
            for layer in range(4):
                torch.testing.assert_close(one.cache.k(layer), other.cache.k(layer), rtol=1e-4, atol=1e-4)
                assert torch.equal(one.cache.positions(layer), other.cache.positions(layer))
            facts = [[(s.tier, s.loaded_bytes, s.hit, s.fallback) for s in sources] for sources in (ours, theirs)]
            assert facts[0] == facts[1]
        assert self.pinned() == 0
        return ours

    def pinned(self):
        """Return the blocks that are still pinned when the GPU is done."""
        self.transferring.runner._kv_transfer._releasing.shutdown()
        return sum(stats.pinned for stats in self.tiers[0].stats().values())


def scout(model, **fields):
    return Scout(layers=4, heads=HEADS, group=4, scale=model.scale, floor=1, cap=0.2, **fields)


@pytest.mark.parametrize("body", BODIES)
def test_transferred_blocks_answer_like_loaded_ones(tmp_path, model, body):
    ours = Case(tmp_path, model, body).compare(Reuse(4))
    assert {source.tier for source in ours} == {"host"}


@pytest.mark.parametrize("name", ["scout", "fusion", "samkv", "blend", "encoded"])
def test_transferred_blocks_answer_like_loaded_ones_under_every_kind_of_plan(tmp_path, model, name):
    methods = {
        "scout": scout(model),
        "fusion": scout(model, update="fusion"),
        "samkv": SamKV(layers=(2, 3), extremes="dynamic"),
        "blend": CacheBlend(4),
        "encoded": ReuseEncoded(4),  # its keys have other positions, so its blocks are not pinned
    }
    Case(tmp_path, model).compare(methods[name])


@pytest.mark.parametrize(("near", "expected"), [((True, True), True), ((True, False), False), ((False, False), False)])
def test_blocks_are_near_only_if_all_of_them_are(tmp_path, model, near, expected):
    """A kernel for the GPU's own memory runs many programs. Reading over the bus, they would block other work."""
    case, forms = Case(tmp_path, model), []
    _, sources = case.prefill(case.loading, 0, Reuse(4))
    stitch = Stitch(model, [source.piece for source in sources], 0, 128)
    requested = [((0, 1), (0,), ())] * 4
    stitch.reserve([source.piece for source in sources], requested)
    with ThreadPoolExecutor(1) as threads, ExitStack() as pins:
        pinned = acquire({i: sources[i].pin([each[i] for each in requested], threads) for i in range(2)}, pins)
        pinned = {i: replace(each, form=replace(each.form, near=near[i])) for i, each in pinned.items()}
        kv_transfer = KVTransfer(model, lambda *args: forms.append(args[-1]))
        kv_transfer.transfer(stitch, [source.piece for source in sources], pinned, pins.pop_all().close)
    assert {form.near for form in forms} == {expected}


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_blocks_in_the_gpu_pool_are_transferred_from_there(tmp_path, model):
    ours = Case(tmp_path, model, gpu=ROOM).compare(Reuse(4))
    assert {source.tier for source in ours} == {"gpu"}


@pytest.mark.parametrize("host", [0, 40_000])
def test_blocks_that_memory_has_no_room_for_are_loaded(tmp_path, model, host):
    """No pool at all, and a pool that holds only some of the chunks."""
    case = Case(tmp_path, model, host=host)
    slots = case.tiers[0].stats()["host"].slots
    assert slots < 4 * sum(-(-len(chunk) // 4) for chunk in CHUNKS)
    (one, _), (other, _) = case.prefill(case.transferring, 0, Reuse(4)), case.prefill(case.loading, 1, Reuse(4))
    torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)


def test_a_damaged_chunk_is_encoded_again_and_the_others_are_transferred(tmp_path, model):
    case = Case(tmp_path, model)
    healthy, _ = case.prefill(case.loading, 1, Reuse(4))
    store = case.stores[0]
    store.head(store.key(CHUNKS[1]), len(CHUNKS[1]))  # keeps the head record in memory
    (file,) = tmp_path.glob(f"*/{store.key(CHUNKS[1])}.kv")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    context, sources = case.prefill(case.transferring, 0, Reuse(4))
    assert [bool(source.fallback) for source in sources] == [False, True, False]
    assert case.pinned() == 0
    torch.testing.assert_close(context.logits, healthy.logits, rtol=1e-4, atol=1e-4)


def test_a_source_that_fails_leaves_nothing_pinned(tmp_path, model):
    case = Case(tmp_path, model)

    class Broken(StoredChunk):
        def pin(self, requested, threads):
            def wait():
                raise RuntimeError("out of order")

            return wait

    store = case.stores[0]
    sources = [StoredChunk(store, CHUNKS[0], True, lambda: None), Broken(store, CHUNKS[1], False, lambda: None)]
    sources.append(StoredChunk(store, CHUNKS[2], False, lambda: None))
    with pytest.raises(RuntimeError, match="out of order"):
        case.transferring.prefill_sparse(sources, QUESTION, Reuse(4), StepTimer(), PrefillOptions(8))
    assert case.pinned() == 0


class Event:
    """Counts the calls of `wait`."""

    waited = 0

    def wait(self):
        self.waited += 1


ACCESSES = {
    "k": lambda cache: cache.k(1),
    "v": lambda cache: cache.v(1),
    "buffers": lambda cache: cache.buffers(1, 0),
    "addresses": lambda cache: cache.addresses(0),
    "put": lambda cache: cache.put(1, torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.tensor([5])),
    "write": lambda cache: cache.write(1, torch.tensor([0]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)),
    "fill": lambda cache: cache.fill(1, torch.tensor([0]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)),
    "truncate": lambda cache: cache.truncate([0] * 4),
    "make_room": lambda cache: cache.make_room(100),
    "wait_ready": lambda cache: cache.wait_ready(1),
}


@pytest.mark.parametrize("name", ACCESSES)
def test_every_access_to_a_layer_waits_once_for_its_pending_copy(name):
    cache = ContextCache(tiny.model().shape, 4, torch.float32)
    cache.reserve(1, torch.arange(2))
    one, other = Event(), Event()
    cache.record_event(1, one)
    cache.record_event(2, other)
    ACCESSES[name](cache)
    ACCESSES[name](cache)
    assert one.waited == 1
    assert other.waited == (name in ("truncate", "make_room", "addresses"))
    assert cache.tensors


def test_a_small_transfer_is_one_launch():
    assert launch_layers([0, 2, 4, 6, 8], LEAST // 9) == [0]
    assert launch_layers([0, 0, 0], LEAST) == [0]


def test_a_transfer_begins_with_a_short_launch_and_goes_on_with_longer_ones():
    begin = launch_layers([100 * layer for layer in range(33)], LEAST // 100 + 1)
    assert begin == [0, 1, 1 + GROWTH, 1 + GROWTH + MOST // LEAST], "the model waits for the first one"


def test_a_large_transfer_has_about_as_many_launches_as_it_may():
    begin = launch_layers([100 * layer for layer in range(401)], LEAST // 100 + 1)
    assert LAUNCHES <= len(begin) <= LAUNCHES + 3
    assert begin == sorted(set(begin))
    assert begin[-1] < 400


def test_layers_without_blocks_share_a_launch():
    assert launch_layers([0, 100, 100, 100, 500, 600], LEAST // 100 + 1) == [0, 1, 4]
