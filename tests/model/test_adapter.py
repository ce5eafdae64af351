"""LoRA adapters: merged as PEFT merges them, in the fingerprint, and refused in one line where they are not plain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ragkv.engine.engine import Engine
from ragkv.errors import ConfigError, ModelNotFound, ModelUnsupported
from ragkv.ingest.pipeline import ingest
from ragkv.model.adapter import CONFIG, WEIGHTS, read_adapter
from ragkv.model.decoder import DecoderModel
from ragkv.model.source import ModelSource
from ragkv.types import AskOptions, Document
from tests import tiny, written_gguf
from tests.ingest.reader import WordEmbedder
from tests.libraries import open_engine
from tests.written_gguf import write_gguf

# PEFT asks transformers for a name that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A folder of a tiny random llama, in float32, with the small model's tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tiny.weights(vocabulary=len(tokenizer), max_positions=2048).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, **options) -> Path:
    """Write a random adapter with PEFT."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": list(PROJECTIONS), **options})
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(len(folder.name))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(base, tmp_path_factory.mktemp("adapter") / "short")


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def load(base: Path, adapter: Path, dtype: str = "float32", **options) -> DecoderModel:
    return DecoderModel.load(ModelSource(str(base), str(adapter)), "cpu", dtype, **options)


def projections(model: DecoderModel) -> dict[str, torch.Tensor]:
    """The weights of all projections, as they were before they were packed."""
    found = {name: each.detach() for name, each in model.body.named_parameters() if "proj" in name}
    return {name: each.to_dense() if each.is_mkldnn else each for name, each in found.items()}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"target_modules": ["q_proj", "down_proj"]}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merge_is_pefts(base, tmp_path, options, dtype):
    folder = save_adapter(base, tmp_path / "adapter", **options)
    model = load(base, folder, dtype)
    own = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(own, folder).merge_and_unload()
    expected = {name: each for name, each in merged.model.named_parameters() if "proj" in name}
    plain = projections(DecoderModel.load(str(base), "cpu", dtype))
    for name, tensor in projections(model).items():
        close = {"rtol": 0, "atol": 1e-6} if dtype == "float32" else {"rtol": 2**-8, "atol": 1e-6}
        torch.testing.assert_close(tensor.float(), expected[name].detach(), **close)
        targeted = any(each in name for each in options.get("target_modules", PROJECTIONS))
        assert torch.equal(tensor, plain[name]) != targeted
    assert model.dtype == getattr(torch, dtype)
    assert model.body.rotary_emb.inv_freq.dtype == torch.float32
    assert model.name == f"{base.name} + adapter"


def test_the_adapters_profile_wins_over_the_models(base, adapter, tmp_path):
    model = Path(shutil.copytree(base, tmp_path / "model"))
    (model / "profile.json").write_text(json.dumps({"block": 32, "chunk_tokens": 100}))
    (adapter / "profile.json").write_text(json.dumps({"block": 8, "scout_repair": "none"}))
    profile = load(model, adapter).profile
    assert (profile.block, profile.chunk_tokens, profile.scout_repair) == (8, 100, "none")
    found = load(model, adapter)
    (tmp_path / f"{found.weights_hash}.json").write_text(json.dumps({"block": 4}))
    assert load(model, adapter, profiles=tmp_path).profile.block == 4
    (adapter / "profile.json").write_text(json.dumps({"scout_repair": "all"}))
    with pytest.raises(ConfigError, match="choose one of kept, none"):
        load(model, adapter)
    (adapter / "profile.json").write_text(json.dumps({"scout_cap": 0}))
    with pytest.raises(ConfigError, match="scout_cap 0: a share above 0"):
        load(model, adapter)


def set_field(**fields: object):
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, **fields}))

    return change


def change_tensors(change):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        save_file(change(tensors), folder / WEIGHTS)

    return apply


def renamed(old: str, new: str):
    return change_tensors(lambda tensors: {name.replace(old, new): each for name, each in tensors.items()})


def resized(tensors):
    name = next(each for each in tensors if "up_proj.lora_A" in each)
    return {**tensors, name: torch.zeros(4, 48)}


def not_finite(tensors):
    name = next(iter(tensors))
    return {**tensors, name: torch.full_like(tensors[name], torch.inf)}


