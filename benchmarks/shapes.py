"""Models of known shapes with random weights, to measure times without a trained model.

The cost of dense attention depends on shapes alone. What a sparse policy chooses, and therefore costs, depends on where
the attention lies. With plain random weights it is spread over all keys, as in no trained model, so these weights are
*sparse by construction*. A few coordinates of the hidden state are reserved: the embedding writes them, no layer does.

    coordinate    written by                        read by
    0             every token                       q_proj: what a query head looks for; k_proj: where a key stands
    1 … 4         anchors: of each group one token  k_proj of the kv heads that read the group
                  id in `ANCHOR_EVERY`, .5 to 1
    5             the first token of an input       k_proj of every kv head

    near          constant queries and keys in pairs of dimensions that RoPE turns fast: the score falls with the
                  distance from an offset, so neighbours are attended to, and echoes farther away -> slash lines
    anchors       in pairs that RoPE hardly turns, so the position does not matter -> vertical lines
    sink          likewise, the first token

Every query head attends to the sink and to near, anchors, or both, as drawn per head. All other weights are random and
give every score noise of standard deviation 1. Layers write little, so the structure is the same at every depth.

The table says what share of its keys, at least, holds .95 of a row's attention. It was measured with
`tools/key_share.py`, with the heads of llama-3.1-8b on a hidden size of 512:

                                      median head    nine of ten    most
    8,192 tokens, 2 layers                   .13%            .5%     .9%
    32,768 tokens, 1 layer                   .09%            .3%    1.0%
    plain random, hidden size 4096            50%            52%     53%

The shares are small because the first token alone often holds most of a row, as in trained models. So times measured
on these models are meaningful. Errors of their outputs mean little: they lack what heads of a trained model search for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.own_shapes import OWN_SHAPES, own_random_model
from ragkv.errors import InputError
from ragkv.kernels.packed_products import pack_products, supports_packing
from ragkv.model.decoder import DecoderModel
from ragkv.model.execution.fp8_weights import quantise_weights
from ragkv.model.placement import SPREAD, assign_layers, gpus

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MILLION = {"rope_type": "default", "rope_theta": 1_000_000.0}

FIRST = 1
"""Token id that every input starts with."""
CONSTANT, GROUPS, SINK = 0, (1, 2, 3, 4), 5
APART = 6
"""Number of reserved coordinates of the hidden state."""
ANCHOR_EVERY = 512
NOISE = 0.1
"""Random share of the hidden state's power; the constant coordinate has nearly all of the rest."""
WRITTEN = 0.5
"""Power that all layers together add, as a share of the random power."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        kind: prefix of transformers' class names.
        rope: parameters of RoPE.
        positions: tokens of the longest input.
    """

    kind: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    rope: dict[str, Any]
    positions: int


SHAPES = {
    "llama-3.1-8b": ModelShape("Llama", 32, 32, 8, 128, 4096, 14336, 128256, LLAMA3, 131072),
    "llama-3.1-70b": ModelShape("Llama", 80, 64, 8, 128, 8192, 28672, 128256, LLAMA3, 131072),
    "mistral-7b": ModelShape("Mistral", 32, 32, 8, 128, 4096, 14336, 32768, MILLION, 32768),
    "qwen2.5-3b": ModelShape("Qwen2", 36, 16, 2, 128, 2048, 11008, 151936, MILLION, 32768),
    "tiny": ModelShape("Llama", 4, 8, 2, 32, 64, 128, 2048, LLAMA3, 131072),
}


