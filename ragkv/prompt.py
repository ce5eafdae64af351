"""Prompt pieces: S, one wrapper per chunk, the question part. Each is tokenised alone, so a chunk's tokens never depend
on its neighbours and its KV can be stored.

    prompt = S · chunk · chunk · … · question part
"""

from __future__ import annotations

import re
from typing import Any

from ragkv.profile import Profile

SYSTEM = (
    "You answer questions from the documents given. Reply with the shortest span that answers the question, "
    'and with "unknown" when the documents do not say.'
)
_CHUNK = "Document: {title}\n{text}\n"
_QUESTION = "Question: {question}\nAnswer:"
_CHUNKS_HERE = "\u2983chunks\u2984"
_QUESTION_HERE = "\u2983question\u2984"


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

    def chunk(self, title: str, text: str) -> tuple[int, ...]:
        """Token ids of one chunk: wrapper, title and text."""
        return self.plain(self.chunk_text(title, text))

    def chunk_text(self, title: str, text: str) -> str:
        """The chunk's prompt piece as text."""
        return _fill(self._chunk, title=title, text=text)

    def question(self, question: str) -> tuple[int, ...]:
        """Token ids of the question part, up to where the answer starts."""
        return self._before + self.plain(self.question_text(question)) + self._after

    def question_text(self, question: str) -> str:
        """The question's prompt piece as text, without what a chat template puts around it."""
        return _fill(self._question, question=question)

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
