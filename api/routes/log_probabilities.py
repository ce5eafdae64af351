"""Log probabilities of an answer's tokens, in the forms of the APIs that have them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable, Sequence
from typing import Any

from ragkv.engine.token_scores import TokenScore


def token_entries(tokens: Iterable[TokenScore]) -> list[dict[str, Any]]:
    """Build an entry for each token, as OpenAI's chats and responses and Ollama's routes have it."""
    return [
        _entry(token.text, token.log_probability) | {"top_logprobs": [_entry(*likely) for likely in token.likely]}
        for token in tokens
    ]


def _entry(text: bytes, log_probability: float) -> dict[str, Any]:
    return {"token": _shown(text), "logprob": log_probability, "bytes": list(text)}


def _shown(text: bytes) -> str:
    """Return a token as text; one that is a part of a character as the escapes of its bytes."""
    return text.decode("utf-8", "backslashreplace")


class TokenLists:
    """The lists of OpenAI's completions. An object of it is for one reply, whose offsets count over all pieces."""

    def __init__(self) -> None:
        """Start before the first token."""
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._text = ""

    def of(self, tokens: Sequence[TokenScore]) -> dict[str, Any]:
        """Build the lists for the next tokens. The chosen token is always among the most likely ones of its place."""
        return {
            "tokens": [_shown(token.text) for token in tokens],
            "token_logprobs": [token.log_probability for token in tokens],
            "top_logprobs": [
                {_shown(text): value for text, value in (*token.likely, (token.text, token.log_probability))}
                for token in tokens
            ],
            "text_offset": [self._offset(token) for token in tokens],
        }

    def _offset(self, token: TokenScore) -> int:
        """Return where a token begins in the text, which has no white space at its start."""
        begins = len(self._text.lstrip())
        self._text += self._decoder.decode(token.text)
        return begins
