"""GGUF files as models: what is converted computes what the file says, and bad files are refused in one line."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ragkv.errors import ModelNotFound, ModelUnsupported, RagkvError
from ragkv.model import gguf as reading
from ragkv.model.decoder import DecoderModel
from tests import families, hybrids, written_gguf
from tests.written_gguf import permuted, write_gguf

KINDS = ("llama", "mistral", "qwen2", "qwen3")
TEXT = "<|im_start|>the harbour <|im_end|>\nthe Tarn é 1889"


def load(path: Path, cache: Path, dtype: str = "float32") -> DecoderModel:
    return DecoderModel.load(str(path), "cpu", dtype, cache=cache)


def logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def reloaded(folder: Path):
    """The converted model as transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def only(cache: Path) -> Path:
    """The one folder of a cache."""
    (folder,) = [path for path in cache.iterdir() if not path.name.startswith(".")]
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_file_is_the_model_that_was_written(tmp_path, kind, tied):
    # Fewer heads than hidden / head size: the head size is the file's.
    options = {} if kind == "qwen2" else {"q_heads": 4}
    model = written_gguf.weights(kind, **options)
    if tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.model.embed_tokens.weight
    architecture = "llama" if kind == "mistral" else kind  # as llama.cpp converts it
    loaded = load(write_gguf(tmp_path / "a.gguf", model, architecture), tmp_path / "cache")
    assert loaded.name == "a.gguf"
    found, ids = reloaded(only(tmp_path / "cache")), [1, 40, 50, 60, 70, 2]
    torch.testing.assert_close(logits(found, ids), logits(model, ids), rtol=0, atol=0)
    assert loaded.shape.head_dim == 8
    assert loaded.max_positions == model.config.max_position_embeddings


CONVOLUTIONS = hybrids.HYBRIDS["lfm2"]["layer_types"]
NEWER = {
    "gemma2": ("gemma2", {"sliding_window": 8, "query_pre_attn_scalar": 16}, {"gemma2.attention.sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
        {"gemma3.attention.sliding_window": 8},
    ),
    "qwen3moe": (
        "qwen3_moe",
        {**families.FAMILIES["qwen3_moe"], "norm_topk_prob": True},
        {
            "qwen3moe.expert_count": 4,
            "qwen3moe.expert_used_count": 2,
            "qwen3moe.expert_feed_forward_length": 32,
        },
    ),
    "lfm2": (
        "lfm2",
        {**hybrids.HYBRIDS["lfm2"], "block_auto_adjust_ff_dim": False},
        {
            "lfm2.attention.head_count_kv": [2 * (kind == "full_attention") for kind in CONVOLUTIONS],
            "lfm2.shortconv.l_cache": 3,
        },
    ),
    "phi3": ("phi3", {}, {"tokenizer.ggml.padding_token_id": 0}),
    "stablelm": ("stablelm", families.FAMILIES["stablelm"], {}),
    "starcoder2": ("starcoder2", {}, {}),
}


@pytest.mark.parametrize("architecture", NEWER)
def test_a_converted_file_of_another_architecture_is_served_as_the_model_that_was_written(tmp_path, architecture):
    if architecture in ("gemma2", "gemma3", "lfm2") and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("this release of transformers does not read the metadata of such files")
    kind, fields, metadata = NEWER[architecture]
    model = families.weights(kind, **{"vocab_size": len(written_gguf.vocabulary()), **fields})
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    path = write_gguf(tmp_path / "a.gguf", model, architecture, metadata=metadata)
    loaded = load(path, tmp_path / "cache")
    ids = [1, 40, 50, 60, 70, 2, 80, 90, 100, 110, 120, 130]
    torch.testing.assert_close(loaded.own_logits(ids), logits(model, ids), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_0"])
def test_quantised_tensors_are_those_of_the_format(tmp_path, kind):
    model = written_gguf.weights("llama")
    quantised = gguf.GGMLQuantizationType[kind]
    load(write_gguf(tmp_path / "a.gguf", model, "llama", quantised=quantised), tmp_path / "cache")
    found = reloaded(only(tmp_path / "cache")).state_dict()
    for name, heads in (("q", 8), ("k", 2)):
        rows = model.state_dict()[f"model.layers.1.self_attn.{name}_proj.weight"].numpy()
        stored = gguf.dequantize(gguf.quantize(permuted(rows, heads), quantised), quantised)
        pairs = stored.reshape(heads, -1, 2, stored.shape[1])
        expected = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(stored.shape)
        got = found[f"model.layers.1.self_attn.{name}_proj.weight"]
        assert torch.equal(got, torch.from_numpy(expected).bfloat16().float())
    up = model.state_dict()["model.layers.0.mlp.up_proj.weight"].numpy()
    expected = gguf.dequantize(gguf.quantize(up, quantised), quantised)
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], torch.from_numpy(expected).bfloat16().float())


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_transformers_own_reader_agrees(tmp_path, kind):
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights(kind), kind, quantised=gguf.GGMLQuantizationType.Q8_0)
    load(path, tmp_path / "cache")
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    found = reloaded(only(tmp_path / "cache")).state_dict()
    for name, tensor in own.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16().float()), name


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_tokenizer_gives_the_ids_of_the_vocabulary_and_ends_at_its_eos(tmp_path, kind):
    model = load(write_gguf(tmp_path / "a.gguf", written_gguf.weights(kind), kind), tmp_path / "cache")
    ids = model.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == written_gguf.tokenizer().encode(TEXT).ids
    assert [ids[0], written_gguf.EOS in ids] == [written_gguf.BOS, True]
    assert model.tokenizer.decode(ids) == TEXT
    assert model.tokenizer.eos_token == "<|im_end|>"
    assert model.stop_ids == {written_gguf.EOS}


