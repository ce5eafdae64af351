"""The recipe of the default model's adapter: stages, data, sizes. With the hardware it determines the weights."""

from __future__ import annotations

from ragkv.tune.options import TuneOptions

GENERATOR_SHARE = 0.35
"""Share of the contexts that the project's generator writes; the others are other people's prose."""

_LENGTHS = ((2048, 0.75), (4096, 0.25))

STAGES = {
    # First what to answer, under full attention; a part of it already over stored KV.
    "answers": TuneOptions(
        steps=1000, lengths=_LENGTHS, rate=8e-4, warmup=60, hold=0.5, teacher="self", answers=1.0, stored=0.0, seed=1
    ),
    # Then the same over stored KV, with dropped blocks, from the model's own answers under full attention.
    "blocks": TuneOptions(
        steps=700, lengths=_LENGTHS, rate=5e-4, warmup=30, hold=0.3, teacher="self", answers=1.0, stored=0.6, seed=2
    ),
}
"""By name, in order."""
