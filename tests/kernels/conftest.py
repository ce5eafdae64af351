"""Without a GPU, Triton's interpreter runs the kernels on the CPU."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
