"""`auto`: a sparse policy where it was measured to be quicker than dense attention, and dense everywhere else.

Whether a policy is quicker depends on how many keys there are and on where they lie. Nothing is measured at start: the
sizes are those of `docs/results`, rounded to the side of dense attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ragkv.sparse.base import DecodePolicy, DecodeState
from ragkv.sparse.prefill import PrefillState

KeyTier = Literal["cpu", "gpu", "host"]
"""Where the keys lie that attention reads: in the memory of the CPU that computes, of the GPU that computes, or in host
memory, from where the GPU fetches them over the bus."""


@dataclass(frozen=True)
class Crossover:
    """The smallest sizes at which a policy was measured to be quicker than dense attention.

    Answers were measured at smaller sizes than these. Those of lfps and psa stayed within one point of dense F1 on
    contexts of 1.7k to 7.8k tokens of the small model (docs/results/decode.md).

    Attributes:
        cpu_keys: Keys a layer from which `lfps` is used where a CPU holds the keys: 10.9 to 11.6 times dense at 65,536
            keys of an 8B layer, and slower than dense at 7,168 keys of a small model (docs/results/decode.md).
        host_keys: Keys a layer from which `psa` is used where keys lie in host memory and a GPU computes: 3.0 times
            dense at 4,096 keys, 8.1 times at 32,768, both with keys in host memory and an earlier pool
            (docs/results/decode.md).
    """

    cpu_keys: int = 65_536
    host_keys: int = 4_096


MEASURED = Crossover()


@dataclass(frozen=True)
class AutoPrefill:
    """The prefill policy `auto`: dense, whatever the size and the place of the keys.

    `critiprefill` is quicker on a GPU from 32,768 rows on, and answers worse: a model of 1.5 B parameters lost 13 to 20
    points of F1 with it at 15,000 and 32,000 tokens. `loopserve` loses nothing there and is slower than dense
    (docs/results/prefill.md).
    """

    def why_dense(self, rows: int, keys: int) -> str:
        """See `PrefillPolicy.why_dense`."""
        return "auto: no policy was measured to prefill faster than dense and to answer as well"

    def start(self) -> PrefillState:
        """Refuse: there is always a reason to be dense.

        Raises:
            ValueError: Always.
        """
        raise ValueError("auto prefills densely")


@dataclass(frozen=True)
class AutoDecode(DecodePolicy):
    """The decode policy `auto`.

    Attributes:
        policy: Used from the crossover on.
        name: Name of the policy.
        tier: Where the keys lie.
        keys: The crossover.
    """

    policy: DecodePolicy
    name: str
    tier: KeyTier
    keys: int

    def why_dense(self, keys: float) -> str:
        """See `DecodePolicy.why_dense`."""
        if self.tier == "gpu":
            return "auto: the GPU holds all keys, where dense decoding was measured to be the fastest"
        if keys < self.keys:
            return f"auto: {keys:.0f} keys a layer; {self.name} was measured to be faster from {self.keys} keys on"
        return self.policy.why_dense(keys)

    def start(self) -> DecodeState:
        """Create the state of one request."""
        return self.policy.start()


def key_tier(device: torch.device, pool: bool = False) -> KeyTier:
    """Return where the keys of a long context lie.

    Args:
        device: The device of the model, which computes.
        pool: Whether there is a pool of KV blocks, so that contexts that are decoded under PSA lie in host memory.
    """
    if device.type != "cuda":
        return "cpu"
    return "host" if pool else "gpu"
