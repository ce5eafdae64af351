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

REFINEMENT_GENERATOR_SHARE = 0.4
"""The same share in a run that goes on from an adapter with questions that people asked (`--people`, `--hops`)."""

HOPS_SHARE = 0.35
"""Share of the questions over several paragraphs among those that people asked."""

REFINEMENT = TuneOptions(
    # 4 minutes on an H200 are about 1,000 steps of 32,768 tokens. A CPU needs --seconds.
    steps=1000,
    rows_tokens=32768,
    accumulate=1,
    lengths=((2048, 0.75), (4096, 0.25)),
    rate=3e-4,
    warmup=20,
    hold=0.3,
    teacher="self",
    answers=1.0,
    stored=1.0,
    save_every=500,
    seed=2,
)
"""A run that goes on from an adapter with questions that people asked."""
