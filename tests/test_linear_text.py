"""What takes text from outside takes a time that is linear in it, at every door that takes this kind of text."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ragkv.api.middleware.hosts import read_hosts
from ragkv.api.routes.openai_tasks import task_reply
from ragkv.api.schemas.history import blocks_with_answer
from ragkv.config import load_settings
from ragkv.engine.citations import mark
from ragkv.engine.occurrences import occurrences
from ragkv.errors import ConfigError
from ragkv.ingest.formats.html import parse as parse_html
from ragkv.ingest.formats.records import column_names
from ragkv.ingest.loader import parse
from ragkv.passages import headings
from ragkv.types import Chunk, TextSpan
from tests.growth import grows_linearly

TITLE = "Provide a concise, 5-word-or-less title for the conversation, in the same language."


def marked(text: str) -> object:
    return mark(Chunk("a#0", "a", 0, "T", text, (), TextSpan(0, len(text))), "a a a a b")


def refused_host(name: str) -> None:
    with pytest.raises(ConfigError):
        read_hosts(load_settings(hosts=name), keys=False)


DOORS: dict[str, tuple[Callable[[str], object], Callable[[int], str]]] = {
    "heading of a file": (lambda text: parse(text.encode(), "a.md", 2**24), lambda n: f"# a{' ' * n}b"),
    "hashes of a file": (lambda text: parse(text.encode(), "a.md", 2**24), lambda n: f"# a{' #' * n}b"),
    "line of a file": (lambda text: parse(text.encode(), "a.md", 2**24), lambda n: f"a\n{'=' * n}\t\tb"),
    "front matter of a file": (lambda text: parse(text.encode(), "a.md", 2**24), lambda n: "---\n" + "--- \n-" * n),
    "headings of a document": (lambda text: list(headings(text)), lambda n: f"# a{' ' * n}b\n" * 3),
    "line ends of a document": (lambda text: list(headings(text)), lambda n: "\n" * n + "#"),
    "title in line breaks": (task_reply, lambda n: f"{TITLE}{chr(10) * n}x"),
    "title behind line breaks": (task_reply, lambda n: f"{TITLE}{chr(10) * n}Conversation:{chr(10) * n}user:"),
    "title of nothing": (task_reply, lambda n: f"{TITLE}{'Conversation:' * n}"),
    "history of spaces": (task_reply, lambda n: f'### Task: "title": <chat_history>{" " * n}'),
    "history of line breaks": (
        task_reply,
        lambda n: f'### Task: "title": <chat_history>{chr(10) * n}x</chat_history>',
    ),
    "history without end": (task_reply, lambda n: '### Task: "title": ' + "<chat_history> user:\n" * n),
    "wanted without colon": (task_reply, lambda n: f'### Task: <chat_history></chat_history> "title"{" " * n}'),
    "words of an answer": (marked, lambda n: "a " * n),
    "spaces between words": (marked, lambda n: f"a{' ' * n}a{' ' * n}b"),
    "blocks of an answer": (lambda text: blocks_with_answer([text], "a a"), lambda n: "aa " * n),
    "cells": (lambda text: column_names([text, "b"]), lambda n: "1" * n + "x"),
    "character set": (lambda text: parse_html(text.encode(), 2**24), lambda n: f"<meta charset={' ' * n}<p>a</p>"),
    "host": (refused_host, lambda n: ":" * n + "!"),
}


@pytest.mark.parametrize("door", DOORS)
def test_the_time_grows_with_the_text(door: str) -> None:
    call, text = DOORS[door]
    assert grows_linearly(call, text, 2500)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('The "Ada\n Brook" was. adabrook ada brooks Ada Brook', ["ada", "brook"]),
        ("a a a aa a a", ["a", "a"]),
        ("x.y x y xx.y x.y", ["x.y"]),
        ("Straße STRASSE straße", ["straße"]),
        ("100 % 100 %5 (100 %)", ["100", "%"]),
        ("İstanbul is i̇stanbul", ["istanbul"]),
        ("好 好好 好", ["好"]),
    ],
)
def test_words_are_found_where_an_expression_finds_them(text: str, words: list[str]) -> None:
    between = r"\s+".join(map(re.escape, words))
    pattern = rf"(?<!\w){between}(?!\w)"
    assert occurrences(text, words) == [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)]


@pytest.mark.parametrize(
    ("line", "heading"),
    [
        ("# a", "a"),
        ("   ###### a b # # ", "a b #"),
        ("#\ta ##\t", "a"),
        ("# #", ""),
        ("#  ", ""),
        ("#a", ""),
        ("    # a", ""),
        ("####### a", ""),
        ("# a#", "a"),
    ],
)
def test_a_heading_is_read_without_its_marks(line: str, heading: str) -> None:
    assert [text for _, text in headings(f"x\n{line}\ny")] == ([heading] if heading else [])


@pytest.mark.parametrize(
    ("chat", "title"),
    [
        ("user: Who built it?\nassistant: Ada.\nuser: When?", "Who built it?"),
        ("\n  USER:  Who\n built it?  \n\n AI: Ada.", "Who built it?"),
        ("assistant: Hello.\nuser: Who?", "Who?"),
        ("Who built it?", "Who built it?"),
    ],
)
def test_the_title_of_a_chat_is_its_first_question(chat: str, title: str) -> None:
    assert task_reply(f"{TITLE}\n\nConversation:\n{chat}") == title
    assert (
        task_reply(f'### Task:\n{{"title": "x"}}\n<chat_history>\n{chat}\n</chat_history>') == f'{{"title": "{title}"}}'
    )


def test_a_title_is_asked_for_within_two_hundred_characters() -> None:
    assert task_reply(f"{TITLE}{' x' * 200}\nConversation: a") is None
    assert task_reply(f"{TITLE} Conversation: a") is None
    assert task_reply(f"{TITLE} Of the Conversation: only.\n\n Conversation: a") == "a"