REFUSED = {
    "no config": (lambda folder: (folder / CONFIG).unlink(), ModelNotFound, CONFIG),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), ModelNotFound, WEIGHTS),
    "no folder": (shutil.rmtree, ModelNotFound, "does not exist"),
    "config cut short": (lambda folder: (folder / CONFIG).write_text("{"), ModelNotFound, "damaged"),
    "config of another kind": (lambda folder: (folder / CONFIG).write_text("[]"), ModelNotFound, "damaged"),
    "weights cut short": (lambda folder: (folder / WEIGHTS).write_bytes(b"\0" * 20), ModelNotFound, "damaged"),
    "another method": (set_field(peft_type="IA3"), ModelUnsupported, "IA3"),
    "no rank": (lambda folder: (folder / CONFIG).write_text("{}"), ModelUnsupported, "only LoRA"),
    "DoRA": (set_field(use_dora=True), ModelUnsupported, "use_dora"),
    "biases": (set_field(bias="all"), ModelUnsupported, "bias 'all'"),
    "whole modules": (set_field(modules_to_save=["lm_head"]), ModelUnsupported, "modules_to_save"),
    "ranks of modules": (set_field(rank_pattern={"q_proj": 8}), ModelUnsupported, "rank_pattern"),
    "transposed": (set_field(fan_in_fan_out=True), ModelUnsupported, "fan_in_fan_out"),
    "changed base": (set_field(init_lora_weights="pissa"), ModelUnsupported, "pissa"),
    "a field of the future": (set_field(use_something=True), ModelUnsupported, "use_something"),
    "another rank": (set_field(r=8), ModelUnsupported, "not rank 8"),
    "unknown module": (renamed("self_attn.q_proj", "attention.query"), ModelUnsupported, "attention.query"),
    "unknown tensor": (renamed("lora_A", "lora_embedding_A"), ModelUnsupported, "lora_embedding_A"),
    "no A": (
        change_tensors(lambda tensors: {name: each for name, each in tensors.items() if "v_proj.lora_A" not in name}),
        ModelUnsupported,
        "lacks A or B",
    ),
    "empty": (change_tensors(lambda tensors: {}), ModelUnsupported, "lacks A or B of every module"),
    "another shape": (change_tensors(resized), ModelUnsupported, "the model that it was trained on"),
    "not finite": (change_tensors(not_finite), ModelUnsupported, "not finite"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_merged_is_refused_in_one_line(base, adapter, what):
    change, kind, word = REFUSED[what]
    change(adapter)
    with pytest.raises(kind, match=word) as refusal:
        load(base, adapter)
    assert "\n" not in str(refusal.value)
    assert str(adapter) in str(refusal.value)


def test_an_adapter_of_the_output_layer_is_refused(base, adapter):
    renamed("model.layers.0.self_attn.q_proj", "lm_head")(adapter)
    with pytest.raises(ModelUnsupported, match="lm_head, which is no projection"):
        load(base, adapter)


def test_an_adapter_of_a_larger_model_is_refused(base, tmp_path, tiny_folder):
    with pytest.raises(ModelUnsupported, match="in the model; use the model that it was trained on"):
        load(tiny_folder, save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"]))


def test_the_digest_depends_on_both_files(adapter):
    found = {read_adapter(adapter).digest}
    set_field(lora_alpha=7)(adapter)
    found.add(read_adapter(adapter).digest)
    change_tensors(lambda tensors: {name: each * 2 for name, each in tensors.items()})(adapter)
    found.add(read_adapter(adapter).digest)
    assert len(found) == 3


# No KV of another model

TEXT = " ".join(f"The harbour of Tarn number {number} was built in {1700 + number}." for number in range(9))


def never_hits(engine: Engine) -> bool:
    """Whether a question finds none of the stored KV."""
    report = engine.answer("Who built the harbour?", AskOptions(method="reuse", max_tokens=1)).report
    return report.cache.misses == report.cache.chunks > 0 and not any(vars(report.cache.hits).values())


def test_kv_of_another_adapter_base_or_file_is_never_a_hit(base, saved, tmp_path, tiny_folder):
    """The first five models have the same shapes, tokenizer and profile; so have the three of files."""
    other = save_adapter(base, tmp_path / "longer name")
    moved = Path(shutil.copytree(base, tmp_path / "moved"))
    shutil.copytree(saved, tmp_path / "scaled")
    set_field(lora_alpha=60)(tmp_path / "scaled")
    weights = transformers.AutoModelForCausalLM.from_pretrained(base)
    weights.model.norm.weight.data[0] += 1e-3
    weights.save_pretrained(moved)
    files = [
        write_gguf(tmp_path / name, written_gguf.weights("llama", seed=seed), "llama")
        for seed, name in enumerate(("a.gguf", "b.gguf"))
    ]
    sources = [
        ModelSource(str(base)),
        *(ModelSource(str(base), str(adapter)) for adapter in (saved, other, tmp_path / "scaled")),
        ModelSource(str(moved), str(saved)),
        *(ModelSource(str(file)) for file in files),
        ModelSource(str(files[0]), str(save_for(files[0], tmp_path))),
    ]
    fingerprints = set()
    for source in sources:
        loaded = DecoderModel.load(source, "cpu", cache=tmp_path / "cache")
        with open_engine(tmp_path / "data", loaded, WordEmbedder(), chunk_tokens=64) as engine:
            fingerprints.add(engine.fingerprint)
            if len(fingerprints) == 1:
                ingest(engine, Document("tarn", "Tarn", TEXT))
                assert not never_hits(engine)
            else:
                assert never_hits(engine), source
            assert not never_hits(engine), "the same model finds what it stored"
    assert len(fingerprints) == len(sources)


def save_for(file: Path, folder: Path) -> Path:
    """An adapter for the model in a GGUF file, whose layers have the shapes of `base`."""
    plain = folder / "plain"
    written_gguf.weights("llama").save_pretrained(plain)
    return save_adapter(plain, folder / "for a file")
