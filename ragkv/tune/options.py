"""What a tuning run does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ragkv.tune.rows import DropParams


@dataclass(frozen=True)
class TuneOptions:
    """Parameters of a run. The papers say nothing about tuning, so every field is paper silent.

    Attributes:
        kind: What is trained: a `lora` adapter, or `wrapper` tokens (adapters.py).
        steps: Optimiser steps.
        rows_tokens: Tokens of the rows of one forward pass, over all lengths. On a GPU without the memory for them,
            `train` halves them and doubles `accumulate`.
        accumulate: Forward passes of one step.
        lengths: Lengths of rows, in tokens, each with its weight.
        rank: Rank of a LoRA adapter.
        front: Wrapper tokens in front of a chunk.
        back: Wrapper tokens behind it.
        rate: Peak learning rate.
        warmup: Steps until the peak.
        hold: Share of the steps after which the rate falls, linearly, to a fiftieth.
        teacher: `base` learns from the model without the adapter. `self` learns from the model with the adapter as it
            is at that step, under full attention; `answers` then says what full attention should answer. `gold` learns
            the given answers alone: under stored KV, or under full attention. A pass then costs half.
        answers: Weight of the cross entropy of the given answers under full attention, for `self`.
        distilled: Weight of learning, under stored KV, from the model itself under full attention, for `self`.
        stored: Share of the forward passes that also learn under stored KV; for `gold`, that learn under it alone.
        drop: Which blocks questions do not see under stored KV.
        seconds: The run ends after this time, and the learning rate falls accordingly; 0 is no limit.
        save_every: Steps between checkpoints, from which a stopped run goes on.
        workers: Processes that make rows.
        seed: Seed of the rows.
    """

    kind: Literal["lora", "wrapper"] = "lora"
    steps: int = 600
    rows_tokens: int = 16384
    accumulate: int = 4
    lengths: tuple[tuple[int, float], ...] = ((1024, 0.3), (2048, 0.5), (4096, 0.2))
    rank: int = 32
    front: int = 8
    back: int = 8
    rate: float = 4e-4
    warmup: int = 30
    hold: float = 0.3
    teacher: Literal["base", "self", "gold"] = "base"
    answers: float = 0.0
    distilled: float = 1.0
    stored: float = 1.0
    drop: DropParams = field(default_factory=DropParams)
    seconds: float = 0.0
    save_every: int = 100
    workers: int = 0
    seed: int = 0
