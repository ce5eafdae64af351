"""The layers of a loaded model, and what stands before and behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ragkv.model.layer_bodies import LayerBody, WiredLayer
from ragkv.model.layer_kinds import LayerKind
from ragkv.model.pass_rows import PassRows
from ragkv.model.placement import layer_devices
from ragkv.model.recurrence import RecurrentLayer
from ragkv.model.rotary import Rotation
from ragkv.model.shared_kv import KVReader
from ragkv.types import Shape


class Ends(Protocol):
    """What a model does before its first layer and behind its last layer.

    Attributes:
        norm: its last norm.
    """

    norm: Any

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what enters the layers for tokens [T], on the embedding's device.

        Returns:
            The rows [T, hidden] of the first layer, and the inputs [layers, T, n] that each layer reads besides; None
            in a model whose layers read none.
        """
        ...

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [O, vocabulary] of rows [O, hidden] behind the last norm, on the head's device."""
        ...


class WiredEnds:
    """An embedding, a norm and a head without anything around them."""

    def __init__(self, weights: Any):
        """Wrap a *ForCausalLM."""
        self._embedding, self.norm, self._head = weights.model.embed_tokens, weights.model.norm, weights.lm_head

    def embed(self, tokens: Tensor) -> tuple[Tensor, None]:
        """See `Ends`."""
        rows: Tensor = self._embedding(tokens)
        return rows, None

    def logits(self, normed: Tensor) -> Tensor:
        """See `Ends`."""
        logits: Tensor = self._head(normed)
        return logits


@dataclass(frozen=True)
class Layers:
    """The layers of a model.

    Attributes:
        bodies: one a layer, readers behind the others.
        kinds: the attention of each layer with KV of its own.
        rotations: the different rotations, by number.
        shape: layers, heads and head size.
        ends: what stands before and behind them.
        recurrent: the layers with a state before each layer with attention, and those behind the last one; empty where
            there are none.
        readers: the layers that read the KV of others (shared_kv.py).
        reads: the name by which layers are given an input of their own; "" where they have none.
    """

    bodies: Sequence[LayerBody]
    kinds: tuple[LayerKind, ...]
    rotations: tuple[Rotation, ...]
    shape: Shape
    ends: Ends
    recurrent: tuple[tuple[RecurrentLayer, ...], ...] = ()
    readers: tuple[KVReader, ...] = ()
    reads: str = ""

    @property
    def states(self) -> int:
        """How many layers have a state."""
        return sum(map(len, self.recurrent))

    @property
    def state_devices(self) -> list[torch.device]:
        """Device of each layer that has a state."""
        return [layer.device for layers in self.recurrent for layer in layers]

    def devices(self, weights: Any) -> tuple[torch.device, ...]:
        """Return the device of each layer with KV."""
        found = layer_devices(weights.model)
        if not self.recurrent:
            return found[: self.shape.layers]
        before = [len(layers) for layers in self.recurrent[:-1]]
        return tuple(found[sum(before[: layer + 1]) + layer] for layer in range(len(before)))

    def run_recurrent(self, layer: int, rows: Sequence[PassRows]) -> None:
        """Run the layers with a state that stand before layer `layer`, or behind the last one, for several passes."""
        if self.recurrent and self.recurrent[layer]:
            first = sum(map(len, self.recurrent[:layer]))
            for pass_rows in rows:
                pass_rows.recur(first, self.recurrent[layer])


def wired_layers(weights: Any) -> Layers:
    """Return the layers of a *ForCausalLM that are made as Llama's."""
    config, blocks = weights.config, weights.model.layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = Shape(config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, head_dim)
    kinds = tuple(LayerKind(0, block.self_attn.scaling) for block in blocks)
    bodies = [WiredLayer(block, head_dim) for block in blocks]
    return Layers(bodies, kinds, (Rotation(),), shape, WiredEnds(weights))


def own_layers(weights: Any) -> Layers:
    """Return the layers of a *ForCausalLM as they run by their own forward.

    Raises:
        ModelUnsupported: a layer does something that is not understood.
    """
    # transformers' modelling code takes seconds to import, and layers made as Llama's do without it.
    from ragkv.model.layer_probe import read_layers
    from ragkv.model.own_forward import OwnEnds, check_parts, use_own_attention

    check_parts(weights)
    use_own_attention(weights)
    found = read_layers(weights)
    return Layers(
        found.bodies,
        found.kinds,
        found.rotations,
        found.shape,
        OwnEnds(weights, found.reads),
        found.recurrent,
        found.readers,
        found.reads,
    )
