"""The candidates of one token that are read under LFPS: the best by their exact scores (lfps.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ragkv.sparse.indexing import index_flat
from ragkv.sparse.lfps_candidates import top_candidates
from ragkv.sparse.lfps_marked import Marked
from ragkv.sparse.lfps_tables import KeyScores


@dataclass(frozen=True)
class ChosenKeys:
    """The best candidates of one token. There are H lists of candidates, each for g query heads.

    Attributes:
        marked: All candidates [m].
        rows: Where they are among the rows of all kv heads [m].
        best: The chosen ones, as numbers within their list [H, g, b]. Numbers beyond the end of a list stand for none.
        scores: Exact scores of the chosen ones [H, g, b]; -inf for none, and for idle heads.
        busy: bool [H, g, 1], heads that are not idle.
    """

    marked: Marked
    rows: Tensor
    best: Tensor
    scores: Tensor
    busy: Tensor

    def teach(self, tables: KeyScores) -> None:
        """Add half of the weights of the chosen keys to both tables (Eq. 10)."""
        positions, starts, now, counts = self.marked.positions, self.marked.starts, self.marked.now, self.marked.counts
        if not len(positions):
            return
        weights, last = self._weights(self.scores)[0], len(positions) - 1
        if self.busy.shape[1] == 1:
            beyond = self.best[:, 0] >= counts[:, None]
            at = index_flat(positions, self._chosen[:, 0]).masked_fill_(beyond, -1)
            tables.add_scores(at, 0.5 * weights[:, 0], now)  # Eq. 10, w
        else:
            most = int(counts.max())
            summed = weights.new_zeros(*weights.shape[:2], most).scatter_(-1, self.best, weights).sum(1)
            summed /= self.busy.sum(1).clamp(min=1)
            number = torch.arange(most, device=positions.device).expand(len(counts), -1)
            at = index_flat(positions, (starts[:-1, None] + number).clamp_(max=last))
            tables.add_scores(at.masked_fill_(number >= counts[:, None], -1), 0.5 * summed, now)

    def read(self, v: Tensor, first: int | None = None) -> tuple[Tensor, Tensor]:
        """Attend to the chosen keys.

        Args:
            v: Values [n, Hkv, d].
            first: Reads only keys before this position; None for all.

        Returns:
            The output [Hkv, g, d], and its log-sum-exp [Hkv, g], which is -inf where nothing is read.
        """
        heads, (lists, group, _) = v.shape[1], self.scores.shape
        if not len(self.rows):
            shape = heads, lists * group // heads
            return self.scores.new_zeros(*shape, v.shape[2]), self.scores.new_full(shape, -math.inf)
        chosen, scores = self._chosen, self.scores
        if first is not None:
            scores = scores.masked_fill(index_flat(self.marked.positions, chosen) >= first, -math.inf)
        weights, lse = self._weights(scores)
        rows, shares = index_flat(self.rows, chosen).flatten(0, 1), weights.flatten(0, 1).to(v.dtype)
        values = v.reshape(-1, v.shape[2])
        out = F.embedding_bag(rows, values, mode="sum", per_sample_weights=shares)  # Eq. 1
        return out.to(scores.dtype).view(heads, -1, v.shape[2]), lse.view(heads, -1)

    @property
    def _chosen(self) -> Tensor:
        """Numbers of the chosen keys among all candidates [H, g, b]. Those for none have no weight: any one will do."""
        return (self.marked.starts[:-1, None, None] + self.best).clamp_(max=len(self.rows) - 1)

    @staticmethod
    def _weights(scores: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the softmax [H, g, b] of scores, 0 where all are -inf, and their log-sum-exp [H, g, 1]."""
        lse = scores.logsumexp(-1, keepdim=True)
        return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)), lse


class CandidateScores:
    """Scores candidates. Every call gathers keys in the same memory, since new pages cost as much as the rows."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def select(self, marked: Marked, idle: Tensor, q: Tensor, k: Tensor, *, recent: Tensor, keep: int) -> ChosenKeys:
        """Choose the best candidates.

        Args:
            marked: The candidates.
            idle: bool [Hkv, g], heads that read none.
            q: Queries [Hkv, g, d], scaled.
            k: Keys [n, Hkv, d].
            recent: The last positions, which are chosen in any case.
            keep: How many others are chosen.
        """
        heads, starts, counts = k.shape[1], marked.starts, marked.counts
        lists, most = len(counts), int(counts.max())
        list_heads = torch.arange(lists, device=q.device) * heads // lists
        rows, keys = marked.slots * heads + list_heads.repeat_interleave(counts), k.reshape(-1, k.shape[2])
        queries, busy = q.reshape(lists, -1, q.shape[2]), ~idle.view(lists, -1, 1)
        exact = q.new_full((*queries.shape[:2], most), -math.inf)
        for row, (start, stop) in enumerate(pairwise(starts.tolist())):
            exact[row, :, : stop - start] = queries[row] @ self._gather(keys, rows[start:stop], q.dtype).T
        exact.masked_fill_(~busy, -math.inf)
        best = top_candidates(exact, counts, keep, recent)
        return ChosenKeys(marked, rows, best, exact.gather(-1, best), busy)

    def _gather(self, x: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather rows `at` [m] of x [rows, d]. The result is valid until the next call."""
        buffers = []
        for kind in (x.dtype, dtype):
            buffer = self._buffers.get((x.device, kind))
            if buffer is None or buffer.shape[0] < len(at):
                buffer = self._buffers[x.device, kind] = x.new_empty(2 * len(at), x.shape[1], dtype=kind)
            buffers.append(buffer[: len(at)])
        torch.index_select(x, 0, at, out=buffers[0])
        return buffers[0] if x.dtype == dtype else buffers[1].copy_(buffers[0])
