"""The recipe of the default model's adapter: data and sizes. With the hardware it determines the weights."""

from __future__ import annotations

from ragkv.tune.options import TuneOptions

GENERATOR_SHARE = 0.4
"""Share of the contexts that the project's generator writes; the others are other people's prose."""

OPTIONS = TuneOptions(
    # 17 minutes on an H200 are about 3,000 steps of 65,536 tokens.
    steps=3000,
    rows_tokens=32768,
    accumulate=2,
    lengths=((2048, 0.75), (4096, 0.25)),
    rate=8e-4,
    warmup=60,
    hold=0.4,
    # What to answer is learned under full attention; over stored KV the model learns from itself.
    teacher="self",
    answers=1.0,
    stored=1.0,
    save_every=500,
    seed=1,
)

PEOPLE_SHARE = 0.8
"""Share of the contexts with questions that people asked, in a run that goes on from an adapter (`--people`); the
generator writes the others."""

REFINEMENT = TuneOptions(
    # 90 minutes of one core of a server's CPU are about 150 steps of 4,096 tokens.
    steps=400,
    rows_tokens=1024,
    accumulate=4,
    lengths=((1024, 1.0),),
    rate=2e-4,
    warmup=8,
    hold=0.4,
    teacher="gold",
    stored=0.55,
    save_every=40,
    seed=2,
)
"""A run that goes on from an adapter with questions that people asked; short enough for a CPU."""
