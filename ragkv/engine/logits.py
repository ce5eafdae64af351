"""Logits of a forward, whose rows belong to several sequences.

Greedy decoding needs the largest number of each row and its normaliser. They are computed for all rows at once, when
the first row needs them: row by row, each would wait for a GPU, and launch a few kernels. `fetch` begins to copy them
to the host, so that whoever reads them waits for these logits and not for a step that was launched behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from ragkv.kernels.host_copy import begin_host_copies

MOST_LIKELY = 20
"""Most tokens of a row whose log probabilities anybody asks for, as in OpenAI's API."""


class StepLogits:
    """Logits [W, vocabulary] of a forward."""

    def __init__(self, logits: Tensor):
        self.logits = logits
        self._best: list[int] | None = None
        self._ids: HostCopy | None = None
        self._scores: HostCopy | None = None

    def fetch(self) -> None:
        """Begin to copy the best tokens to the host, and behind them their log probabilities."""
        self._ids = HostCopy(self.likeliest)
        self._scores = HostCopy(self.logits.amax(-1).float() - self.normalisers)

    @cached_property
    def likeliest(self) -> Tensor:
        """Token id with the largest logit of each row [W] int64, on the device of the logits."""
        return self.logits.argmax(-1)

    @property
    def best(self) -> list[int]:
        """Token id with the largest logit of each row; the first of equals. It is known from the first call on."""
        if self._best is None:
            self._best = (self.likeliest if self._ids is None else self._ids.read()).tolist()
        return self._best

    @cached_property
    def normalisers(self) -> Tensor:
        """Logarithm of the sum of all exponentials of each row [W], float32."""
        return self.logits.float().logsumexp(-1)

    @cached_property
    def best_log_probabilities(self) -> tuple[Tensor, ...]:
        """Log probability [] of the best token of each row, float32; on the host where it was fetched."""
        if self._scores is not None:
            return self._scores.read().unbind()
        return (self.logits.amax(-1).float() - self.normalisers).unbind()

    @cached_property
    def most_likely(self) -> tuple[Tensor, Tensor]:
        """Log probabilities [W, MOST_LIKELY] float32 of each row's most likely tokens, best first, and their ids."""
        found, ids = self.logits.float().topk(min(MOST_LIKELY, self.logits.shape[-1]), -1)
        return found - self.normalisers[:, None], ids

    def log_probability(self, row: int, token: int) -> Tensor:
        """Return the natural logarithm of a token's probability in a row, as float32 [].

        It is on the host where the token is the row's best one and was fetched, else on the device of the logits.
        """
        if self._best is not None and token == self._best[row]:
            return self.best_log_probabilities[row]
        return self.logits[row, token].float() - self.normalisers[row]

    def rows(self) -> list[RowLogits]:
        """Return all rows."""
        return [RowLogits(self, row) for row in range(self.logits.shape[0])]

    def split(self, sizes: Sequence[int]) -> list[list[RowLogits]]:
        """Return the rows in parts of these sizes."""
        rows = iter(self.rows())
        return [[next(rows) for _ in range(size)] for size in sizes]


class HostCopy:
    """A tensor on its way to the host. Reading it waits for no work that was launched later."""

    def __init__(self, tensor: Tensor):
        """Begin to copy a tensor."""
        (self._copy,), self._wait = begin_host_copies([tensor])

    def read(self) -> Tensor:
        """Return the tensor on the CPU, when it is there."""
        self._wait()
        return self._copy


class RowLogits:
    """One row of the logits of a forward: those of the next token of a sequence."""

    def __init__(self, step: StepLogits, row: int):
        self._step, self._row = step, row

    @property
    def logits(self) -> Tensor:
        """The row [vocabulary]."""
        return self._step.logits[self._row]

    @property
    def best(self) -> int:
        """Token id with the largest logit."""
        return self._step.best[self._row]

    def log_probability(self, token: int) -> Tensor:
        """Return the natural logarithm of a token's probability, as `StepLogits.log_probability` does.

        Nothing waits for the device, unless the token was fetched, and it is there when the token is known.
        """
        return self._step.log_probability(self._row, token)

    def most_likely(self, count: int) -> tuple[Tensor, Tensor]:
        """Return log probabilities [count] float32 of the most likely tokens, best first, and their ids [count].

        Nothing waits for the device. count: at most MOST_LIKELY.
        """
        found, ids = self._step.most_likely
        return found[self._row, :count], ids[self._row, :count]
