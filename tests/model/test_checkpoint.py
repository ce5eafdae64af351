"""Model folders as in RAGKV_MODEL: every supported family loads and answers, others are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from ragkv.engine.decoding import decode
from ragkv.engine.generation import Sampling
from ragkv.engine.memory_source import InMemoryChunk
from ragkv.engine.prefill import Prefiller
from ragkv.engine.prefill_state import PrefillOptions
from ragkv.engine.registry import make_method
from ragkv.errors import ConfigError, ModelUnsupported
from ragkv.ingest.pipeline import ingest
from ragkv.model.decoder import DecoderModel
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_pass import append
from ragkv.timing import StepTimer
from ragkv.types import AskOptions, Document
from tests import tiny
from tests.libraries import open_engine


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    """Save a tiny random model of every family with the bundled tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    saved = {}
    for kind in tiny.ARCHITECTURES:
        saved[kind] = tmp_path_factory.mktemp(kind)
        tiny.weights(kind, vocabulary=len(tokenizer), max_positions=2048).float().save_pretrained(saved[kind])
        tokenizer.save_pretrained(saved[kind])
    return saved


@pytest.mark.parametrize("kind", tiny.ARCHITECTURES)
def test_every_family_loads_and_answers_like_its_own_generate(folders, kind):
    model = DecoderModel.load(str(folders[kind]), "cpu", "float32")
    assert model.profile.retrieval_heads == (), "it is not calibrated"
    assert model.profile.stable_layers == (3,)
    prefiller = Prefiller(model, model.prompt.prefix)
    chunks = [model.prompt.chunk("Tarn", "The harbour was built in 1889. " * n) for n in (20, 30)]
    question = model.prompt.question("Who built it?")
    context = prefiller.prefill_full(chunks, question, StepTimer(), PrefillOptions(12))
    got = list(decode(model, context.cache, context.logits, context.position, Sampling(12)))
    own = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32).eval()
    ids = [*model.prompt.prefix, *chunks[0], *chunks[1], *question]
    generated = own.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=2)
    expected = generated[0, len(ids) :].tolist()
    assert got == [token for token in expected if token not in model.stop_ids]
    sources = [
        InMemoryChunk(prefiller.encode(chunk), model.profile.block, exact=i == 0) for i, chunk in enumerate(chunks)
    ]
    for name in ("reuse", "samkv-overwrite", "samkv-fusion", "scout"):
        assert (
            prefiller.prefill_sparse(sources, question, make_method(name, model), StepTimer(), PrefillOptions(12))
            .logits.isfinite()
            .all()
        )


def test_weights_that_differ_in_one_number_have_another_hash(folders, tmp_path):
    first = DecoderModel.load(str(folders["llama"]), "cpu")
    weights = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    weights.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
    weights.save_pretrained(tmp_path)
    first.tokenizer.save_pretrained(tmp_path)
    assert DecoderModel.load(str(tmp_path), "cpu").weights_hash != first.weights_hash
    assert DecoderModel.load(str(folders["llama"]), "cpu").weights_hash == first.weights_hash


