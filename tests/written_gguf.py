"""GGUF files that tests write: tiny random models with a small byte-level tokenizer, in llama.cpp's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import tiny

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġ", "the"), ("a", "r"), ("b", "o"), ("bo", "ur"), ("u", "r"))
BOS, EOS = 1, 2
OLDER = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose names and forms stand here, and not in gguf's table."""

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{each}_proj": f"attn_{each}" for each in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{each}_proj": f"ffn_{each}" for each in ("gate", "up", "down")},
}


def vocabulary() -> list[str]:
    """All tokens, special ones first."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]


def tokenizer() -> Tokenizer:
    """The tokenizer that a file describes, made without the file."""
    ids = {token: number for number, token in enumerate(vocabulary())}
    made = Tokenizer(models.BPE(ids, list(MERGES)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return made


def weights(kind: str, **options):
    """A tiny *ForCausalLM of the vocabulary above, in float32, every weight a bfloat16 number."""
    made = tiny.weights(kind, layers=2, vocabulary=len(vocabulary()), **options).float()
    for parameter in made.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    return made


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """q or k rows as llama.cpp's convert_hf_to_gguf.py orders them."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors(model, architecture: str) -> dict[str, np.ndarray]:
    """The weights under llama.cpp's names, in its order of rows."""
    found = {}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        parts = stem.split(".")
        ours = ".".join(parts[3:]) if parts[:2] == ["model", "layers"] else stem
        prefix = f"blk.{parts[2]}." if parts[:2] == ["model", "layers"] else ""
        data = tensor.float().numpy()
        if architecture in ("llama", "mistral") and ours.endswith(("q_proj", "k_proj")):
            config = model.config
            data = permuted(data, config.num_attention_heads if "q_" in ours else config.num_key_value_heads)
        found[f"{prefix}{_TENSORS[ours]}.{suffix}"] = data
    return found


def converted(model, architecture: str) -> dict[str, np.ndarray]:
    """The weights as llama.cpp's converter writes those of newer architectures: under its names, in its form."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table, found = gguf.get_tensor_name_map(number, model.config.num_hidden_layers), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        parts = {name: tensor.float()}
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.float().chunk(2, 1)
            parts = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        for part, data in parts.items():
            stem, _, suffix = part.rpartition(".")
            stored = f"{table.get_name(stem)}.{suffix}" if table.get_name(stem) else f"{table.get_name(part)}.weight"
            if architecture in ("gemma2", "gemma3") and stem.endswith("norm"):
                data = data + 1
            found[stored] = (data[:, 0] if stem.endswith("conv.conv") else data).numpy()
    return found


def write_gguf(
    path: Path,
    model,
    architecture: str,
    *,
    quantised: gguf.GGMLQuantizationType | None = None,
    metadata: Mapping[str, object] | None = None,
    changed: Mapping[str, np.ndarray | None] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType | None] | None = None,
) -> Path:
    """Write a file.

    Args:
        path: where.
        model: a *ForCausalLM.
        architecture: as llama.cpp calls it.
        quantised: type of matrices; None for float32.
        metadata: more values, strings, numbers or lists; they win over the usual ones.
        changed: tensors that replace or join those of the model; None removes one.
        types: types of single tensors, other than `quantised`.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if f"{architecture}.attention.head_count_kv" not in (metadata or {}):
        writer.add_head_count_kv(config.num_key_value_heads)
    for name in ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps"):
        if hasattr(config, name):
            plain = name in ("norm_epsilon", "layer_norm_eps")
            (writer.add_layer_norm_eps if plain else writer.add_layer_norm_rms_eps)(getattr(config, name))
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or head_dim
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    for key, value in (metadata or {}).items():
        kinds = {str: writer.add_string, float: writer.add_float32, list: writer.add_array}
        kinds.get(type(value), writer.add_uint32)(key, value)
    given = tensors(model, architecture) if architecture in OLDER else converted(model, architecture)
    for name, data in {**given, **(changed or {})}.items():
        if data is None:
            continue
        kind = (types or {}).get(name, quantised)
        if kind is not None and data.ndim == 2:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
