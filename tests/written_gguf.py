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
        metadata: more values, strings or numbers; they win over the usual ones.
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
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    for name, data in {**tensors(model, architecture), **(changed or {})}.items():
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
