"""LFPS: what it learns of a prompt, and which keys are candidates (lfps.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragkv.sparse.attention import score_dtype
from ragkv.sparse.indexing import true_indices
from ragkv.sparse.lfps_tables import KeyScores, PromptStatistics, TableMoments


def prompt_statistics(q: Tensor, k: Tensor, v: Tensor, outside: Tensor, *, scale: float) -> PromptStatistics:
    """Compute kbar, vbar and r from the rows outside [n] bool of k, v [n, Hkv, d].

    q [Hq, d] is the last query of the prompt.
    """
    queries = q.unflatten(0, (k.shape[1], -1)).to(score_dtype(q.dtype))
    slots, sinks = true_indices(outside), true_indices(~outside)
    kbar, vbar = ((x.sum(0, dtype=queries.dtype) - x[sinks].sum(0, dtype=queries.dtype)) / len(slots) for x in (k, v))
    variance = [
        (query @ k[:, head].to(queries.dtype).T * scale).index_select(1, slots).var(-1, correction=0)
        for head, query in enumerate(queries)
    ]
    square = queries.square().sum(-1).clamp(min=torch.finfo(queries.dtype).tiny)
    return PromptStatistics(kbar, vbar, torch.stack(variance) / square)


def sink_share(q: Tensor, k: Tensor, scores: KeyScores, sink: Tensor, *, scale: float) -> Tensor:
    """Estimate rho [Hkv, g] of q [Hkv, g, d] from the log-sum-exp of the sinks, `sink` [Hkv, g]."""
    slots = scores.slot[scores.recent]
    recent = k[slots[slots >= 0]].to(q.dtype)
    local = (q @ recent.permute(1, 2, 0) * scale).logsumexp(-1)  # log A_local, Eq. 5
    statistics = scores.statistics
    if statistics is None:
        return sink_ratio(sink, local, local)
    middle = (q @ statistics.mean_key[..., None])[..., 0] * scale
    overall = (
        math.log(scores.scored) + middle + statistics.score_variance * q.square().sum(-1) / 2
    )  # log A_global, Eq. 5
    return sink_ratio(sink, overall, local)


def sink_ratio(sink: Tensor, overall: Tensor, local: Tensor) -> Tensor:
    """Compute rho = A_sink / (A_sink + max(A_global, A_local)) from logarithms, so that no score overflows."""
    return torch.exp(sink - torch.logaddexp(sink, torch.maximum(overall, local)))  # Eq. 6


def thresholds(vertical: TableMoments, slash: TableMoments, beta: float) -> tuple[Tensor, Tensor]:
    """Compute tau_v, tau_s [H] = mean + beta · deviation · f. The table with the sharper peaks gets the lower bar."""
    both = (vertical.kurtosis * slash.kurtosis).sqrt()
    tau_v, tau_s = (
        table.mean + beta * table.deviation * (both / table.kurtosis).sqrt().clamp(1 / 4, 4)
        for table in (vertical, slash)
    )
    return tau_v, tau_s  # Eq. 8


def top_candidates(scores: Tensor, counts: Tensor, keep: int, recent: Tensor) -> Tensor:
    """Select the best `keep` candidates and the recent ones, or all if there are no more.

    Args:
        scores: Exact scores [H, g, m].
        counts: Length of each list [H]. The recent tokens are at its end.
        keep: How many candidates to select besides the recent ones.
        recent: The last positions.

    Returns:
        Indices [H, g, .].
    """
    keep, most = keep + len(recent), scores.shape[-1]
    if most <= keep:
        return torch.arange(most, device=scores.device).expand(scores.shape)
    last = (counts[:, None] - 1 - torch.arange(len(recent), device=scores.device)).clamp_(min=0)
    raised = scores.scatter(-1, last[:, None].expand(-1, scores.shape[1], -1), math.inf)
    return raised.topk(keep, dim=-1, sorted=False).indices
