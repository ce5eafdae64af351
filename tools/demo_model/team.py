"""The processes of a run: one, or one per GPU with RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR set, as torchrun does.

They share the rows of every batch and sum their gradients, so that a step does not depend on their number.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Team:
    """rank: number of this process. size: number of processes. device: device of this process."""

    rank: int
    size: int
    device: str

    @classmethod
    def join(cls, device: str) -> Team:
        """Connect to the other processes, if there are any. device: "cuda" or "cpu"."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, device)
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        return cls(dist.get_rank(), size, device)

    def total(self, tensors: Sequence[Tensor]) -> None:
        """Replace float tensors by their sums over all processes."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        """Disconnect."""
        if self.size > 1:
            dist.destroy_process_group()
