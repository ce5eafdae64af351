"""A decode step that is launched before anybody has read the tokens of the step in front of it.

Between two steps a GPU waits for its host, which reads the tokens, prepares the next inputs and launches a graph.
Greedy decoding needs no host for that: the likeliest tokens are on the device, positions and lengths grow by one. So
the next step is launched at once, over the same requests, and its logits are taken when the host asks for the tokens
that were fed. A row whose request has ended, or goes on with another token, is never looked at, and what it wrote into
its cache lies behind the live rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor

from ragkv.kernels.attention import index_to_device
from ragkv.model.execution.step_inputs import table_of
from ragkv.model.kv_cache import ContextCache

Replay = Callable[[Callable[[Tensor], None]], Tensor | None]
"""Changes the inputs [2 + 3 L, W] of a step on the device, and runs it again; None where it cannot be run again."""


@dataclass(frozen=True, eq=False)
class LaunchedStep:
    """A step over requests that each have one row in it.

    Attributes:
        caches: of the requests. The step keeps none of them alive.
        positions: of their tokens.
        replay: runs the step again.
    """

    caches: Sequence[ref[ContextCache]]
    positions: Sequence[int]
    replay: Replay

    @classmethod
    def of(cls, caches: Sequence[ContextCache], positions: Sequence[int], replay: Replay) -> LaunchedStep | None:
        """Return the step; None where a request has several rows in it."""
        if len({id(cache) for cache in caches}) < len(caches):
            return None
        return cls([ref(cache) for cache in caches], list(positions), replay)

    @property
    def has_room(self) -> bool:
        """Whether the cache of every request is there and holds another row where it is."""
        return all(cache is not None and _has_room(cache) for cache in (alive() for alive in self.caches))

    def run_ahead(self, tokens: Tensor, known: Callable[[], Sequence[int]]) -> StepAhead | None:
        """Launch the next step with tokens [W] int64 on the device; None where the caches have no room for it, or its
        graph is gone.

        Args:
            tokens: of the requests, in their order.
            known: returns them on the host, once they are there.
        """
        if not self.has_room:
            return None
        count = len(self.caches)

        def change(inputs: Tensor) -> None:
            inputs[0, :count].copy_(tokens)
            inputs[1, :count].add_(1)
            table_of(inputs)[2, :, :count].add_(1)  # rows of the caches

        logits = self.replay(change)
        if logits is None:
            return None
        step = LaunchedStep(self.caches, [position + 1 for position in self.positions], self.replay)
        return StepAhead(step, known, logits[:count].clone())  # the next replay overwrites the original


@dataclass(frozen=True, eq=False)
class StepAhead:
    """A step that was launched before its tokens were read.

    Attributes:
        step: the step.
        tokens: returns the tokens that it was launched with.
        logits: [requests, vocabulary], on the device.
    """

    step: LaunchedStep
    tokens: Callable[[], Sequence[int]]
    logits: Tensor

    def has(self, cache: ContextCache) -> bool:
        """Whether a request has a row in it."""
        return any(alive() is cache for alive in self.step.caches)

    def logits_of(
        self, caches: Sequence[ContextCache], tokens: Sequence[int], positions: Sequence[int]
    ) -> Tensor | None:
        """Return logits [W, vocabulary] of rows; None where one of them was not in the step.

        Args:
            caches: the cache of each row.
            tokens: its token.
            positions: its position.
        """
        fed = zip(self.step.caches, self.tokens(), self.step.positions, strict=True)
        number = {(id(alive()), token, position): row for row, (alive, token, position) in enumerate(fed)}
        asked = [(id(cache), token, position) for cache, token, position in zip(caches, tokens, positions, strict=True)]
        rows = [number[row] for row in asked if row in number]
        if len(rows) < len(asked):
            return None
        if rows == [*range(len(number))]:
            return self.logits
        return self.logits.index_select(0, index_to_device(torch.tensor(rows), self.logits.device))


def _has_room(cache: ContextCache) -> bool:
    """Return whether every layer can hold another row where it is."""
    keys = cache.tensors[: len(cache.lengths)]
    return all(length < rows.shape[0] for length, rows in zip(cache.lengths, keys, strict=True))