def random_model(
    shape: str | ModelShape,
    device: str | torch.device | Sequence[torch.device] = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    layers: int | None = None,
    sparse: bool = True,
    form: str = "exact",
) -> DecoderModel:
    """Make a model without a tokenizer. The weights depend on the seed and the kind of device alone.

    Output embeddings are never tied to the input embeddings.

    Args:
        device: one device; or `spread`, or several devices, which get equal runs of layers and, together, other weights
            than a single device.
        dtype: default bfloat16 on CUDA, else float32.
        layers: number of layers, if not the shape's.
        sparse: weights that are sparse by construction (see the module); False: plain random weights.
        form: `exact` or `fp8`, as `RAGKV_WEIGHTS`. Shapes of own_shapes.py have `exact` weights and all their layers.

    Raises:
        InputError: unknown shape, or unknown form.
        ConfigError: there is no GPU to spread over.
    """
    if form not in ("exact", "fp8"):
        raise InputError(f"weights have the form exact or fp8, not {form!r}")
    if isinstance(shape, str) and shape in OWN_SHAPES and isinstance(device, (str, torch.device)):
        if layers or form != "exact":
            raise InputError(f"shape {shape!r} has all its layers, and exact weights")
        return own_random_model(shape, device, dtype, seed)
    name, sizes = (shape, find_shape(shape)) if isinstance(shape, str) else ("random", shape)
    if device == SPREAD:
        device = gpus()
    devices = [torch.device(device)] if isinstance(device, (str, torch.device)) else list(device)
    if dtype is None:
        dtype = torch.bfloat16 if devices[0].type == "cuda" else torch.float32
    weights = _empty(model_config(sizes, layers or sizes.layers), devices, dtype).eval().requires_grad_(False)
    with torch.no_grad():
        _fill(weights, seed, sparse)
        if sparse:
            _set_apart(weights, torch.Generator().manual_seed(seed))
    if form == "fp8":  # as `DecoderModel.load` does
        quantise_weights(weights)
    elif supports_packing(weights):
        pack_products(weights)
    return DecoderModel(weights, name=name)


def find_shape(name: str) -> ModelShape:
    """The shape of that name. Raises InputError, which lists the names."""
    if name not in SHAPES:
        raise InputError(f"shape {name!r} does not exist; choose one of {', '.join((*SHAPES, *OWN_SHAPES))}")
    return SHAPES[name]


