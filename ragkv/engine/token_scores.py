"""Log probabilities of an answer's tokens, for who asks for them.

They are those of the model's own distribution: of its logits as they are, at temperature 1, before penalties, `top_p`
and a schema change or forbid anything. So they say what the model made of its context, however a token was chosen, and
a token that a schema forced may be improbable. vLLM returns the same by default (`raw_logprobs`).
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ragkv.engine.generation import Sequence

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LEAST = -9999.0
"""Stands for a smaller log probability, which JSON may have no number for. OpenAI's least is the same."""


@dataclass(frozen=True)
class TokenScore:
    """A token of an answer.

    Attributes:
        text: Its bytes. A character may have several tokens.
        log_probability: Natural logarithm of its probability.
        likely: The most likely tokens in its place with theirs, best first; as many as were asked for.
    """

    text: bytes
    log_probability: float
    likely: tuple[tuple[bytes, float], ...] = ()


class AnswerScores:
    """The scores of one answer while it is decoded. State of one request."""

    def __init__(self, sequence: Sequence, tokenizer: LLTokenizer):
        """Start before the first token.

        Args:
            sequence: Decodes the answer.
            tokenizer: Knows the bytes of the model's tokens.
        """
        self._sequence, self._tokenizer = sequence, tokenizer
        self._scores = list[TokenScore]()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._spans = list[tuple[int, int]]()

    def of(self, text: str) -> tuple[TokenScore, ...]:
        """Return the tokens that a text is made of: the answer as it was decoded, or its start.

        White space around the answer and what a stop string cut off are no part of it. A token that is one in part is
        returned whole.
        """
        self._extend()
        if not text:
            return ()
        start = f"{self._text}\ufffd".find(text)  # half of a character may stand at the end
        if start < 0:  # some tokenizers render a text differently from its tokens
            start = len(self._text) - len(self._text.lstrip())
        spans = zip(self._spans, self._scores, strict=True)
        return tuple(score for (begin, end), score in spans if begin < start + len(text) and end > start)

    def _extend(self) -> None:
        """Score the tokens that came since the last call."""
        known, tokens = len(self._scores), self._sequence.tokens
        if known == len(tokens):
            return
        scored = self._sequence.scores(known)
        for token, (log_probability, likely) in zip(tokens[known:], scored, strict=False):  # a stop token has one, too
            pairs = tuple((self._bytes(other), _bounded(value)) for other, value in likely)
            self._scores.append(TokenScore(self._bytes(token), _bounded(log_probability), pairs))
            begin = len(self._text)
            self._text += self._decoder.decode(self._scores[-1].text)
            begun = bool(self._decoder.getstate()[0])  # a character that the next token ends
            self._spans.append((begin, len(self._text) + begun))

    def _bytes(self, token: int) -> bytes:
        return bytes(self._tokenizer.decode_bytes([token]))


def _bounded(log_probability: float) -> float:
    """Return a number that JSON has, and that is no more than certain: the sum of a softmax is rounded."""
    return min(0.0, max(log_probability, LEAST))
