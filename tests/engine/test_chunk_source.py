"""ChunkStore and StoredChunk on the bundled model: bodies, secrets and collections never share entries."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch

from ragkv.config import load_settings
from ragkv.engine.chunk_source import StoredChunk
from ragkv.engine.chunk_store import ChunkStore
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.passes import Passes, run_alone
from ragkv.engine.prefill import Prefiller
from ragkv.errors import EntryCorrupt, EntryMissing, NotQuantisable
from ragkv.model.decoder import DecoderModel
from ragkv.model.layer_pass import Pass
from ragkv.retrieval import Embedder
from ragkv.store.disk_store import DiskStore
from ragkv.store.format.codec import pack
from ragkv.store.format.layout import BODIES
from ragkv.store.format.seal import CHECKSUMS, Keyed
from ragkv.types import AskOptions, ChunkKV
from tests.libraries import ANSWER, QUESTION, chunk_store_of, open_engine, open_library

SECRET = "0123456789abcdef"
TOKENS = tuple(range(300, 450))
"""Nine blocks of 16 and one of 6."""


@pytest.fixture(scope="module")
def kv(model: DecoderModel) -> ChunkKV:
    return Prefiller(model, model.prompt.prefix).encode(TOKENS)


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "kv")


def never() -> Passes[ChunkKV]:
    raise AssertionError("encoded again")


@pytest.mark.parametrize("seal", [CHECKSUMS, Keyed(SECRET)], ids=["plain", "sealed"])
@pytest.mark.parametrize("body", BODIES)
def test_put_returns_the_chunk_as_it_is_loaded_bit_for_bit(
    model: DecoderModel, disk: DiskStore, kv: ChunkKV, body: str, seal: Keyed
) -> None:
    store = chunk_store_of(disk, model, "f", "c", body, seal)
    loaded, error = store.put(kv)
    assert error is None
    stored, in_memory = StoredChunk(store, TOKENS, False, never), InMemoryChunk(loaded, store.block)
    requested = [(0, 3, 9), (), *[(1, 2)] * (model.shape.layers - 2)]
    ours, theirs = (run_alone(model, source.load(requested)) for source in (stored, in_memory))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert torch.equal(stored.piece.digest.mean_keys, loaded.digest.mean_keys)
    row, full, last = {"exact": (512, 32, 12), "int8": (128, 35, 15), "fp8": (128, 35, 15)}[body]
    assert stored.loaded_bytes == row * (2 * full + last + 2 * full * (model.shape.layers - 2))
    assert torch.equal(loaded.k, kv.k) == (body == "exact")
    assert float((loaded.k - kv.k).abs().max() / kv.k.abs().max()) < 0.07


def test_bodies_secrets_and_collections_never_share_an_entry(
    model: DecoderModel, disk: DiskStore, kv: ChunkKV, tmp_path: Path, embedder: Embedder
) -> None:
    """With one model and one document, two different settings miss each other's entries. Equal settings hit."""
    kinds = [(body, secret) for body in BODIES for secret in ("", SECRET, SECRET + "!")]
    stores: dict[str, ChunkStore] = {}
    for body, secret in kinds:
        with open_engine(tmp_path, model, embedder, store_body=body, store_secret=secret) as engine:
            for collection in ("mine", "theirs"):
                stores[f"{body} {secret} {collection}"] = chunk_store_of(
                    disk, model, engine.fingerprint, collection, body, engine.chunks.seal
                )
    assert len({store.key(TOKENS) for store in stores.values()}) == len(stores) == 18
    for one, other in combinations(list(stores)[::5], 2):
        stores[one].put(kv)
        with pytest.raises(EntryMissing):
            stores[other].head(stores[other].key(TOKENS), len(TOKENS))
        disk.delete(stores[one].key(TOKENS))
    mine = next(iter(stores.values()))
    mine.put(kv)
    mine.put(kv)
    assert list(disk.keys()) == [mine.key(TOKENS)]


