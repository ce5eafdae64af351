"""What a model gives to its layers: its own forward, run once on layers and a rotary module that note what they get."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ragkv.errors import ModelUnsupported
from ragkv.model.own_forward import copy_with, masking, norm_name
from ragkv.model.rotary import Rotation, rotary_name
from ragkv.model.rotation_probe import Turning

TOKENS = 8
"""Tokens on which the model's own forward runs."""


@dataclass
class Recorded:
    """What a model's forward gives to its layers, by name, and what it asks of its rotary module, with the answers.

    Attributes:
        layers: what each layer is given.
        rotations: what the rotary module was asked behind the positions, and what it answered.
        known: how layers were found to turn their queries and keys.
        grids: sizes in front of the positions that the rotary module is given.
    """

    layers: list[dict[str, Any]] = field(default_factory=list)
    rotations: list[tuple[tuple[Any, ...], Any]] = field(default_factory=list)
    known: list[tuple[Turning, Rotation]] = field(default_factory=list)
    grids: tuple[int, ...] = (1,)

    def asked(self, turned: Any) -> tuple[Any, ...]:
        """Return what the rotary module was asked for the cos and sin that a layer is given.

        Raises:
            ModelUnsupported: they do not come from the rotary module.
        """
        for arguments, answer in self.rotations:
            # A model may take rows of the answer before it gives it to the last layers.
            if answer is turned or all(map(torch.equal, answer, turned)):
                return arguments
        raise ModelUnsupported("its cos and sin do not come from the model's rotary module")


class _Mask:
    """A mask's function, of which a model may take rows."""

    def __init__(self, function: Callable[..., Tensor]):
        self._function = function

    def __call__(self, *at: Tensor) -> Tensor:
        return self._function(*at)

    def __getitem__(self, rows: Any) -> _Mask:
        return self


class _RecordingLayer(nn.Module):
    """Stands where a layer is, notes what it is given and returns its rows. It has the layer's attributes."""

    def __init__(self, block: Any, recorded: Recorded):
        super().__init__()
        object.__setattr__(self, "block", block)
        object.__setattr__(self, "recorded", recorded)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(self.block.forward).bind(*args, **kwargs)
        named = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
        rows: Tensor = named.pop(next(iter(bound.signature.parameters)))
        self.recorded.layers.append(named)
        return rows

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "block"), name)


class _RecordingRotary(nn.Module):
    """Stands where the rotary module is, and notes what it is asked and what it answers."""

    def __init__(self, module: Callable[..., Any], recorded: Recorded):
        super().__init__()
        self._ask, self._recorded = partial(module), recorded  # the module itself would become a child

    def forward(self, x: Tensor, position_ids: Tensor, *arguments: Any) -> Any:
        found = self._ask(x, position_ids, *arguments)
        self._recorded.rotations.append((arguments, found))
        self._recorded.grids = tuple(position_ids.shape[:-1])
        return found


def record(body: Any) -> Recorded:
    """Run a decoder's own forward on layers that record what they are given. Raises ModelUnsupported."""
    recorded, rotary = Recorded(), getattr(body, rotary_name(body))
    recording = copy_with(
        body,
        layers=nn.ModuleList(_RecordingLayer(block, recorded) for block in body.layers),
        **{norm_name(body): nn.Identity()},
        **({} if rotary is None else {rotary_name(body): _RecordingRotary(rotary, recorded)}),
    )
    tokens = torch.arange(TOKENS, device=body.embed_tokens.weight.device)[None] % body.config.vocab_size
    try:
        with masking(_Mask):
            recording(input_ids=tokens, use_cache=False)
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelUnsupported(
            f"{type(body).__name__} is not supported: its layers cannot be called one by one ({error})"
        ) from None
    return recorded
