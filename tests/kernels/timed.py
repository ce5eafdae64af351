"""How fast blocks are carried on this GPU: `python -m tests.kernels.timed`.

Blocks of 16 tokens of Llama-3.1-8B's shape, out of page-locked memory and out of the memory of the GPU, in an order
that no copy could follow; beside it a copy of as many bytes by the copy engine, and products, alone and beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

from ragkv.kernels import triton_carry
from ragkv.kernels.carry import Entries, Form
from ragkv.store.layout import BODIES, Layout
from ragkv.types import Shape

BLOCKS, TOKENS, HEADS, D, CAPACITY = 2048, 16, 8, 128, 32768
SIZE = 8192
"""Of the products' matrices."""


def seconds(work: Callable[[], object], tries: int = 10) -> float:
    """Median, after two that do not count."""
    taken = []
    for _ in range(tries + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        taken.append(start.elapsed_time(stop) / 1000)
    return median(taken[2:])


def main() -> None:
    """Print a line for each body and place."""
    k, v = (torch.zeros(CAPACITY, HEADS, D, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cos = torch.ones(CAPACITY, D, dtype=torch.bfloat16, device="cuda")
    a = torch.ones(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    alone = seconds(lambda: [a @ a for _ in range(20)])
    for body in BODIES:
        size = Layout(Shape(1, HEADS, HEADS, D), TOKENS, TOKENS, torch.bfloat16, body).full_bytes
        form, total = Form(body, TOKENS, HEADS, D, torch.bfloat16), BLOCKS * size
        host = torch.zeros(BLOCKS, size, dtype=torch.uint8, pin_memory=True)
        here = host.cuda()
        copied = seconds(lambda host=host, here=here: here.copy_(host, non_blocking=True))
        print(f"{body:5}  copy engine {total / copied / 1e9:7.1f} GB/s")
        order = torch.randperm(BLOCKS)
        rows = torch.arange(BLOCKS) * TOKENS
        for name, pool in (("host", host), ("gpu", here)):
            to = [store.data_ptr() + rows * HEADS * D * 2 for store in (k, v)]
            table = torch.stack([pool.data_ptr() + order * size, torch.full((BLOCKS,), TOKENS), *to, rows]).cuda()
            for programs in (16, 32, 48, 96, 264):
                triton_carry.PROGRAMS = programs

                def carry(table=table, form=form):
                    triton_carry.carry(Entries(table), 0, BLOCKS, cos, cos, form)

                def beside(carry=carry):
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        carry()
                    return [a @ a for _ in range(20)]

                taken, both = seconds(carry), seconds(beside)
                torch.cuda.synchronize()
                print(
                    f"{body:5}  from {name:4}  {programs:3} programs {total / taken / 1e9:7.1f} GB/s read"
                    f"   {taken * 1e3:6.2f} ms; products {alone * 1e3:6.2f} ms alone, {both * 1e3:6.2f} beside it"
                )


if __name__ == "__main__":
    main()
