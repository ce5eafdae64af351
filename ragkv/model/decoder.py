"""A decoder model: Hugging Face weights with our own layer loop.

The loop calls the modules of the loaded model one by one (embedding, norms, projections with q_norm/k_norm where
present, rotary, o_proj, MLP, head), so its logits are those of the model's own forward. It can also do what a forward
cannot: expose q and k before RoPE, take explicit positions, write K and V rows into given slots, drop rows from layer
to layer, and read a cache whose layers hold different tokens. On a GPU `execution/fused.py` does the same with fewer
launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragkv.kernels.attention import MaskPlan, attend_planned, index_to_device, plan_mask
from ragkv.kernels.packed_products import pack_products, supports_packing
from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.execution.fp8_weights import check_fp8, quantise_weights
from ragkv.model.execution.fused import Fused
from ragkv.model.execution.merged_weights import supports_merging
from ragkv.model.hashing import joined_hash
from ragkv.model.layer_pass import Pass, write_rows
from ragkv.model.model_cache import Notify
from ragkv.model.placement import layer_devices, move_inputs, on_device
from ragkv.model.profile import Profile, default_profile
from ragkv.model.prompt import Prompt
from ragkv.model.source import ModelSource
from ragkv.model.supported import check_supported
from ragkv.types import Shape


@dataclass(frozen=True)
class Rotary:
    """cos and sin [T, d] of given positions, scaled as the model scales them."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor) -> Rotary:
        """Select rows."""
        return Rotary(self.cos[rows], self.sin[rows])

    def to(self, device: torch.device) -> Rotary:
        """Return the same on a device."""
        return Rotary(self.cos.to(device), self.sin.to(device))


