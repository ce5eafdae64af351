"""Prompt pieces: the prefix S, one piece per chunk, and the question part.

Each piece is tokenised alone. The tokens of a chunk therefore never depend on its neighbours, and its KV can be stored.

    prompt = S, chunk, chunk, …, question part,
             answer, separator of turns, further chunks, question part, …

Earlier turns that come with a question (`AskOptions.history`) stand behind the chunks, so that these stay where their
KV was computed: chunks, instructions, question, answer, separator, question.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragkv.errors import InputError
from ragkv.model.pieces import PieceTemplate, control_tokens, fill
from ragkv.model.plain_text import plain_encoder
from ragkv.model.profile import Profile
from ragkv.model.token_bytes import TokenBytes
from ragkv.model.wrapper import EVERY_COLLECTION, NO_WRAPPERS, Wrapper, Wrappers, without_wrapper

SYSTEM = (
    "You answer questions from the documents given. Reply with the shortest span that answers the question, "
    'and with "unknown" when the documents do not say.'
)
_CHUNK = "Document: {title}\n{text}\n"
_QUESTION = "Question: {question}\nAnswer:"
_CHUNKS_HERE = "\u2983chunks\u2984"
_QUESTION_HERE = "\u2983question\u2984"
_ANSWER_HERE = "\u2983answer\u2984"
_NEXT_HERE = "\u2983next\u2984"


class Prompt:
    """Tokenise the pieces of a prompt. Immutable.

    Added tokens, special or not, are recognised in the pieces only, be they those of the profile or the chat template.
    In a document, `</s>` or `<tool_call>` is plain text.

    Attributes:
        prefix: token ids of S.
        wrapper: wrapper tokens around every chunk; None for none.
    """

    wrapper: Wrapper | None

    def __init__(self, tokenizer: Any, profile: Profile, wrappers: Wrappers = NO_WRAPPERS):
        """Choose the pieces.

        They come from the profile, else from the tokenizer's chat template, else they are plain `Document:` and
        `Question:` pieces after the BOS token.

        Args:
            tokenizer: a Hugging Face tokenizer.
            profile: the profile of the model.
            wrappers: wrapper tokens of each collection; these pieces have those of every collection.
        """
        self._wrappers, self.wrapper = wrappers, wrappers.find(EVERY_COLLECTION)
        self._tokenizer, self._encode, self._bytes = tokenizer, plain_encoder(tokenizer), TokenBytes(tokenizer)
        prefix, before, after = _frame(tokenizer)
        self._prefix = profile.prefix or prefix
        self._chunk = PieceTemplate(profile.chunk or _CHUNK, tokenizer, self._encode)
        self._question = PieceTemplate(profile.question or _QUESTION, tokenizer, self._encode)
        self.prefix = self._special(self._prefix)
        self._before, self._after = ((), ()) if profile.question else (self._special(before), self._special(after))
        self._open = self._question.template if profile.question else self._question.template + after
        self._framed = not profile.question or self._question.controlled

    def of(self, collection: str) -> Prompt:
        """Return the same pieces, with the wrapper tokens of a collection."""
        wrapper = self._wrappers.find(collection)
        if wrapper is self.wrapper:
            return self
        other = copy(self)
        other.wrapper = wrapper
        return other

    def reader(self, fingerprint: str) -> str:
        """Name what reads chunks: the model's fingerprint, and the wrapper tokens."""
        return f"{fingerprint}+{self.wrapper.digest[:16]}" if self.wrapper else fingerprint

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        """Return the token ids of one chunk: title and text in their piece, between wrapper tokens."""
        tokens = self._chunk.tokens(title=title, text=text)
        return (*self.wrapper.front_ids, *tokens, *self.wrapper.back_ids) if self.wrapper else tokens

    def chunk_text(self, title: str, text: str) -> str:
        """Return the prompt piece of a chunk as text."""
        return self._chunk.filled(title=title, text=text)

    def token_ends(self, title: str, text: str, tokens: Sequence[int]) -> NDArray[np.float64]:
        """Return where each token of a chunk ends, in bytes of `text`: below 0 before it, above its size behind it.

        Args:
            title: title of the chunk.
            text: text of the chunk.
            tokens: token ids of the chunk, as `chunk` returns them.
        """
        before, _, after = self._chunk.template.partition("{text}")
        start, end = (len(fill(piece, title=title).encode()) for piece in (before, after))
        return self._bytes.ends(tokens, start + len(text.encode()) + end) - start

    def blocks(self, tokens: Sequence[int], block: int) -> list[str]:
        """Return the text of each block of `block` tokens; joined, they are the text of all tokens.

        A character whose tokens are in two blocks belongs to the later one. Any thread may call this while another uses
        the tokenizer: decoding reads its vocabulary and no setting.
        """
        whole, ends = self._text(tokens), [0]
        for end in range(block, len(tokens), block):
            text = self._text(tokens[:end])
            while not whole.startswith(text):  # part of a character decodes to something else
                text = text[:-1]
            ends.append(max(ends[-1], len(text)))
        return [whole[start:end] for start, end in zip(ends, [*ends[1:], len(whole)], strict=True)]

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(without_wrapper(tokens)))

    def question(
        self, question: str, history: Sequence[tuple[str, str]] = (), instructions: str = ""
    ) -> tuple[int, ...]:
        """Return the token ids of the question part, up to the start of the answer.

        Args:
            question: the question.
            history: earlier questions with their answers, in order; each is a turn of its own.
            instructions: what stands before the first question; "" for nothing.
        """
        opening = self.plain(f"{instructions}\n") if instructions else ()
        turns = [(*self._asked(asked), *self.retold(answer)) for asked, answer in history]
        return (*opening, *(token for turn in turns for token in turn), *self._asked(question))

    def _asked(self, question: str) -> tuple[int, ...]:
        return self._before + self._question.tokens(question=question) + self._after

    def question_text(self, question: str) -> str:
        """Return the prompt piece of a question as text, without the pieces of a chat template around it."""
        return self._question.filled(question=question)

    @cached_property
    def between(self) -> tuple[int, ...]:
        """Token ids between an answer and the chunks of the next turn.

        Raises:
            InputError: the chat template does not support a second turn.
        """
        return self._special(_between(self._tokenizer)) if self._framed else self.plain("\n")

    def answered(self, tokens: Sequence[int], text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of an answer in the prompt of the next turn.

        A token that a stop string cuts in two is dropped, and its text before the cut is tokenised again.

        Args:
            tokens: the tokens of the answer.
            text: their text, up to the stop string that ended it.

        Returns:
            The tokens that are kept, and the tokens that follow them up to the chunks of the next turn.
        """
        kept_text, kept = self._tokenizer.decode(tokens), len(tokens)
        while kept and not text.startswith(kept_text):
            kept -= 1
            kept_text = self._tokenizer.decode(tokens[:kept])
        return tuple(tokens[:kept]), self.plain(text[len(kept_text) :]) + self.between

    def answer(self, text: str) -> tuple[int, ...]:
        """Return the token ids of an answer behind the question part, without the token that ends it."""
        return self.plain(self._spaced(text))

    def retold(self, answer: str) -> tuple[int, ...]:
        """Return the tokens of an answer, up to the chunks of the next turn, where only its text is known."""
        return self.answered((), self._spaced(answer) if answer else "")[1]

    def _spaced(self, answer: str) -> str:
        """Return the answer as it follows the question part."""
        return answer if self._open[-1:].isspace() else f" {answer}"

    def pieces(self) -> tuple[str, str]:
        """Return the pieces that stored KV depends on: S and that of a chunk."""
        return self._prefix, self._chunk.template

    def plain(self, text: str) -> tuple[int, ...]:
        """Return the token ids of plain text, without any added token."""
        return tuple(self._encode(text))

    def _special(self, text: str) -> tuple[int, ...]:
        return control_tokens(text, self._tokenizer)


def _frame(tokenizer: Any) -> tuple[str, str, str]:
    """Return (S, text before the question, text after it) from the chat template; (BOS, "", "") without one."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.bos_token or "", "", ""
    content = f"{SYSTEM}\n\n{_CHUNKS_HERE}{_QUESTION_HERE}"
    # The instruction is in the user turn, because some templates have no system role.
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prefix, rest = rendered.split(_CHUNKS_HERE)
    before, after = rest.split(_QUESTION_HERE)
    return prefix, before, after


def _between(tokenizer: Any) -> str:
    """Return the text between an answer and the next turn's chunks from the chat template; a new line without one."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    turns = (("user", _QUESTION_HERE), ("assistant", _ANSWER_HERE), ("user", _NEXT_HERE))
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(rendered.split(_ANSWER_HERE)[1].split(_NEXT_HERE)[0])
    except Exception as error:  # templates raise any type
        raise InputError(f"the model's chat template does not hold conversations: {error}; ask without one") from None
