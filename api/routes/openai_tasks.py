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
_CHAT, _CHAT_END = "<chat_history>", "</chat_history>"
_WANTED = re.compile(r'"(title|tags|follow_ups|queries)"\s*:')
_PLAIN_TITLE, _PLAIN_CHAT = "Provide a concise, 5-word-or-less title for the conversation", "Conversation:"
_PLAIN_REST = 200
"""Most characters between the two."""
_USER, _ROLES = "user:", ("assistant:", "ai:", "user:", "system:")


def task_reply(question: str) -> str | None:
    """Return the reply to a request about a chat; None for a question.

    Args:
        question: The last message.
    """
    if question.startswith(_PLAIN_TITLE):
        plain = _plain_chat(question[len(_PLAIN_TITLE) :])
        return None if plain is None else _title(plain)
    if not question.startswith(_TASK):
        return None
    chat, ended, _ = question.partition(_CHAT)[2].partition(_CHAT_END)
    wanted = _WANTED.search(question)
    if not ended or wanted is None:
        return None
    name = wanted[1]
    return json.dumps({name: _title(chat) if name == "title" else []}, ensure_ascii=False)


def _plain_chat(rest: str) -> str | None:
    """Return what follows the line `Conversation:`; None if it does not begin soon."""
    at = rest.find(_PLAIN_CHAT)
    while at >= 0:
        before = len(rest[:at].rstrip())
        if before > _PLAIN_REST:
            return None
        if 0 <= rest.find("\n", before, at) <= _PLAIN_REST:
            return rest[at + len(_PLAIN_CHAT) :]
        at = rest.find(_PLAIN_CHAT, at + 1)
    return None


def _title(chat: str) -> str:
    """Return the first question of the chat, cut at a word."""
    words = " ".join((_first_question(chat) or chat).split())
    if len(words) <= LONGEST_TITLE:
        return words
    cut = words[: LONGEST_TITLE - 1]
    return f"{cut.rpartition(' ')[0] or cut}…"


def _first_question(chat: str) -> str:
    """Return what the user said first, up to the next line that begins with a role; "" if there is nothing."""
    said = list[str]()
    for line in chat.split("\n"):
        begun = line.lstrip()
        role = begun[: len(max(_ROLES, key=len))].lower()
        if said and role.startswith(_ROLES):
            break
        if said:
            said.append(line)
        elif role.startswith(_USER):
            said.append(begun[len(_USER) :])
    return "\n".join(said).strip()
