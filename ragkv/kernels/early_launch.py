"""Launching a kernel before the one in front of it has ended: programmatic dependent launch, on Hopper and newer GPUs.

A decode step is some three hundred short kernels, each of which needs the result of the one before it. Between two of
them the GPU drains and fills again. A kernel that is launched early starts while its predecessor still runs, prepares
what does not depend on it, and then waits for it:

    gdc_launch_dependents    the next kernel may start once all programs of this one have
    gdc_wait                 everything before this kernel is complete and visible

A kernel with EARLY must wait before it reads what another one writes, and before it writes. Both calls do nothing where
no early launch was asked for.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CAPABILITY = (9, 0)
"""The first GPUs with early launches."""


def early(x: Tensor) -> dict[str, bool]:
    """Return the options of a kernel launch on the device of x: EARLY, and Triton's `launch_pdl` where it is true."""
    return {"EARLY": True, "launch_pdl": True} if x.is_cuda and _supported(x.device.index) else {"EARLY": False}


@cache
def _supported(device: int | None) -> bool:
    return torch.cuda.get_device_capability(device) >= CAPABILITY
