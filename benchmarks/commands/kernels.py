"""`ragkv bench kernels`: our kernels compared with their rooflines, on this GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.commands.common import device_for, show
from ragkv.cli.common import Device, Json, progress, writable, write_json


def kernels(
    file: Json = None,
    shape: Annotated[str, typer.Option("--shape", help="Whose sizes.")] = "llama-3.1-8b",
    keys: Annotated[int, typer.Option(min=4096, help="Tokens of the context.")] = 16384,
    table: Annotated[
        Path | None, typer.Option("--table", callback=writable, help="Write the table to this Markdown file.")
    ] = None,
    device: Device = None,
) -> int:
    """Every kernel of ragkv: its time, the least time that it could take, its error. Needs a GPU."""
    import torch

    from benchmarks.kernels import KernelParams, grid, measure
    from benchmarks.shapes import find_shape

    where = device_for(device)
    with progress() as report:
        at, rows = measure(find_shape(shape), KernelParams(keys=keys), where, report)
    write_json(file, {"speeds": dataclasses.asdict(at), "kernels": [dataclasses.asdict(row) for row in rows]})
    title = f"kernels of {shape} on {torch.cuda.get_device_name()}, bfloat16"
    speeds = (
        f"copies {at.copy / 1e12:.2f} TB/s, link {at.link / 1e9:.1f} GB/s, products {at.products / 1e12:.0f} TFLOP/s"
    )
    show([(title, grid(rows), (speeds,))], table)
    return 0
