"""From logits to an answer: choose a token, run one row, until something says stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragkv.context import ContextCache
from ragkv.model import DecoderModel
from ragkv.passes import append


@dataclass(frozen=True)
class Sampling:
    """max_tokens: longest answer · temperature: 0 is greedy · top_p: smallest set of tokens that holds this share ·
    stop: strings that end the answer, not part of it · seed: of the draw."""

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int = 0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from logits [vocabulary]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    share = torch.softmax(logits.float().cpu() / sampling.temperature, dim=-1)
    share, order = share.sort(descending=True)
    # A token stays while the mass before it is below top_p, so the most likely one always does.
    share = torch.where(share.cumsum(0) - share < sampling.top_p, share, 0.0)
    return int(order[torch.multinomial(share, 1, generator=generator)])


def decode(
    model: DecoderModel, cache: ContextCache, logits: Tensor, position: int, sampling: Sampling
) -> Iterator[int]:
    """Yield token ids, the first from `logits` [vocabulary], each next one from a pass of one row at position..

    Ends at a stop token (not yielded) or after max_tokens. Dense: every token reads the whole context cache.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    for step in range(sampling.max_tokens):
        token = choose(logits, sampling, generator)
        if token in model.stop_ids:
            return
        yield token
        if step + 1 < sampling.max_tokens:
            logits = model.forward([append(cache, [token], position + step)])[0][-1]


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """(text before the first stop string, whether there was one)."""
    ends = [at for at in (text.find(mark) for mark in stop if mark) if at >= 0]
    return (text[: min(ends)], True) if ends else (text, False)