class DecoderModel:
    """Weights, tokenizer, prompt pieces and profile of a model. It holds no request state.

    Attributes:
        body: the decoder body (embedding, layers, last norm).
        lm_head: the head.
        config: the configuration of transformers.
        shape: layers, heads and head size.
        devices: device of each layer.
        device: device of the first layer, where inputs go and logits are returned.
        dtype: dtype of the weights.
        spread: whether the weights are on several devices (placement.py).
        scale: factor of attention scores.
        tokenizer: the tokenizer of transformers.
        name: the name of the model.
        weights_hash: sha256 over config, tokenizer and weight files.
        profile: block sizes, stable layers, retrieval heads and prompt pieces.
        stop_ids: token ids that end an answer.
        max_positions: length of the model's context.
        fused: the layer loop that `forward` runs; None for the plain loop of this class.
    """

    def __init__(
        self,
        weights: Any,
        tokenizer: Any = None,
        profile: Profile | None = None,
        name: str = "model",
        weights_hash: str = "",
    ):
        """Wrap loaded weights.

        Args:
            weights: a loaded *ForCausalLM in eval mode.
            tokenizer: the tokenizer of transformers.
            profile: None for the default profile of the model.
            name: the name of the model.
            weights_hash: sha256 over config, tokenizer and weight files.

        Raises:
            ModelUnsupported: the layer loop cannot run the model.
        """
        config = weights.config
        check_supported(config)
        self.body, self.lm_head, self.config = weights.model, weights.lm_head, config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = Shape(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim)
        self.devices, self.dtype = layer_devices(self.body), next(weights.parameters()).dtype
        self.device, self.spread = self.devices[0], len({each.device for each in weights.parameters()}) > 1
        ends = (self.body.embed_tokens, self.body.norm, self.lm_head)
        self._embedding_at, self._norm_at, self._head_at = (next(each.parameters()).device for each in ends)
        self.scale: float = self.body.layers[0].self_attn.scaling
        self.tokenizer, self.name, self.weights_hash = tokenizer, name, weights_hash
        self.profile = profile or default_profile(self.shape.layers, config.hidden_size, config.model_type)
        self.stop_ids = _stop_ids(weights, tokenizer)
        self.max_positions: int = config.max_position_embeddings
        self.fused = self._fuse()

    @classmethod
    def load(
        cls,
        source: str | ModelSource,
        device: str = "auto",
        dtype: str = "auto",
        profiles: Path | None = None,
        cache: Path | None = None,
        notify: Notify = lambda line: None,
        weights: str = "exact",
    ) -> DecoderModel:
        """Load a local folder, a GGUF file or, when `source` is no path, a hub id. See `checkpoint.load_checkpoint`.

        The weights belong to this model and are not trained, so their products may be packed.

        Args:
            source: as of `load_checkpoint`, like the next five.
            weights: `exact`, or `fp8` to round them to FP8 (`execution/fp8_weights.py`).

        Raises:
            ConfigError: the device does not multiply in FP8; or as `load_checkpoint`, like all other errors.
        """
        found = load_checkpoint(source, device, dtype, profiles, cache, notify)
        weights_hash = found.weights_hash
        if weights == "fp8":
            for layer_device in dict.fromkeys(layer_devices(found.weights.model)):
                check_fp8(layer_device)
            quantise_weights(found.weights)
            weights_hash = joined_hash(weights_hash, weights)
        elif supports_packing(found.weights):
            pack_products(found.weights)
        return cls(found.weights, found.tokenizer, found.profile, found.name, weights_hash)

    @property
    def device_names(self) -> str:
        """Names of the devices, for display."""
        return " and ".join(dict.fromkeys(map(str, self.devices)))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        size: int = self.dtype.itemsize
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * size

    @cached_property
    def pair_weight(self) -> float:
        """Weight of n² against n in the cost of prefilling n tokens.

        This is the number of multiplications of a query-key pair in all layers, with half of the pairs visible, divided
        by the number of multiplications of a token with the weights of the layers.
        """
        weights: int = sum(each.numel() for each in self.body.layers.parameters())
        return float(self.shape.layers * self.shape.q_heads * self.shape.head_dim) / weights

    @cached_property
    def prompt(self) -> Prompt:
        """Prompt pieces of the tokenizer and profile."""
        return Prompt(self.tokenizer, self.profile)

    @torch.inference_mode()
    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Run passes together.

        Projections and MLPs process the rows of all requests at once. Each request attends to its own cache only, so
        its result does not depend on the other requests.

        Returns:
            Logits [O, vocabulary] of each pass for the O rows that are left; empty for a pass that stops early.
        """
        if not passes:
            return []
        if self.fused is not None:
            return self.fused.forward(passes)
        embed = self.body.embed_tokens
        hidden = [embed(p.tokens.to(self._embedding_at)) if p.hidden is None else p.hidden for p in passes]
        positions, plans = [p.positions for p in passes], list[MaskPlan | None]([None] * len(passes))
        rotary = [self.rotary(p.positions) for p in passes]
        depth = max(self._depth(p) for p in passes)
        for layer in range(depth):
            running = [i for i, p in enumerate(passes) if p.start <= layer < self._depth(p)]
            if not running:
                continue
            device = self.devices[layer]
            for i in running if self.spread else ():
                hidden[i], rotary[i], plans[i] = hidden[i].to(device), rotary[i].to(device), None
            q, k, v = self._project(layer, [hidden[i] for i in running])
            turned, turned_keys = _rotate_together(q, k, [rotary[i] for i in running])
            attended: list[Tensor] = []
            for j, i in enumerate(running):
                p, step = passes[i], passes[i].steps[layer - passes[i].start]
                p.cache.wait_ready(layer)
                if p.capture is not None:
                    p.capture.add(hidden[i], q[j], k[j], v[j])
                write_rows(p, layer, step, turned_keys[j], v[j])
                leave = step.leave
                if layer == self._depth(p) - 1 and p.depth is not None:
                    leave = torch.empty(0, dtype=torch.int64)  # the pass stops here: nothing above needs its output
                if leave is not None:
                    rows = index_to_device(leave, device)
                    turned[j], hidden[i], rotary[i] = turned[j][rows], hidden[i][rows], rotary[i][rows]
                    positions[i] = positions[i][leave]
                out, plans[i] = self._attend(layer, p, turned[j], positions[i], plans[i])
                attended.append(out)
            for i, rows in zip(running, self._finish(layer, [hidden[i] for i in running], attended), strict=True):
                hidden[i] = rows
        final = self.body.norm(torch.cat([h.to(self._norm_at) for h in hidden]))
        return list(self._logits(final).split([h.shape[0] for h in hidden]))

    @torch.inference_mode()
    def own_logits(self, tokens: Sequence[int]) -> Tensor:
        """Compute logits [n, vocabulary] with the loaded model's own forward, to check the layer loop."""
        ids = torch.tensor([tokens], device=self._embedding_at)
        with move_inputs(self.body, self.devices) if self.spread else nullcontext():
            hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return self._logits(hidden[0])

    def rotary(self, positions: Tensor) -> Rotary:
        """Compute cos and sin at `positions` [T] with the model's own rotary module."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.body.rotary_emb(probe, positions[None].to(self.device))
        return Rotary(cos[0], sin[0])

    def _fuse(self) -> Fused | None:
        """Make the layer loop with few launches where the model supports it."""
        if not supports_merging(self.body):
            return None
        from ragkv.kernels import triton_rows

        return Fused(self.body, self._logits, self.shape, self.scale, self._cos_sin, triton_rows)

    def _logits(self, normed: Tensor) -> Tensor:
        """Compute logits [O, vocabulary] of rows behind the last norm, on any device."""
        logits: Tensor = self.lm_head(normed.to(self._head_at))
        return logits.to(self.device)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self.rotary(positions)
        return rotary.cos, rotary.sin

    def _depth(self, p: Pass) -> int:
        return self.shape.layers if p.depth is None else p.depth

    def _project(self, layer: int, hidden: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Compute pre-RoPE q [T, Hq, d] and k, v [T, Hkv, d] of each request's rows."""
        block = self.body.layers[layer]
        attention, sizes = block.self_attn, [h.shape[0] for h in hidden]
        x = block.input_layernorm(torch.cat(hidden))
        q = attention.q_proj(x).view(x.shape[0], -1, self.shape.head_dim)
        k = attention.k_proj(x).view(x.shape[0], -1, self.shape.head_dim)
        v = attention.v_proj(x).view(x.shape[0], -1, self.shape.head_dim)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return list(q.split(sizes)), list(k.split(sizes)), list(v.split(sizes))

    def _attend(
        self, layer: int, p: Pass, q: Tensor, positions: Tensor, plan: MaskPlan | None
    ) -> tuple[Tensor, MaskPlan | None]:
        """Compute attention of one request's rows over its own cache. plan: of the layer below, None for none.

        Returns:
            The attention, and the mask's plan for the layer above.
        """
        k, v, k_pos = p.cache.k(layer), p.cache.v(layer), p.cache.positions(layer)
        if not q.shape[0]:
            return q, plan
        with on_device(self.devices[layer]):
            if p.attention is not None:
                return p.attention(layer, q, k, v, positions, k_pos, scale=self.scale), plan
            if plan is None or not plan.fits(positions, k_pos):
                plan = plan_mask(positions, k_pos, q.device, q.shape[1] // k.shape[1])
            return attend_planned(q, k, v, plan, scale=self.scale), plan

    def _finish(self, layer: int, hidden: list[Tensor], attended: list[Tensor]) -> list[Tensor]:
        """Apply output projection, residuals and MLP."""
        block = self.body.layers[layer]
        x = torch.cat(hidden)
        x = x + block.self_attn.o_proj(torch.cat([a.flatten(1) for a in attended]))
        x = x + block.mlp(block.post_attention_layernorm(x))
        return list(x.split([h.shape[0] for h in hidden]))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply RoPE to x [T, heads, d] in the operation order of transformers, so that results are bit-equal."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * rotary.cos[:, None]) + (rotated * rotary.sin[:, None])


def _rotate_together(
    q: Sequence[Tensor], k: Sequence[Tensor], rotary: Sequence[Rotary]
) -> tuple[list[Tensor], list[Tensor]]:
    """Rotate the q and k of several requests at once: a few rows each take as long as all of them."""
    if len(rotary) == 1:
        return [rotate(q[0], rotary[0])], [rotate(k[0], rotary[0])]
    sizes = [each.shape[0] for each in q]
    every = Rotary(torch.cat([each.cos for each in rotary]), torch.cat([each.sin for each in rotary]))
    return list(rotate(torch.cat(list(q)), every).split(sizes)), list(rotate(torch.cat(list(k)), every).split(sizes))


def _stop_ids(weights: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(weights, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
