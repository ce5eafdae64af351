"""Prompt pieces of an operator: control tokens that a piece writes are tokens, and what is filled in is plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ragkv.model.plain_text import Encode, added_words

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class _Part:
    """A part of a piece. ids: its tokens where it holds no field; else None, and its text is filled in and read."""

    text: str
    ids: tuple[int, ...] | None


class PieceTemplate:
    """A prompt piece with fields like `{text}`. Immutable.

    Text between two control tokens is tokenised together with the values in it, so a piece without control tokens makes
    the tokens of its filled text.

    Attributes:
        template: the piece, with its fields.
        controlled: it writes control tokens.
    """

    def __init__(self, text: str, tokenizer: Any, plain: Encode):
        """Find the control tokens of a piece.

        Args:
            text: the piece.
            tokenizer: a Hugging Face tokenizer.
            plain: tokenises text without making added tokens.
        """
        self.template, self._plain = text, plain
        self._parts = tuple(_parts(text, tokenizer))
        self.controlled = any(part.ids is not None for part in self._parts)

    def filled(self, **values: str) -> str:
        """Return the piece as text."""
        return fill(self.template, **values)

    def tokens(self, **values: str) -> tuple[int, ...]:
        """Return the token ids of the filled piece. No value makes an added token."""
        pieces = (self._plain(fill(part.text, **values)) if part.ids is None else part.ids for part in self._parts)
        return tuple(token for piece in pieces for token in piece)


def fill(piece: str, **values: str) -> str:
    """Insert all values into a piece at once, so that `{text}` in a title is not replaced."""
    return _FIELD.sub(lambda field: values.get(field[1], field[0]), piece)


def control_tokens(text: str, tokenizer: Any) -> tuple[int, ...]:
    """Return the token ids of a text without fields, its control tokens included."""
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def _split(text: str, words: Sequence[str]) -> list[str]:
    """Divide a text at words, the first of them that stands at a place: text, word, text, word, …, text."""
    cut, start, at = list[str](), 0, 0
    while at < len(text):
        word = next((word for word in words if text.startswith(word, at)), "")
        if word:
            cut += [text[start:at], word]
            start = at + len(word)
        at = start if word else at + 1
    return [*cut, text[start:]]


def _parts(text: str, tokenizer: Any) -> Iterator[_Part]:
    """Divide a piece into texts with fields and runs of control tokens with what stands between them."""
    words = sorted({word for word in added_words(tokenizer).values() if word}, key=len, reverse=True)
    cut = _split(text, words)
    if len(cut) == 1:
        yield _Part(text, None)
        return
    for number in range(1, len(cut), 2):
        cut[number - 1], cut[number + 1] = _stripped(cut[number], cut[number - 1], cut[number + 1], tokenizer)
    run = ""
    for number, part in enumerate(cut):
        if number % 2 or not _FIELD.search(part):
            run += part
            continue
        if run:
            yield _Part(run, control_tokens(run, tokenizer))
        yield _Part(part, None)
        run = ""
    if run:
        yield _Part(run, control_tokens(run, tokenizer))


def _stripped(word: str, before: str, after: str, tokenizer: Any) -> tuple[str, str]:
    """Return the texts beside a control token without the spaces that it takes with it."""
    for token in tokenizer.added_tokens_decoder.values():
        if str(token) == word:
            before = before.rstrip() if getattr(token, "lstrip", False) else before
            after = after.lstrip() if getattr(token, "rstrip", False) else after
    return before, after
