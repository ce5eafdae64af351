"""Drafts for speculative decoding: tokens that probably come next, copied from the prompt.

Prompt-lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): the latest tokens of the answer
are an n-gram. Where the same n-gram stands in the prompt, what follows it there is the draft. Answers that quote their
documents are drafted well, and a draft costs no model.

One pass verifies a draft: the rows of the latest token and of k drafted tokens give the logits of k + 1 tokens. Each
token is sampled from its logits as always. A drafted token is accepted while it equals the sampled one; the rows behind
the first difference are dropped. Speculative sampling (Leviathan et al., ICML 2023, arXiv 2211.17192; Chen et al.,
2023, arXiv 2302.01318) accepts a token x that was drafted with certainty with probability p(x), and otherwise samples
from p without x. Sampling from p and comparing gives the same distribution. It also draws once a token and in the same
order as decoding without drafts, so a seed gives the same answer, but for the rounding of passes with other numbers of
rows.

The pass of a rejected draft takes longer than that of one row, more than twice as long in float32 on a CPU. Drafts
therefore become longer while they are accepted, and shorter and much rarer while they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GAP = -1
"""Stands between texts that do not follow each other, and for tokens that are never drafted. No token has this id."""


@dataclass(frozen=True)
class DraftParams:
    """What is drafted, and when.

    Attributes:
        longest: Tokens of the longest n-gram that is looked up.
        shortest: Tokens of the shortest n-gram; without a match of so many tokens there is no draft. Short answers
            thus have none: the pass of a draft that is accepted for a token or two gains nothing.
        first: Tokens of the first draft at most, and of drafts after one that was partly accepted.
        most: Tokens of any draft at most. A draft that is accepted as a whole doubles the next one up to this.
        pause: Tokens that are decoded without a draft, at most, after drafts of which nothing was accepted. The pause
            is 3 after the first of them, and about four times as long after each further one in a row.
    """

    longest: int = 12
    shortest: int = 8
    first: int = 8
    most: int = 16
    pause: int = 64

    def __post_init__(self) -> None:
        if not (1 <= self.shortest <= self.longest and 1 <= self.first <= self.most and self.pause >= 0):
            raise ValueError("1 <= shortest <= longest, 1 <= first <= most and 0 <= pause must hold")


class PromptLookup:
    """Finds the latest tokens of an answer in its prompt, and in the answer itself.

    Attributes:
        answered: Tokens of the answer that are known here.
    """

    def __init__(self, texts: Iterable[Sequence[int]], params: DraftParams, never: Iterable[int] = ()):
        """Take what drafts are copied from.

        Args:
            texts: Token ids of texts, in the order in which they are searched. No n-gram and no draft spans two.
            params: Lengths of n-grams.
            never: Token ids that are never drafted, such as stop tokens. They end a text.
        """
        self.answered = 0
        self._params = params
        known = [GAP]
        for text in texts:
            known += [*text, GAP]
        # Behind the texts there is room for the answer: a position holds the token, GAP where there is none.
        self._known = np.array(known, dtype=np.int64)
        self._known[np.isin(self._known, np.array(list(never), dtype=np.int64))] = GAP
        self._size = len(known)

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        size = self._size + len(tokens)
        if size > self._known.shape[0]:
            self._known = np.concatenate([self._known, np.full(size, GAP, dtype=np.int64)])
        self._known[self._size : size] = tokens
        self._size, self.answered = size, self.answered + len(tokens)

    def find(self, count: int) -> tuple[int, ...]:
        """Return the tokens behind the first place of the longest n-gram that ends the answer.

        Args:
            count: Tokens to return at most. Fewer are there where a text ends.
        """
        longest = min(self._params.longest, self.answered)
        if count < 1 or longest < self._params.shortest:
            return ()
        ends, length = self._match(longest)
        if length < self._params.shortest:
            return ()
        found = self._known[ends[0] + 1 : min(ends[0] + 1 + count, self._size)].tolist()
        return tuple(found[: found.index(GAP)] if GAP in found else found)

    def is_near(self) -> bool:
        """Whether a token more may make an n-gram that is long enough."""
        needed = self._params.shortest - 1
        return self.answered >= needed and self._match(needed)[1] >= needed

    def _match(self, longest: int) -> tuple[NDArray[np.int64], int]:
        """Return where the longest n-gram that ends the answer ends in the texts, and its length, at most `longest`."""
        known = self._known[: self._size]
        # Places where the n-gram may end: something follows, so the end of the answer itself is none of them.
        ends = np.flatnonzero((known[:-1] == known[-1]) & (known[1:] != GAP))
        length = 1 if ends.size else 0
        while 0 < length < longest:
            longer = ends[known[ends - length] == known[-1 - length]]  # never negative: known begins with a gap
            if not longer.size:
                break
            ends, length = longer, length + 1
        return ends, length


class Drafter:
    """Drafts the tokens of one answer. State of one sequence.

    Attributes:
        passes: Passes that verified a draft.
        drafted: Tokens of all drafts.
        accepted: Tokens of those that became tokens of the answer.
    """

    def __init__(
        self, texts: Iterable[Sequence[int]], never: Iterable[int] = (), params: DraftParams | None = None
    ) -> None:
        """Take what drafts are copied from. See `PromptLookup` for `texts` and `never`."""
        self.passes = self.drafted = self.accepted = 0
        self._params = params or DraftParams()
        self._lookup = PromptLookup(texts, self._params, never)
        self._size = self._params.first
        self._open = self._right = self._rejected = self._resume = 0

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return a draft of the tokens behind the answer so far, often an empty one.

        Args:
            tokens: The answer so far, longer than at the last call.
            limit: Tokens of the draft at most.
        """
        self._lookup.append(tokens[self._lookup.answered :])
        self._adapt(len(tokens))
        draft = self._lookup.find(min(self._size, limit)) if len(tokens) >= self._resume else ()
        self._open = len(draft)
        self.passes += bool(draft)
        self.drafted += len(draft)
        return draft

    def may_propose(self, tokens: Sequence[int]) -> bool:
        """Whether there may be a draft behind the next token. tokens: the answer so far, of which none is a draft."""
        self._lookup.append(tokens[self._lookup.answered :])
        return len(tokens) + 1 >= self._resume and self._lookup.is_near()

    def accept(self) -> None:
        """Note that the next token of the latest draft was accepted."""
        self._right += 1
        self.accepted += 1

    def _adapt(self, answered: int) -> None:
        """Choose the length of the next draft, and how soon it comes, by what became of the latest one."""
        drafted, right, params = self._open, self._right, self._params
        self._open = self._right = 0
        if not drafted:
            return
        if not right:
            self._rejected += 1
            self._size = max(1, self._size // 2)
            self._resume = answered + min(4**self._rejected - 1, params.pause)
            return
        self._rejected = 0
        self._size = min(2 * self._size, params.most) if right == drafted else max(params.first, right)
