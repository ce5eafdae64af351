"""Folders as they are published: the text part of multimodal ones, and quantised weights, multiplied out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.model import published
from ragkv.model.decoder import DecoderModel
from ragkv.model.published import load_weights, served_config

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def multimodal(kind: str, vocabulary: int):
    """A tiny random model of a class that reads images."""
    text = {**TEXT, "vocab_size": vocabulary}
    if kind == "mistral3":
        text |= {"model_type": "mistral", "sliding_window": None}
        config = transformers.Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **VISION})
    elif kind == "llava":
        text |= {"model_type": "llama"}
        vision = {"model_type": "clip_vision_model", **VISION}
        config = transformers.LlavaConfig(text_config=text, vision_config=vision)
    elif kind == "gemma3":
        vision = {"model_type": "siglip_vision_model", **VISION}
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    else:
        config = transformers.Qwen3_5Config(text_config={**text, **LINEAR}, vision_config=EYES)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config).eval()


def renamed(name: str) -> str:
    """The name of a weight in checkpoints of the first releases of these classes."""
    if name.startswith("lm_head"):
        return f"language_model.{name}"
    return name.replace("model.language_model.", "language_model.model.").removeprefix("model.")


def write(folder: Path, model, naming: str) -> Path:
    """Save a multimodal model, under the names of today's or of the first releases."""
    model.save_pretrained(folder)
    if naming == "first":
        weights = {renamed(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("naming", ["now", "first"])
@pytest.mark.parametrize("kind", ["mistral3", "llava", "gemma3", "qwen3_5"])
def test_the_text_part_of_a_multimodal_folder_is_loaded_alone(tmp_path, kind, naming, capfd):
    model = multimodal(kind, 97)
    folder = write(tmp_path, model, naming)
    config = served_config(transformers.AutoConfig.from_pretrained(folder))
    weights = load_weights(folder, config, torch.float32, None)
    assert type(weights).__name__.endswith("ForCausalLM")
    assert not [name for name, _ in weights.named_parameters() if "vision" in name or "visual" in name]
    ids = torch.randint(10, 90, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(weights(ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)
    assert "UNEXPECTED" not in capfd.readouterr().err


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return transformers.AutoTokenizer.from_pretrained(tiny_folder)


@pytest.mark.parametrize("kind", ["mistral3", "llava", "gemma3", "qwen3_5"])
def test_a_multimodal_folder_is_served(tmp_path, tokenizer, kind):
    model = multimodal(kind, len(tokenizer))
    tokenizer.save_pretrained(write(tmp_path, model, "now"))
    served = DecoderModel.load(str(tmp_path), "cpu", "float32")
    ids = list(range(3, 60))
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(served.own_logits(ids)[-1], expected, rtol=0, atol=1e-4)


def test_a_folder_that_lacks_weights_is_refused_with_their_name(tmp_path, tokenizer):
    model = multimodal("llava", len(tokenizer))
    tokenizer.save_pretrained(write(tmp_path, model, "now"))
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if "layers.1.self_attn.k_proj" not in name}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelNotFound, match=r"lacks weights .*layers\.1\.self_attn\.k_proj"):
        DecoderModel.load(str(tmp_path), "cpu")


def test_a_text_part_without_a_model_of_its_own_is_refused(tmp_path, tokenizer):
    text = {**TEXT, "vocab_size": len(tokenizer), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = transformers.Qwen2_5_VLConfig(text_config=text)
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="Qwen2_5_VLForConditionalGeneration: its text part") as refusal:
        DecoderModel.load(str(tmp_path), "cpu")
    assert "\n" not in str(refusal.value)


def fp8(weights: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (weights in FP8, scales a block, what they stand for)."""
    rows, columns = (size // part for size, part in zip(weights.shape, block, strict=True))
    parts = weights.reshape(rows, block[0], columns, block[1])
    scales = parts.abs().amax((1, 3)) / 448
    rounded = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meant = rounded.float() * scales[:, None, :, None]
    return rounded.reshape(weights.shape), scales, meant.reshape(weights.shape)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
FORMS = {
    "blocks": ((32, 32), "weight_scale_inv", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "rows": ((1, 0), "weight_scale", {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}),
    "matrices": ((0, 0), "weight_scale", {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}),
}


def llama(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer), tie_word_embeddings=False)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def quantise(folder: Path, tokenizer, form: str):
    """Write a folder with projections in FP8; return the model that it stands for."""
    block, name, settings = FORMS[form]
    model = llama(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    for key in [key for key in stored if key.endswith("_proj.weight")]:
        sizes = tuple(part or size for part, size in zip(block, stored[key].shape, strict=True))
        stored[key], scales, meant = fp8(stored[key], sizes)
        stored[key.replace("weight", name)] = scales.reshape(()) if form == "matrices" else scales
        model.state_dict()[key].copy_(meant)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(folder, settings)
    return model


def set_quantisation(folder: Path, settings: dict) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_in_fp8_are_multiplied_out(tmp_path, tokenizer, form, dtype):
    model = quantise(tmp_path, tokenizer, form)
    config = served_config(transformers.AutoConfig.from_pretrained(tmp_path))
    weights = load_weights(tmp_path, config, getattr(torch, dtype), None)
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights.state_dict()[name], tensor.to(getattr(torch, dtype))), name
    served = DecoderModel.load(str(tmp_path), "cpu", "float32")
    ids = list(range(3, 60))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(served.own_logits(ids)[-1], expected, rtol=0, atol=1e-4)


MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def multiplied_out(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights [experts, in, out] of MXFP4: two numbers a byte, low half first, a power of two for 32 of them."""
    numbers = torch.tensor(MXFP4)[torch.stack([blocks & 15, blocks >> 4], -1).int()].flatten(-2)
    return (numbers * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)


def test_experts_in_mxfp4_are_multiplied_out(tmp_path):
    config = transformers.GptOssConfig(
        **TEXT, vocab_size=97, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    expected = dict(stored)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 128, (experts, columns, rows // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = multiplied_out(blocks, scales)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    read = served_config(transformers.AutoConfig.from_pretrained(tmp_path))
    found = load_weights(tmp_path, read, torch.float32, None).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float()), name


REFUSED = {
    "gptq": ({"quant_method": "gptq", "bits": 4}, "gptq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "int4": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}},
        },
        r"compressed-tensors \(4-bit int\)",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_quantisations_are_refused_with_what_is_read(tmp_path, tokenizer, what):
    settings, words = REFUSED[what]
    llama(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    set_quantisation(tmp_path, settings)
    with pytest.raises(ModelUnsupported, match=rf"{words} are not read; FP8 .* GGUF files are read") as refusal:
        DecoderModel.load(str(tmp_path), "cpu")
    assert "\n" not in str(refusal.value)


def test_without_the_package_that_reads_them_the_command_that_installs_it_is_named(tmp_path, tokenizer, monkeypatch):
    quantise(tmp_path, tokenizer, "blocks")
    monkeypatch.setattr(published, "find_spec", lambda name: None)
    with pytest.raises(ModelUnsupported, match="pip install 'accelerate"):
        DecoderModel.load(str(tmp_path), "cpu")
