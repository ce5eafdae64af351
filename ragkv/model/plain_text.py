"""Tokenise text from outside, so that it makes no added token.

A tokenizer knows some words as one token each: the special ones that end a turn, and others that are not called special
(`<tool_call>` of Qwen's). A model was trained to read them as control tokens, so a document must not write them. Its
`<tool_call>` is read as the characters that it consists of.

    fast tokenizers    the same parts without the words. Where the vocabulary has a word, too, and a text makes it, a
                       copy of all parts in which the word has another name
    all others         a text that makes one is cut inside of it, and the pieces are tokenised one by one

Added tokens of nothing but spaces and line breaks control nothing: Gemma's line break is one. A text makes them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

from ragkv.errors import InputError

Encode = Callable[[str], list[int]]


def plain_encoder(tokenizer: Any) -> Encode:
    """Return what tokenises text from outside.

    The unknown token of a tokenizer still stands for characters that it does not know.

    Args:
        tokenizer: a Hugging Face tokenizer.
    """
    words = added_words(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        return _Fast(backend, words).encode
    encode = partial(tokenizer, add_special_tokens=False, split_special_tokens=True)
    return _Cutting(
        lambda text: list(encode(text)["input_ids"]), words, getattr(tokenizer, "unk_token_id", None)
    ).encode


def added_words(tokenizer: Any) -> dict[int, str]:
    """Return the added tokens of a tokenizer, special or not, but those of spaces: their ids, and their words."""
    words = {int(id): str(token) for id, token in tokenizer.added_tokens_decoder.items()}
    words |= {int(id): word for word, id in tokenizer.get_added_vocab().items()}
    words |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return {id: word for id, word in words.items() if not word.isspace()}


class _Fast:
    """Tokenises with the parts of a fast tokenizer, without its added tokens but those of spaces."""

    def __init__(self, backend: Tokenizer, words: Mapping[int, str]):
        self._backend, self._words = backend, words
        self._plain = Tokenizer(backend.model)  # shares the parts
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(backend, part)) is not None:
                setattr(self._plain, part, value)
        added = backend.get_added_tokens_decoder()
        # One beyond the vocabulary would get another id here; its spaces are read as the vocabulary has them.
        self._spaces = {
            id: token
            for id, token in added.items()
            if token.content.isspace() and self._plain.token_to_id(token.content) == id
        }
        self._plain.add_tokens(list(self._spaces.values()))

    def encode(self, text: str) -> list[int]:
        """Return the token ids."""
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids if self._words.keys().isdisjoint(ids) else self._renamed(text)

    @cached_property
    def _renamed(self) -> Encode:
        """Tokenises without words that the vocabulary has, too. Made when it is first needed: it takes a second.

        A word keeps its id under a name that no text has. Models that look whole words up, such as Unigram's, would
        find it otherwise.
        """
        try:
            content = json.loads(self._backend.to_str())
            content |= {"post_processor": None, "truncation": None, "padding": None}
            content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] in self._spaces]
            _rename(content["model"], {word: secrets.token_hex(16) for word in self._words.values()})
            copy = Tokenizer.from_str(json.dumps(content))
        except Exception:  # the library raises no other: for a part written in Python, or one that it does not know
            copy = None
        if copy is not None:
            return lambda text: list(copy.encode(text, add_special_tokens=False).ids)
        unknown = self._backend.token_to_id(getattr(self._backend.model, "unk_token", None) or "")
        return _Cutting(
            lambda text: list(self._plain.encode(text, add_special_tokens=False).ids), self._words, unknown
        ).encode


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename words in the vocabulary of a model, and drop the merges that have to do with them."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): id for word, id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [
            [left, right]
            for left, right in pairs
            if names.keys().isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]


class _Cutting:
    """Cuts a text inside of each word that would become an added token."""

    def __init__(self, encode: Encode, words: Mapping[int, str], unknown: int | None):
        self._encode = encode
        self._words = {id: word for id, word in words.items() if word}
        self._unknown = unknown

    def encode(self, text: str) -> list[int]:
        """Return the token ids. Raises InputError for a character that only an added token stands for."""
        ids = self._encode(text)
        made = self._made(ids, text)
        if not made:
            return ids
        if len(text) == 1 and self._unknown is not None:
            return [self._unknown]
        if len(text) == 1:
            raise InputError(f"the model's tokenizer knows {text!r} only as a control token")
        pieces = _cut(text, (self._words[id] for id in made))
        if len(pieces) == 1:  # made of other characters than its word, which a normaliser changed
            pieces = [text[: len(text) // 2], text[len(text) // 2 :]]
        return [id for piece in pieces for id in self.encode(piece)]

    def _made(self, ids: Iterable[int], text: str) -> set[int]:
        """Return the added tokens among these; the unknown token is one only where the text has its word."""
        made = self._words.keys() & set(ids)
        if self._unknown in made and self._words[self._unknown] not in text:
            made.discard(self._unknown)
        return made


def _cut(text: str, words: Iterable[str]) -> list[str]:
    """Cut a text behind the first character of each occurrence of these words."""
    ends = {0, len(text)}
    for word in words:
        at = text.find(word)
        while at >= 0 and len(word) > 1:
            ends.add(at + 1)
            at = text.find(word, at + 1)
    places = sorted(ends)
    return [text[start:end] for start, end in pairwise(places)]
