"""Prompt pieces: S, one wrapper per chunk, the question part. Each is tokenised alone, so a chunk's tokens never depend
on its neighbours and its KV can be stored.

    prompt = S · chunk · chunk · … · question part
             answer · what stands between turns · chunks that join · question part · …
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ragkv.errors import InputError
from ragkv.model.profile import Profile

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
    """Turns texts into token ids. Immutable.

    Special tokens are recognised in our own pieces only: a document that contains `</s>` or `<|im_end|>` is text.
    """

    def __init__(self, tokenizer: Any, profile: Profile):
        """tokenizer: a Hugging Face tokenizer. Pieces come from the profile, else from the tokenizer's chat template,
        else from plain `Document:` / `Question:` pieces after the BOS token."""
        self._tokenizer = tokenizer
        prefix, before, after = _frame(tokenizer)
        self._prefix = profile.prefix or prefix
        self._chunk = profile.chunk or _CHUNK
        self._question = profile.question or _QUESTION
        self.prefix = self._special(self._prefix)
        self._before, self._after = ((), ()) if profile.question else (self._special(before), self._special(after))
        self._open = self._question if profile.question else self._question + after
        self._framed = not profile.question

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        """Token ids of one chunk: wrapper, title and text."""
        return self.plain(self.chunk_text(title, text))

    def chunk_text(self, title: str, text: str) -> str:
        """The chunk's prompt piece as text."""
        return _fill(self._chunk, title=title, text=text)

    def blocks(self, tokens: Sequence[int], block: int) -> list[str]:
        """What each block of so many tokens says; together what all of them say. A character whose tokens lie in two
        blocks belongs to the later one.

        Any thread may call this while another one uses the tokenizer: decoding reads its vocabulary and no setting.
        """
        whole, ends = self._tokenizer.decode(tokens), [0]
        for end in range(block, len(tokens), block):
            said = self._tokenizer.decode(tokens[:end])
            while not whole.startswith(said):  # half a character decodes as what the whole does not say there
                said = said[:-1]
            ends.append(max(ends[-1], len(said)))
        return [whole[start:end] for start, end in zip(ends, [*ends[1:], len(whole)], strict=True)]

    def question(self, question: str) -> tuple[int, ...]:
        """Token ids of the question part, up to where the answer starts."""
        return self._before + self.plain(self.question_text(question)) + self._after

    def question_text(self, question: str) -> str:
        """The question's prompt piece as text, without what a chat template puts around it."""
        return _fill(self._question, question=question)

    @cached_property
    def between(self) -> tuple[int, ...]:
        """Token ids from behind an answer to where the next turn's chunks start. Raises InputError where the chat
        template has no second turn."""
        return self._special(_between(self._tokenizer)) if self._framed else self.plain("\n")

    def answered(self, tokens: Sequence[int], text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How an answer stands in what the next turn reads: (the tokens that stay, what stands behind them).

        tokens: as they were decoded · text: theirs, up to where a stop string cut it. A token that the cut goes through
        does not stay; what it says before the cut is tokenised anew.
        """
        said, kept = self._tokenizer.decode(tokens), len(tokens)
        while kept and not text.startswith(said):
            kept -= 1
            said = self._tokenizer.decode(tokens[:kept])
        return tuple(tokens[:kept]), self.plain(text[len(said) :]) + self.between

    def retold(self, answer: str) -> tuple[int, ...]:
        """An answer whose tokens are not known, in the same place."""
        space = "" if self._open[-1:].isspace() else " "
        return self.answered((), space + answer)[1]

    def pieces(self) -> tuple[str, str]:
        """The pieces that stored KV depends on: S and the chunk wrapper."""
        return self._prefix, self._chunk

    def plain(self, text: str) -> tuple[int, ...]:
        """Token ids of text in which nothing is special."""
        return tuple(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _special(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else ()


def _fill(piece: str, **values: str) -> str:
    """Put values into a piece in one go: a title that says `{text}` stays a title."""
    return re.sub(r"\{(\w+)\}", lambda field: values.get(field[1], field[0]), piece)


def _frame(tokenizer: Any) -> tuple[str, str, str]:
    """(S, text before the question, text after it) from the chat template; (BOS, "", "") without one."""
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer.bos_token or "", "", ""
    content = f"{SYSTEM}\n\n{_CHUNKS_HERE}{_QUESTION_HERE}"
    # The instruction stands in the user turn: templates without a system role exist, templates without a user do not.
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    prefix, rest = rendered.split(_CHUNKS_HERE)
    before, after = rest.split(_QUESTION_HERE)
    return prefix, before, after


def _between(tokenizer: Any) -> str:
    """Text from behind an answer to where the next turn's chunks start, from the chat template; a new line without."""
    if not getattr(tokenizer, "chat_template", None):
        return "\n"
    said = (("user", _QUESTION_HERE), ("assistant", _ANSWER_HERE), ("user", _NEXT_HERE))
    messages = [{"role": role, "content": content} for role, content in said]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return str(rendered.split(_ANSWER_HERE)[1].split(_NEXT_HERE)[0])
    except Exception as error:  # templates raise what they like
        raise InputError(f"the model's chat template does not hold conversations: {error}; ask without one") from None
