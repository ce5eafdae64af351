"""Evidence: what speaks for each block of a context, before the model has read anything of it.

    meaning      cosine of the question and the block's window, in the space of the retrieval embedder
    words        idf of the question's words that stand in the window, summed; a window is what counts, so a word that
                 stands in each of them says nothing

A window is a block with its neighbours. Each kind is standardised over all blocks of the context, so that the kinds are
on one scale, and the sum of the kinds is a logit: the softmax over all blocks is the probability that the answer is in
a block. The weights were fitted by maximum likelihood on development questions about generated and real documents, and
not to any language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["meaning", "words", "attention"]
"""A kind of evidence. `attention` is that of calibrated heads of the model (scout.py)."""

WITHOUT_PASS: tuple[Kind, ...] = ("meaning", "words")
"""The kinds that need no pass of the model."""
WEIGHTS: dict[Kind, float] = {"meaning": 0.83, "words": 0.60, "attention": 1.0}


@dataclass(frozen=True)
class BlockEvidence:
    """What speaks for the blocks of one chunk.

    Attributes:
        meaning: Cosine of the question and each block's window [B] float32.
        words: Which of the question's words stand in each block's window [B, W] bool.
    """

    meaning: Tensor
    words: Tensor


def evidence_logits(found: Sequence[BlockEvidence], kinds: Sequence[Kind]) -> Tensor:
    """Join the evidence of all chunks of a context.

    Args:
        found: The evidence of each chunk, for the same question.
        kinds: The kinds that count.

    Returns:
        Logit of each block [sum of B] float32; 0 for all where no kind tells blocks apart.
    """
    scores: dict[Kind, Tensor] = {
        "meaning": torch.cat([each.meaning for each in found]),
        "words": inverse_frequencies(torch.cat([each.words for each in found])),
    }
    logits = torch.zeros(len(scores["meaning"]))
    for kind in kinds:
        if kind in scores:
            logits += WEIGHTS[kind] * standardised(scores[kind])
    return logits


class EvidencePiece(Protocol):
    """A chunk as a method sees it (`Piece`): its blocks, and what speaks for them; None where nothing is known."""

    @property
    def blocks(self) -> int: ...

    @property
    def evidence(self) -> BlockEvidence | None: ...


def piece_logits(pieces: Sequence[EvidencePiece], kinds: Sequence[Kind]) -> Tensor:
    """Join the evidence of pieces.

    Returns:
        Logits [sum of B] float32; 0 for all where a piece has no evidence, such as a chunk of an earlier turn.
    """
    found = [piece.evidence for piece in pieces if piece.evidence is not None]
    if len(found) < len(pieces):
        return torch.zeros(sum(piece.blocks for piece in pieces))
    return evidence_logits(found, kinds)


def inverse_frequencies(present: Tensor) -> Tensor:
    """Sum the inverse document frequency log((N + 1) / (n + 1)) of the words in each of N windows.

    Args:
        present: Which words each window has [N, W] bool; n windows have a word.

    Returns:
        Sums [N] float32.
    """
    windows = present.float()
    return windows @ ((len(windows) + 1) / (windows.sum(0) + 1)).log()


def standardised(scores: Tensor) -> Tensor:
    """Return (scores - mean) / standard deviation of scores [N]; zeros where all are the same."""
    deviation = scores.std(correction=0)
    return (scores - scores.mean()) / deviation if deviation > 1e-6 else torch.zeros_like(scores)
