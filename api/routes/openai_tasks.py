"""Requests that chat programs send about a chat, and that no document answers: a title, tags, what to ask next.

Open WebUI and LibreChat send them to the model of the chat, after its first answer. A search for their words would find
passages about nothing, and the model of this service answers from passages. So the replies are made by rules: the title
is the first question, and lists are empty. The programs do the same where a model's reply cannot be read.

    Open WebUI   "### Task:" with the JSON object that it wants, and the chat in <chat_history>
    LibreChat    a sentence that asks for a title, and the chat after "Conversation:"
"""

from __future__ import annotations

import json
import re

LONGEST_TITLE = 60
"""Characters of a title."""

_TASK = "### Task:"
_CHAT = re.compile(r"<chat_history>\s*(.*?)\s*</chat_history>", re.DOTALL)
_WANTED = re.compile(r'"(title|tags|follow_ups|queries)"\s*:')
_PLAIN_TITLE = re.compile(
    r"Provide a concise, 5-word-or-less title for the conversation.{0,200}?\n\s*Conversation:\s*(.*)", re.DOTALL
)
_FIRST = re.compile(r"^\s*user:\s*(.*?)\s*(?:^\s*(?:assistant|ai|user|system):|\Z)", re.DOTALL | re.MULTILINE | re.I)


def task_reply(question: str) -> str | None:
    """Return the reply to a request about a chat; None for a question.

    Args:
        question: The last message.
    """
    plain = _PLAIN_TITLE.match(question)
    if plain:
        return _title(plain[1])
    if not question.startswith(_TASK):
        return None
    chat, wanted = _CHAT.search(question), _WANTED.search(question)
    if chat is None or wanted is None:
        return None
    name = wanted[1]
    return json.dumps({name: _title(chat[1]) if name == "title" else []}, ensure_ascii=False)


def _title(chat: str) -> str:
    """Return the first question of the chat, cut at a word."""
    first = _FIRST.search(chat)
    words = " ".join((first[1] if first else chat).split())
    if len(words) <= LONGEST_TITLE:
        return words
    cut = words[: LONGEST_TITLE - 1]
    return f"{cut.rpartition(' ')[0] or cut}…"
