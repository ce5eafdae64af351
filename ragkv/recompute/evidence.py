"""Evidence: what speaks for each block of a context, before the model has read anything of it.

    meaning      cosine of the question and the block's window, in the space of the retrieval embedder
    words        squared idf of the question's words that stand in the window, summed, as in a product of two tf-idf
                 vectors; a window is what counts, so a word that stands in each of them says nothing
    links        how much of the title of the block's chunk stands in a strong window of another chunk: "built by Odile
                 Brannock" is a link to the chunk with that title. What the question itself has of the title is left out

A window is a block with its neighbours. Meaning and words are standardised over all blocks of the context, so that they
are on one scale; a link is a share from 0 to 1. The weighted sum of the kinds is a logit: the softmax over all blocks
is the probability that the answer is in a block. The weights were fitted by maximum likelihood on development questions
about generated and real documents, and not to any language model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["meaning", "words", "links", "attention"]
"""A kind of evidence. `attention` is that of calibrated heads of the model (scout.py)."""

WITHOUT_PASS: tuple[Kind, ...] = ("meaning", "words", "links")
"""The kinds that need no pass of the model."""
WEIGHTS: dict[Kind, float] = {"meaning": 0.83, "words": 0.60, "links": 3.0, "attention": 1.0}
STRONG_WINDOWS = 256
"""Windows in which titles are looked for, those of the largest logits: what others hold counts for next to nothing."""
OWN_TITLE = 0.2
"""What a word of a window's own title counts for, if the words of its text count 1: chunks of one document, which share
a title, are linked a little."""


@dataclass(frozen=True)
class BlockEvidence:
    """What speaks for the blocks of one chunk.

    Attributes:
        meaning: Cosine of the question and each block's window [B] float32.
        words: Which of the question's words stand in each block's window [B, W] bool.
        named: Which of the words of titles stand in the text of each block's window [B, U] bool. They are the words of
            the titles of all chunks of the context, without the question's; none where links are not asked for.
        title: Which of these words the title of this chunk has [U] bool.
    """

    meaning: Tensor
    words: Tensor
    named: Tensor
    title: Tensor


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
    return logits + WEIGHTS["links"] * title_links(found, logits) if "links" in kinds else logits


def title_links(found: Sequence[BlockEvidence], logits: Tensor) -> Tensor:
    """Find the chunks that strong windows of other chunks name.

    Of a strong window w of another chunk, the share of chunk c's title that w holds, each word by its squared idf,
    times exp(logit of w - largest logit). The link of c is the largest of these products.

    Args:
        found: The evidence of each chunk, for the same question.
        logits: Logit of each block by the other kinds [sum of B].

    Returns:
        The link of each block's chunk [sum of B] float32, 0 to 1; 0 where the question has the whole title, or there is
        none.
    """
    sizes = torch.tensor([len(each.meaning) for each in found])
    chunk = torch.arange(len(found)).repeat_interleave(sizes)
    named, titles = torch.cat([each.named for each in found]), torch.stack([each.title for each in found]).float()
    weights = titles * rarity(named)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-6)
    best, strong = logits.topk(min(len(logits), STRONG_WINDOWS))
    held = named[strong].float().maximum(OWN_TITLE * titles[chunk[strong]]) @ weights.T
    held *= (best - best[0]).exp()[:, None]
    held[torch.arange(len(strong)), chunk[strong]] = 0.0  # its own windows say nothing of a chunk
    return held.amax(0)[chunk]


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


def rarity(present: Tensor) -> Tensor:
    """Return the squared inverse document frequency log((N + 1) / (n + 1))² of words.

    Args:
        present: Which words each of N windows has [N, W] bool; n windows have a word.

    Returns:
        Weights [W] float32.
    """
    return ((len(present) + 1) / (present.sum(0) + 1)).log().square()


def inverse_frequencies(present: Tensor) -> Tensor:
    """Sum the `rarity` of the words in each of N windows.

    Args:
        present: Which words each window has [N, W] bool.

    Returns:
        Sums [N] float32.
    """
    return present.float() @ rarity(present)


def standardised(scores: Tensor) -> Tensor:
    """Return (scores - mean) / standard deviation of scores [N]; zeros where all are the same."""
    deviation = scores.std(correction=0)
    return (scores - scores.mean()) / deviation if deviation > 1e-6 else torch.zeros_like(scores)
