"""Shared parts of the benchmark commands: the model that is measured, and tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.cli.common import out, settings_from, tell

if TYPE_CHECKING:
    from benchmarks.grid import TextGrid
    from ragkv.model.decoder import DecoderModel

Piece = tuple[str, "TextGrid", Sequence[str]]
"""A table: (title, cells, lines below it)"""


def random_weights(shape: str, device: str | None, layers: int | None, plain: bool) -> DecoderModel:
    """Make random weights of a known shape, without settings or a store.

    Args:
        shape: NAME, or NAME:fp8 for weights in FP8.
        device: As of the command.
        layers: Number of layers, if not the shape's.
        plain: Plain random weights, not sparse by construction.

    Raises:
        InputError: Unknown shape, or unknown form.
        ConfigError: The device has no FP8.
    """
    import torch

    from benchmarks.shapes import random_model
    from ragkv.model.execution.fp8_weights import check_fp8

    where, (name, _, form) = device_for(device), shape.partition(":")
    if form == "fp8":
        check_fp8(torch.device("cuda" if where == "spread" else where))
    return random_model(name, where, layers=layers, sparse=not plain, form=form or "exact")


def configured(model: str | None, device: str | None) -> DecoderModel:
    """Load the model of the settings."""
    from ragkv.engine.open_model import load_model

    return load_model(settings_from(None, None, model, device), tell)


def device_for(device: str | None) -> str:
    """The device; for `auto` or None the GPU if there is one, else the CPU."""
    import torch

    if device and device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def show(pieces: Sequence[Piece], table: Path | None) -> None:
    """Print tables, and write them to a Markdown file."""
    from benchmarks.grid import aligned, titled

    console = out()
    for title, grid, notes in pieces:
        console.print(title)
        head, *rows = aligned(grid)
        console.print(head, style="bold")
        for line in (*rows, *notes):
            console.print(line)
    if table is not None:
        table.write_text("\n".join(titled(*piece) for piece in pieces), encoding="utf-8")
