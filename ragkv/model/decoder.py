"""A decoder model: Hugging Face weights with our own layer loop.

The loop calls the layers of the loaded model one by one (layer_bodies.py), so its logits are those of the model's own
forward. It can also do what a forward cannot: expose q and k before RoPE, take explicit positions, write K and V rows
into given slots, drop rows from layer to layer, and read a cache whose layers hold different tokens. On a GPU
`execution/fused.py` does the same with fewer launches, for layers made as Llama's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ragkv.errors import ModelUnsupported
from ragkv.kernels.attention import index_to_device
from ragkv.kernels.packed_products import pack_products, supports_packing
from ragkv.model.agreement import TOLERANCE, centred, relative_error
from ragkv.model.checkpoint import load_checkpoint
from ragkv.model.execution.few_rows import FewRows, supports_few_rows
from ragkv.model.execution.fp8_weights import check_fp8, quantise_weights
from ragkv.model.execution.fused import Fused
from ragkv.model.execution.merged_weights import supports_merging
from ragkv.model.hashing import joined_hash
from ragkv.model.kv_cache import ContextCache
from ragkv.model.layer_bodies import Attend
from ragkv.model.layer_pass import Pass, append
from ragkv.model.layers import Layers, own_layers, wired_layers
from ragkv.model.model_cache import Notify
from ragkv.model.pass_rows import PassRows, attend_shared, attend_together
from ragkv.model.placement import layer_devices, move_inputs
from ragkv.model.profile import Profile, default_profile
from ragkv.model.prompt import Prompt
from ragkv.model.recurrence import StateForm, States, state_form
from ragkv.model.rotary import Rotary, rotary_name, rotate
from ragkv.model.source import ModelSource
from ragkv.model.supported import architecture_of, check_supported, is_wired
from ragkv.model.wrapper import NO_WRAPPERS, Wrappers

CHECKED = 8
"""Tokens whose logits a model's layers and its own forward must agree on, where its layers run by their own code."""


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
        kinds: the attention of each layer.
        wired: whether the layers are made as Llama's, so that our own code runs them.
        scale: factor of attention scores in the first layer.
        tokenizer: the tokenizer of transformers.
        name: the name of the model.
        weights_hash: sha256 over config, tokenizer and weight files.
        profile: block sizes, stable layers, retrieval heads and prompt pieces.
        wrappers: wrapper tokens that the embedding knows.
        stop_ids: token ids that end an answer.
        max_positions: length of the model's context.
        fused: the layer loop that `forward` runs; None for the plain loop of this class.
        rounds_decoding: whether passes that decode may have rounded weights (`decoding`).
        states: the form of the states of its layers without attention; empty in a model that has none.
        readers: how many layers read the KV of others (shared_kv.py).
    """

    def __init__(
        self,
        weights: Any,
        tokenizer: Any = None,
        profile: Profile | None = None,
        name: str = "model",
        weights_hash: str = "",
        wrappers: Wrappers = NO_WRAPPERS,
    ):
        """Wrap loaded weights.

        Args:
            weights: a loaded *ForCausalLM in eval mode.
            tokenizer: the tokenizer of transformers.
            profile: None for the default profile of the model.
            name: the name of the model.
            weights_hash: sha256 over config, tokenizer and weight files.
            wrappers: wrapper tokens that the embedding knows.

        Raises:
            ModelUnsupported: the layer loop cannot run the model.
        """
        config = weights.config
        check_supported(config)
        self.wired = is_wired(config)
        self._layers: Layers = wired_layers(weights) if self.wired else own_layers(weights)
        self.body, self.lm_head, self.config = weights.model, weights.lm_head, config
        self.kinds, self.shape, self.readers = self._layers.kinds, self._layers.shape, len(self._layers.readers)
        self.devices, self.dtype = self._layers.devices(weights), next(weights.parameters()).dtype
        self.device, self.spread = self.devices[0], len({each.device for each in weights.parameters()}) > 1
        self._norm = self._layers.ends.norm
        if self.readers and self.spread:
            raise ModelUnsupported("layers that read the KV of others run on one GPU; RAGKV_DEVICE=spread has several")
        ends = (self.body.embed_tokens, nn.ModuleList([self._norm, self.body.layers[-1]]), self.lm_head)
        self._embedding_at, self._norm_at, self._head_at = (next(each.parameters()).device for each in ends)
        self.scale: float = self.kinds[0].scale
        self.tokenizer, self.name, self.weights_hash, self.wrappers = tokenizer, name, weights_hash, wrappers
        self.profile = profile or default_profile(self.shape.layers, config.hidden_size, config.model_type)
        self.stop_ids = _stop_ids(weights, tokenizer)
        self.max_positions: int = config.max_position_embeddings
        self.fused = self._fuse()
        self.rounds_decoding = False
        self._tables: dict[tuple[int, torch.device], Rotary] = {}
        self.states = StateForm()
        if not self.wired:
            self._check_layers()

    @classmethod
    def load(
        cls,
        source: str | ModelSource,
        device: str = "auto",
        dtype: str = "auto",
        profiles: Path | None = None,
        cache: Path | None = None,
        notify: Notify = lambda line: None,
        weights: str = "auto",
    ) -> DecoderModel:
        """Load a local folder, a GGUF file or, when `source` is no path, a hub id. See `checkpoint.load_checkpoint`.

        The weights belong to this model and are not trained, so their products may be packed.

        Args:
            source: as of `load_checkpoint`, like the next five.
            weights: `exact`; `fp8` to round them to FP8 (`execution/fp8_weights.py`); or `auto`: exact, and a CPU that
                computes in bfloat16 decodes by `execution/few_rows.py`.

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
        model = cls(found.weights, found.tokenizer, found.profile, found.name, weights_hash, found.wrappers)
        model.rounds_decoding = weights == "auto"
        return model

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
        layers = self.body.layers[: len(self.body.layers) - self.readers]  # few rows of a prefill run the others
        weights: int = sum(each.numel() for each in layers.parameters())
        return float(self.shape.layers * self.shape.q_heads * self.shape.head_dim) / weights

    @cached_property
    def decoding(self) -> FewRows | None:
        """The loop for passes that decode, where a CPU has one of its own (`execution/few_rows.py`).

        It is made when it is first asked for: that takes seconds, and many commands decode nothing.
        """
        if not (self.rounds_decoding and self.wired and supports_few_rows(self.body, self.lm_head)):
            return None
        return FewRows(self.body, self.lm_head, self.shape, self.scale, self._cos_sin)

    @cached_property
    def prompt(self) -> Prompt:
        """Prompt pieces of the tokenizer and profile."""
        return Prompt(self.tokenizer, self.profile, self.wrappers)

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
        if any(p.decodes for p in passes) and self.decoding is not None:
            return self._forward_apart(self.decoding, passes)
        rows = [self._enter(p) for p in passes]
        for layer in range(max(each.depth for each in rows)):
            running = [each for each in rows if each.layer_pass.start <= layer < each.depth]
            if running:
                self._layers.run_recurrent(layer, running)
                self._run_layer(layer, running)
        self._layers.run_recurrent(self.shape.layers, [each for each in rows if each.layer_pass.depth is None])
        self._run_readers(rows)
        for pass_rows in rows:
            pass_rows.drop_ended()
        final = self._norm(torch.cat([each.hidden.to(self._norm_at) for each in rows]))
        logits = list(self._logits(final).split([each.hidden.shape[0] for each in rows]))
        for pass_rows in rows:  # last, so that a forward that fails leaves all states as they were
            pass_rows.leave_states()
        return logits

    def _forward_apart(self, decoding: FewRows, passes: Sequence[Pass]) -> list[Tensor]:
        """Run the passes that decode by their own loop, and the others as ever: neither changes the other's result."""
        logits = dict[int, Tensor]()
        for decodes, run in ((True, decoding.forward), (False, self.forward)):
            chosen = [number for number, p in enumerate(passes) if p.decodes is decodes]
            if chosen:
                logits |= zip(chosen, run([passes[number] for number in chosen]), strict=True)
        return [logits[number] for number in range(len(passes))]

    def _enter(self, p: Pass) -> PassRows:
        """Begin a pass with what enters its first layer."""
        layers, hidden, inputs = self._layers, p.hidden, None
        if hidden is None or layers.reads:  # what the layers read of a token is no part of its hidden state
            embedded, inputs = layers.ends.embed(p.tokens.to(self._embedding_at))
            hidden = embedded if hidden is None else hidden
        behind = bool(layers.recurrent and layers.recurrent[-1])
        return PassRows(p, hidden, self.shape.layers, layers.states, behind, inputs)

    def _run_layer(self, layer: int, running: Sequence[PassRows]) -> None:
        """Run a layer for the rows of several passes."""
        device = self.devices[layer]
        for pass_rows in running if self.spread else ():
            pass_rows.move(device)
        for pass_rows in running:
            pass_rows.turn(self.kinds[layer].rotation, partial(self.rotary, layer=layer), device)
        self._run_body(layer, partial(attend_together, layer, self.kinds[layer], running), running)

    def _run_readers(self, rows: Sequence[PassRows]) -> None:
        """Run the layers that read the KV of others, for all rows that give logits."""
        for number, reader in enumerate(self._layers.readers, self.shape.layers):
            running = [each for each in rows if each.layer_pass.depth is None and each.count]
            if running:
                for pass_rows in running:
                    pass_rows.turn(reader.kind.rotation, partial(self.rotary, layer=reader.owner), self.device)
                self._run_body(number, partial(attend_shared, reader, running), running)

    def _run_body(self, number: int, attend: Attend, running: Sequence[PassRows]) -> None:
        """Run the body of a layer, readers counted behind the others."""
        hidden = torch.cat([each.hidden for each in running])
        positions = torch.cat([each.positions for each in running])
        inputs = [each.inputs[number] for each in running if each.inputs is not None]
        left = self._layers.bodies[number](hidden, positions, attend, torch.cat(inputs) if inputs else None)
        for pass_rows, part in zip(running, left.split([each.count for each in running]), strict=True):
            pass_rows.hidden = part

    @torch.inference_mode()
    def own_logits(self, tokens: Sequence[int]) -> Tensor:
        """Compute logits [n, vocabulary] with the loaded model's own forward, to check the layer loop."""
        ids = torch.tensor([tokens], device=self._embedding_at)
        at = layer_devices(self.body)  # of layers with a state, too
        spread = move_inputs(self.body, at, self._norm, self._norm_at) if self.spread else nullcontext()
        with spread:
            hidden = self.body(input_ids=ids, use_cache=False).last_hidden_state
        return self._logits(hidden[0])

    def rotary(self, positions: Tensor, layer: int = 0) -> Rotary:
        """Compute cos and sin of a layer at `positions` [T] with the model's own rotary module."""
        rotation = self._layers.rotations[self.kinds[layer].rotation]
        compute = getattr(self.body, rotary_name(self.body))
        if compute is None:
            still = torch.ones(len(positions), 1, dtype=self.dtype, device=self.device)
            return rotation.form(still, 0 * still)
        device = next((each.device for each in compute.buffers()), self.device)
        probe = torch.empty(0, dtype=self.dtype, device=device)
        cos, sin = compute(probe, positions.to(device).expand(*rotation.grids, -1), *rotation.arguments)
        return rotation.form(cos[0], sin[0]).to(self.device)

    def rotary_tables(self, end: int) -> dict[tuple[int, torch.device], Rotary]:
        """Return cos and sin of all positions before `end`, by rotation and device of the layers: views of one table.

        Every question asks for them, so they are computed once, of twice as many positions each time they grow.
        """
        tables = self._tables
        if not tables or next(iter(tables.values())).cos.shape[0] < end:
            numbers = [kind.rotation for kind in self.kinds]
            with torch.inference_mode(False):  # callers are inside and outside of it
                at = torch.arange(1 << (end - 1).bit_length())
                made = {number: self.rotary(at, numbers.index(number)) for number in dict.fromkeys(numbers)}
                pairs = dict.fromkeys(zip(numbers, self.devices, strict=True))
                tables = {(number, device): made[number].to(device) for number, device in pairs}
            self._tables = tables
        return {key: table.before(end) for key, table in tables.items()}

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Apply the RoPE of each layer to x [L, T, heads, d] at positions [T], layers that turn alike together."""
        tables, rotations = self.rotary_tables(int(positions.max()) + 1), [kind.rotation for kind in self.kinds]
        at, turned = index_to_device(positions, x.device), torch.empty_like(x)
        for number in dict.fromkeys(rotations):
            layers = [layer for layer, rotation in enumerate(rotations) if rotation == number]
            table = tables[number, self.devices[layers[0]]].to(x.device)[at]
            turned[layers] = rotate(x[layers], table)
        return turned

    def states_of(self, tensors: Sequence[Tensor]) -> States:
        """Return stored tensors (`StateForm.flat`) as states, where the layers compute."""
        return self.states.states(tensors, self._layers.state_devices)

    @property
    def compares_heads(self) -> bool:
        """Whether stored keys are the heads of every layer, so that queries can be compared with them."""
        return all(kind.packed is None for kind in self.kinds)

    @property
    def orders_alike(self) -> bool:
        """Whether stored keys have their dimensions in the model's own order, as its own cache has."""
        return all(rotation.order is None for rotation in self._layers.rotations)

    @property
    def turns_alike(self) -> bool:
        """Whether all layers turn keys by the same angles."""
        return len(self._layers.rotations) == 1

    def _check_layers(self) -> None:
        """Raise ModelUnsupported where the layers, run one by one over a cache, give other logits than a forward."""
        tokens = [number % self.config.vocab_size for number in range(CHECKED)]
        cache = ContextCache(self.shape, CHECKED, self.dtype, self.devices)
        first, then = tokens[: CHECKED // 2], tokens[CHECKED // 2 :]
        self.forward([append(cache, first, 0, outputs=0)])
        if cache.states is not None:
            self.states = state_form(cache.states, self.dtype)
        (ours,) = self.forward([append(cache, then, len(first), outputs=len(then))])
        error = relative_error(centred(ours), centred(self.own_logits(tokens)[len(first) :]))
        if not error <= TOLERANCE[self.dtype]:  # NaN fails, too
            raise ModelUnsupported(
                f"architecture {architecture_of(self.config)} is not supported: its layers, run one by one, give other "
                f"logits than its own forward (relative error {error:.2g})"
            )

    def _fuse(self) -> Fused | None:
        """Make the layer loop with few launches where the model supports it."""
        if not (self.wired and supports_merging(self.body)):
            return None
        from ragkv.kernels import triton_rows

        return Fused(self.body, self._logits, self.shape, self.scale, self._cos_sin, triton_rows)

    def _logits(self, normed: Tensor) -> Tensor:
        """Compute logits [O, vocabulary] of rows behind the last norm, on any device."""
        return self._layers.ends.logits(normed.to(self._head_at)).to(self.device)

    def _cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self.rotary(positions)
        return rotary.cos, rotary.sin


def _stop_ids(weights: Any, tokenizer: Any) -> frozenset[int]:
    generation = getattr(weights, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)
