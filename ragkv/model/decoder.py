"""DecoderModel: Hugging Face weights, our own visible layer loop. The only importer of transformers' models, beside
what makes some with random weights (bench/shapes.py).

The loop calls the modules of the loaded model one by one (embedding, norms, projections with q_norm/k_norm where
present, rotary, o_proj, MLP, head), so its logits are those of the model's own forward, and it can do what a forward
cannot: show q and k before RoPE, take positions as given, write K and V rows into given slots, let rows thin out from
layer to layer, and read a cache whose layers hold different tokens. On a GPU another loop does the same in fewer
launches: fused.py.

Supported: dense decoders of the Llama, Mistral, Qwen2/2.5 and Qwen3 families with static rope and full attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from ragkv.errors import ModelNotFound, ModelUnsupported
from ragkv.kernels.attention import attend
from ragkv.model.checkpoint import find_folder, first_line, weights_hash_of
from ragkv.model.execution.fused import Fused
from ragkv.model.execution.merged_weights import supports_merging
from ragkv.model.layer_pass import Pass, write_rows
from ragkv.model.placement import SPREAD, check_spreadable, current, devices_of, following, unhooked
from ragkv.model.profile import Profile, default_profile, load_profile
from ragkv.model.prompt import Prompt
from ragkv.types import Shape

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Rotary:
    """cos, sin [T, d] of given positions, scaled as the model scales them."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, rows: Tensor) -> Rotary:
        return Rotary(self.cos[rows], self.sin[rows])

    def to(self, device: torch.device) -> Rotary:
        """The same on a device."""
        return Rotary(self.cos.to(device), self.sin.to(device))