def test_the_second_end_of_an_answer_is_one(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 0}
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights("llama"), "llama", metadata=ends)
    assert load(path, tmp_path / "cache").stop_ids == {0, written_gguf.EOS}


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


def divisors(head_dim: int) -> np.ndarray:
    """What transformers divides Llama 3's frequencies by."""
    config = transformers.LlamaConfig(
        head_dim=head_dim, rope_parameters=LLAMA3, hidden_size=64, num_attention_heads=8, max_position_embeddings=16384
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()


def test_the_scaled_rope_of_llama_3_is_recognised(tmp_path):
    model = written_gguf.weights("llama", rope_parameters=LLAMA3, max_positions=16384)
    path = write_gguf(tmp_path / "a.gguf", model, "llama", changed={"rope_freqs.weight": divisors(8)})
    load(path, tmp_path / "cache")
    found, ids = reloaded(only(tmp_path / "cache")), list(range(3, 200))
    assert found.config.rope_parameters["rope_type"] == "llama3"
    torch.testing.assert_close(logits(found, ids), logits(model, ids), rtol=0, atol=1e-4)


def cut(path: Path, share: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_refused(tmp_path, share):
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights("llama"), "llama")
    cut(path, share)
    with pytest.raises(ModelNotFound, match=r"a\.gguf") as refusal:
        load(path, tmp_path / "cache")
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


BAD = {
    "no such architecture": ({"metadata": {"general.architecture": "gpt2"}}, ModelUnsupported, "gpt2"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, ModelUnsupported, "experts"),
    "scaled rope": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, ModelUnsupported, "yarn"),
    "long rope": ({"changed": {"rope_factors_long.weight": np.ones(4)}}, ModelUnsupported, "prompt's length"),
    "other frequencies": (
        {"changed": {"rope_freqs.weight": np.array([1, 2, 3, 7], np.float32)}},
        ModelUnsupported,
        "frequencies",
    ),
    "missing tensor": ({"changed": {"blk.1.attn_q.weight": None}}, ModelNotFound, r"layers\.1\.self_attn\.q_proj"),
    "foreign tensor": ({"changed": {"blk.0.ssm_a": np.ones(4)}}, ModelUnsupported, "ssm_a"),
    "wrong shape": ({"changed": {"output_norm.weight": np.ones(32)}}, ModelNotFound, r"model\.norm"),
    "not finite": ({"changed": {"output_norm.weight": np.full(64, np.nan)}}, ModelNotFound, "finite"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_converted_is_refused_in_one_line_and_leaves_nothing(tmp_path, what):
    options, kind, word = BAD[what]
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights("llama"), "llama", **options)
    with pytest.raises(kind, match=word) as refusal:
        load(path, tmp_path / "cache")
    assert "\n" not in str(refusal.value)
    assert str(path) in str(refusal.value)
    assert not list((tmp_path / "cache").glob("*"))


def test_a_file_that_is_no_gguf_file_or_is_not_there_is_named(tmp_path):
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "folder.gguf").mkdir()
    for name, words in (("text", "no GGUF file"), ("folder", "cannot be read"), ("none", "cannot be read")):
        with pytest.raises(ModelNotFound, match=words):
            load(tmp_path / f"{name}.gguf", tmp_path / "cache")


def test_without_the_package_that_reads_them_the_command_that_installs_it_is_named(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", written_gguf.weights("llama"), "llama")
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    with pytest.raises(RagkvError, match="pip install 'gguf"):
        load(path, tmp_path / "cache")
