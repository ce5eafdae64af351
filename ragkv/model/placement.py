"""A model's layers on several GPUs: runs of layers, one behind the other.

A layer's weights, its K and V and what is computed in it are on its device; rows move on where the device changes, by a
plain copy from one to the next. The GPUs work in turns, so this is for models that one of them has no room for, and not
quicker. transformers places the layers (`device_map="balanced"`, which needs accelerate) and hooks modules so that each
fetches what it is called with; our loops know where a layer is, so the hooks are taken off again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ragkv.errors import ConfigError, ModelUnsupported

SPREAD = "spread"
"""The setting: over all GPUs that there are."""


def gpus() -> tuple[torch.device, ...]:
    """All that there are. Raises ConfigError where there is none."""
    if not torch.cuda.is_available():
        raise ConfigError("device spread: torch sees no GPU here; `auto` is the CPU then")
    return tuple(torch.device("cuda", number) for number in range(torch.cuda.device_count()))


def check_spreadable() -> None:
    """Raise ConfigError where no model can be loaded over several GPUs, telling what is missing."""
    if not find_spec("accelerate"):
        raise ConfigError("device spread needs the package accelerate: pip install 'ragkv[spread]'")
    gpus()


def unhooked(weights: Any) -> Any:
    """A model that was loaded with a `device_map`, without accelerate's hooks. Raises ModelUnsupported where the GPUs
    have no room for all of it: what is left to the CPU, or to a disk, comes in by a hook alone."""
    from accelerate.hooks import remove_hook_from_module

    away = sorted({str(place) for place in weights.hf_device_map.values()} & {"cpu", "disk"})
    if away:
        raise ModelUnsupported(f"the GPUs have no room for this model: parts of it would be on {' and '.join(away)}")
    return remove_hook_from_module(weights, recurse=True)


def devices_of(body: Any) -> tuple[torch.device, ...]:
    """Where each layer is."""
    return tuple(next(block.parameters()).device for block in body.layers)


def in_runs(layers: int, devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """A device for each of so many layers: equal runs, as far as that goes."""
    return tuple(devices[layer * len(devices) // layers] for layer in range(layers))


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels of our own go to the current GPU, not to that of their tensors: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def following(body: Any, devices: Sequence[torch.device]) -> Iterator[None]:
    """Within, the model's own forward works over several devices: each layer, and the norm, gets what it is called with
    where it is."""
    with ExitStack() as held:
        for module, device in (*zip(body.layers, devices, strict=True), (body.norm, body.norm.weight.device)):

            def fetch(
                _: Any, args: tuple[Any, ...], named: dict[str, Any], device: torch.device = device
            ) -> tuple[Any, dict[str, Any]]:
                return _moved(args, device), {name: _moved(each, device) for name, each in named.items()}

            held.callback(module.register_forward_pre_hook(fetch, with_kwargs=True).remove)
        yield


def _moved(given: Any, device: torch.device) -> Any:
    """The same with all tensors in it, and in tuples of it, on the device."""
    if isinstance(given, Tensor):
        return given.to(device)
    return tuple(_moved(each, device) for each in given) if isinstance(given, tuple) else given
