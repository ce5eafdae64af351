"""Placement of a model's layers on several GPUs, in runs of consecutive layers.

A layer's weights, its K and V and its computation are on its device. Rows are copied from one device to the next where
the device changes. The GPUs work one after another, so this is not faster; it is for models that do not fit on one GPU.
transformers places the layers (`device_map="balanced"`, which needs accelerate) and adds hooks that move the inputs of
each module. Our loops know the device of each layer, so the hooks are removed.
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
"""The device setting that spreads a model over all GPUs."""


def gpus() -> tuple[torch.device, ...]:
    """Return all GPUs.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError("device spread: torch sees no GPU here; `auto` is the CPU then")
    return tuple(torch.device("cuda", number) for number in range(torch.cuda.device_count()))


def check_spreadable() -> None:
    """Check that a model can be spread over GPUs.

    Raises:
        ConfigError: accelerate or a GPU is missing.
    """
    if not find_spec("accelerate"):
        raise ConfigError("device spread needs the package accelerate: pip install 'accelerate>=1.15,<2'")
    gpus()


def remove_hooks(weights: Any) -> Any:
    """Remove accelerate's hooks from a model that was loaded with a `device_map`.

    Raises:
        ModelUnsupported: the model does not fit on the GPUs. Parts on the CPU or on a disk cannot work without hooks.
    """
    from accelerate.hooks import remove_hook_from_module

    offloaded = sorted({str(each) for each in weights.hf_device_map.values()} & {"cpu", "disk"})
    if offloaded:
        raise ModelUnsupported(
            f"the GPUs have no room for this model: parts of it would be on {' and '.join(offloaded)}"
        )
    return remove_hook_from_module(weights, recurse=True)


def layer_devices(body: Any) -> tuple[torch.device, ...]:
    """Return the device of each layer."""
    return tuple(next(block.parameters()).device for block in body.layers)


def assign_layers(layers: int, devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """Assign layers to devices in runs of equal length, as far as possible."""
    return tuple(devices[layer * len(devices) // layers] for layer in range(layers))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one. Triton launches kernels on the current GPU, not on that of their tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def move_inputs(body: Any, devices: Sequence[torch.device], norm: Any, norm_at: torch.device) -> Iterator[None]:
    """Within this context, the inputs of each layer and of the last norm are moved to its device.

    The model's own forward then works over several devices.
    """
    with ExitStack() as hooks:
        for module, device in (*zip(body.layers, devices, strict=True), (norm, norm_at)):

            def move(
                _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device = device
            ) -> tuple[Any, dict[str, Any]]:
                return _moved(args, device), {name: _moved(each, device) for name, each in kwargs.items()}

            hooks.callback(module.register_forward_pre_hook(move, with_kwargs=True).remove)
        yield


def _moved(value: Any, device: torch.device) -> Any:
    """Return a value with all its tensors, also in tuples, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_moved(each, device) for each in value) if isinstance(value, tuple) else value