def test_a_body_of_another_form_under_the_right_key_is_a_miss(
    model: DecoderModel, disk: DiskStore, kv: ChunkKV
) -> None:
    for body, other in (("exact", "int8"), ("int8", "fp8"), ("fp8", "exact")):
        store = chunk_store_of(disk, model, "f", "c", body)
        disk.put(store.key(TOKENS), *pack(kv, store.block, "f", other))
        with pytest.raises(EntryCorrupt, match="form"):
            store.head(store.key(TOKENS), len(TOKENS))


def test_a_chunk_that_cannot_be_quantised_is_used_and_not_stored(
    model: DecoderModel, disk: DiskStore, kv: ChunkKV
) -> None:
    spoilt = replace(kv, v=kv.v.clone())
    spoilt.v[3, 7, 1, 5] = torch.inf
    store = chunk_store_of(disk, model, "f", "c", "int8")
    loaded, error = store.put(spoilt)
    assert isinstance(error, NotQuantisable)
    assert loaded is spoilt
    assert list(disk.keys()) == []
    source = StoredChunk(store, TOKENS, False, never)
    assert not source.hit
    with pytest.raises(EntryMissing):
        _ = source.piece
    source.accept(store.put(spoilt)[0])
    assert torch.isinf(run_alone(model, source.load([(0,)] * model.shape.layers))[3][1]).sum() == 1


def test_blocks_that_are_gone_are_encoded_by_a_pass_that_is_yielded(
    model: DecoderModel, disk: DiskStore, kv: ChunkKV
) -> None:
    store, prefiller = chunk_store_of(disk, model, "f", "c"), Prefiller(model, model.prompt.prefix)
    store.put(kv)
    source = StoredChunk(store, TOKENS, False, lambda: prefiller.encode_passes(TOKENS))
    piece = source.piece
    disk.delete(store.key(TOKENS))
    passes = source.load([(0, 9)] * model.shape.layers)
    layer_pass = next(passes)
    assert isinstance(layer_pass, Pass)
    assert layer_pass.tokens.tolist() == list(TOKENS)
    with pytest.raises(StopIteration) as end:
        passes.send(model.forward([layer_pass])[0])
    rows = [*range(16), *range(144, 150)]
    assert torch.equal(end.value.value[3][0], kv.k[3, rows])
    assert (source.hit, source.fallback) == (False, "missing")
    assert source.piece is piece, "a plan holds what it was made with"


def test_a_quantised_and_sealed_library_answers(tmp_path: Path, model: DecoderModel, embedder: Embedder) -> None:
    with open_library(tmp_path, model, embedder, ("01", "02"), store_body="int8", store_secret=SECRET) as engine:
        first = engine.answer(QUESTION, AskOptions(method="scout", top_k=4))
        assert first.answer == ANSWER
        report = first.report
        assert report.ratios.cache_hit == 1.0
        assert report.bytes.context_kv == report.tokens.context * 12 * 1024  # float32, whatever the body is
        exact = round(report.tokens.kept * 12) * 1024
        assert 0 < report.bytes.loaded < 0.29 * exact, "not all blocks are loaded"
        everything = engine.answer(QUESTION, AskOptions(method="scout:repair=none", top_k=4)).report
        assert 0.25 < everything.bytes.loaded / exact < 0.29
        assert report.ratios.load == (report.bytes.loaded + report.bytes.heads) / report.bytes.context_kv
        for path in sorted((tmp_path / "kv").glob("*/*.kv")):
            path.unlink()
        again = engine.answer(QUESTION, AskOptions(method="scout", top_k=4))
        assert again.report.ratios.cache_hit == 0.0
        assert (again.answer, again.report.chunks) == (first.answer, report.chunks), "a miss answers as a hit does"


def test_the_secret_is_shown_by_no_setting_and_no_engine(
    tmp_path: Path, model: DecoderModel, embedder: Embedder
) -> None:
    settings = load_settings(data=tmp_path, store_secret=SECRET)
    assert settings.store_secret.get_secret_value() == SECRET
    with open_engine(tmp_path, model, embedder, store_secret=SECRET) as engine:
        texts = [repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()]
        texts += [repr(engine.chunks.seal), engine.fingerprint, str(engine.health())]
        assert not any(SECRET in text or SECRET.encode().hex() in text for text in texts)
