"""Devices that are not there: tensors that say where they are, refuse to meet others, and lie in host memory.

What runs on several GPUs can so be tried on a machine without one: each tensor that is used where it is not raises, as
it would there, and the numbers are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

HOST = torch.device("cpu")
PLACES = (torch.device("mps:0"), torch.device("mps:1"))
"""A kind of device for which nothing in the project, or in transformers, has kernels of its own."""

MOVES = (Tensor.to, Tensor.copy_)
INDEXED = (Tensor.__getitem__, Tensor.__setitem__)
"""An index may be a tensor of the host."""


class Placed(Tensor):
    """A tensor of the host that says it is elsewhere."""

    place: torch.device

    @property
    def device(self) -> torch.device:
        return self.place

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return _do(func, args, kwargs or {})


class _Made(TorchFunctionMode):
    """What is made on a place is there."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _do(func, args, kwargs or {})


@contextmanager
def places() -> Iterator[None]:
    """Within, the places are there."""
    with _Made():
        yield


def spread(model, first: int):
    """The weights of `model`, a *ForCausalLM, on both places: the layers from `first` on are on the second one."""
    for name, module in model.named_modules():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        behind = layer >= first or name in ("model.norm", "lm_head")
        for held in (module._parameters, module._buffers):
            for key, each in held.items():
                if each is not None:
                    moved = _placed(each.detach().clone(), PLACES[behind])
                    held[key] = nn.Parameter(moved, requires_grad=False) if held is module._parameters else moved
    return model


def here(x: Tensor) -> Tensor:
    """The same as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _placed(x: Tensor, place: torch.device) -> Placed:
    with torch._C.DisableTorchFunctionSubclass():
        found = x.as_subclass(Placed)
    found.place = place
    return found


def _do(func, args, kwargs):
    if func is Tensor.cpu:
        func, args = Tensor.to, (args[0], HOST)
    given = [*_leaves(args), *_leaves(kwargs)]
    tensors = [each for each in given if isinstance(each, Tensor)]
    asked = [at for each in given if (at := _device(each)) is not None]
    if func in INDEXED:
        tensors = [each for i, each in enumerate(tensors) if not i or isinstance(each, Placed)]
    met = {_where(each) for each in tensors if isinstance(each, Placed) or each.dim()}
    if len(met) > 1 and not asked and func not in MOVES:
        raise RuntimeError(f"{func.__name__} of tensors on {' and '.join(sorted(map(str, met)))}")
    if func is Tensor.to and len(tensors) > 1:
        asked = [_where(tensors[1])]
    place = asked[0] if asked else next(map(_where, tensors), HOST)
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*_held(args), **_held(kwargs))
    return _back(found, place)


def _where(x: Tensor) -> torch.device:
    return x.place if isinstance(x, Placed) else HOST


def _device(x) -> torch.device | None:
    if isinstance(x, str) and x.split(":")[0] in ("cpu", PLACES[0].type):
        return torch.device(x)
    return x if isinstance(x, torch.device) else None


def _leaves(x) -> list:
    if isinstance(x, dict):
        x = tuple(x.values())
    return [leaf for each in x for leaf in _leaves(each)] if isinstance(x, (tuple, list)) else [x]


def _held(x):
    """The same in host memory."""
    if isinstance(x, dict):
        return {key: _held(each) for key, each in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(map(_held, x))
    if isinstance(x, Placed):
        return here(x)
    return x if _device(x) is None else HOST


def _back(x, place: torch.device):
    if isinstance(x, Tensor) and place != HOST:
        return _placed(x, place)
    if isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
        return type(x)([_back(each, place) for each in x])
    return x