def rewrite(path: Path, **changes: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_one_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES = {
    "weights": change_one_weight,
    "rope": lambda folder: rewrite(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
    "rope scaling": lambda folder: rewrite(
        folder / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "norm": lambda folder: rewrite(folder / "config.json", rms_norm_eps=1e-3),
    "tokenizer": lambda folder: rewrite(folder / "tokenizer.json", truncation=None, padding=None, added_tokens=[]),
    "tokenizer settings": lambda folder: rewrite(folder / "tokenizer_config.json", model_max_length=777),
    "merges": lambda folder: (folder / "merges.txt").write_text("#version: 0.2\n"),
    "sentencepiece": lambda folder: (folder / "tokenizer.model").write_bytes(b"\n\x00"),
    "special tokens": lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
    "block": lambda folder: (folder / "profile.json").write_text('{"block": 32}'),
    "local blocks": lambda folder: (folder / "profile.json").write_text('{"local": 3}'),
    "retrieval heads": lambda folder: (folder / "profile.json").write_text('{"retrieval_heads": [[2, 5]]}'),
    "prefix": lambda folder: (folder / "profile.json").write_text('{"prefix": "Read carefully. "}'),
    "wrapper": lambda folder: (folder / "profile.json").write_text('{"chunk": "{title}: {text}\\n"}'),
    "dtype": lambda folder: None,
}


@pytest.fixture(scope="module")
def encoded_before(folders, tmp_path_factory, embedder) -> Path:
    """Return a data folder with a document that the tiny llama has encoded."""
    data = tmp_path_factory.mktemp("before")
    with open_engine(data, DecoderModel.load(str(folders["llama"]), "cpu", "float32"), embedder) as engine:
        ingest(engine, Document("tarn", "Tarn", "The harbour of Tarn was built in 1889. " * 20))
        assert engine.answer("Who?", AskOptions(method="reuse", max_tokens=1)).report.ratios.cache_hit == 1.0
    return data


@pytest.mark.parametrize("what", CHANGES)
def test_old_entries_are_never_used_after_any_change_of_the_model(folders, encoded_before, embedder, tmp_path, what):
    shutil.copytree(folders["llama"], tmp_path / "model")
    shutil.copytree(encoded_before, tmp_path / "data")
    before = DecoderModel.load(str(tmp_path / "model"), "cpu", "float32")
    CHANGES[what](tmp_path / "model")
    after = DecoderModel.load(str(tmp_path / "model"), "cpu", "bfloat16" if what == "dtype" else "float32")
    with open_engine(tmp_path / "data", before, embedder) as engine:
        fingerprint, old = engine.fingerprint, set(engine.store.keys())
    with open_engine(tmp_path / "data", after, embedder) as engine:
        assert engine.fingerprint != fingerprint
        cache = engine.answer("Who?", AskOptions(method="reuse", max_tokens=1)).report.cache
        assert (cache.hits.store, cache.misses) == (0, cache.chunks)
        assert {fallback.reason for fallback in cache.fallbacks} == {"missing"}
        assert len(set(engine.store.keys()) - old) == cache.chunks


IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
"""The smallest part that reads images."""


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3"])
def test_of_a_model_that_reads_images_the_text_part_is_served(tmp_path, tiny_folder, kind):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    text = {"model_type": "mistral"} if kind == "mistral3" else {"model_type": f"{kind}_text", "sliding_window": 8}
    if kind == "gemma4":
        text |= {"hidden_size_per_layer_input": 0, "global_head_dim": 32, "vocab_size_per_layer_input": 97}
    config = transformers.AutoConfig.for_model(
        kind,
        text_config={"sliding_window": None, "initializer_range": 0.2, **sizes, **text},
        vision_config={**IMAGES, "image_size": 28, "patch_size": 14},
    )
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = DecoderModel.load(str(tmp_path), "cpu", "float32")
    assert model.wired == (kind == "mistral3")
    assert sum(each.numel() for each in model.body.parameters()) < sum(each.numel() for each in whole.parameters())
    ids = tiny.tokens(20)
    ours = model.forward([append(ContextCache(model.shape, 20, model.dtype), ids, 0, outputs=20)])[0]
    with torch.inference_mode():
        own = whole(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, own, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForConditionalGeneration"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ({"attention_chunk_size": 64}, "chunks"),
    ],
)
def test_an_unsupported_folder_is_refused_before_its_weights_are_read(folders, tmp_path, change, word):
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelUnsupported, match=word) as refusal:
        DecoderModel.load(str(tmp_path), "cpu")
    assert "\n" not in str(refusal.value)


def test_a_profile_in_the_data_folder_is_read_and_a_damaged_one_is_refused(folders, tmp_path):
    model = DecoderModel.load(str(folders["qwen3"]), "cpu")
    found = tmp_path / f"{model.weights_hash}.json"
    found.write_text(json.dumps({"retrieval_heads": [[2, 5]], "block": 32}))
    calibrated = DecoderModel.load(str(folders["qwen3"]), "cpu", profiles=tmp_path)
    assert (calibrated.profile.retrieval_heads, calibrated.profile.block) == (((2, 5),), 32)
    found.write_text(json.dumps({"retrieval_heads": [[2, 5]], "scout_prior": 0.0}))
    assert DecoderModel.load(str(folders["qwen3"]), "cpu", profiles=tmp_path).profile.retrieval_heads == ((2, 5),)
    found.write_text(json.dumps({"blocks": 32}))
    with pytest.raises(ConfigError, match="not a model profile"):
        DecoderModel.load(str(folders["qwen3"]), "cpu", profiles=tmp_path)