class DecoderModel:
    """Weights (`body`, `lm_head`), tokenizer, prompt pieces and profile of a model. No request state.

    devices: of each layer · device: the first of them, where inputs go and logits are · spread: whether there are
    several (spread.py).
    """

    def __init__(
        self,
        weights: Any,
        tokenizer: Any = None,
        profile: Profile | None = None,
        name: str = "model",
        weights_hash: str = "",
    ):
        """weights: a loaded *ForCausalLM in eval mode · weights_hash: sha256 over config, tokenizer and weight files.
        `fused` is the layer loop that `forward` runs, None where it is the plain one below.

        Raises ModelUnsupported.
        """
        config = weights.config
        check_supported(config)
        self.body, self.lm_head, self.config = weights.model, weights.lm_head, config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.shape = Shape(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim)
        self.devices, self.dtype = devices_of(self.body), next(weights.parameters()).dtype
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
    def load(cls, source: str, device: str = "auto", dtype: str = "auto", profiles: Path | None = None) -> DecoderModel:
        """Load a local folder or, when `source` is no folder, a hub id.

        profiles: folder where `ragkv calibrate` keeps profiles of models that carry none.
        Raises ModelNotFound, ModelUnsupported, ConfigError (damaged profile, or nothing to spread over).
        """
        folder = find_folder(source)
        transformers.utils.logging.disable_progress_bar()
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ModelNotFound(f"model {source!r}: no readable config.json ({first_line(error)})") from None
        check_supported(config)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == SPREAD:
            check_spreadable()
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        try:
            weights = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[dtype], use_safetensors=True, device_map="balanced" if device == SPREAD else None
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            weights = (unhooked(weights) if device == SPREAD else weights.to(device)).eval()
        except KeyError:
            raise ModelUnsupported(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}") from None
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelNotFound(f"model {source!r}: cannot be loaded ({first_line(error)})") from None
        weights_hash = weights_hash_of(folder)
        profile = default_profile(config.num_hidden_layers, config.hidden_size, config.model_type)
        for path in [folder / "profile.json", *([profiles / f"{weights_hash}.json"] if profiles else [])]:
            if path.is_file():
                profile = load_profile(path, profile)
        return cls(weights, tokenizer, profile, Path(source).name, weights_hash)

    @property
    def place(self) -> str:
        """Its devices, in words."""
        named = dict.fromkeys(map(str, self.devices))
        return " and ".join(named)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        size: int = self.dtype.itemsize
        return 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim * size

    @cached_property
    def pair_weight(self) -> float:
        """What n² weighs against n when n tokens are prefilled: multiplications of a query-key pair in all layers,
        half of the pairs being visible, to those of a token with the layers' weights."""
        weights: int = sum(each.numel() for each in self.body.layers.parameters())
        return float(self.shape.layers * self.shape.q_heads * self.shape.head_dim) / weights

    @cached_property
    def prompt(self) -> Prompt:
        """The prompt pieces of this tokenizer and profile."""
        return Prompt(self.tokenizer, self.profile)

    @torch.inference_mode()
    def forward(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Run the passes together; returns each one's logits [O, vocabulary] (O rows left; empty for early stops).

        Projections and MLPs see the rows of all requests at once; each request attends to its own cache only, so a
        request's result does not depend on its company.
        """
        if not passes:
            return []
        if self.fused is not None:
            return self.fused.forward(passes)
        embed = self.body.embed_tokens
        hidden = [embed(p.tokens.to(self._embedding_at)) if p.hidden is None else p.hidden for p in passes]
        positions = [p.positions for p in passes]
        rotary = [self.rotary(p.positions) for p in passes]
        depth = max(self._depth(p) for p in passes)
        for layer in range(depth):
            running = [i for i, p in enumerate(passes) if p.start <= layer < self._depth(p)]
            if not running:
                continue
            device = self.devices[layer]
            for i in running if self.spread else ():
                hidden[i], rotary[i] = hidden[i].to(device), rotary[i].to(device)
            q, k, v = self._project(layer, [hidden[i] for i in running])
            attended: list[Tensor] = []
            for j, i in enumerate(running):
                p, step = passes[i], passes[i].steps[layer - passes[i].start]
                p.cache.wait_ready(layer)
                if p.capture is not None:
                    p.capture.add(hidden[i], q[j], k[j], v[j])
                write_rows(p, layer, step, rotate(k[j], rotary[i]), v[j])
                leave = step.leave
                if layer == self._depth(p) - 1 and p.depth is not None:
                    leave = torch.empty(0, dtype=torch.int64)  # stops here: nothing above needs its output
                if leave is not None:
                    rows = leave.to(device)
                    q[j], hidden[i], rotary[i] = q[j][rows], hidden[i][rows], rotary[i][rows]
                    positions[i] = positions[i][leave]
                attended.append(self._attend(layer, p, rotate(q[j], rotary[i]), positions[i]))
            for i, out in zip(running, self._finish(layer, [hidden[i] for i in running], attended), strict=True):
                hidden[i] = out
        final = self.body.norm(torch.cat([h.to(self._norm_at) for h in hidden]))
        return list(self._logits(final).split([h.shape[0] for h in hidden]))

    @torch.inference_mode()
    def own_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, vocabulary] of the loaded model's own forward: what the layer loop is held against."""
        ids = torch.tensor([tokens], device=self._embedding_at)
        with following(self.body, self.devices) if self.spread else nullcontext():
            hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return self._logits(hidden[0])

    def rotary(self, positions: Tensor) -> Rotary:
        """cos and sin at `positions` [T], from the model's own rotary module."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.body.rotary_emb(probe, positions[None].to(self.device))
        return Rotary(cos[0], sin[0])

    def _fuse(self) -> Fused | None:
        """The layer loop with few launches, where it is worth having."""
        if not supports_merging(self.body):
            return None
        from ragkv.kernels import triton_rows

        return Fused(self.body, self._logits, self.shape, self.scale, self._cos_sin, triton_rows)

    def _logits(self, normed: Tensor) -> Tensor:
        """[O, vocabulary] of rows behind the last norm, wherever they are."""
        logits: Tensor = self.lm_head(normed.to(self._head_at))
        return logits.to(self.device)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        at = self.rotary(positions)
        return at.cos, at.sin

    def _depth(self, p: Pass) -> int:
        return self.shape.layers if p.depth is None else p.depth

    def _project(self, layer: int, hidden: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Pre-RoPE q [T, Hq, d] and k, v [T, Hkv, d] of each request's rows."""
        block = self.body.layers[layer]
        attention, sizes = block.self_attn, [h.shape[0] for h in hidden]
        x = block.input_layernorm(torch.cat(hidden))
        q = attention.q_proj(x).view(x.shape[0], -1, self.shape.head_dim)
        k = attention.k_proj(x).view(x.shape[0], -1, self.shape.head_dim)
        v = attention.v_proj(x).view(x.shape[0], -1, self.shape.head_dim)
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        return list(q.split(sizes)), list(k.split(sizes)), list(v.split(sizes))

    def _attend(self, layer: int, p: Pass, q: Tensor, positions: Tensor) -> Tensor:
        """One request's rows over its own cache."""
        k, v, at = p.cache.k(layer), p.cache.v(layer), p.cache.positions(layer)
        with current(self.devices[layer]):
            if p.attention is None or not q.shape[0]:
                return attend(q, k, v, positions, at, scale=self.scale)
            return p.attention(layer, q, k, v, positions, at, scale=self.scale)

    def _finish(self, layer: int, hidden: list[Tensor], attended: list[Tensor]) -> list[Tensor]:
        """Output projection, residuals and MLP."""
        block = self.body.layers[layer]
        x = torch.cat(hidden)
        x = x + block.self_attn.o_proj(torch.cat([a.flatten(1) for a in attended]))
        x = x + block.mlp(block.post_attention_layernorm(x))
        return list(x.split([h.shape[0] for h in hidden]))


def rotate(x: Tensor, at: Rotary) -> Tensor:
    """Apply RoPE to x [T, heads, d], in the operation order of transformers (so results are bit-equal to it)."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * at.cos[:, None]) + (turned * at.sin[:, None])


def check_supported(config: Any) -> None:
    """Raise ModelUnsupported, in one line, for what the layer loop or stored KV cannot represent."""
    architecture = (config.architectures or [type(config).__name__.replace("Config", "ForCausalLM")])[0]
    if architecture not in ARCHITECTURES:
        raise ModelUnsupported(f"architecture {architecture} is not supported; supported: {', '.join(ARCHITECTURES)}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind not in ROPES:
        raise ModelUnsupported(f"rope type {kind!r} depends on the prompt's length, so stored keys cannot be re-used")
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise ModelUnsupported("partial rotary embeddings are not supported")
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or [])
    if sliding or getattr(config, "sliding_window", None):
        raise ModelUnsupported(
            "sliding-window attention is not supported; set sliding_window to null if the model allows"
        )


def _stop_ids(weights: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(weights, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
