"""A Llama decoder in plain loops over tokens, float64: the oracle of the real layer loop.

A cache is one dictionary per layer, from positions to rows. Nothing is batched, and no code of `ragkv` runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

Row = tuple[Vector, Vector]
"""k with RoPE and v [Hkv, d] of one token."""

Cache = list[dict[int, Row]]
"""Rows by position, per layer."""


@dataclass
class Trace:
    """What a pass computes for each token, [layer] by position.

    Attributes:
        q: Pre-RoPE queries [Hq, d].
        k: Pre-RoPE keys [Hkv, d].
        v: Values [Hkv, d].
        hidden: Hidden states behind the last layer [hidden size].
    """

    q: list[dict[int, Vector]] = field(default_factory=list)
    k: list[dict[int, Vector]] = field(default_factory=list)
    v: list[dict[int, Vector]] = field(default_factory=list)
    hidden: dict[int, Vector] = field(default_factory=dict)


class NaiveModel:
    """The weights of a LlamaForCausalLM, as numpy arrays.

    Attributes:
        layers: Number of layers.
        q_heads: Query heads.
        kv_heads: Key and value heads.
        d: Head size.
    """

    def __init__(self, weights: Any):
        config = weights.config
        self.layers, self.d = config.num_hidden_layers, config.head_dim
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._weights = {name: value.double().numpy() for name, value in weights.state_dict().items()}
        self._eps, self._theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]

    def embed(self, token: int) -> Vector:
        """Return the embedding [hidden size] of a token."""
        return self._weights["model.embed_tokens.weight"][token].copy()

    def project(self, layer: int, hidden: Vector) -> tuple[Vector, Vector, Vector]:
        """Compute pre-RoPE q [Hq, d] and k, v [Hkv, d] of one token."""
        x = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (self._weight(layer, f"self_attn.{name}_proj") @ x for name in "qkv")
        return q.reshape(self.q_heads, self.d), k.reshape(self.kv_heads, self.d), v.reshape(self.kv_heads, self.d)

    def rotate(self, x: Vector, position: int) -> Vector:
        """Rotate pairs (x_i, x_{i + d/2}) of every head by position · theta^(-2i/d)."""
        out, half = x.copy(), self.d // 2
        for head in range(x.shape[0]):
            for i in range(half):
                angle = position * self._theta ** (-2 * i / self.d)
                a, b = x[head, i], x[head, i + half]
                out[head, i] = a * math.cos(angle) - b * math.sin(angle)
                out[head, i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def weights(self, q: Vector, position: int, rows: Mapping[int, Row]) -> dict[int, Vector]:
        """Compute the attention [Hq] of one rotated query [Hq, d] to every row that it may see, by position."""
        group, seen = self.q_heads // self.kv_heads, [at for at in rows if at <= position]
        shares = {at: np.zeros(self.q_heads) for at in seen}
        for head in range(self.q_heads):
            scores = {at: float(q[head] @ rows[at][0][head // group]) / math.sqrt(self.d) for at in seen}
            top = max(scores.values())
            total = sum(math.exp(score - top) for score in scores.values())
            for at in seen:
                shares[at][head] = math.exp(scores[at] - top) / total
        return shares

    def attend(self, layer: int, hidden: Vector, q: Vector, position: int, rows: Mapping[int, Row]) -> Vector:
        """Run attention, residuals and MLP of one token: its hidden state behind the layer."""
        group = self.q_heads // self.kv_heads
        out = np.zeros((self.q_heads, self.d))
        for at, share in self.weights(self.rotate(q, position), position, rows).items():
            for head in range(self.q_heads):
                out[head] += share[head] * rows[at][1][head // group]
        x = hidden + self._weight(layer, "self_attn.o_proj") @ out.reshape(-1)
        normed = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = self._weight(layer, "mlp.gate_proj") @ normed
        up = self._weight(layer, "mlp.up_proj") @ normed
        return x + self._weight(layer, "mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)

    def logits(self, hidden: Vector) -> Vector:
        """Compute the logits [vocabulary] of a hidden state behind the last layer."""
        return self._weights["lm_head.weight"] @ self._norm(hidden, "model.norm.weight")

    def append(self, cache: Cache, tokens: Mapping[int, int]) -> Trace:
        """Prefill tokens by position over a cache, and write their rows to it."""
        trace = Trace(hidden={at: self.embed(token) for at, token in tokens.items()})
        for layer in range(self.layers):
            projected = {at: self.project(layer, trace.hidden[at]) for at in tokens}
            for part, number in ((trace.q, 0), (trace.k, 1), (trace.v, 2)):
                part.append({at: rows[number] for at, rows in projected.items()})
            for at, (_, k, v) in projected.items():
                cache[layer][at] = self.rotate(k, at), v
            for at, (q, _, _) in projected.items():
                trace.hidden[at] = self.attend(layer, trace.hidden[at], q, at, cache[layer])
        return trace

    def empty(self) -> Cache:
        """Return a cache without rows."""
        return [{} for _ in range(self.layers)]

    def _weight(self, layer: int, name: str) -> Vector:
        return self._weights[f"model.layers.{layer}.{name}.weight"]

    def _norm(self, x: Vector, name: str) -> Vector:
        return x / math.sqrt(float(x @ x) / len(x) + self._eps) * self._weights[name]


def mean(vectors: Collection[Vector]) -> Vector:
    """Average vectors, one after the other."""
    total = np.zeros_like(next(iter(vectors)))
    for vector in vectors:
        total = total + vector
    return total / len(vectors)


def cosine(a: Vector, b: Vector) -> float:
    """Compute the cosine of two vectors of any shape."""
    a, b = a.reshape(-1), b.reshape(-1)
    return float(a @ b) / (math.sqrt(float(a @ a)) * math.sqrt(float(b @ b)))