def random_tokens(model: DecoderModel, length: int, seed: int = 0) -> list[int]:
    """Token ids of an input: FIRST, then ids drawn evenly from the rest of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(FIRST + 1, model.config.vocab_size, (length - 1,), generator=generator)
    return [FIRST, *drawn.tolist()]


def model_config(shape: ModelShape, layers: int) -> Any:
    """Return the configuration of a model of that shape with so many layers."""
    given = {"sliding_window": None} if shape.kind == "Mistral" else {}
    return getattr(transformers, f"{shape.kind}Config")(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.positions,
        rope_parameters=dict(shape.rope),
        tie_word_embeddings=False,
        **given,
    )


def _empty(config: Any, devices: Sequence[torch.device], dtype: torch.dtype) -> Any:
    """A model with uninitialised weights. Several devices get equal runs of its layers."""
    if len(devices) == 1:
        with devices[0]:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.device("meta"):
        weights = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    body, places = weights.model, assign_layers(config.num_hidden_layers, devices)
    for module, at in (
        *((body.embed_tokens, devices[0]), (body.norm, devices[-1]), (weights.lm_head, devices[-1])),
        *zip(body.layers, places, strict=True),
    ):
        module.to_empty(device=at)
    body.rotary_emb = type(body.rotary_emb)(config).to(devices[0])  # its frequencies are not among the weights
    return weights


def _fill(weights: Any, seed: int, sparse: bool) -> None:
    """Draw every matrix with a generator on its device; norms are ones and biases zeros.

    With `sparse`, queries, keys, values and the MLP's hidden layer have a variance of about 1, and what layers write is
    scaled down.
    """
    config = weights.config
    written = math.sqrt(NOISE * WRITTEN / (2 * config.num_hidden_layers))
    attended = 0.1 * config.num_attention_heads * config.head_dim  # measured: power of an average over keys is about .1
    gated = 0.36 * config.intermediate_size  # E silu(x)^2 = .36
    deviations = {
        "embed_tokens": math.sqrt(NOISE),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), 1 / math.sqrt(NOISE * config.hidden_size)),
        **dict.fromkeys(("gate_proj", "up_proj", "lm_head"), 1 / math.sqrt(config.hidden_size)),
        "o_proj": written / math.sqrt(attended),
        "down_proj": written / math.sqrt(gated),
    }
    devices = dict.fromkeys(each.device for each in weights.parameters())
    generators = {device: torch.Generator(device).manual_seed(seed + i) for i, device in enumerate(devices)}
    for name, parameter in weights.named_parameters():
        kind = name.split(".")[-2]
        if kind in deviations:
            deviation = deviations[kind] if sparse else 0.02
            if name.endswith("weight"):
                parameter.normal_(0, deviation, generator=generators[parameter.device])
            else:
                parameter.zero_()
        else:
            parameter.fill_(1)


def _set_apart(weights: Any, generator: torch.Generator) -> None:
    """Write the structure into the reserved coordinates. It is drawn on the CPU: the same on every device."""
    config, body = weights.config, weights.model
    size, hidden = config.vocab_size, config.hidden_size
    constant, mark = math.sqrt((1 - NOISE) * hidden), math.sqrt(0.1 * hidden)
    embedding = torch.zeros(size, APART)
    embedding[:, CONSTANT] = constant
    for group in GROUPS:
        anchors = torch.randperm(size, generator=generator)[: max(1, size // ANCHOR_EVERY)]
        embedding[anchors, group] = mark * (0.5 + 0.5 * torch.rand(len(anchors), generator=generator))
    embedding[FIRST, SINK] = mark
    body.embed_tokens.weight[:, :APART] = embedding.to(body.embed_tokens.weight)
    weights.lm_head.weight[:, :APART] = 0
    frequencies = body.rotary_emb.inv_freq.double().cpu()
    for layer in body.layers:
        attention = layer.self_attn
        q, k = _directions(config, frequencies, generator)
        attention.q_proj.weight[:, :APART] = (q / constant).to(attention.q_proj.weight)
        attention.k_proj.weight[:, :APART] = (k / torch.tensor([constant] + [mark] * 5)).to(attention.k_proj.weight)
        attention.v_proj.weight[:, :APART] = 0
        attention.o_proj.weight[:APART] = 0
        layer.mlp.down_proj.weight[:APART] = 0


def _directions(config: Any, frequencies: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Components of q [Hq * d, APART] and k [Hkv * d, APART] of one layer, per unit of each coordinate.

    Pair i of a head's dimensions is (i, i + d / 2), turned by position times frequencies[i].
    """
    d, pairs = config.head_dim, config.head_dim // 2
    slow = max(2, d // 16)
    anchored, sunk = torch.arange(pairs - slow, pairs - slow // 2), torch.arange(pairs - slow // 2, pairs)
    placed = torch.arange(pairs)[frequencies >= 1 / WIDEST]
    q = torch.zeros(config.num_attention_heads, d, APART)
    k = torch.zeros(config.num_key_value_heads, d, APART)
    k[:, placed, CONSTANT] = KEY
    k[:, sunk, SINK] = KEY
    for head in k:
        group = GROUPS[int(torch.randint(len(GROUPS), (1,), generator=generator))]
        head[anchored, group] = KEY

    def between(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand(1, generator=generator))

    def towards(chosen: Tensor, score: float) -> float:
        """The query's component in each chosen pair that gives the score if all pairs agree."""
        return score * math.sqrt(d) / (KEY * len(chosen))

    for head in q:
        near, far = KINDS[int(torch.randint(len(KINDS), (1,), generator=generator))]
        head[sunk, CONSTANT] = towards(sunk, between(*SINKS))
        if far:
            head[anchored, CONSTANT] = towards(anchored, between(*FAR))
        if near:
            width = math.exp(between(math.log(WIDEST / 16), math.log(WIDEST)))
            offset = 0.0 if between(0, 1) < AT_HOME else math.exp(between(0, math.log(256)))
            chosen = placed[(frequencies[placed] >= 1 / width) & (frequencies[placed] <= 16 / width)]
            strength, phase = towards(chosen, between(*NEAR)), -frequencies[chosen] * round(offset)
            head[chosen, CONSTANT] = (strength * phase.cos()).float()
            head[chosen + pairs, CONSTANT] = (strength * phase.sin()).float()
    return q.flatten(0, 1), k.flatten(0, 1)


KINDS = ((True, False), (False, True), (True, True))
"""(near, anchors): whether a head attends to them."""
KEY = 3.0
"""A key's component in every dimension where it is constant."""
WIDEST = 256.0
NEAR, FAR, SINKS = (13.0, 17.0), (13.0, 17.0), (14.0, 17.0)
"""Ranges of scores: of the best position, of the strongest anchors, of the first token."""
AT_HOME = 0.75
"""Share of the near heads whose offset is 0."""
