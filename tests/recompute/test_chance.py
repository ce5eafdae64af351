"""Chance keeps as many blocks as Scout, but other ones."""

import torch

from ragkv.recompute.chance import Chance
from ragkv.recompute.scout import Scout

OPTIONS = {"layers": 2, "heads": ((0, 0),), "group": 1, "scale": 1.0, "opening": 0}


def test_it_keeps_as_many_blocks_as_scout_but_other_ones():
    g = torch.Generator().manual_seed(5)
    logits = torch.rand(80, generator=g).pow(12).log()
    found = Scout(**OPTIONS).select_blocks((20,) * 4, logits, 0.3, 0.9)
    drawn = [Chance(**OPTIONS, seed=seed).select_blocks((20,) * 4, logits, 0.3, 0.9) for seed in range(5)]
    for chosen in drawn:
        assert sum(map(len, chosen)) == sum(map(len, found)) > 2
        assert chosen != found
    assert len({str(chosen) for chosen in drawn}) == 5
    assert drawn[0] == Chance(**OPTIONS).select_blocks((20,) * 4, logits, 0.3, 0.9), (
        "the same seed selects the same blocks"
    )
